"""Batches that are harder than the rest and come again and again. Pure: no torch, no clock, no files."""

from collections import deque
from typing import Any

from trainer_plugin.detectors import Verdict

# So many losses that each stand alone within so many values, none of them so much higher than another.
_BATCHES = 5
_VALUES = 500
_ALIKE = 2.0


class HardBatches:
    """Whether losses far out, each standing alone, have come so often of late that they are a kind of batch.

    Every tenth batch may be from a harder source. An incident that each of them prolonged would never end, and hold
    back every checkpoint since its first one.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._outlier_at = -1
        # Number of the value and how far above the level it was, for each that stood alone.
        self._lone: deque[tuple[int, float]] = deque(maxlen=_BATCHES)

    def update(self, verdict: Verdict | None) -> bool:
        """Take in the robust detector's word about a loss; whether such batches are known, and this is no other one."""
        self._seen += 1
        lone, rise = self._lone, 0.0
        if verdict is not None:
            rise = verdict.value - verdict.baseline
            if self._seen - self._outlier_at == 1:
                lone.clear()  # It goes on: what began before did not stand alone.
            else:
                lone.append((self._seen, rise))
            self._outlier_at = self._seen
        if len(lone) < _BATCHES or self._seen - lone[0][0] > _VALUES:
            return False
        return rise <= _ALIKE * min(one for _, one in lone)

    def state_dict(self) -> dict[str, Any]:
        """Those of late."""
        return {"seen": self._seen, "outlier_at": self._outlier_at, "lone": [list(one) for one in self._lone]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._seen, self._outlier_at = state["seen"], state["outlier_at"]
        self._lone.clear()
        self._lone.extend((number, rise) for number, rise in state["lone"])

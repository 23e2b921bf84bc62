"""Batches that are harder than the rest and come again and again. Pure: no torch, no clock, no files."""

from collections import deque
from typing import Any

from trainer_plugin.detection.detectors import Verdict

# So many times within so many values, none of them so much higher than another.
_TIMES = 5
_VALUES = 500
_ALIKE = 2.0
# By chance two or three come in a row; what goes on longer is a fault.
_MOST_IN_A_ROW = 3


class HardBatches:
    """Whether losses far out, each soon over, have come so often of late that they are a kind of batch.

    Every tenth batch may be from a harder source. An incident that each of them prolonged would never end, and hold
    back every checkpoint since its first one.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._in_a_row = 0
        # Number of the value and how far above the level it was, for the first of each that were in a row.
        self._first: deque[tuple[int, float]] = deque(maxlen=_TIMES)

    def update(self, verdict: Verdict | None) -> bool:
        """Take in the robust detector's word about a loss; whether such batches are known, and this is no other one."""
        self._seen += 1
        first = self._first
        if verdict is None:
            self._in_a_row = 0
            return len(first) == _TIMES and self._seen - first[0][0] <= _VALUES
        rise = verdict.value - verdict.baseline
        self._in_a_row += 1
        if self._in_a_row == 1:
            first.append((self._seen, rise))
        elif self._in_a_row > _MOST_IN_A_ROW:
            first.clear()
        known = len(first) == _TIMES and self._seen - first[0][0] <= _VALUES
        return known and rise <= _ALIKE * min(one for _, one in first)

    def state_dict(self) -> dict[str, Any]:
        """Those of late."""
        return {"seen": self._seen, "in_a_row": self._in_a_row, "first": [list(one) for one in self._first]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._seen, self._in_a_row = state["seen"], state["in_a_row"]
        self._first.clear()
        self._first.extend((number, rise) for number, rise in state["first"])

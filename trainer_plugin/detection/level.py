"""The lowest level that a run has reached, and whether it has left it for good. Pure: no torch, no clock, no files."""

from collections import deque
from typing import Any

from trainer_plugin.detection.detectors import Verdict

# A center is a median of 32 values: between two looks half of them are new.
LOOK_VALUES = 16
# A low is kept when it is so much below the last one: few are enough to know the low of any earlier step.
_THIN_RATIO = 0.99
# From 10 down to 0.8; what is dropped are the highest.
_MOST_LOWS = 256
# As long as the center is so near its low, it has not left it: twice what a calm one wanders.
_NEAR_RATIO = 1.03


class Level:
    """A long memory: the center far above the lowest one of all that the run has passed through, also in warm-up.

    The other detectors know the last 128 values. What climbs slower than these follow, jumps while nothing is judged,
    or comes back higher after a gap or a restart is seen only from here. Each look takes the median that the robust
    detector holds. Lows have their steps, so that a step back forgets those that the run has not reached again. A
    low that is not above zero has no ratio, and nothing is said of it.
    """

    def __init__(self, signal: str, *, least_ratio: float) -> None:
        self._signal = signal
        self._least_ratio = least_ratio
        self._lows: deque[tuple[int, float]] = deque(maxlen=_MOST_LOWS)
        self._step = self._looked = self._near = 0
        self._seen = -LOOK_VALUES

    def is_due(self, step: int) -> bool:
        """Take in a step; whether its center is to be looked at, by `update`: one in sixteen is."""
        if step < self._step:
            self._go_back(step)
        self._step = step
        self._seen += 1
        if self._seen < LOOK_VALUES:
            return False
        self._seen = 0
        return True

    def update(
        self, step: int, value: float, *, center: float, least_rise: float, learn: bool, judge: bool
    ) -> Verdict | None:
        """Take in the center after a step; a verdict must be above the low by `least_rise` besides."""
        before, self._looked = self._looked, step
        low = self._lows[-1][1] if self._lows else center
        if low <= 0.0 or center <= 0.0:
            return None
        if learn and (not self._lows or center < low * _THIN_RATIO):
            self._lows.append((step, center))
        if center <= low * _NEAR_RATIO:
            # The newest of the values may have left it already; those before the last look had not.
            self._near = before
        elif judge and center > low * self._least_ratio and center - low > least_rise:
            return Verdict(
                detector="drift", signal=self._signal, step=step, value=value, baseline=low, first_step=self._near + 1
            )
        return None

    def _go_back(self, step: int) -> None:
        while self._lows and self._lows[-1][0] >= step:
            self._lows.pop()
        self._looked, self._near = min(self._looked, step - 1), min(self._near, step - 1)

    def wait(self) -> None:
        """The center is learnt anew: look again when it is one of a full window."""
        self._seen = -LOOK_VALUES

    def forget(self) -> None:
        """Another level is accepted for good: the lows are of the one before."""
        self._lows.clear()
        self.wait()

    def state_dict(self) -> dict[str, Any]:
        """The lows, and when it looks next."""
        return {
            "lows": [list(low) for low in self._lows],
            "steps": [self._step, self._looked, self._near],
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._lows.clear()
        self._lows.extend((step, low) for step, low in state["lows"])
        self._step, self._looked, self._near = state["steps"]
        self._seen = state["seen"]

"""The drift detector: a climb that no single step shows. Pure: no torch, no clock, no files."""

import math
from typing import Any

from trainer_plugin.detection.detectors import Verdict

# Page's test is best for a shift of twice the allowance: two deviations, which no single value shows. The center, a
# median of 32 values, is 16 behind, so that this is a climb of an eighth of a deviation a step.
_ALLOWANCE = 1.0
# No single value makes a verdict, however far out: that is the robust detector's.
_MAX_SCORE = 5.0
# Where a run's own tail is at least so heavy, two values far out in a row are as common as one: it takes a third.
_HEAVY_TAIL = 2.0


class Drift:
    """R8: the sum of what the robust scores have above an allowance (CUSUM; Page 1954), beyond `limit`.

        S = max(0, S + min(score, 5) - 1)

    Over normal noise S exceeds 6 once in 800,000 values (exp(2 (h + 1.166)) / 2; Siegmund 1985). Real losses wander
    more than noise does, and another mix of data moves them by a twentieth; hence a value must besides be
    `least_ratio` times the level at which the sum began.
    """

    def __init__(self, signal: str, *, limit: float, least_ratio: float) -> None:
        self._signal = signal
        self._limit = limit
        self._least_rise = least_ratio - 1.0
        self._sum = 0.0
        self._level = 0.0
        self._onset = 0

    def update(
        self, step: int, value: float, *, score: float, center: float, tail_ratio: float = 1.0
    ) -> Verdict | None:
        """Judge a step by its score against the center and the tail that the robust detector holds."""
        if self._sum == 0.0:
            if not score > _ALLOWANCE:  # So is NaN: it leaves everything as it was.
                return None
            self._level, self._onset = center, step
        elif math.isnan(score):
            return None
        total = self._sum + (min(_MAX_SCORE, score)) - _ALLOWANCE
        self._sum = max(0.0, total)
        limit = self._limit if tail_ratio < _HEAVY_TAIL else self._limit + _MAX_SCORE - _ALLOWANCE
        if total <= limit or value - self._level <= self._least_rise * abs(self._level):
            return None
        self.reset()
        return Verdict(
            detector="drift", signal=self._signal, step=step, value=value, baseline=self._level, first_step=self._onset
        )

    def reset(self) -> None:
        """Begin the sum anew."""
        self._sum = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The sum, and where it began."""
        return {"sum": self._sum, "level": self._level, "onset": self._onset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._sum, self._level, self._onset = state["sum"], state["level"], state["onset"]

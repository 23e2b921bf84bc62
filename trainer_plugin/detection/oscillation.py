"""The oscillation detector: small spikes that come again and again. Pure: no torch, no clock, no files."""

import math
from collections import deque
from typing import Any

from trainer_plugin.detection.detectors import Verdict

# A spike has begun above the first score and is over below the second.
_SPIKE_SCORE = 4.0
_OVER_SCORE = 2.0
# What is out for a single value was the batch. Where a run's own tail is so heavy, so may be two in a row.
_LEAST_VALUES = 2
_HEAVY_TAIL = 2.0


class Oscillation:
    """`spikes` excursions of the robust score within `window` values, whether or not each was a verdict by itself.

    The sign of a learning rate that is too high: the loss is thrown out of its valley and falls back, time and again.
    Falling back takes it more than one step; every tenth batch may be from another domain, and does not count.
    The scores are held against the run's own tail, so that a noisy run does not seem to oscillate (one in 30,000 values
    of normal noise is above 4), and against the tail as it was before the first of the spikes, which soon are a tail
    themselves. None begins while the loss is not back from the one before: its way back is up and down as well.
    """

    def __init__(self, signal: str, *, spikes: int, window: int, least_ratio: float = 1.0) -> None:
        self._signal = signal
        self._spikes = spikes
        self._window = window
        self._least_rise = least_ratio - 1.0
        self._seen = 0
        self._inside = True
        # The step at which an excursion began that is not counted yet, and its values so far.
        self._begun: int | None = None
        self._values = 0
        self._tail_ratio = 1.0
        # Number of the value and its step, for each spike in the window.
        self._found: deque[tuple[int, int]] = deque()

    def update(
        self, step: int, value: float, *, score: float, tail_ratio: float, center: float, settled: bool = True
    ) -> Verdict | None:
        """Judge a step by its score against the center and the tail that the robust detector holds.

        `settled`: the loss was back before this step.
        """
        if not math.isfinite(score):
            return None
        self._seen += 1
        if self._found and self._found[0][0] <= self._seen - self._window:
            self._found.popleft()
        if not self._found and self._begun is None:
            self._tail_ratio = tail_ratio
        score *= tail_ratio / self._tail_ratio
        if score < _OVER_SCORE:
            self._inside, self._begun = True, None
            return None
        if score > _SPIKE_SCORE and self._inside and settled and value - center > self._least_rise * abs(center):
            self._inside, self._begun, self._values = False, step, 0
        self._values += 1
        least = _LEAST_VALUES if self._tail_ratio < _HEAVY_TAIL else _LEAST_VALUES + 1
        if self._begun is not None and self._values >= least:
            self._found.append((self._seen, self._begun))
            self._begun = None
            if len(self._found) >= self._spikes:
                first_step = self._found[0][1]
                self._found.clear()
                return Verdict(
                    detector="oscillation",
                    signal=self._signal,
                    step=step,
                    value=value,
                    baseline=center,
                    first_step=first_step,
                )
        return None

    def reset(self) -> None:
        """Forget the spikes so far: they have had their verdict, or it was another's."""
        self._found.clear()
        self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """The spikes in the window, and where it stands."""
        return {
            "seen": self._seen,
            "inside": self._inside,
            "begun": self._begun,
            "values": self._values,
            "tail_ratio": self._tail_ratio,
            "found": [list(spike) for spike in self._found],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._seen, self._inside, self._tail_ratio = state["seen"], state["inside"], state["tail_ratio"]
        self._begun, self._values = state["begun"], state["values"]
        self._found.clear()
        self._found.extend((number, step) for number, step in state["found"])

"""Recovery: how long a signal has been high or out of its band, and when it is back. Pure, as the detectors are."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any


class Recovery:
    """How long the loss has been out of its robust band without coming back for good.

    Back for good is `BACK_STEPS` of the last `OF_STEPS` steps inside the band: a count of strictly consecutive bad
    steps would be broken by batch noise, and a single good step would end it. And those inside must be above the level
    by less than `NEAR_SCORE` deviations in the mean: what is noise in one step is a fault that stays in eight (damaged
    weights that train on, in a run whose band is wide). `values` counts the values since then, which are fewer than the
    steps in a log of every nth step.

    `back_in_steps` is how much longer it will take, if what is above the level goes on falling by the same share: read
    off the medians of the older and the newer half of the last `TREND_VALUES` distances. 0 if the loss is not away or
    is there already; infinite if it does not fall, or nothing can be said yet.
    """

    BACK_STEPS = 8
    OF_STEPS = 10
    NEAR_SCORE = 1.0  # As the drift detector allows.
    TREND_VALUES = 40
    _LEAST_HALF = 10

    def __init__(self) -> None:
        self.unrecovered_steps = 0
        self.values = 0
        self._left_at = 0
        self._inside: deque[bool] = deque(maxlen=self.OF_STEPS)
        self._above: deque[float] = deque(maxlen=self.OF_STEPS)
        self._distances: deque[float] = deque(maxlen=self.TREND_VALUES)

    @property
    def back_in_steps(self) -> float:
        """As above, in values of the signal."""
        half = len(self._distances) // 2
        if not self.unrecovered_steps or half < self._LEAST_HALF:
            return math.inf if self.unrecovered_steps else 0.0
        distances = list(self._distances)
        older, newer = median(distances[:half]), median(distances[-half:])
        if newer <= self.NEAR_SCORE:
            return 0.0
        return half * math.log(newer / self.NEAR_SCORE) / math.log(older / newer) if newer < older else math.inf

    def update(
        self, step: int, *, left_at: int | None, inside: bool, distance: float = math.nan, far: bool = False
    ) -> int:
        """Count one step: `left_at` is the first step of a deviation found now; `inside`, whether the loss is back.

        `distance` is how many deviations it is above the level; `far`, whether that is worth a word.
        """
        if self.unrecovered_steps:
            self._inside.append(inside)
            self._above.append(distance if inside and far else 0.0)
            count = sum(self._inside)
            if count >= self.BACK_STEPS and sum(self._above) < self.NEAR_SCORE * count:
                self.clear()
                return 0
        elif left_at is None:
            return 0
        else:
            self._left_at = left_at
            self._forget()
        self.values += 1
        if math.isfinite(distance):
            self._distances.append(distance)
        steps = max(step - self._left_at + 1, 1)
        # A log of every 200th step has no 200 bad steps to show in one line: first it must have had the time to return.
        self.unrecovered_steps = steps if self.values >= self.OF_STEPS else min(steps, self.OF_STEPS)
        return self.unrecovered_steps

    def clear(self) -> None:
        """Stop counting."""
        self.unrecovered_steps = self.values = 0
        self._forget()

    def _forget(self) -> None:
        self._inside.clear()
        self._above.clear()
        self._distances.clear()

    def state_dict(self) -> dict[str, Any]:
        """The count and the last steps."""
        return {
            "unrecovered_steps": self.unrecovered_steps,
            "values": self.values,
            "left_at": self._left_at,
            "inside": list(self._inside),
            "above": list(self._above),
            "distances": list(self._distances),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.unrecovered_steps, self.values = state["unrecovered_steps"], state["values"]
        self._left_at = state["left_at"]
        self._forget()
        self._inside.extend(state["inside"])
        # A checkpoint of before these were kept has none.
        self._above.extend(state.get("above", ()))
        self._distances.extend(state.get("distances", ()))


class HighSteps:
    """Consecutive steps above each of some rising levels of a ratio."""

    def __init__(self, levels: Iterable[float]) -> None:
        self.counts = dict.fromkeys(levels, 0)
        self._lowest = min(self.counts)

    def update(self, ratio: float) -> None:
        """Count one step."""
        counts, lowest = self.counts, self._lowest
        if not (ratio > lowest or counts[lowest]):
            return
        for level, count in counts.items():
            # A value that is not finite is certainly not a good one: it goes on with a run, but begins none.
            if ratio > level or (count and not math.isfinite(ratio)):
                counts[level] = count + 1
            elif count:
                counts[level] = 0
            else:  # The levels rise: where there is nothing to count and to end, there is none above it.
                return

    def clear(self) -> None:
        """Begin anew."""
        self.counts.update(dict.fromkeys(self.counts, 0))

    def state_dict(self) -> dict[str, Any]:
        """The counts, in the order of the levels."""
        return {"counts": list(self.counts.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.counts.update(zip(self.counts, state["counts"], strict=True))

"""Continuity: whether a step goes on from the one before it, and whether what comes was planned. Pure."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

# A log that misses some lines still goes on; one that misses so many is about another stretch of the run.
_LEAST_GAP_VALUES = 20
# A schedule moves by less in one step, but for its restarts and a person's hand.
_LR_JUMP_RATIO = 1.5
_LR_RISE_RATIO = 2.0
# A ramp up is as planned as a jump: the rate is held against its lowest of the last one to two times so many values.
_LR_VALUES = 50


class Continuity:
    """Knows the last step, the usual distance between two and the last learning rates.

    A baseline is of its place in the run. Further on than `gap_steps`, or back by more than `window` values without
    the state of that place, it is another one. `planned` are steps from which on, by the user's word, the data or the
    batches are others. `last_rise`: where the learning rate jumped last, and to how many times what it had been.
    """

    def __init__(self, *, gap_steps: int, window: int, planned: Iterable[int] = ()) -> None:
        self._gap_steps = gap_steps
        self._window = window
        self._planned_steps = sorted(planned)
        self._step: int | None = None
        self._interval_steps = 1
        # The lowest rate of the present block of values and of the one before; infinite for none.
        self._low = self._low_before = math.inf
        self._values = 0
        self.last_rise: tuple[int, float] | None = None

    def update(self, step: int, learning_rates: tuple[float, ...]) -> str | None:
        """Take in the next step: "elsewhere" if it does not follow the last one, "back" if some steps come again.

        "announced" if it is the first after a change that the user has planned, "planned" if the learning rates go up
        as no schedule does but at its start.
        """
        last, self._step = self._step, step
        elsewhere = last is not None and step - last != self._interval_steps and self._elsewhere(step - last)
        planned = learning_rates != () and self._rises(step, learning_rates)
        if elsewhere:
            return "elsewhere"
        if last is not None and self._planned_steps and self._announced(last, step):
            return "announced"
        if last is not None and step < last:
            return "back"
        return "planned" if planned else None

    def is_announced(self, step: int) -> bool:
        """Whether the user has planned a change for this step, or for one since the last that was taken in."""
        return self._step is not None and self._announced(self._step, step)

    def _announced(self, last: int, step: int) -> bool:
        """Whether a planned step lies between the two, whichever of them comes first."""
        return bisect_right(self._planned_steps, last) != bisect_right(self._planned_steps, step)

    def _elsewhere(self, ahead_steps: int) -> bool:
        near = -self._window * self._interval_steps <= ahead_steps <= self._gap_steps
        near = near or 0 < ahead_steps <= _LEAST_GAP_VALUES * self._interval_steps
        if ahead_steps > 0:
            self._interval_steps = ahead_steps
        return not near

    def _rises(self, step: int, learning_rates: tuple[float, ...]) -> bool:
        self._values += 1
        if self._values >= _LR_VALUES:
            self._values, self._low_before, self._low = 0, self._low, math.inf
        rate = learning_rates[0] if len(learning_rates) == 1 else max(learning_rates)
        if rate <= 0.0:
            return False
        low = min(self._low, self._low_before)
        if rate > _LR_JUMP_RATIO * low:
            # A ramp is told in steps of that ratio; what is more came at once.
            self.last_rise = (step, rate / low) if rate > _LR_RISE_RATIO * low else self.last_rise
            self._low = self._low_before = rate  # It has been told; what is told next is the next rise.
            return True
        if rate < self._low:
            self._low = rate
        return False

    def state_dict(self) -> dict[str, Any]:
        """The last step and learning rates."""
        lows = [None if math.isinf(low) else low for low in (self._low, self._low_before)]
        return {"step": self._step, "interval_steps": self._interval_steps, "lows": lows, "values": self._values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._step, self._interval_steps, self._values = state["step"], state["interval_steps"], state["values"]
        self._low, self._low_before = (math.inf if low is None else low for low in state["lows"])
        self.last_rise = None

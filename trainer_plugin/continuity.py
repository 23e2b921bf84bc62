"""Continuity: whether a step goes on from the one before it, and whether what comes was planned. Pure."""

from typing import Any

# A log that misses some lines still goes on; one that misses so many is about another stretch of the run.
_LEAST_GAP_VALUES = 20
# A schedule moves by less in one step, but for its restarts and a person's hand.
_LR_JUMP_RATIO = 1.5


class Continuity:
    """Knows the last step, the usual distance between two and the last learning rates.

    A baseline is of its place in the run. Further on than `gap_steps`, or back by more than `window` values without
    the state of that place, it is another one.
    """

    def __init__(self, *, gap_steps: int, window: int) -> None:
        self._gap_steps = gap_steps
        self._window = window
        self._step: int | None = None
        self._interval_steps = 1
        self._lrs: tuple[float, ...] = ()

    def update(self, step: int, learning_rates: tuple[float, ...]) -> str | None:
        """Take in the next step: "elsewhere" if it does not follow the last one, "planned" if the rates jump up."""
        last, self._step = self._step, step
        elsewhere = last is not None and step - last != self._interval_steps and self._elsewhere(step - last)
        planned = learning_rates != self._lrs and self._planned(learning_rates)
        return "elsewhere" if elsewhere else "planned" if planned else None

    def _elsewhere(self, ahead_steps: int) -> bool:
        near = -self._window * self._interval_steps <= ahead_steps <= self._gap_steps
        near = near or 0 < ahead_steps <= _LEAST_GAP_VALUES * self._interval_steps
        if ahead_steps > 0:
            self._interval_steps = ahead_steps
        return not near

    def _planned(self, learning_rates: tuple[float, ...]) -> bool:
        last, self._lrs = max(self._lrs, default=0.0), learning_rates
        return max(learning_rates, default=0.0) > _LR_JUMP_RATIO * last > 0.0

    def state_dict(self) -> dict[str, Any]:
        """The last step and learning rates."""
        return {"step": self._step, "interval_steps": self._interval_steps, "lrs": list(self._lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._step, self._interval_steps, self._lrs = state["step"], state["interval_steps"], tuple(state["lrs"])

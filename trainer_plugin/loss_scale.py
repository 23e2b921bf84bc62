"""AMP's loss scale: whether it has left the range in which half precision works. Pure, as the detectors are."""

import math
from typing import Any

from trainer_plugin.detectors import Verdict


class LossScale:
    """Collapsed below `floor` or grown above `ceiling`; said at each such step, `tell_steps` times in one stay.

    A scaler that looks for its scale halves it some times, and that is its own business. No search goes below 1: true
    gradients beyond half precision are then the cause. A scale that only grows means gradients too small to be right.
    After `tell_steps` whoever listens knows: an incident that never ends would hold every later checkpoint back.
    """

    def __init__(self, *, floor: float, ceiling: float, tell_steps: int) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._tell_steps = tell_steps
        self.collapsed = False
        self._left_at: int | None = None
        self._told_steps = 0

    def update(self, step: int, scale: float | None) -> Verdict | None:
        """Judge the scale that a step was run with; None without a scaler."""
        if scale is None or math.isnan(scale):
            return None
        self.collapsed = scale < self._floor
        if not self.collapsed and scale <= self._ceiling:
            self._left_at, self._told_steps = None, 0
            return None
        self._left_at = step if self._left_at is None else self._left_at
        if self._told_steps >= self._tell_steps:
            return None
        self._told_steps += 1
        return Verdict(
            detector="drift",
            signal="amp_loss_scale",
            step=step,
            value=scale,
            baseline=self._floor if self.collapsed else self._ceiling,
            first_step=self._left_at,
        )

    def state_dict(self) -> dict[str, Any]:
        """Since when it has been out of its range, and how often that was said."""
        return {"collapsed": self.collapsed, "left_at": self._left_at, "told_steps": self._told_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.collapsed, self._left_at, self._told_steps = state["collapsed"], state["left_at"], state["told_steps"]

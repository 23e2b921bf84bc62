"""AMP's loss scale: whether it has left the range in which half precision works. Pure, as the detectors are."""

import math
from collections import deque
from typing import Any

from trainer_plugin.detection.detectors import Verdict


class LossScale:
    """Collapsed, or run away; said at each such step, `tell_steps` times in one stay.

    A scaler that looks for its scale halves it some times, and that is its own business, wherever the scale lies: a
    loss that is summed and not averaged has a small one for good. Collapsed is a scale below `floor` that has been
    halved ten times oftener than doubled within the last 2,000 steps: true gradients are beyond half precision then.
    Run away is one above `ceiling` and above where the run began: gradients are too small to be right.
    After `tell_steps` whoever listens knows: an incident that never ends would hold every later checkpoint back.
    """

    # A scaler doubles its scale once in so many good steps.
    _RECENT_STEPS = 2000
    # A healthy run in fp16 was seen at a 128th of its highest scale of that time, and at no less.
    _LEAST_FALL = 2.0**10

    def __init__(self, *, floor: float, ceiling: float, tell_steps: int) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._tell_steps = tell_steps
        self.collapsed = False
        self._first_scale: float | None = None
        # Each scale of late and the last step that ran with it, falling: the highest of them is in front.
        self._recent: deque[tuple[int, float]] = deque()
        self._left_at: int | None = None
        self._told_steps = 0

    def update(self, step: int, scale: float | None) -> Verdict | None:
        """Judge the scale that a step was run with; None without a scaler."""
        if scale is None or math.isnan(scale):
            return None
        self._first_scale = scale if self._first_scale is None else self._first_scale
        highest = self._highest(step, scale)
        self.collapsed = scale < self._floor and scale * self._LEAST_FALL <= highest
        run_away = scale > max(self._ceiling, self._first_scale)
        if not self.collapsed and not run_away:
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

    def _highest(self, step: int, scale: float) -> float:
        """The highest scale of the last steps, this one among them."""
        recent = self._recent
        while recent and recent[-1][1] <= scale:
            recent.pop()
        recent.append((step, scale))
        while recent[0][0] < step - self._RECENT_STEPS:
            recent.popleft()
        return recent[0][1]

    def state_dict(self) -> dict[str, Any]:
        """Where it began and has been of late, since when it is out of its range, and how often that was said."""
        return {
            "collapsed": self.collapsed,
            "first_scale": self._first_scale,
            "recent": [list(one) for one in self._recent],
            "left_at": self._left_at,
            "told_steps": self._told_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.collapsed, self._first_scale = state["collapsed"], state["first_scale"]
        self._recent = deque((step, scale) for step, scale in state["recent"])
        self._left_at, self._told_steps = state["left_at"], state["told_steps"]

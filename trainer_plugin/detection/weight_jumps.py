"""Each layer's weights against themselves some steps ago: which were thrown further than updates take them. Pure."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer_plugin.signals import LayerReading

# A norm that changes by less is no jump, ...
_LEAST_CHANGE = math.log(1.1)
# ... nor is one below so many times its largest change in the last stretches: the layers of a young run grow fast.
_USUAL_RATIO = 3.0
_USUAL_STRETCHES = 4
# A layer that is read in every step is held against what it was so long ago: ten steps of a rate far too high are one.
_STRETCH_STEPS = 50
# A gate of a few numbers may go through 0.
_LEAST_ELEMENTS = 32
# JSON knows no infinity.
_MOST_LOG = 700.0


class WeightJump(NamedTuple):
    """A layer whose weight norm became `ratio` times what it was, in some step after the first and up to the last."""

    after_step: int
    last_step: int
    layer: str
    ratio: float


class WeightJumps:
    """The weight norm of each layer, and by how much it changed from one stretch of steps to the next.

    An optimizer moves weights by little; a bit that flips, what a faulty chip adds or a learning rate that is far too
    high throws them far away at once, finite or not. `last` is the newest of these jumps, None while there is none.
    """

    def __init__(self) -> None:
        # Layer -> (step, log of the norm, elements, changes of it in the last stretches).
        self._past: dict[str, tuple[int, float, int, list[float]]] = {}
        self.last: WeightJump | None = None

    def update(self, step: int, layers: Mapping[str, LayerReading], *, learn: bool) -> None:
        """Take in the layers that were read after optimizer step `step`; without `learn` they are only judged."""
        for layer, reading in layers.items():
            if reading.elements is None or reading.elements < _LEAST_ELEMENTS or math.isnan(reading.weight_norm):
                continue
            log_norm = math.log(reading.weight_norm) if 0.0 < reading.weight_norm < math.inf else None
            past = self._past.get(layer)
            # Other weights than before: some were frozen or set free, or a rank could not read its part.
            if past is None or step <= past[0] or not math.isclose(reading.elements, past[2], rel_tol=1e-3):
                self._begin(layer, step, log_norm, reading.elements)
                continue
            self._judge(layer, step, reading.weight_norm, log_norm, learn=learn)

    def _begin(self, layer: str, step: int, log_norm: float | None, elements: int) -> None:
        if log_norm is None:
            self._past.pop(layer, None)
        else:
            self._past[layer] = step, log_norm, elements, []

    def _judge(self, layer: str, step: int, norm: float, log_norm: float | None, *, learn: bool) -> None:
        before, log_before, elements, changes = self._past[layer]
        # A norm of 0, or one whose square no float holds though every weight is finite, is as far as can be.
        log_now = log_norm if log_norm is not None else math.copysign(_MOST_LOG, norm - 1.0)
        change = log_now - log_before
        known = len(changes) >= _USUAL_STRETCHES
        if known and abs(change) > max(_LEAST_CHANGE, _USUAL_RATIO * max(changes)):
            self.last = WeightJump(before, step, layer, math.exp(min(change, _MOST_LOG)))
        elif step - before < _STRETCH_STEPS:
            return
        elif learn:
            changes = [*changes, abs(change)][-_USUAL_STRETCHES:]
        if log_norm is not None:
            self._past[layer] = step, log_norm, elements, changes

    def state_dict(self) -> dict[str, Any]:
        """Each layer's past, as plain numbers."""
        return {layer: [*past[:3], list(past[3])] for layer, past in self._past.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state: what has jumped since then is undone."""
        self._past = {layer: (past[0], past[1], past[2], list(past[3])) for layer, past in state.items()}
        self.last = None

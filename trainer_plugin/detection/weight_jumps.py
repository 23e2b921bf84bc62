"""Each layer's weights against themselves one reading ago: which were thrown further than updates take them. Pure."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer_plugin.signals import LayerReading

# A norm that changes by less from one reading of the layer to the next is no jump, ...
_LEAST_CHANGE = math.log(1.1)
# ... nor is one below so many times the largest change of the last readings: small layers of a young run grow fast.
_USUAL_RATIO = 3.0
_USUAL_READINGS = 4
# JSON knows no infinity.
_MOST_LOG = 700.0


class WeightJump(NamedTuple):
    """A layer whose weight norm became `ratio` times what it was, in some step after the first and up to the last."""

    after_step: int
    last_step: int
    layer: str
    ratio: float


class WeightJumps:
    """The weight norm of each layer, and by how much it changed from one reading to the next.

    An optimizer moves weights by little; a bit that flips, what a faulty chip adds or a learning rate that is far too
    high throws them far away at once, finite or not. `last` is the newest of these jumps, None while there is none.
    """

    def __init__(self) -> None:
        # Layer -> [step, log of the norm, changes of it in the last readings].
        self._past: dict[str, tuple[int, float, list[float]]] = {}
        self.last: WeightJump | None = None

    def update(self, step: int, layers: Mapping[str, LayerReading], *, learn: bool) -> None:
        """Take in the layers that were read after optimizer step `step`; without `learn` they are only judged."""
        for layer, reading in layers.items():
            if not 0.0 < reading.weight_norm < math.inf:
                continue
            log_norm = math.log(reading.weight_norm)
            before, log_norm_before, changes = self._past.get(layer, (step, log_norm, []))
            change = log_norm - log_norm_before
            if step > before:
                known = len(changes) >= _USUAL_READINGS
                if known and abs(change) > max(_LEAST_CHANGE, _USUAL_RATIO * max(changes)):
                    self.last = WeightJump(before, step, layer, math.exp(min(change, _MOST_LOG)))
                elif learn:
                    changes = [*changes, abs(change)][-_USUAL_READINGS:]
            self._past[layer] = step, log_norm, changes

    def state_dict(self) -> dict[str, Any]:
        """Each layer's past, as plain numbers."""
        return {layer: [step, log_norm, list(changes)] for layer, (step, log_norm, changes) in self._past.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state: what has jumped since then is undone."""
        self._past = {layer: (step, log_norm, list(changes)) for layer, (step, log_norm, changes) in state.items()}
        self.last = None

"""Each layer's gradient norm against its own past: which layers surge, and how far. Pure."""

import math
from collections.abc import Mapping
from typing import Any

# A norm further from its baseline than this, up or down, is an outlier: it enters no baseline.
OUTLIER_RATIO = 3.0
# So many outliers in a row are no outliers any more: the layer has a new level.
_ACCEPT_STEPS = 200
# Below so many values a baseline is no past to be held against.
_LEAST_VALUES = 50
_OUTLIER_LOG = math.log(OUTLIER_RATIO)
# JSON knows no infinity.
_MOST_LOG = 700.0


class LayerBaselines:
    """An outlier-free moving average of each layer's log gradient norm; `alpha` as in `detection: {ema_alpha}`.

    `ratios` holds norm over baseline in the step seen last, for the layers that have a past: what multiplies, such as
    an exploding gradient, is even in the logarithm. A norm that is 0 or not finite is neither judged nor learnt.
    """

    def __init__(self, *, alpha: float) -> None:
        self._alpha = alpha
        # Layer -> [mean log norm, values in it, outliers in a row].
        self._past: dict[str, list[float]] = {}
        self.ratios: dict[str, float] = {}

    def update(self, norms: Mapping[str, float], *, learn: bool) -> None:
        """Take in the gradient norms of one step; without `learn` they are only judged."""
        self.ratios = {}
        for layer, norm in norms.items():
            if not 0.0 < norm < math.inf:
                continue
            log_norm = math.log(norm)
            past = self._past.setdefault(layer, [log_norm, 0.0, 0.0])
            distance = log_norm - past[0]
            known = past[1] >= _LEAST_VALUES
            if known:
                self.ratios[layer] = math.exp(min(distance, _MOST_LOG))
            if learn:
                self._learn(past, log_norm, outlier=known and abs(distance) > _OUTLIER_LOG)

    def _learn(self, past: list[float], log_norm: float, *, outlier: bool) -> None:
        past[2] = past[2] + 1.0 if outlier else 0.0
        if past[2] >= _ACCEPT_STEPS:
            past[:] = [log_norm, 1.0, 0.0]
        elif not outlier:
            past[1] += 1.0
            # The plain mean of the first values, which an average from the first one on would take long to reach.
            past[0] += max(1.0 - self._alpha, 1.0 / past[1]) * (log_norm - past[0])

    def state_dict(self) -> dict[str, Any]:
        """Each layer's past, as plain numbers."""
        return {layer: list(past) for layer, past in self._past.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._past = {layer: list(past) for layer, past in state.items()}
        self.ratios = {}

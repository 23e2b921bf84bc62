"""Spikes of the loss in a row, and which of them may be withheld. Pure: no torch, no clock, no files."""

import math
from typing import Any

# What goes on longer is no bad batch: to withhold it for ever would be no training at all.
_MOST_WITHHELD = 3


class Spikes:
    """Whether the step that comes may be withheld if it is a spike, and above which limits it is one.

    One bad batch behind a clip does no harm, several in a row do. So the first of a row is withheld only on request,
    and only with loss and gradient norm both out of their bands; behind a loss that was out of its band the loss alone
    decides. At most three are withheld until the loss has come back for good.
    """

    def __init__(self) -> None:
        self._out = False
        self._withheld = 0

    def update(self, loss: float, *, out: bool, withheld: bool, recovered: bool) -> None:
        """Take in a step: whether its loss was `out` of its band, was `withheld` for it, or is back for good."""
        if not math.isfinite(loss):
            return
        self._out = out
        if withheld:
            self._withheld += 1
        elif recovered:
            self._withheld = 0

    def limits(self, loss: float, grad_norm: float, *, first: bool) -> tuple[float, float]:
        """Loss and norm above both of which the next step is withheld, from the limits of their bands.

        With `first` so is the first of a row. Infinite where none is withheld.
        """
        if self._withheld >= _MOST_WITHHELD or not (first or self._out):
            return math.inf, math.inf
        return loss, 0.0 if self._out else grad_norm

    def state_dict(self) -> dict[str, Any]:
        """Where in a row the run is."""
        return {"out": self._out, "withheld": self._withheld}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; a checkpoint of before it was kept has none."""
        self._out, self._withheld = state.get("out", False), state.get("withheld", 0)

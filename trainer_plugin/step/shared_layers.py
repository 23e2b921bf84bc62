"""Layer signals of several ranks: each reads its own parts, and they are added up in the next step's one reduction."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.ranks import Ranks, local
from trainer_plugin.signals import LayerReading
from trainer_plugin.step.layer_signals import FIRST_MOMENTS, SECOND_MOMENTS, LayerSignals, reading_of, wide
from trainer_plugin.step.norms import tensor_norms


class SharedLayerSignals(LayerSignals):
    """As of one process. `layers` are those of all ranks, `shares` what a parameter's parts count for on this one.

    A vector has, for each layer that is due, six sums, all but the elements of squares, and for each of these how many
    parts it is of: it is as long on every rank in every step. The largest activation is that of the first rank's data.
    """

    def __init__(
        self,
        layers: dict[str, list[nn.Parameter]],
        optimizers: list[Optimizer],
        *,
        every: int,
        modules: dict[str, nn.Module] | None = None,
        ranks: Ranks,
        shares: Mapping[nn.Parameter, float],
    ) -> None:
        super().__init__(layers, optimizers, every=every, modules=modules)
        self._shares = shares
        self._counts_activations = ranks.first
        self._device = next(weight.device for weights in layers.values() for weight in weights)
        self._step = 0

    @torch.no_grad()
    def before_optimizer(self, step: int) -> None:
        """As of one process."""
        self._step = step
        self._copies = {
            layer: [(weight, local(weight).clone()) for weight in self._layers[layer] if weight.requires_grad]
            for layer in self.due(step)
        }

    @torch.no_grad()
    def after_optimizer(self) -> tuple[tuple[str, ...], Tensor] | None:
        """The layers that had their turn, and this rank's parts of their values."""
        copies, self._copies = self._copies, {}
        if not copies:
            return None
        parts = [self._part(layer, pairs) for layer, pairs in copies.items()]
        return tuple(copies), torch.cat([part.to(self._device) for part in parts])

    def nothing(self, step: int) -> tuple[tuple[str, ...], Tensor]:
        """As of one process, and as long as if they were there."""
        layers = self.due(step)
        return layers, torch.zeros(2 * self._COLUMNS * len(layers), dtype=torch.float64, device=self._device)

    @classmethod
    def read(cls, layers: tuple[str, ...], values: tuple[float, ...]) -> dict[str, LayerReading]:
        """The roots of the vector added up, once they have arrived; a layer that nobody has read is left out."""
        readings = {}
        for number, layer in enumerate(layers):
            own = values[2 * number * cls._COLUMNS : 2 * (number + 1) * cls._COLUMNS]
            there = zip(own[: cls._COLUMNS], own[cls._COLUMNS :], strict=True)
            weight, update, elements, first, second, activation = (value if count else None for value, count in there)
            if weight is None or update is None:
                continue
            # Of every value comes the root, of this one too.
            elements = None if elements is None else elements * elements
            readings[layer] = reading_of(
                weight=weight, update=update, elements=elements, first=first, second=second, activation=activation
            )
        return readings

    def _part(self, layer: str, pairs: list[tuple[nn.Parameter, Tensor]]) -> Tensor:
        sums = torch.zeros(2, self._COLUMNS, dtype=torch.float64, device=self._device)
        for weight, copy in pairs:
            share, state, now = self._shares[weight], self._state(weight), local(weight)
            squares = [_square(now), _square(wide(copy).sub_(wide(now)))]
            for place, square in enumerate(squares):
                sums[0, place] += square.to(self._device) * share
            sums[0, 2] += now.numel() * share
            sums[1, :3] += 1.0
            for key, moment in ((key, local(state[key])) for key in state if isinstance(state[key], Tensor)):
                if key in FIRST_MOMENTS:
                    sums[0, 3] += _square(moment).to(self._device) * share
                    sums[1, 3] += 1.0
                elif key in SECOND_MOMENTS:
                    sums[0, 4] += moment.sum(dtype=torch.float64).to(self._device) * share
                    sums[1, 4] += 1.0
        largest = self._largest.pop(layer, None)
        if largest is not None and self._counts_activations:
            sums[0, 5] = largest.to(self._device).double().square()
            sums[1, 5] = 1.0
        return sums.flatten()


def _square(tensor: Tensor) -> Tensor:
    """The sum of all squares; those of small moments are beyond float32."""
    (norm,) = tensor_norms([tensor])
    return norm.double().square()

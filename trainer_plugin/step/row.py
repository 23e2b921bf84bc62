"""A row: all values of one step in one tensor, on their way from the device to the host in one transfer."""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

# Squares of a larger norm are beyond float32.
HUGE_NORM = math.sqrt(torch.finfo(torch.float32).max)


class Withhold(IntEnum):
    """Why the update of a step is not to be applied, as it stands in a row."""

    NO = 0
    NONFINITE = 1
    SPIKE = 2
    HUGE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RowValues:
    """A row as read on the host. `grad_norm` is None when there was no gradient.

    Where the device could not tell a huge norm, it is `HUGE_NORM`: at least so much. `beside` is what was handed to
    the row beside the step's own values.
    """

    loss: float
    grad_norm: float | None
    clip_coefficient: float
    amp_loss_scale: float
    withhold: Withhold
    layer_grad_norms: dict[str, float]
    beside: tuple[float, ...] = ()
    shared: "Shared | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What the row of several ranks tells besides, on all of them the same.

    `talks`: the first rank may have something to say at this step's boundary. `stop_asked`: a rank was asked to stop.
    `losses` ranks had a loss; it was not finite on `loss_ranks`, the gradient on `gradient_ranks`. `tokens` and
    `samples` are of all ranks.
    """

    talks: bool
    stop_asked: bool
    losses: int
    tokens: int
    samples: int
    loss_ranks: tuple[int, ...]
    gradient_ranks: tuple[int, ...]


# Beside the step's own values, in this order, and then for each rank what of it is not finite.
SHARED_VALUES = 5
LOSS_FLAG, GRADIENT_FLAG = 1, 2
# In place of the norm of a layer that no rank has a gradient of.
ABSENT = -1.0


class Row:
    """`[loss, norm, coefficient, loss scale, withhold, layer norms..., shared..., beside...]`, float32, of one step.

    `norms` are those of the single gradients, by name, which stay on the device: only a step gone bad needs them. With
    `ranks` the row is of so many ranks, and has the values of `Shared`; a layer norm may then be `ABSENT`.
    """

    def __init__(
        self,
        values: Tensor,
        layers: tuple[str, ...] = (),
        norms: tuple[tuple[str, ...], Tensor] | None = None,
        *,
        ranks: int = 0,
    ) -> None:
        self._layers = layers
        self._norms = norms
        self._ranks = ranks
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        # For whoever shows it too: on the device, not to be waited for.
        self.norm = values[1]
        self._read: RowValues | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @property
    def known(self) -> bool:
        """Whether the host has the values already."""
        return self._read is not None

    def read(self) -> RowValues:
        """The values. The one place where the host waits for the device."""
        if self._read is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._read = self._values_of(self._values.tolist())
        return self._read

    def bad(self) -> bool:
        """Whether the update is to be withheld. Waits for the device like `read`."""
        return self.read().withhold != Withhold.NO

    def nonfinite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient held a NaN or Inf. Reads the host: only for a step gone bad.

        From the norms, not from the gradients: a loop has cleared those by the time it reaches the boundary.
        """
        if self._norms is None:
            return []
        names, norms = self._norms
        return [name for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)]

    def _values_of(self, numbers: list[float]) -> RowValues:
        loss, norm, coefficient, scale, withhold, *rest = numbers
        huge = withhold == Withhold.HUGE
        layers = {
            layer: _lower_bound(value) if huge else value
            for layer, value in zip(self._layers, rest, strict=False)
            if value != ABSENT
        }
        absent = self._norms is None or (self._ranks > 0 and not layers)
        shared, beside = None, rest[len(self._layers) :]
        if self._ranks:
            told = SHARED_VALUES + self._ranks
            shared, beside = _shared(beside[:told]), beside[told:]
        return RowValues(
            loss=loss,
            grad_norm=None if absent else _lower_bound(norm) if huge else norm,
            clip_coefficient=coefficient,
            amp_loss_scale=scale,
            withhold=Withhold(int(withhold)),
            layer_grad_norms=layers,
            beside=tuple(beside),
            shared=shared,
        )


def _shared(values: list[float]) -> Shared:
    talks, stop_asked, losses, tokens, samples, *flags = values
    return Shared(
        talks=talks > 0.0,
        stop_asked=stop_asked > 0.0,
        losses=round(losses),
        tokens=round(tokens),
        samples=round(samples),
        loss_ranks=tuple(rank for rank, flag in enumerate(flags) if int(flag) & LOSS_FLAG),
        gradient_ranks=tuple(rank for rank, flag in enumerate(flags) if int(flag) & GRADIENT_FLAG),
    )


def _lower_bound(norm: float) -> float:
    """What a huge norm is at least, where float32 could not hold its squares."""
    return HUGE_NORM if math.isinf(norm) else norm

"""Signals: what one training step showed, as plain numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReading:
    """One layer after one optimizer step; None where there is no such thing.

    The update is what the step added to the weights, which are so many `elements`. Both moments are in the unit of the
    gradient: the norm of the first, and the root of the sum of the second.
    """

    weight_norm: float
    update_ratio: float | None
    first_moment_norm: float | None
    second_moment_norm: float | None
    activation_max: float | None
    elements: int | None = None


class Signals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step, read at its boundary.

    `grad_norm` and `layer_grad_norms` are taken before clipping and after AMP's unscaling; they are None and empty
    when no gradient was there to measure (never 0). A non-finite value is kept as it was. `clip_coefficient` is what
    every gradient was multiplied with. `surge`: the norm was clipped as one. `withheld` says why the optimizer did not
    apply this step, if it did not. `huge`: every gradient is finite, yet their norm is beyond float32's squares; an
    accelerator can only tell the least that it may be. `loss_mean` is how the loss was made of micro-batches: `none`,
    `micro_batch` or `token`. `layers` holds the layers whose turn it was in the step before. Of several ranks the
    values are of all together, `samples` too; the loss was not finite on `loss_ranks`, the gradient on
    `gradient_ranks`. `again`: this update was measured before, as a closure does that is evaluated more than once.
    """

    step: int
    loss: float
    grad_norm: float | None
    layer_grad_norms: Mapping[str, float] = _NONE
    clip_coefficient: float = 1.0
    surge: bool = False
    withheld: str | None = None
    amp_loss_scale: float | None = None
    learning_rates: tuple[float, ...] = ()
    step_seconds: float = math.nan
    data_wait_seconds: float = math.nan
    data_position: int | None = None
    sample_ids: tuple[str, ...] = ()
    tokens: int | None = None
    huge: bool = False
    layers: Mapping[str, LayerReading] = _NONE
    loss_mean: str = "none"
    samples: int | None = None
    loss_ranks: tuple[int, ...] = ()
    gradient_ranks: tuple[int, ...] = ()
    again: bool = False

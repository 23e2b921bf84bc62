"""The probe: loss, gradient norm and per-layer norms of one step as one row on the device, and the clip they decide.

Nothing here reads a value on the host (on a CPU, where that waits for nothing, only to look again at a huge norm).
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer_plugin.detection.spikes import MOST_IN_A_ROW
from trainer_plugin.step.norms import layer_norms, scale_all, scale_and_check, tensor_norms
from trainer_plugin.step.row import Row, Withhold

# The squares of smaller elements are not whole numbers to float32 any more.
LEAST_NORM = 1e-15
# What torch.compile puts into the names of a module that it wraps, the whole model or a part of it.
_WRAPPER = re.compile(r"(^|\.)_orig_mod(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a gradient may go in this step, in units of the total norm. `math.inf` stands for no limit.

    A norm above `surge_above` is a surge and clipped to `surge_clip`; any other is clipped to `max_norm`. A step whose
    loss is above `spike_loss` is withheld if its norm is above `spike_norm`, or if the step before had such a loss too;
    of a row none beyond the fourth. `weight` is what the step counts for: the gradients are multiplied with it beside
    the clip.
    """

    max_norm: float = math.inf
    surge_above: float = math.inf
    surge_clip: float = math.inf
    spike_loss: float = math.inf
    spike_norm: float = math.inf
    weight: float = 1.0


class Probe:
    """Measures and clips the gradients of one model.

    A tied weight is one parameter and counts once. Layers are named after modules: see `layer_of`. With `torchs_clip`
    the clip is `torch.nn.utils.clip_grad_norm_` itself, whatever it does to a bad step; without it the norms that were
    measured serve the clip too, and are nearer to the truth.
    """

    def __init__(self, model: nn.Module, *, torchs_clip: bool = False) -> None:
        self._torchs_clip = torchs_clip
        # All of them: one that is frozen now may be trained later.
        self.parameters: dict[str, nn.Parameter] = {
            plain_name(name): parameter for name, parameter in model.named_parameters()
        }
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            raise ValueError("model has no parameter that requires a gradient")
        # A mask of -inf is what it is; a running mean that becomes NaN is damage.
        self._finite_buffers = {
            plain_name(name): buffer
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and is_finite(buffer)
        }
        self.layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            self.layers.setdefault(layer_of(name), []).append(parameter)
        self._layer_cache: tuple[tuple[bool, ...], tuple[str, ...], Tensor] | None = None
        self._spikes_in_a_row = torch.zeros((), device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next(iter(self.parameters.values())).device

    @torch.no_grad()
    def measure(
        self,
        loss: Tensor | None,
        limits: Limits,
        *,
        scale: Tensor | None = None,
        beside: Sequence[Tensor] = (),
        again: bool = False,
    ) -> tuple[Row, Tensor]:
        """Measure the gradients, clip them in place, and return `(row, bad)`, both on the device.

        A loss of None could not be read, and withholds nothing. `scale` is AMP's loss scale, shape []; the gradients
        have been divided by it already. `beside` are vectors of other values that shall go to the host with this row.
        With `again` this is no new update, but the last one evaluated once more: it is no spike, and of no row.
        `bad` is a float32 scalar: 1.0 when the update is to be withheld (`Withhold`), else 0.0; the gradients of a step
        that is not finite are left exactly as they were.

        The total is the 2-norm of the per-tensor 2-norms and the coefficient `max_norm / (norm + 1e-6)`, at most 1,
        both as in `torch.nn.utils.clip_grad_norm_`.
        """
        judged = loss is not None and not again
        present = tuple(parameter.grad is not None for parameter in self.parameters.values())
        held = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        # A sparse gradient is measured where the values of one place are added up, and clipped as it is.
        gradients = [values_of(gradient) for gradient in held]
        measured = [values_of(gradient.coalesce()) if gradient.is_sparse else gradient for gradient in held]
        # Detached before anything else: the row must not keep the graph of the forward pass alive.
        loss = torch.zeros((), device=self.device) if loss is None else loss.detach().float().reshape(())
        if not gradients:
            finite = torch.isfinite(loss)
            if judged:
                self._is_spike(loss, loss, finite, spike_loss=limits.spike_loss, spike_norm=math.inf)
            bad = (~finite).float()
            head = [loss, *(torch.full((), math.nan, device=loss.device) for _ in range(3)), bad]
            return Row(packed(head, *beside)), bad
        device = gradients[0].device
        tensors = tensor_norms(measured)
        norms = torch.stack(tensors if len({norm.device for norm in tensors}) == 1 else [n.to(device) for n in tensors])
        total = torch.linalg.vector_norm(norms)
        huge = torch.zeros_like(total, dtype=torch.bool)
        if device.type == "cpu" and not LEAST_NORM < float(total) < math.inf:
            # Finite but huge, or small but there? Squares of 1e20 and of 1e-22 are beyond float32. On a CPU looking
            # costs nothing.
            exact = torch.stack([torch.linalg.vector_norm(gradient.double()) for gradient in measured])
            huge = torch.isfinite(exact).all() & ~torch.isfinite(total)
            norms, total = exact.float(), torch.linalg.vector_norm(exact).float()
        loss = loss.to(device)
        finite = torch.isfinite(total) & torch.isfinite(loss)
        limit = torch.where(total > limits.surge_above, limits.surge_clip, limits.max_norm)
        # A bad step must not be scaled: max / Inf is 0, and 0 x Inf would turn every gradient into NaN.
        # A product with the reciprocal, as torch has it: a quotient differs in the last bit.
        clip = torch.clamp((total + 1e-6).reciprocal() * limit, max=1.0)
        # After the clip, which would undo it, and after the norms, whose baselines it must not lower.
        coefficient = torch.where(finite, clip if limits.weight == 1.0 else clip * limits.weight, 1.0)
        if self._torchs_clip:
            # torch refuses sparse gradients: a loop that has some does not clip.
            if limits.max_norm < math.inf and not any(gradient.is_sparse for gradient in held):
                nn.utils.clip_grad_norm_(self.parameters.values(), limits.max_norm)
        elif device.type != "cpu":
            huge = torch.isinf(total) & ~scale_and_check(gradients, coefficient)
        elif limits != Limits():
            scale_all(gradients, coefficient)
        withhold = torch.where(finite, 0.0, float(Withhold.NONFINITE))
        if judged:
            spike = self._is_spike(loss, total, finite, spike_loss=limits.spike_loss, spike_norm=limits.spike_norm)
            withhold = torch.where(spike, float(Withhold.SPIKE), withhold)
        withhold = torch.where(huge & torch.isfinite(loss), float(Withhold.HUGE), withhold)
        scale = torch.ones_like(total) if scale is None else scale.reshape(()).to(total.device)
        layers, numbers = self._layers_of(present, norms.device)
        row = Row(
            packed([loss, total, coefficient, scale, withhold], layer_norms(norms, numbers, len(layers)), *beside),
            layers,
            (tuple(itertools.compress(self.parameters, present)), norms),
        )
        return row, (withhold > 0).float()

    def nonfinite_weights(self) -> list[str]:
        """Names of the weights, and of buffers that were finite, that hold a NaN or Inf.

        Reads the host: only when the loss or a gradient already is not finite.
        """
        held = {**self.parameters, **self._finite_buffers}
        return [name for name, tensor in held.items() if not is_finite(tensor)]

    def forget(self) -> None:
        """The run has gone back: what the last steps were says nothing about the next one."""
        self._spikes_in_a_row = torch.zeros_like(self._spikes_in_a_row)

    def _is_spike(
        self, loss: Tensor, norm: Tensor, known: Tensor, *, spike_loss: Tensor | float, spike_norm: Tensor | float
    ) -> Tensor:
        """Whether this step is a spike to withhold. Judged on the device, where the step before is known already.

        One that is not `known`, for its loss or norm is not finite or could not be read, leaves the row as it is.
        """
        before = self._spikes_in_a_row.to(loss.device)
        high = loss > spike_loss
        self._spikes_in_a_row = torch.where(known, torch.where(high, before + 1.0, 0.0), before)
        return known & high & ((before > 0.0) | (norm > spike_norm)) & (before < MOST_IN_A_ROW)

    def _layers_of(self, present: tuple[bool, ...], device: torch.device) -> tuple[tuple[str, ...], Tensor]:
        """The layers that have a gradient in this step, and for each gradient the number of its layer."""
        if self._layer_cache is None or self._layer_cache[0] != present or self._layer_cache[2].device != device:
            names = [layer_of(name) for name in itertools.compress(self.parameters, present)]
            layers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            numbers = torch.tensor([layers[name] for name in names], pin_memory=device.type == "cuda")
            self._layer_cache = present, tuple(layers), numbers.to(device, non_blocking=True)
        return self._layer_cache[1:]


def plain_name(name: str) -> str:
    """The name of a parameter or module as it is in the model, without torch.compile's wrapper."""
    return _WRAPPER.sub("", name).lstrip(".")


def layer_of(parameter_name: str) -> str:
    """The layer a parameter belongs to: the block of a stack (`blocks.3`), else the module that owns it (`wte`)."""
    parts = parameter_name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or parts[0]


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is. Reads the host."""
    return bool(torch.isfinite(tensor).all())


def values_of(gradient: Tensor) -> Tensor:
    """What a gradient holds, to be written too."""
    return gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - `values()` wants it coalesced


def packed(head: list[Tensor], *tails: Tensor) -> Tensor:
    """One float32 vector of scalars and vectors."""
    values = torch.stack([value.float() for value in head])
    return torch.cat([values, *(tail.to(values.device).float() for tail in tails)])

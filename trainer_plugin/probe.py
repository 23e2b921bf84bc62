"""The probe: loss, gradient norm and per-layer norms of one step as one row on the device, and the clip they decide.

Nothing here reads a value on the host except `Row.read`, which is called at the boundary.
"""

import functools
import itertools
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Below this, torch's own pass over all tensors at once is as fast.
_LEAST_ROWS_NUMEL = 1 << 18
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_WRAPPER_PREFIX = re.compile(r"(^|\.)_orig_mod(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a gradient may go in this step, in units of the total norm. `math.inf` stands for no limit.

    A norm above `surge_above` is a surge and clipped to `surge_clip`; any other is clipped to `max_norm`.
    """

    max_norm: float = math.inf
    surge_above: float = math.inf
    surge_clip: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class RowValues:
    """A row as read on the host. `grad_norm` is None when there was no gradient."""

    loss: float
    grad_norm: float | None
    clip_coefficient: float
    amp_loss_scale: float
    layer_grad_norms: dict[str, float]


class Row:
    """One step's values on their way to the host: `[loss, norm, coefficient, loss scale, layer norms...]`, float32."""

    def __init__(self, values: Tensor, layers: tuple[str, ...], norms: dict[str, Tensor] | None = None) -> None:
        self._layers = layers
        self._norms = norms
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> RowValues:
        """The values. The one place where the host waits for the device: at a boundary, for a row launched earlier."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, norm, coefficient, scale, *layer_norms = self._values.tolist()
        if self._norms is None:
            return RowValues(loss=loss, grad_norm=None, clip_coefficient=1.0, amp_loss_scale=scale, layer_grad_norms={})
        return RowValues(
            loss=loss,
            grad_norm=norm,
            clip_coefficient=coefficient,
            amp_loss_scale=scale,
            layer_grad_norms=dict(zip(self._layers, layer_norms, strict=True)),
        )

    def nonfinite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient held a NaN or Inf. Reads the host: only for a step gone bad.

        From the norms, not from the gradients: a loop has cleared those by the time it reaches the boundary.
        """
        return [name for name, norm in (self._norms or {}).items() if not math.isfinite(norm)]


class Probe:
    """Measures and clips the gradients of one model.

    A tied weight is one parameter and counts once. Layers are named after modules: see `layer_of`. With `bitwise` the
    norms, and so the clip, are torch's own to the last bit; without it large tensors on a CPU are summed row by row,
    which is faster on several threads and nearer to the truth.
    """

    def __init__(self, model: nn.Module, *, bitwise: bool = False) -> None:
        self._bitwise = bitwise
        self.parameters: dict[str, nn.Parameter] = {
            _WRAPPER_PREFIX.sub(r"\1", name).lstrip("."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError("model has no parameter that requires a gradient")
        self.layers = tuple(dict.fromkeys(layer_of(name) for name in self.parameters))
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        self._layer_numbers = [numbers[layer_of(name)] for name in self.parameters]
        self._index_cache: dict[tuple[bool, ...], Tensor] = {}

    def measure(self, loss: Tensor, limits: Limits, *, scale: Tensor | None = None) -> tuple[Row, Tensor]:
        """Measure the gradients, clip them in place, and return `(row, bad)`, both on the device.

        `scale` is AMP's loss scale, shape []; the gradients have been divided by it already. `bad` is a float32
        scalar: 1.0 when loss or norm is not finite, else 0.0; a bad step's gradients are left exactly as they were.

        The total is the 2-norm of the per-tensor 2-norms and the coefficient `max_norm / (norm + 1e-6)`, at most 1,
        both as in `torch.nn.utils.clip_grad_norm_`, so that an unlimited guard changes no bit of a training run.
        """
        present = tuple(parameter.grad is not None for parameter in self.parameters.values())
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        # Detached before anything else: the row must not keep the graph of the forward pass alive.
        loss = loss.detach().float().reshape(())
        if not gradients:
            bad = (~torch.isfinite(loss)).float()
            nothing = torch.full((3 + len(self.layers),), math.nan, device=loss.device)
            return Row(torch.cat([loss.reshape(1), nothing]), self.layers), bad
        tensor_norms = _tensor_norms(gradients, bitwise=self._bitwise)
        norms = torch.stack(tensor_norms)
        total = torch.linalg.vector_norm(norms)
        if total.device.type == "cpu" and not self._bitwise and not bool(torch.isfinite(total)):
            # Finite but huge? The squares of 1e20 are beyond float32. On a CPU looking costs nothing; elsewhere such a
            # step is withheld like one that is not finite.
            tensor_norms = [torch.linalg.vector_norm(gradient.double()).float() for gradient in gradients]
            norms = torch.stack(tensor_norms)
            total = torch.linalg.vector_norm(norms.double()).float()
        loss = loss.to(total.device)
        # Squares of a huge norm need float64, which Apple's GPUs do not have.
        wide = torch.float32 if norms.device.type == "mps" else torch.float64
        layer_norms = (
            torch.zeros(len(self.layers), device=norms.device, dtype=wide)
            .index_add_(0, self._layer_index(present, norms.device), norms.to(wide).square())
            .sqrt_()
            .float()
        )
        finite = torch.isfinite(total) & torch.isfinite(loss)
        limit = torch.where(total > limits.surge_above, limits.surge_clip, limits.max_norm)
        # A bad step must not be scaled: max / Inf is 0, and 0 x Inf would turn every gradient into NaN.
        # A product with the reciprocal, as torch has it: a quotient differs in the last bit.
        coefficient = torch.where(finite, torch.clamp((total + 1e-6).reciprocal() * limit, max=1.0), 1.0)
        if limits != Limits():
            torch._foreach_mul_(gradients, coefficient)
        scale = torch.ones_like(total) if scale is None else scale.float().reshape(()).to(total.device)
        values = torch.cat([torch.stack([loss, total, coefficient, scale]), layer_norms])
        names = itertools.compress(self.parameters, present)
        return Row(values, self.layers, dict(zip(names, tensor_norms, strict=True))), (~finite).float()

    def weights_finite(self) -> bool:
        """Whether every weight is finite. Reads the host: only when the loss or a gradient already is not."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters.values())

    def _layer_index(self, present: tuple[bool, ...], device: torch.device) -> Tensor:
        index = self._index_cache.get(present)
        if index is None or index.device != device:
            numbers = [number for number, here in zip(self._layer_numbers, present, strict=True) if here]
            index = torch.tensor(numbers, device=device)
            self._index_cache = {present: index}
        return index


def layer_of(parameter_name: str) -> str:
    """The layer a parameter belongs to: the block of a stack (`blocks.3`), else the module that owns it (`wte`)."""
    parts = parameter_name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or parts[0]


def _tensor_norms(gradients: list[Tensor], *, bitwise: bool) -> list[Tensor]:
    """2-norm of each tensor as float32; half precision is accumulated in float32."""
    rows = {} if bitwise else {place: length for place, g in enumerate(gradients) if (length := _row_length(g))}
    rest = [gradient for place, gradient in enumerate(gradients) if place not in rows]
    half = any(gradient.dtype in _HALF_DTYPES for gradient in rest)
    others = iter(torch._foreach_norm(rest, 2.0, dtype=torch.float32 if half else None) if rest else [])  # noqa: SLF001
    return [
        torch.linalg.vector_norm(torch.linalg.vector_norm(gradient.view(-1, rows[place]), dim=1))
        if place in rows
        else next(others)
        for place, gradient in enumerate(gradients)
    ]


def _row_length(gradient: Tensor) -> int:
    """Elements in a row by which a large float32 tensor on a CPU is summed; 0 where it is not."""
    if gradient.numel() < _LEAST_ROWS_NUMEL or gradient.device.type != "cpu":
        return 0
    if gradient.dtype != torch.float32 or not gradient.is_contiguous():
        return 0
    return _divisor(gradient.numel())


@functools.cache
def _divisor(numel: int) -> int:
    """The largest row length between 16 k and 128 k that divides `numel`; 0 if there is none."""
    return next((length for length in range(1 << 17, (1 << 14) - 1, -1) if numel % length == 0), 0)

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
        # All of them: one that is frozen now may be trained later.
        self.parameters: dict[str, nn.Parameter] = {
            _WRAPPER_PREFIX.sub(r"\1", name).lstrip("."): parameter for name, parameter in model.named_parameters()
        }
        if not any(parameter.requires_grad for parameter in self.parameters.values()):
            raise ValueError("model has no parameter that requires a gradient")
        # A mask of -inf is what it is; a running mean that becomes NaN is damage.
        self._finite_buffers = {
            name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point() and _is_finite(buffer)
        }
        self.layers = tuple(
            dict.fromkeys(layer_of(name) for name, parameter in self.parameters.items() if parameter.requires_grad)
        )
        self._layer_cache: tuple[tuple[bool, ...], tuple[str, ...], Tensor] | None = None

    def measure(self, loss: Tensor, limits: Limits, *, scale: Tensor | None = None) -> tuple[Row, Tensor]:
        """Measure the gradients, clip them in place, and return `(row, bad)`, both on the device.

        `scale` is AMP's loss scale, shape []; the gradients have been divided by it already. `bad` is a float32
        scalar: 1.0 when loss or norm is not finite, else 0.0; a bad step's gradients are left exactly as they were.

        The total is the 2-norm of the per-tensor 2-norms and the coefficient `max_norm / (norm + 1e-6)`, at most 1,
        both as in `torch.nn.utils.clip_grad_norm_`, so that an unlimited guard changes no bit of a training run.
        """
        present = tuple(parameter.grad is not None for parameter in self.parameters.values())
        gradients = [_dense(parameter) for parameter in self.parameters.values() if parameter.grad is not None]
        # Detached before anything else: the row must not keep the graph of the forward pass alive.
        loss = loss.detach().float().reshape(())
        if not gradients:
            bad = (~torch.isfinite(loss)).float()
            return Row(torch.cat([loss.reshape(1), torch.full((3,), math.nan, device=loss.device)]), ()), bad
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
        layers, numbers = self._layers_of(present, norms.device)
        layer_norms = (
            torch.zeros(len(layers), device=norms.device, dtype=wide)
            .index_add_(0, numbers, norms.to(wide).square())
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
        scale = torch.ones_like(total) if scale is None else scale.reshape(()).to(total.device)
        values = torch.cat([torch.stack([v.float() for v in (loss, total, coefficient, scale)]), layer_norms])
        names = itertools.compress(self.parameters, present)
        return Row(values, layers, dict(zip(names, tensor_norms, strict=True))), (~finite).float()

    def nonfinite_weights(self) -> list[str]:
        """Names of the weights, and of buffers that were finite, that hold a NaN or Inf.

        Reads the host: only when the loss or a gradient already is not finite.
        """
        held = {**self.parameters, **self._finite_buffers}
        return [name for name, tensor in held.items() if not _is_finite(tensor)]

    def _layers_of(self, present: tuple[bool, ...], device: torch.device) -> tuple[tuple[str, ...], Tensor]:
        """The layers that have a gradient in this step, and for each gradient the number of its layer."""
        if self._layer_cache is None or self._layer_cache[0] != present or self._layer_cache[2].device != device:
            names = [layer_of(name) for name in itertools.compress(self.parameters, present)]
            layers = tuple(dict.fromkeys(names))
            self._layer_cache = present, layers, torch.tensor([layers.index(name) for name in names], device=device)
        return self._layer_cache[1:]


def layer_of(parameter_name: str) -> str:
    """The layer a parameter belongs to: the block of a stack (`blocks.3`), else the module that owns it (`wte`)."""
    parts = parameter_name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or parts[0]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _dense(parameter: nn.Parameter) -> Tensor:
    """The values of a parameter's gradient; a sparse one is coalesced first, since its values may repeat a place."""
    gradient = parameter.grad
    if gradient is None:
        raise ValueError("a gradient is wanted")
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    values: Tensor = parameter.grad._values()  # noqa: SLF001 - `values()` of a coalesced tensor is a copy-free view too, but not to be written
    return values


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

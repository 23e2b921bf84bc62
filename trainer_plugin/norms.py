"""Norms of many tensors at once, on their device: exact, and in as few passes as there can be."""

import functools

import torch
from torch import Tensor

# Below this, torch's own pass over all tensors at once is as fast.
_LEAST_ROWS_NUMEL = 1 << 18
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def tensor_norms(tensors: list[Tensor], *, bitwise: bool = False) -> list[Tensor]:
    """2-norm of each tensor, shape []; half precision is accumulated in float32.

    `bitwise` gives torch's own to the last bit; without it large tensors on a CPU are summed row by row, which is
    faster on several threads and nearer to the truth.
    """
    rows = {} if bitwise else {place: length for place, t in enumerate(tensors) if (length := _row_length(t))}
    rest = [tensor for place, tensor in enumerate(tensors) if place not in rows]
    half = any(tensor.dtype in _HALF_DTYPES for tensor in rest)
    others = iter(torch._foreach_norm(rest, 2.0, dtype=torch.float32 if half else None) if rest else [])  # noqa: SLF001
    return [
        torch.linalg.vector_norm(torch.linalg.vector_norm(tensor.view(-1, rows[place]), dim=1))
        if place in rows
        else next(others)
        for place, tensor in enumerate(tensors)
    ]


def layer_norms(norms: Tensor, numbers: Tensor, layers: int) -> Tensor:
    """2-norm of each layer from those of its tensors; squares of a huge norm need float64, which Apple's GPUs lack."""
    wide = torch.float32 if norms.device.type == "mps" else torch.float64
    sums = torch.zeros(layers, device=norms.device, dtype=wide).index_add_(0, numbers, norms.to(wide).square())
    return sums.sqrt_()


def scale_and_check(gradients: list[Tensor], coefficient: Tensor) -> Tensor:
    """Multiply every gradient with the coefficient, and say whether any element was not finite, in the same pass.

    The scaler's own kernel, one pass for each dtype: what tells a finite but huge gradient from an infinite one.
    """
    unfit = torch.zeros(1, device=coefficient.device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, unfit, coefficient.float().reshape(1))
    return unfit.reshape(()) > 0


def _row_length(tensor: Tensor) -> int:
    """Elements in a row by which a large float32 tensor on a CPU is summed; 0 where it is not."""
    if tensor.numel() < _LEAST_ROWS_NUMEL or tensor.device.type != "cpu":
        return 0
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        return 0
    return _divisor(tensor.numel())


@functools.cache
def _divisor(numel: int) -> int:
    """The largest row length between 16 k and 128 k that divides `numel`; 0 if there is none."""
    return next((length for length in range(1 << 17, (1 << 14) - 1, -1) if numel % length == 0), 0)

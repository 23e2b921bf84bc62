"""Norms of many tensors at once, on their device: exact, and in as few passes as there can be."""

import torch
from torch import Tensor

_HALF_DTYPES = (torch.float16, torch.bfloat16)
# torch sums a tensor's squares one after the other: at 20 million elements a float32 norm is off by 1e-3. Norms of rows
# of this length, and the norm of these, are off by less than 1e-6, and are taken on all threads. Smaller tensors than
# `_LEAST_NUMEL` are exact enough as they are, and then one pass over all of them is cheaper.
_ROW_NUMEL = 1 << 13
_LEAST_NUMEL = {torch.float32: 1 << 18, torch.float16: 1 << 16, torch.bfloat16: 1 << 16}


def tensor_norms(tensors: list[Tensor], *, bitwise: bool = False) -> list[Tensor]:
    """2-norm of each tensor, shape []; half precision is accumulated in float32.

    `bitwise` gives torch's own to the last bit; without it large tensors on a CPU are summed row by row, which is
    faster on several threads and nearer to the truth.
    """
    by_rows = [not bitwise and _is_large(tensor) for tensor in tensors]
    rest = [tensor for tensor, large in zip(tensors, by_rows, strict=True) if not large]
    half = any(tensor.dtype in _HALF_DTYPES for tensor in rest)
    others = iter(torch._foreach_norm(rest, 2.0, dtype=torch.float32 if half else None) if rest else [])  # noqa: SLF001
    return [_norm_by_rows(tensor) if large else next(others) for tensor, large in zip(tensors, by_rows, strict=True)]


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


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor is summed by rows: on a CPU, and large."""
    least = _LEAST_NUMEL.get(tensor.dtype)
    return least is not None and tensor.numel() >= least and tensor.device.type == "cpu" and tensor.is_contiguous()


def _norm_by_rows(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    whole = flat.numel() - flat.numel() % _ROW_NUMEL
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW_NUMEL), dim=1, dtype=torch.float32)
    if whole < flat.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).reshape(1)])
    norm: Tensor = torch.linalg.vector_norm(parts)
    return norm

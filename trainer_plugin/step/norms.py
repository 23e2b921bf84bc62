"""Norms of many tensors at once, on their device: exact, and in as few passes as there can be."""

from collections.abc import Iterable

import torch
from torch import Tensor

_HALF_DTYPES = (torch.float16, torch.bfloat16)
# torch sums a tensor's squares one after the other: at 20 million elements a float32 norm is off by 1e-3. Norms of rows
# of this length, and the norm of these, are off by less than 1e-6, and are taken on all threads. Smaller tensors than
# `_LEAST_NUMEL` are exact enough as they are, and then one pass over all of them is cheaper.
_ROW_NUMEL = 1 << 11
_LEAST_NUMEL = {torch.float32: 1 << 18, torch.float16: 1 << 16, torch.bfloat16: 1 << 16}


def tensor_norms(tensors: list[Tensor]) -> list[Tensor]:
    """2-norm of each tensor, shape [], on the tensor's device; half precision is accumulated in float32."""
    norms: dict[int, Tensor] = {}
    for places in _alike(tensors):
        rest = []
        for place in places:
            if _is_large(tensors[place]):
                norms[place] = _norm_by_rows(tensors[place])
            else:
                rest.append(place)
        dtype = torch.float32 if tensors[places[0]].dtype in _HALF_DTYPES else None
        if rest:
            found = torch._foreach_norm([tensors[place] for place in rest], 2.0, dtype=dtype)  # noqa: SLF001
            norms |= dict(zip(rest, found, strict=True))
    return [norms[place] for place in range(len(tensors))]


def layer_norms(norms: Tensor, numbers: Tensor, layers: int) -> Tensor:
    """2-norm of each layer from those of its tensors; squares of a huge norm need float64, which Apple's GPUs lack."""
    wide = torch.float32 if norms.device.type == "mps" else torch.float64
    sums = torch.zeros(layers, device=norms.device, dtype=wide).index_add_(0, numbers, norms.to(wide).square())
    return sums.sqrt_()


def scale_all(tensors: list[Tensor], coefficient: Tensor) -> None:
    """Multiply every tensor with the coefficient, shape []."""
    for places in _alike(tensors):
        same = [tensors[place] for place in places]
        torch._foreach_mul_(same, coefficient.to(same[0].device))


def scale_and_check(tensors: list[Tensor], coefficient: Tensor) -> Tensor:
    """Multiply every tensor with the coefficient, and say whether any element was not finite, in the same pass.

    The scaler's own kernel: what tells a finite but huge gradient from an infinite one.
    """
    unfit = torch.zeros((), device=coefficient.device)
    for places in _alike(tensors):
        same = [tensors[place] for place in places]
        theirs = torch.zeros(1, device=same[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(same, theirs, coefficient.float().reshape(1).to(theirs.device))
        unfit = torch.maximum(unfit, theirs.reshape(()).to(unfit.device))
    return unfit > 0


def _alike(tensors: list[Tensor]) -> Iterable[list[int]]:
    """The places of the tensors of each device and dtype: only those can be handled in one pass."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return groups.values()


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor is summed by rows: on a CPU, and large."""
    least = _LEAST_NUMEL.get(tensor.dtype)
    return least is not None and tensor.numel() >= least and tensor.device.type == "cpu"


def _norm_by_rows(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        # A norm does not ask for the order: that of the memory (channels last, transposed) needs no copy.
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    whole = flat.numel() - flat.numel() % _ROW_NUMEL
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW_NUMEL), dim=1, dtype=torch.float32)
    if whole < flat.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).reshape(1)])
    norm: Tensor = torch.linalg.vector_norm(parts)
    return norm

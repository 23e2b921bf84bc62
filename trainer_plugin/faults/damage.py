"""What faults do to tensors: to a batch, to gradients, to weights and to a layer norm's input."""

import math
from typing import Any

import torch
from torch import Tensor, nn

# A loss scale at which every gradient above 65504 / 2^30 is beyond half precision.
_OVERFLOWING_SCALE = 2.0**30


def garbage(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise over the range of a batch: what a file that is no text looks like."""
    if not tensor.numel():
        return tensor
    noise = torch.rand(tensor.shape, generator=generator).to(tensor.device)
    if tensor.is_floating_point():
        low, high = tensor.min(), tensor.max()
        return low + (high - low) * noise.to(tensor)
    # One more than the greatest of them may be beyond their own type, as 256 is for a byte.
    low, high = tensor.long().min(), tensor.long().max()
    return (low + noise * (high - low + 1)).long().to(tensor.dtype)


def shuffled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The same values in any order."""
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)


def overflow(gradient: Tensor) -> None:
    """Take a gradient through half precision at a loss scale that is too high for it, in place."""
    gradient.copy_((gradient.float() * _OVERFLOWING_SCALE).half().float() / _OVERFLOWING_SCALE)


def fill_inf(gradient: Tensor) -> None:
    """Every element is beyond all precision, in place."""
    gradient.fill_(math.inf)


def flip_bit(parameter: Tensor, bit: int) -> None:
    """Flip one bit of the middle element of float32 weights, in place.

    Raises:
        ValueError: they are no float32, or have no such bit.
    """
    if parameter.dtype != torch.float32 or not 0 <= bit < 32:
        raise ValueError(f"bit_flip: bit 0 to 31 of float32 weights wanted, found bit {bit} of {parameter.dtype}")
    bits = parameter.data.view(torch.int32)
    mask = -(1 << 31) if bit == 31 else 1 << bit
    bits[torch.unravel_index(torch.tensor(bits.numel() // 2), bits.shape)] ^= mask


def add_noise(parameter: Tensor, times: float, generator: torch.Generator) -> None:
    """Add normal noise of so many times the weights' own deviation, in place."""
    deviation = parameter.data.std() if parameter.numel() > 1 else parameter.data.abs()
    parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * deviation * times)


def constant_row(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook: the first row of a layer norm's input is padding, the same value everywhere."""
    x = args[0].clone()
    x[0] = 1.0
    return (x, *args[1:])


def put_nan(gradient: Tensor) -> None:
    """One element becomes NaN, in place."""
    gradient[(0,) * gradient.dim()] = math.nan

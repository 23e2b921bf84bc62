"""Norms: near to float64 whatever the dtype and size, and the kernel that tells huge from infinite."""

import math

import pytest
import torch

from trainer_plugin.step.norms import layer_norms, scale_and_check, tensor_norms


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (1024, 1024)),  # Summed by rows.
        (torch.float32, (7, 11)),
        (torch.float32, (600_011,)),  # Large, and a prime: no row length divides it.
        (torch.float32, ()),
        (torch.bfloat16, (512, 512)),
        (torch.float16, (512, 512)),
        (torch.float64, (512, 512)),
    ],
)
def test_norms_equal_a_float64_reference(dtype, shape):
    """Each tensor's norm is that of the same numbers in float64, to 1e-5, also beside others of another dtype."""
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3.0).to(dtype)
    other = torch.tensor([3.0, 4.0])
    norms = tensor_norms([other, tensor])
    assert norms[0].item() == 5.0
    assert norms[1].item() == pytest.approx(tensor.double().norm().item(), rel=1e-5)


def test_a_tensor_that_is_not_contiguous_is_measured_as_well():
    """A transposed gradient has the norm of its elements."""
    tensor = torch.randn(600, 700).t()
    assert tensor_norms([tensor])[0].item() == pytest.approx(tensor.double().norm().item(), rel=1e-5)


def test_layers_are_the_root_of_the_sum_of_squares():
    """Norms 3 and 4 of one layer are 5; a norm whose square is beyond float32 is no Inf."""
    found = layer_norms(torch.tensor([3.0, 1e30, 4.0]), torch.tensor([0, 1, 0]), 2)
    assert found.tolist() == pytest.approx([5.0, 1e30])


@pytest.mark.parametrize(("poison", "unfit"), [(1e20, False), (math.inf, True), (math.nan, True)])
def test_one_pass_scales_and_tells_huge_from_infinite(poison, unfit):
    """Every gradient of every dtype is multiplied, and only NaN and Inf are unfit, not a norm beyond float32."""
    gradients = [torch.tensor([2.0, 4.0]), torch.tensor([poison, 1.0]), torch.tensor([8.0], dtype=torch.bfloat16)]
    assert bool(scale_and_check(gradients, torch.tensor(0.5))) == unfit
    assert gradients[0].tolist() == [1.0, 2.0]
    assert gradients[2].tolist() == [4.0]


def test_a_coefficient_of_one_changes_no_bit():
    """What is not clipped is as it was, NaN and Inf included."""
    gradient = torch.tensor([1.0 / 3.0, math.inf, -0.0])
    scale_and_check([gradient], torch.tensor(1.0))
    assert gradient.tolist() == [torch.tensor(1.0 / 3.0).item(), math.inf, 0.0]
    assert math.copysign(1.0, gradient[2].item()) == -1.0

"""Unscaling: once a step, whoever does it, and undone where no optimizer step came of it."""

import pytest
import torch
from torch import nn

from trainer_plugin.step.unscaling import Unscaling


class Scaled:
    """Two weights with an optimizer each, under one scaler of 1024."""

    def __init__(self):
        self.weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in self.weights]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
        self.unscaling = Unscaling(self.scaler, self.optimizers)

    def backward(self, *places):
        """Gradients of [3, 4], scaled, for these weights."""
        for place in places:
            self.scaler.scale((self.weights[place] * torch.tensor([3.0, 4.0])).sum()).backward()

    def gradients(self):
        """Those that are there."""
        return [weight.grad.tolist() for weight in self.weights if weight.grad is not None]


def test_gradients_are_divided_once():
    """Asked again in the same step, nothing changes; the loop's own call counts as well."""
    scaled = Scaled()
    scaled.backward(0, 1)
    scaled.scaler.unscale_(scaled.optimizers[0])
    scaled.unscaling.unscale()
    scaled.unscaling.unscale(again=True)
    assert scaled.gradients() == [[3.0, 4.0]] * 2
    assert scaled.unscaling.scale(torch.device("cpu")).item() == 1024.0


@pytest.mark.parametrize("boundary", [True, False])
def test_a_step_that_was_left_out_leaves_no_trace(boundary):
    """After a step without `scaler.step` and `update`, with or without a boundary, the next gradients are unscaled."""
    scaled = Scaled()
    scaled.backward(0, 1)
    scaled.unscaling.unscale()
    if boundary:
        scaled.unscaling.settle(lambda _: False)
        assert scaled.gradients() == [[3072.0, 4096.0]] * 2
    for weight in scaled.weights:
        weight.grad = None
    scaled.backward(0, 1)
    scaled.unscaling.unscale()
    assert scaled.gradients() == [[3.0, 4.0]] * 2
    for optimizer in scaled.optimizers:
        scaled.scaler.step(optimizer)
    scaled.scaler.update()
    assert scaled.weights[0].tolist() == pytest.approx([0.7, 0.6])


def test_an_optimizer_that_steps_more_rarely_keeps_its_gradients():
    """One that steps every third time has the sum of three gradients then, each divided once."""
    scaled = Scaled()
    for number in range(3):
        scaled.backward(0, 1)
        scaled.unscaling.unscale()
        stepping = scaled.optimizers if number == 2 else scaled.optimizers[:1]
        if number == 2:
            assert scaled.gradients()[1] == [9.0, 12.0]
        for optimizer in stepping:
            scaled.scaler.step(optimizer)
            optimizer.zero_grad()
        scaled.scaler.update()
        scaled.unscaling.settle(lambda optimizer, stepping=stepping: optimizer in stepping)
    assert scaled.weights[1].tolist() == pytest.approx([0.1, -0.2])


def test_without_a_scaler_nothing_happens():
    """A loop without AMP has no scale."""
    unscaling = Unscaling(None, [])
    unscaling.unscale()
    unscaling.settle(lambda _: False)
    assert not unscaling.scaled
    assert unscaling.scale(torch.device("cpu")) is None

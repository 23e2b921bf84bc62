"""R12: moments are restored, reset or kept, with every kind of optimizer, whether all goes back or some layers do."""

import pytest
import torch
from torch import nn
from training import equal, tiny_model

from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.state import TrainingState

LR = 1e-2
KINDS = {
    "fused": lambda p: [torch.optim.AdamW(p, lr=LR, fused=True)],
    "foreach": lambda p: [torch.optim.AdamW(p, lr=LR, foreach=True)],
    "loop": lambda p: [torch.optim.AdamW(p, lr=LR, foreach=False, fused=False)],
    "SGD": lambda p: [torch.optim.SGD(p, lr=LR, momentum=0.9)],
    "SGD fused": lambda p: [torch.optim.SGD(p, lr=LR, momentum=0.9, fused=True)],
    "two": lambda p: [torch.optim.AdamW(p[:2], lr=LR), torch.optim.SGD(p[2:], lr=LR, momentum=0.9)],
}
# The first layer of the tiny model, and its place in the list of parameters.
LAYER, ITS_OWN = "0", (0, 1)


class Loop:
    """A training loop of 65 parameters in two layers."""

    def __init__(self, kind: str) -> None:
        self.model = tiny_model()
        self.parameters = list(self.model.parameters())
        self.optimizers = KINDS[kind](self.parameters)
        self.state = TrainingState(model=self.model, optimizers=self.optimizers)
        self.layers = LayerState(self.model, self.optimizers)
        self.steps = 0

    def run(self, steps: int) -> None:
        """Train on; each batch follows from its number."""
        for _ in range(steps):
            batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.steps))
            nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True)).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.steps += 1

    def moments(self, places=range(4)) -> list[torch.Tensor]:
        """Copies of the moments and step counts of some parameters."""
        states = [
            optimizer.state[self.parameters[place]]
            for place in places
            for optimizer in self.optimizers
            if self.parameters[place] in optimizer.state
        ]
        return [value.clone() for state in states for value in state.values()]

    def weights(self) -> list[torch.Tensor]:
        """Copies of the weights."""
        return [parameter.detach().clone() for parameter in self.parameters]


@pytest.fixture(params=KINDS)
def kind(request):
    """A kind of optimizer, or two."""
    return request.param


def test_restored_moments_go_on_as_if_nothing_had_been(kind):
    """With `restore`, moments and step counts are the old ones, and the run repeats itself to the last bit."""
    loop = Loop(kind)
    loop.run(5)
    snapshot, moments = loop.state.capture({}), loop.moments()
    loop.run(4)
    after = loop.weights()
    loop.state.restore(snapshot, moments="restore")
    assert equal(loop.moments(), moments)
    loop.steps = 5
    loop.run(4)
    assert equal(loop.weights(), after)


def test_reset_moments_are_those_of_an_optimizer_that_never_stepped(kind):
    """With `reset`, the next steps are bit for bit a new optimizer's: step counts and bias correction begin at 1."""
    loop = Loop(kind)
    loop.run(5)
    snapshot, weights = loop.state.capture({}), loop.weights()
    loop.run(4)
    loop.state.restore(snapshot, moments="reset")
    assert loop.moments() == []
    fresh = Loop(kind)
    for parameter, weight in zip(fresh.parameters, weights, strict=True):
        parameter.data.copy_(weight)
    loop.steps = fresh.steps = 100
    loop.run(3)
    fresh.run(3)
    assert equal(loop.weights(), fresh.weights())
    assert equal(loop.moments(), fresh.moments())


def test_kept_moments_are_todays(kind):
    """With `keep`, weights go back and moments and step counts stay."""
    loop = Loop(kind)
    loop.run(5)
    snapshot, weights = loop.state.capture({}), loop.weights()
    loop.run(4)
    moments = loop.moments()
    loop.state.restore(snapshot, moments="keep")
    assert equal(loop.weights(), weights)
    assert equal(loop.moments(), moments)
    loop.run(1)
    assert not equal(loop.moments(), moments)


@pytest.mark.parametrize("moments", ["restore", "reset", "keep"])
def test_a_layer_goes_back_and_nothing_else_does(kind, moments):
    """One layer's weights are the old ones, its moments as asked for; the other's are today's; the next step runs."""
    loop = Loop(kind)
    loop.run(5)
    snapshot, old, old_moments = loop.state.capture({}), loop.weights(), loop.moments(ITS_OWN)
    loop.run(4)
    late, late_moments, rest = loop.weights(), loop.moments(ITS_OWN), loop.moments((2, 3))
    loop.layers.restore(snapshot, [LAYER], moments=moments)
    assert equal(loop.weights(), [*old[:2], *late[2:]])
    assert equal(loop.moments((2, 3)), rest)
    now = loop.moments(ITS_OWN)
    if moments == "reset":
        assert not any(moment.any() for moment in now)
    else:
        assert equal(now, old_moments if moments == "restore" else late_moments)
    loop.run(2)
    assert all(weight.isfinite().all() for weight in loop.weights())


def test_a_layer_that_begins_anew_makes_the_first_step_of_a_new_optimizer(kind):
    """After a partial `reset` its next step is a first one, beside a layer that makes its tenth."""
    loop = Loop(kind)
    loop.run(5)
    snapshot = loop.state.capture({})
    loop.run(4)
    loop.layers.restore(snapshot, [LAYER], moments="reset")
    fresh = Loop(kind)
    for parameter, weight in zip(fresh.parameters, loop.weights(), strict=True):
        parameter.data.copy_(weight)
    loop.steps = fresh.steps = 100
    loop.run(1)
    fresh.run(1)
    assert equal(loop.weights()[:2], fresh.weights()[:2])
    assert equal(loop.moments(ITS_OWN), fresh.moments(ITS_OWN))
    assert not equal(loop.weights()[2:], fresh.weights()[2:])

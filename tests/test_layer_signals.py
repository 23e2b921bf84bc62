"""Layer signals: each layer's weights, updates and moments, read in its turn and true to the last digit that counts."""

import math

import pytest
import torch
from torch import nn
from training import tiny_model

from trainer_plugin.step.layer_signals import LayerSignals
from trainer_plugin.step.probe import Probe

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Watched:
    """A model in training whose layers are read."""

    def __init__(self, *, kind="AdamW", every=1, model=None, modules=None):
        self.model = model or tiny_model()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.layers = Probe(self.model).layers
        self.signals = LayerSignals(self.layers, [self.optimizer], every=every, modules=modules)
        self.number = 0

    def step(self, *, applied=True):
        """One step; the readings that came of it."""
        self.number += 1
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.number))
        self.model(batch).square().mean().backward()
        self.signals.before_optimizer(self.number)
        if applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        found = self.signals.after_optimizer()
        self.signals.listen(self.number + 1)
        return {} if found is None else LayerSignals.read(found[0], tuple(found[1].tolist()))


def norm(tensors):
    """2-norm of all of them in float64."""
    return math.sqrt(sum(tensor.detach().double().square().sum().item() for tensor in tensors))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_readings_equal_a_float64_reference(kind):
    """Weight norm, update ratio and both moments of every layer, to 1e-5; a moment that is not kept is None."""
    watched = Watched(kind=kind)
    for _ in range(3):
        before = {layer: [p.detach().clone() for p in parameters] for layer, parameters in watched.layers.items()}
        readings = watched.step()
        assert list(readings) == ["0", "3"]
        for layer, parameters in watched.layers.items():
            updates = [new.double() - old.double() for new, old in zip(parameters, before[layer], strict=True)]
            states = [watched.optimizer.state[p] for p in parameters]
            firsts = [s[key] for s in states for key in ("exp_avg", "momentum_buffer") if key in s]
            seconds = [s[key] for s in states for key in ("exp_avg_sq", "square_avg") if key in s]
            reading = readings[layer]
            assert reading.weight_norm == pytest.approx(norm(parameters), rel=1e-5)
            assert reading.update_ratio == pytest.approx(norm(updates) / norm(parameters), rel=1e-4)
            assert reading.first_moment_norm == (pytest.approx(norm(firsts), rel=1e-5) if firsts else None)
            total = sum(second.double().sum().item() for second in seconds)
            assert reading.second_moment_norm == (pytest.approx(math.sqrt(total), rel=1e-5) if seconds else None)
            assert reading.activation_max is None
            assert reading.elements == sum(parameter.numel() for parameter in parameters)


def test_p15_a_step_that_was_not_applied_has_no_update():
    """Where the optimizer changes nothing, the ratio is exactly 0."""
    watched = Watched()
    assert {reading.update_ratio for reading in watched.step(applied=False).values()} == {0.0}


@pytest.mark.parametrize("every", [1, 2, 3, 50])
def test_each_layer_has_one_turn(every):
    """In `every` steps each layer is read exactly once, however many layers there are."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
    watched = Watched(every=every, model=model)
    turns = [layer for _ in range(every) for layer in watched.step()]
    assert sorted(turns) == [str(number) for number in range(7)]


def test_turns_are_spread_over_the_steps():
    """With more steps than layers, no step reads two layers."""
    watched = Watched(every=50, model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(25))))
    assert max(len(watched.step()) for _ in range(50)) == 1


def test_frozen_weights_are_left_out():
    """A frozen layer has no turn; a frozen weight in a trained layer does not count; an unfrozen one comes back."""
    watched = Watched()
    for parameter in watched.layers["0"]:
        parameter.requires_grad_(requires_grad=False)
    watched.layers["3"][1].requires_grad_(requires_grad=False)
    readings = watched.step()
    assert list(readings) == ["3"]
    assert readings["3"].weight_norm == pytest.approx(norm(watched.layers["3"][:1]), rel=1e-5)
    assert readings["3"].elements == watched.layers["3"][0].numel()
    for parameter in watched.model.parameters():
        parameter.requires_grad_(requires_grad=True)
    assert list(watched.step()) == ["0", "3"]


def test_what_is_promised_is_what_comes():
    """The moments told beforehand are those that the optimizer keeps, layer by layer, with two optimizers."""
    model = tiny_model()
    optimizers = [OPTIMIZERS["AdamW"](model[0].parameters()), OPTIMIZERS["momentum"](model[3].parameters())]
    signals = LayerSignals(Probe(model).layers, optimizers, every=1)
    assert signals.moments() == {"0": ("first", "second"), "3": ("first",)}
    model[3].requires_grad_(requires_grad=False)
    assert signals.moments() == {"0": ("first", "second")}


def test_the_largest_activation_is_that_of_the_layers_turn():
    """The largest absolute output over the micro-batches of a training step; evaluation does not count."""
    model = tiny_model()
    watched = Watched(model=model, modules={"0": model[0]})
    watched.signals.listen(1)
    batches = [torch.full((2, 4), 2.0), torch.full((2, 4), 30.0), torch.full((2, 4), 1e6)]
    outputs = [model[0](batch).abs().max().item() for batch in batches[:2]]
    model.eval()
    model(batches[2])
    model.train()
    readings = watched.step()
    assert readings["0"].activation_max == pytest.approx(max(outputs))
    assert readings["3"].activation_max is None
    assert watched.step()["0"].activation_max < 30.0
    watched.signals.remove()
    assert not model[0]._forward_hooks


def test_a_zero_weight_has_no_ratio():
    """An update over weights that are all 0 is no number."""
    assert LayerSignals.read(("a",), (0.0, 1.0, 4.0, 2.0, -1.0, -1.0))["a"].update_ratio is None


def test_nothing_is_read_on_the_host():
    """On the meta device, where any host read raises, the layers of a step are measured."""
    model = tiny_model().to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)
        }  # fmt: skip
    signals = LayerSignals(Probe(model).layers, [optimizer], every=1)
    signals.before_optimizer(1)
    layers, values = signals.after_optimizer()
    assert layers == ("0", "3")
    assert values.is_meta


def test_copies_do_not_outlive_a_rollback():
    """What was copied for a step that is undone measures no other."""
    watched = Watched()
    watched.signals.before_optimizer(1)
    watched.signals.forget()
    assert watched.signals.after_optimizer() is None

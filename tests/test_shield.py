"""The shield: a bad step changes no weight, moment or step count, with any optimizer; a good one is as ever."""

import math

import pytest
import torch
from torch import nn
from training import equal, tiny_model

from trainer_plugin.step.probe import Limits, Probe
from trainer_plugin.step.shield import Shield, is_fused

OPTIMIZERS = {
    "AdamW": lambda parameters, **kind: torch.optim.AdamW(parameters, lr=0.1, **kind),
    "Adam": lambda parameters, **kind: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, **kind),
    "SGD": lambda parameters, **kind: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, **kind),
}
KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


class Training:
    """A model, its optimizer, a scaler perhaps, and a shield perhaps; one call is one step."""

    def __init__(self, name: str, kind: str, *, scaled: bool, shielded: bool = True) -> None:
        self.model = tiny_model()
        self.optimizer = OPTIMIZERS[name](self.model.parameters(), **KINDS[kind])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.probe = Probe(self.model)
        self.shield = Shield([self.optimizer]) if shielded else None

    def step(self, number: int, damage: str = "none", *, armed: bool = True) -> None:
        """One step on batch `number`, with a NaN in its gradient or loss perhaps."""
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        loss = nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            if damage == "gradient":  # Before the scaler looks.
                self.model[0].weight.grad[0, 0] = math.nan
            self.scaler.unscale_(self.optimizer)
        elif damage == "gradient":
            self.model[0].weight.grad[0, 0] = math.nan
        if damage == "loss":
            loss = loss * math.nan
        if self.shield is not None:
            row, bad = self.probe.measure(loss, Limits())
            self.shield.arm(bad, row.bad) if armed else self.shield.disarm()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def weights_and_state(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Copies of the weights, and of moments and step counts by name."""
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        state = {
            f"{name}/{key}": value.clone()
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        return weights, state


@pytest.mark.parametrize("damage", ["gradient", "loss"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_changes_nothing_and_the_next_trains_on(name, kind, scaled, damage):
    """After good, bad, good steps, all is bit for bit as after the good ones alone; also when the first one is bad."""
    guarded = Training(name, kind, scaled=scaled)
    twin = Training(name, kind, scaled=scaled, shielded=False)
    for number in range(4):
        before = guarded.weights_and_state()
        guarded.step(100 + number, damage)
        after = guarded.weights_and_state()
        assert equal(before[0], after[0])
        assert all(torch.equal(value, before[1].get(key, torch.zeros_like(value))) for key, value in after[1].items())
        assert before[1].keys() <= after[1].keys()
        guarded.model.zero_grad()
        guarded.step(number)
        twin.step(number)
        assert not equal(before[0], guarded.weights_and_state()[0])
        guarded.model.zero_grad()
        twin.model.zero_grad()
    (weights, state), (twins, twin_state) = guarded.weights_and_state(), twin.weights_and_state()
    assert equal(weights, twins)
    assert state.keys() == twin_state.keys()
    assert all(torch.equal(state[key], twin_state[key]) for key in state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_there_again_after_the_step(kind):
    """Whoever looks at the gradients of a withheld step sees them, the NaN included."""
    training = Training("AdamW", kind, scaled=False)
    training.step(0, "gradient")
    gradients = [parameter.grad for parameter in training.model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert math.isnan(gradients[0][0, 0])
    assert not hasattr(training.optimizer, "found_inf")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unarmed_shield_lets_everything_through(kind):
    """Armed with None (mode observe), the shield withholds nothing: the NaN reaches the weights."""
    training = Training("AdamW", kind, scaled=False)
    training.step(0, "gradient", armed=False)
    assert training.model[0].weight.isnan().any()


def test_a_step_that_raised_leaves_no_flag_behind():
    """When a fused optimizer itself raises in a withheld step, the next good step is not withheld."""
    training = Training("AdamW", "fused", scaled=False)
    training.step(0)
    state = training.optimizer.state[training.model[0].weight]
    moment = state.pop("exp_avg")
    with pytest.raises(KeyError):
        training.step(1, "gradient")
    state["exp_avg"] = moment
    before = training.weights_and_state()[0]
    training.model.zero_grad()
    training.step(2)
    assert not equal(before, training.weights_and_state()[0])
    assert not hasattr(training.optimizer, "found_inf")


def test_two_optimizers_are_both_withheld_from():
    """One flag decides for every optimizer of the loop, fused or not."""
    model = tiny_model()
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), fused=True),
        torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9),
    ]
    shield = Shield(optimizers)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for flag in (1.0, 0.0):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        shield.arm(torch.tensor(flag), lambda flag=flag: flag > 0.0)
        for optimizer in optimizers:
            optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert moved == [flag == 0.0] * 4


def test_a03_a_withheld_step_is_no_step_at_all():
    """AdamW with lr 0.1 and weight decay 0.1: after a withheld step the weight stays 0.8900, and so do its moments."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    shield = Shield([optimizer])
    weight.grad = torch.tensor([1.0])
    optimizer.step()
    assert weight.item() == pytest.approx(0.8900, abs=5e-5)
    before = weight.item(), {key: value.clone() for key, value in optimizer.state[weight].items()}
    shield.arm(torch.ones(()), lambda: True)
    optimizer.step()
    assert weight.item() == before[0]
    assert all(torch.equal(value, before[1][key]) for key, value in optimizer.state[weight].items())


def test_removed_hooks_withhold_no_more():
    """After `remove` the optimizer is as it was before the shield."""
    training = Training("AdamW", "loop", scaled=False)
    training.shield.remove()
    training.step(0, "gradient")
    assert training.model[0].weight.isnan().any()
    assert not training.optimizer._optimizer_step_pre_hooks
    assert not training.optimizer._optimizer_step_post_hooks


def test_is_fused_wants_every_group():
    """An optimizer is fused when each of its groups is."""
    model = tiny_model()
    groups = [{"params": model[0].parameters(), "fused": True}, {"params": model[3].parameters()}]
    assert not is_fused(torch.optim.AdamW(groups))
    assert is_fused(torch.optim.AdamW(model.parameters(), fused=True))

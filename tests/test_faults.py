"""The fault injector: faults begin when told, end for good, and leave nothing behind."""

import math

import pytest
import torch
from torch import nn

from trainer_plugin.faults import Faults


@pytest.fixture
def model():
    """Two small layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def step(faults, model, optimizer):
    """Run one step of training; return the gradients that the optimizer saw and the learning rates it used."""
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    faults.on_gradients(model)
    faults.before_step(optimizer)
    used = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    faults.after_step(optimizer)
    return [parameter.grad.clone() for parameter in model.parameters()], used


def test_lr_jump_lasts_its_steps_and_is_put_back_exactly(model):
    """The learning rate jumps after `at` clean steps, for `steps` steps, and is the same number afterwards."""
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.3}]
    )
    faults = Faults().lr_jump(at=2, times=7, steps=2)
    used = [step(faults, model, optimizer)[1] for _ in range(6)]
    assert used == [[0.1, 0.3]] * 2 + [[0.1 * 7, 0.3 * 7]] * 2 + [[0.1, 0.3]] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert (faults.first_step("lr_jump"), faults.last_step("lr_jump")) == (3, 4)


def test_lr_held_in_a_tensor_is_not_written_to(model):
    """A learning rate in a tensor is replaced for the step, and the very tensor comes back with its value."""
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    used = step(Faults().lr_jump(at=0, times=2), model, optimizer)[1]
    assert used == [1.0]
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_lr_jump_nests_around_hooks_that_scale_the_rate(model):
    """Hooks of the optimizer that scale the rate for the step see the faulty one, and both are put back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    group = optimizer.param_groups[0]
    seen = []

    def halve(*_):
        seen.append(group["lr"])
        group["lr"] *= 0.5

    def put_back(*_):
        seen.append(group["lr"])
        group["lr"] = seen[0]

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(put_back)
    step(Faults().lr_jump(at=0, times=4), model, optimizer)
    assert seen == [1.0, 0.5]
    assert group["lr"] == 0.25


def test_scheduler_that_chains_on_the_rate_never_sees_the_jump(model):
    """A scheduler that multiplies the current rate comes to the same rate with the fault as without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    faults = Faults().lr_jump(at=1, times=100)
    for _ in range(3):
        step(faults, model, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_grad_scale_scales_every_gradient(model):
    """In the faulty step every gradient is so many times what it would be, in the next it is not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = Faults().grad_scale(at=1, times=1e6)
    clean, faulty, after = (step(faults, model, optimizer)[0] for _ in range(3))
    for one, other, last in zip(clean, faulty, after, strict=True):
        assert torch.equal(one * 1e6, other)
        assert torch.equal(one, last)


def test_nan_gradient_hits_one_element_of_the_named_parameter(model):
    """The named parameter gets one NaN, the others none; without a name it is the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for name, index in [("1.bias", 3), (None, 0)]:
        gradients, _ = step(Faults().nan_gradient(at=0, parameter=name), model, optimizer)
        assert [int(gradient.isnan().sum()) for gradient in gradients] == [int(n == index) for n in range(4)]


def test_nan_gradient_of_an_unknown_parameter_is_refused(model):
    """A parameter that has no gradient is named in the error, with those that have one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"found head.weight among \['0.weight'"):
        step(Faults().nan_gradient(at=0, parameter="head.weight"), model, optimizer)


def test_fault_does_not_come_again_after_a_rollback(model):
    """A run that goes back and repeats its steps meets the fault once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = Faults().lr_jump(at=3, times=2, steps=2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        step(faults, model, optimizer)
    model.load_state_dict(saved)
    assert [step(faults, model, optimizer)[1] for _ in range(5)] == [[0.1]] * 5
    assert faults.fired == {"lr_jump": 2}
    assert faults.steps_run == 10


def test_faults_are_counted_by_kind(model):
    """Faults of several kinds, or two of one kind, fire each in its time and are counted by kind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = Faults().grad_scale(at=0, times=2).grad_scale(at=4, times=2).nan_gradient(at=2, steps=3)
    assert faults.fired == {"grad_scale": 0, "nan_gradient": 0}
    assert faults.first_step("grad_scale") is None
    for _ in range(6):
        step(faults, model, optimizer)
    assert faults.fired == {"grad_scale": 2, "nan_gradient": 3}
    assert (faults.first_step("grad_scale"), faults.last_step("grad_scale")) == (1, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": -1, "times": 2.0},
        {"at": 0, "times": 2.0, "steps": 0},
        {"at": 0, "times": 0.0},
        {"at": 0, "times": math.inf},
    ],
)
def test_nonsense_is_refused(wrong):
    """A fault before the start, of no length, or with a factor that is no positive number is refused."""
    with pytest.raises(ValueError, match="lr_jump: "):
        Faults().lr_jump(**wrong)

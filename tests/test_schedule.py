"""Tests of the schedule: it follows the steps that were applied, not the iterations of the loop (case A04)."""

import pytest
import torch
from torch.optim import lr_scheduler
from training import adamw_job, spoil_gradient

from trainer_plugin.schedule import Schedule

SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.01),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=40),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4, 6]),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def training(kind, rate):
    """An optimizer and its scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    return optimizer, SCHEDULERS[kind](optimizer)


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_a_step_that_is_taken_back_leaves_no_trace(kind, tensor_rate):
    """After 10 iterations of which 3 were withheld, the first included, the schedule is that of 7 undisturbed ones."""
    rate = torch.tensor(0.5) if tensor_rate else 0.5
    optimizer, scheduler = training(kind, rate)
    plain_optimizer, plain = training(kind, 0.5)
    schedule = Schedule(scheduler, [optimizer])
    for iteration in range(10):
        schedule.mark()
        optimizer.step()
        scheduler.step()
        if iteration in (0, 4, 5):
            schedule.take_back()
            continue
        plain_optimizer.step()
        plain.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(plain_optimizer.param_groups[0]["lr"])
    assert scheduler.last_epoch == plain.last_epoch == 7


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_a_rate_that_is_raised_for_a_step_does_not_compound(kind, tensor_rate):
    """A loop multiplies its rate with 100 for some steps and puts it back after each: withheld, they leave no trace."""
    optimizer, scheduler = training(kind, torch.tensor(0.5) if tensor_rate else 0.5)
    plain_optimizer, plain = training(kind, 0.5)
    schedule, (group,) = Schedule(scheduler, [optimizer]), optimizer.param_groups
    for iteration in range(10):
        rate = group["lr"]
        if raised := iteration in (0, 4, 5, 6):
            group["lr"] = rate * 100.0
        schedule.mark()
        optimizer.step()
        group["lr"] = rate
        scheduler.step()
        if raised:
            schedule.take_back()
        else:
            plain_optimizer.step()
            plain.step()
        assert float(group["lr"]) == pytest.approx(plain_optimizer.param_groups[0]["lr"])
    assert scheduler.last_epoch == plain.last_epoch == 6


def test_a_rate_set_by_hand_stays_where_the_schedule_has_not_moved():
    """A scheduler that is stepped once an epoch has nothing to take back in the steps between."""
    optimizer, scheduler = training("multi_step", 0.5)
    schedule = Schedule(scheduler, [optimizer])
    optimizer.param_groups[0]["lr"] = 0.125
    schedule.mark()
    optimizer.step()
    schedule.take_back()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_of_another_optimizer_the_rates_are_left_alone():
    """What a loop does by hand with an optimizer that the scheduler does not step is the loop's own."""
    optimizer, scheduler = training("cosine", 0.5)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=3.0)
    schedule = Schedule(scheduler, [other, optimizer])
    schedule.mark()
    optimizer.step()
    scheduler.step()
    other.param_groups[0]["lr"] = 4.0
    schedule.take_back()
    assert other.param_groups[0]["lr"] == 4.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_tells_no_rates_is_taken_back_to_those_that_were_held():
    """One of another kind than torch's has only its state: the rates are put back as they were marked."""

    class Halving:
        """Halves the rate of one group with every step."""

        def __init__(self, optimizer):
            self.group, self.steps = optimizer.param_groups[0], 0

        def step(self):
            self.steps += 1
            self.group["lr"] /= 2.0

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = Halving(optimizer)
    schedule = Schedule(scheduler, [optimizer])
    schedule.mark()
    scheduler.step()
    schedule.take_back()
    assert (scheduler.steps, optimizer.param_groups[0]["lr"]) == (0, 0.5)


def test_without_a_scheduler_nothing_happens():
    """A loop without a scheduler has nothing to take back, and neither has one that was never marked."""
    optimizer, scheduler = training("lambda", 0.5)
    for schedule in (Schedule(None, [optimizer]), Schedule(scheduler, [optimizer])):
        schedule.take_back()
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(("follows", "position"), [("applied_steps", 7), ("iterations", 10)])
def test_a04_the_schedule_of_a_guarded_run_follows_applied_steps(make_guard, follows, position):
    """10 iterations with NaN gradients in 3, the first included: position 7, or 10 where iterations are asked for."""
    job = make_guard(adamw_job(scheduled=True), actions={"schedule_follows": follows})

    start = job.scheduler.last_epoch
    for iteration in range(10):
        job.step(*([spoil_gradient] if iteration in (0, 4, 5) else []))
    assert job.scheduler.last_epoch - start == position
    assert job.optimizer.param_groups[0]["lr"] == job.scheduler.get_last_lr()[0]
    assert job.guard.page.value("train_steps_skipped_total", "nonfinite") == 3

"""Tests of the schedule: it follows the steps that were applied, not the iterations of the loop (case A04)."""

import pytest
import torch
from torch.optim import lr_scheduler
from training import adamw_job, spoil_gradient

from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.schedule import Schedule

SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.001),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=40),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4, 6]),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


class Loop:
    """A loop with a schedule, one optimizer and one group."""

    def __init__(self, make_scheduler, *, rate=0.1, every=1):
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate, momentum=0.9)
        self.scheduler = make_scheduler(self.optimizer)
        (self.group,) = self.optimizer.param_groups
        self.learning_rate = LrFactor([self.optimizer])
        self.schedule = Schedule(self.scheduler, [self.optimizer], self.learning_rate.scheduled)
        self.every = every
        self.steps = 0

    def step(self, *, withheld=False, begin=None, stepped=None, end=None):
        """One step; `begin`, `stepped` and `end` are done before the mark, and before and after the scheduler."""
        for part in (begin, self.schedule.mark, self.optimizer.step, stepped):
            if part is not None:
                part()
        self.steps += 1
        if self.steps % self.every == 0:
            self.scheduler.step()
        if end is not None:
            end()
        if withheld:
            self.schedule.take_back()
        self.schedule.leave()

    def set(self, **values):
        """Set what the group holds: what a loop does by hand."""
        return lambda: self.group.update(values)

    @property
    def rate(self):
        """The rate that the next step begins with."""
        return float(self.group["lr"])


class Halving:
    """A scheduler of another kind than torch's: it halves the rate that it finds, and tells none."""

    def __init__(self, optimizer):
        self.group, self.steps = optimizer.param_groups[0], 0

    def step(self):
        """Halve it."""
        self.steps += 1
        self.group["lr"] /= 2.0

    def state_dict(self):
        """Its count."""
        return {"steps": self.steps}

    def load_state_dict(self, state):
        """Go back to a count."""
        self.steps = state["steps"]


@pytest.fixture(params=sorted(SCHEDULERS))
def kind(request):
    """A scheduler of each kind."""
    return SCHEDULERS[request.param]


@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_step_that_is_taken_back_leaves_no_trace(kind, tensor_rate):
    """After 10 iterations of which 3 were withheld, the first included, the schedule is that of 7 undisturbed ones."""
    rate = torch.tensor(0.1) if tensor_rate else 0.1
    loop, twin = Loop(kind, rate=rate), Loop(kind)
    for iteration in range(10):
        withheld = iteration in (0, 4, 5)
        loop.step(withheld=withheld)
        if not withheld:
            twin.step()
        assert loop.rate == pytest.approx(twin.rate)
        assert loop.group["momentum"] == twin.group["momentum"]
        assert loop.group["lr"] is rate or not tensor_rate
    assert loop.scheduler.last_epoch == twin.scheduler.last_epoch == 7


@pytest.mark.parametrize("restored", ["stepped", "end"])
@pytest.mark.parametrize("tensor_rate", [False, True])
def test_what_is_raised_for_a_step_does_not_compound(kind, tensor_rate, restored):
    """A loop multiplies its rate with 100 for some steps and puts it back after each, before its scheduler or after."""
    loop, twin = Loop(kind, rate=torch.tensor(0.1) if tensor_rate else 0.1), Loop(kind)
    for iteration in range(10):
        rate, momentum = loop.group["lr"], loop.group["momentum"]
        changes = {
            "begin": loop.set(lr=rate * 100.0, momentum=momentum * 1.1),
            restored: loop.set(lr=rate, momentum=momentum),
        }
        if iteration in (4, 5, 6):
            loop.step(withheld=True, **changes)
            continue
        loop.step()
        twin.step()
        assert loop.rate == pytest.approx(twin.rate)
        assert loop.group["momentum"] == pytest.approx(twin.group["momentum"])


def test_a_rate_that_was_raised_for_an_applied_step_is_gone_in_the_next():
    """Raised, and put back after a scheduler that goes on from what it finds: a withheld step changes nothing."""
    loop = Loop(SCHEDULERS["exponential"])
    loop.step(begin=loop.set(lr=10.0), end=loop.set(lr=0.09))
    loop.step(withheld=True)
    assert loop.rate == 0.09
    loop.step()
    assert loop.rate == pytest.approx(0.09 * 0.9)


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("name", ["exponential", "cosine", "halving"])
def test_a_rate_set_by_hand_for_good_is_kept(name, when):
    """People lower a rate when NaNs come: in the step that is withheld, or in the one before it."""
    loop = Loop(SCHEDULERS.get(name, Halving))
    if when == "begin":
        loop.step(begin=loop.set(lr=0.01), withheld=True)
    else:
        loop.step(end=loop.set(lr=0.01))
        loop.step(withheld=True)
    assert loop.rate == pytest.approx(0.01)


def test_a_scheduler_of_another_kind_does_not_compound_either():
    """Only what it finds and leaves is known of it."""
    loop = Loop(Halving)
    for _ in range(3):
        loop.step(begin=loop.set(lr=10.0), stepped=loop.set(lr=0.1), withheld=True)
    assert (loop.rate, loop.scheduler.steps) == (0.1, 0)


def test_a_rate_that_is_damped_over_the_schedule_stays_damped():
    """A warm-up that multiplies the rate after each step of the scheduler is not lost with a withheld step."""
    loop, ran = Loop(SCHEDULERS["cosine"], rate=0.1 * 0.01), []
    for iteration in range(6):
        ran.append(loop.rate)
        damped = 0.1 * 0.01 * (iteration + 2)
        loop.step(withheld=iteration == 3, end=loop.set(lr=damped))
    assert ran == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004, 0.006])


@pytest.mark.parametrize("bad", [1, 2])
def test_a_scheduler_that_steps_once_an_epoch_is_not_taken_back(bad):
    """It counts no updates: neither its step nor a rate set by hand is lost with the last batch of an epoch."""
    loop = Loop(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), every=3)
    for iteration in range(6):
        loop.step(withheld=iteration == bad, begin=loop.set(lr=0.08) if iteration == 1 else None)
    assert loop.rate == pytest.approx(0.02)


def test_within_a_closure_the_schedule_is_marked_without_the_guards_factor():
    """There the rate is lowered already: what is put back is the loop's own."""
    loop = Loop(Halving)
    loop.learning_rate.lower(0.5, floor=0.01, now=0, hold_steps=9, return_steps=9, stack=False)

    def closure():
        assert loop.group["lr"] == 0.05
        loop.schedule.mark()

    loop.optimizer.step(closure)
    loop.scheduler.step()
    loop.schedule.take_back()
    assert loop.rate == 0.1


def test_what_a_scheduler_cannot_tell_is_not_put_back():
    """One whose state fails in a step leaves what it has done, and no older state comes back."""
    loop = Loop(Halving)
    loop.step()
    loop.scheduler.state_dict = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.schedule.mark()
    loop.scheduler.step()
    loop.schedule.take_back()
    assert loop.rate == 0.025


def test_without_a_scheduler_nothing_happens():
    """A loop without a scheduler has nothing to take back, and neither has one that was never marked."""
    loop = Loop(SCHEDULERS["lambda"])
    for schedule in (Schedule(None, [loop.optimizer], loop.learning_rate.scheduled), loop.schedule):
        schedule.take_back()
    assert loop.scheduler.last_epoch == 0


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

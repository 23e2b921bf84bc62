"""The guard's factor on the learning rate: a layer that no scheduler undoes, and that leaves nothing behind."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from trainer_plugin.learning_rate import LrFactor, LrState

SCHEDULERS = {
    "constant": lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=12),
    "step": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, milestones=[5, 16], gamma=0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.97),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=60),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, factor=0.5, total_iters=9), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[9]
    ),
}


class Schedule:
    """A scheduled optimizer and the rates that its steps really use, group by group."""

    def __init__(self, make, rate=0.1, *, guarded=True, state=None) -> None:
        self.weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": [self.weights[0]]}, {"params": [self.weights[1]], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, foreach=False)
        self.factor = LrFactor([self.optimizer], state=state) if guarded else None
        self.scheduler = make(self.optimizer)
        self.used: list[list[float]] = []
        self.steps = 0
        self.optimizer.register_step_pre_hook(
            lambda *_: self.used.append([float(group["lr"]) for group in self.optimizer.param_groups])
        )

    def run(self, steps: int) -> "Schedule":
        """Train some steps."""
        for _ in range(steps):
            for weight in self.weights:
                weight.grad = torch.ones_like(weight)
            if self.factor is not None:
                self.factor.advance(self.steps)
            self.optimizer.step()
            self.steps += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SequentialLR calls its own deprecated form.
                self.scheduler.step()
        return self

    def lower(self, **options) -> float:
        """Halve the rate from the next step on."""
        options = {"floor": 0.01, "hold_steps": 10, "return_steps": 0, "stack": True, **options}
        return self.factor.lower(0.5, now=self.steps, **options)


def constant(rate: float = 0.1, **options) -> Schedule:
    """A constant rate."""
    return Schedule(SCHEDULERS["constant"], rate, **options)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_factor_is_exact_and_no_scheduler_sees_it(name, tensor):
    """While lowered, each step uses half of the undisturbed schedule; afterwards exactly the schedule."""
    rate = torch.tensor(0.1) if tensor else 0.1
    plain = Schedule(SCHEDULERS[name], rate.clone() if tensor else rate, guarded=False).run(30)
    guarded = Schedule(SCHEDULERS[name], rate).run(8)
    guarded.lower()
    guarded.run(22)
    halves = [[used * 0.5 for used in groups] for groups in plain.used[8:18]]
    assert guarded.used == plain.used[:8] + halves + plain.used[18:]
    assert [float(group["lr"]) for group in guarded.optimizer.param_groups] == [
        float(group["lr"]) for group in plain.optimizer.param_groups
    ]
    assert list(map(float, guarded.scheduler.get_last_lr())) == list(map(float, plain.scheduler.get_last_lr()))


@pytest.mark.parametrize(
    ("make", "rate", "wanted"),
    [
        (SCHEDULERS["constant"], 1.0, lambda _: 1.0),
        (
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
            0.1,
            lambda step: 0.05 * (1 + math.cos(math.pi * step / 100)),
        ),
    ],
    ids=["LambdaLR", "cosine"],
)
def test_a05_a_lowered_rate_stays_lowered(make, rate, wanted):
    """From step 51 on, 40 steps run at half the schedule (cosine at 51: 0.02421), and then exactly at the schedule."""
    schedule = Schedule(make, rate).run(51)
    schedule.lower(hold_steps=40)
    schedule.run(45)
    used = [groups[0] for groups in schedule.used]
    assert used[51:91] == pytest.approx([0.5 * wanted(step) for step in range(51, 91)])
    assert used[91:] == pytest.approx([wanted(step) for step in range(91, 96)])
    assert used[51] == pytest.approx(0.5 if rate == 1.0 else 0.02421, abs=5e-6)


def test_the_way_back_is_even():
    """After the hold the factor climbs back to 1 in equal parts."""
    schedule = constant(1.0)
    schedule.lower(hold_steps=2, return_steps=4)
    schedule.run(8)
    assert [groups[0] for groups in schedule.used] == pytest.approx([0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


def test_stacking_multiplies_and_the_floor_holds():
    """Lowered again and again the factor halves each time, but never below the floor."""
    schedule = constant()
    assert [schedule.lower(floor=0.2) for _ in range(4)] == [0.5, 0.25, 0.2, 0.2]


def test_without_stacking_the_factor_is_set_anew():
    """With stacking off a second lowering only begins the time again."""
    schedule = constant()
    schedule.lower(stack=False)
    schedule.run(8)
    assert schedule.lower(stack=False) == 0.5
    assert [groups[0] for groups in schedule.run(11).used[8:]] == [0.05] * 10 + [0.1]


def test_a_tensor_rate_shared_by_all_groups_is_lowered_once():
    """One tensor given for every group is multiplied once, and is itself never written to."""
    rate = torch.tensor(0.5)
    schedule = constant(rate)
    schedule.lower()
    assert schedule.run(1).used == [[0.25, 0.25]]
    assert rate.item() == 0.5


def test_an_optimizer_that_raised_leaves_no_lowered_rate_behind():
    """A step that raises between the hooks does not make the factor stick or compound."""
    schedule = constant()
    schedule.lower(hold_steps=100)
    schedule.run(1)
    state = schedule.optimizer.state[schedule.weights[0]]
    state["exp_avg"] = state["exp_avg"].double()
    with pytest.raises(RuntimeError):
        schedule.run(1)
    state["exp_avg"] = state["exp_avg"].float()
    assert schedule.run(2).used == [[0.05, 0.05]] * 4
    assert schedule.optimizer.param_groups[0]["lr"] == 0.1


def test_remove_gives_the_schedule_its_rate_back():
    """Taken off, also after a step that raised, the guard leaves the schedule's own rate and no hook."""
    schedule = constant()
    schedule.lower()
    schedule.run(1)
    state = schedule.optimizer.state[schedule.weights[0]]
    state["exp_avg"] = state["exp_avg"].double()
    with pytest.raises(RuntimeError):
        schedule.run(1)
    assert schedule.optimizer.param_groups[0]["lr"] == 0.05
    schedule.factor.remove()
    assert schedule.optimizer.param_groups[0]["lr"] == 0.1
    assert len(schedule.optimizer._optimizer_step_pre_hooks) == 1


def test_effective_tells_the_rate_of_the_coming_step():
    """What is exported is the rate that is used next: schedule x factor."""
    schedule = constant()
    assert schedule.factor.effective() == [0.1, 0.1]
    schedule.lower()
    assert schedule.factor.effective() == schedule.run(1).used[-1] == [0.05, 0.05]


def test_effective_does_not_follow_a_tensor_that_the_scheduler_changes():
    """A tensor rate is copied, and not read: the scheduler's next value is not taken for this step's."""
    schedule = Schedule(SCHEDULERS["exponential"], torch.tensor(0.1))
    before = schedule.factor.effective()
    schedule.run(1)
    assert [rate.item() for rate in before] == pytest.approx([0.1, 0.1])
    assert [rate.item() for rate in schedule.factor.effective()] == pytest.approx([0.097, 0.097])


def test_a_state_taken_up_by_a_new_process_goes_on():
    """A factor made with an earlier one's state is lowered from the first step on, and ends when that one would."""
    first = constant()
    first.lower()
    first.run(3)
    second = constant(state=LrState(**{name: getattr(first.factor.state, name) for name in LrState.__struct_fields__}))
    second.steps = 3
    assert [groups[0] for groups in second.run(8).used] == [0.05] * 7 + [0.1]


def test_every_optimizer_is_lowered():
    """With a list of optimizers the factor is on each of them."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=rate) for weight, rate in zip(weights, (0.1, 0.3), strict=True)]
    factor = LrFactor(optimizers)
    factor.lower(0.5, floor=0.1, now=0, hold_steps=5, return_steps=0, stack=True)
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert factor.effective() == [0.05, 0.15]
    assert [weight.item() for weight in weights] == pytest.approx([0.95, 0.85])


def test_lowering_never_raises():
    """A rate that two incidents have lowered stays there when a rollback, which does not stack, lowers it to less."""
    schedule = constant()
    schedule.lower()
    schedule.lower()
    assert schedule.factor.factor == 0.25
    factor = schedule.factor.lower(0.5, floor=0.1, now=schedule.steps, hold_steps=7, return_steps=0, stack=False)
    assert factor == 0.25

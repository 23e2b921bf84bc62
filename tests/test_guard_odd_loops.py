"""The Guard in loops that are not those of the README: closures, wrong arguments, steps left out, late parameters."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from training import adamw_job, equal, spoil_gradient


def batch(number):
    """A batch by its number."""
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(number))


def loss_of(model, number):
    """The loss of one batch."""
    return nn.functional.mse_loss(model(batch(number)), batch(number).sum(1, keepdim=True))


def outcome(model, optimizer):
    """Weights, moments and step counts."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [value.detach().clone() for value in [*model.parameters(), *states]]


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1),
    ],
    ids=["fused", "foreach", "SGD", "LBFGS"],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_bad_step_of_a_closure_is_withheld(make_guard, kind, inside):
    """With `optimizer.step(closure)` the flag is that of the gradients that the closure makes."""
    job = adamw_job()
    job.optimizer = kind(job.model.parameters())
    guard = make_guard(job).guard
    for number in range(4):
        bad = number == 2

        def closure(number=number, bad=bad):
            job.optimizer.zero_grad()
            loss = loss_of(job.model, number)
            loss.backward()
            if bad:
                spoil_gradient(job.model)
            if inside:
                guard.before_optimizer(loss)
            return loss

        if not inside:
            guard.before_optimizer(closure())
        before = [p.detach().clone() for p in job.model.parameters()]
        job.optimizer.step(closure)
        assert equal(before, list(job.model.parameters())) == bad
        guard.end_step()
    assert guard.page.value("train_guard_errors_total") == 0
    assert guard.page.value("train_steps_skipped_total", "nonfinite") == 1


@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_lower_learning_rate_is_used_where_the_guard_is_asked_within_the_step(make_guard, tensor_rate):
    """In a closure, as in all of Lightning's loops, the factor is on the rate of the step, and only there."""
    job = adamw_job()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=torch.tensor(0.1) if tensor_rate else 0.1)
    signals = []
    guard = make_guard(job, on_signals=signals.append).guard
    guard._parts.learning_rate.lower(0.25, floor=0.01, now=0, hold_steps=50, return_steps=9, stack=False)
    wanted = []

    def closure():
        job.optimizer.zero_grad()
        loss_of(job.model, 0).backward()
        guard.before_optimizer(loss_of(job.model, 0))
        wanted[:] = [p.detach() - 0.025 * p.grad for p in job.model.parameters()]

    for _ in range(3):
        job.optimizer.step(closure)
        assert all(torch.allclose(p, want) for p, want in zip(job.model.parameters(), wanted, strict=True))
        assert float(job.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
        guard.end_step()
        assert signals[-1].learning_rates == (pytest.approx(0.025),)


def test_accelerates_own_optimizer_and_scheduler_are_the_inner_ones(make_guard):
    """What `Accelerator.prepare` returns may be given to the guard: NaN is withheld, and the schedule taken back."""
    accelerator = Accelerator(cpu=True)
    job = adamw_job(scheduled=True)
    job.model, job.optimizer, job.scheduler = accelerator.prepare(job.model, job.optimizer, job.scheduler)
    guard = make_guard(job).guard
    begun_at, positions = job.scheduler.scheduler.last_epoch, []
    for number in range(4):
        loss = loss_of(job.model, number)
        accelerator.backward(loss)
        if number == 2:
            spoil_gradient(job.model)
        before = [p.detach().clone() for p in job.model.parameters()]
        guard.before_optimizer(loss)
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
        guard.end_step()
        assert equal(before, list(job.model.parameters())) == (number == 2)
        positions.append(job.scheduler.scheduler.last_epoch - begun_at)
    assert positions == [1, 2, 2, 3]
    assert guard.page.value("train_guard_errors_total") == 0


def test_a_closure_is_heard(make_guard, caplog):
    """A loop in which the guard is asked within the step is not told that no step hook runs."""
    job = make_guard()
    for number in range(15):

        def closure(number=number):
            job.optimizer.zero_grad()
            loss = loss_of(job.model, number)
            loss.backward()
            job.guard.before_optimizer(loss)
            return loss

        job.optimizer.step(closure)
        job.guard.end_step()
    assert "no step hook" not in caplog.text


@pytest.mark.parametrize("wrong", [torch.ones(2), "high", [1.0], object()])
def test_a_loss_that_cannot_be_read_costs_neither_clip_nor_shield(make_guard, wrong):
    """The step has no signals and an error is counted, but a NaN gradient is withheld and a good one clipped."""
    job = make_guard(actions={"clip_max_norm": 1e-3})
    guard = job.guard
    for number in range(3):
        loss_of(job.model, number).backward()
        if number == 1:
            spoil_gradient(job.model)
        before = job.weights()
        guard.before_optimizer(wrong)
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in job.model.parameters()]))
        assert math.isnan(norm) if number == 1 else norm <= 1.001e-3
        job.optimizer.step()
        assert equal(before, job.weights()) == (number == 1)
        job.optimizer.zero_grad()
        guard.end_step()
    assert guard.page.value("train_guard_errors_total") == 3
    assert guard.page.value("train_loss") is None


@pytest.mark.parametrize("number", [2.5, np.float32(2.5), 2])
def test_a_plain_number_is_a_loss(make_guard, number):
    """A loop that has its loss on the host already may give that, and no sample ids."""
    guard = make_guard().guard
    loss_of(guard._parts.state._model, 0).backward()
    guard.before_optimizer(number, sample_ids=None)
    guard.end_step()
    assert guard.page.value("train_loss") == number
    assert guard.page.value("train_guard_errors_total") == 0


def test_wrong_tokens_cost_one_error(make_guard):
    """Tokens that are no number are told; the step has its loss, and the next one its tokens."""
    job = make_guard()
    for number in range(3):
        loss = loss_of(job.model, number)
        loss.backward()
        job.guard.micro_step(loss, tokens="128" if number == 0 else 128, sample_ids=None)
        job.guard.before_optimizer()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.guard.end_step()
        assert job.guard.page.value("train_loss") == loss.item()
    assert job.guard.page.value("train_guard_errors_total") == 1
    assert job.guard.page.value("train_tokens_total") == 256


@pytest.mark.parametrize("mode", ["observe", "auto"])
def test_a_step_left_out_under_a_scaler_does_not_blow_the_next_one_up(make_guard, mode):
    """A loop that drops a step after `before_optimizer` trains on as the same loop without a guard."""

    def run(guarded):
        job = adamw_job()
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        guard = None
        if guarded:
            guard = make_guard(job, mode=mode, scaler=scaler, actions={"clip_max_norm": None}).guard
        for number in range(8):
            loss = loss_of(job.model, number)
            scaler.scale(loss).backward()
            if guard is not None:
                guard.before_optimizer(loss)
            if number != 3:
                scaler.step(job.optimizer)
                scaler.update()
            job.optimizer.zero_grad()
            if guard is not None:
                guard.end_step()
                assert guard.page.value("train_grad_norm") < 100.0
        return job.weights()

    assert equal(run(guarded=True), run(guarded=False))


def test_parameters_that_come_later_are_told(make_guard, caplog):
    """A parameter group that is added after the guard was built is in no norm and no shield: said once."""
    job = make_guard(checkpoints={"every": 10**6})
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for _ in range(210):
        job.step()
    assert caplog.text.count("1 parameters that were not in the model when the guard was built") == 1


def test_an_optimizer_class_of_somebody_elses_is_not_trusted_with_the_flag(make_guard):
    """One derived from a fused AdamW that does more in its step is shown no gradients, so that it does nothing."""

    class Decaying(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.mul_(0.99)

    job = adamw_job()
    job.optimizer = Decaying(job.model.parameters(), fused=True)
    make_guard(job)
    job.step()
    before = outcome(job.model, job.optimizer)
    job.step(spoil_gradient)
    assert equal(before, outcome(job.model, job.optimizer))
    job.step()
    assert not equal(before, outcome(job.model, job.optimizer))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_are_not_kept_alive(make_guard):
    """With `create_graph=True` what the guard does to gradients is in no graph."""
    job = make_guard(checkpoints={"every": 10**6}, actions={"clip_max_norm": 1e-3})
    loss = loss_of(job.model, 0)
    loss.backward(create_graph=True)
    before = [p.grad.grad_fn for p in job.model.parameters()]
    job.guard.before_optimizer(loss)
    assert [p.grad.grad_fn for p in job.model.parameters()] == before
    job.optimizer.zero_grad()


def test_a_loop_without_a_boundary_is_told_and_fills_no_memory(make_guard, caplog):
    """Where `end_step` is never called, that is said, and rows do not pile up."""
    job = make_guard()
    for number in range(150):
        loss = loss_of(job.model, number)
        loss.backward()
        job.guard.before_optimizer(loss)
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert "end_step is not called" in caplog.text
    assert len(job.guard._parts.reader._taken) <= 64


def test_a_clock_that_fails_stops_nothing(make_guard):
    """A broken clock is an error of ours like any other."""

    def clock():
        raise OSError("no time")

    job = make_guard(clock=clock)
    job.step()
    assert job.guard.step == 1
    assert job.guard.page.value("train_guard_errors_total") == 1

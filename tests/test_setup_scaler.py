"""Cases of training under a GradScaler: whose scale a step shows, what is a skip, and what cannot be unscaled."""

import math
from functools import partial

import pytest
import torch
from setups import NO_CHECKPOINTS, Lines, Loop, Setup, one, sgd_job
from training import Job, equal, tiny_model


@pytest.mark.parametrize("unscaled", [False, True])
def test_p11_norm_and_scale_are_those_of_the_step_itself(make_guard, unscaled):
    """5120 at scale 1024, which is lowered to 512 in the same step, is a norm of 5.0; the scale says 1024, then 512."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    job = make_guard(sgd_job(Lines(1)), scaler=scaler, data=None, **NO_CHECKPOINTS)
    page = job.guard.page
    for number, scale in enumerate((1024.0, 512.0)):
        loss = job.model(5.0)
        scaler.scale(loss).backward()
        assert job.model.layers[0].weight.grad.item() == 5.0 * scale
        if unscaled:
            scaler.unscale_(job.optimizer)
        job.guard.before_optimizer(loss)
        scaler.step(job.optimizer)
        scaler.update(512.0 if number == 0 else None)
        job.optimizer.zero_grad()
        job.guard.end_step()
        assert scaler.get_scale() == 512.0
        assert page.value("train_grad_norm") == 5.0
        assert page.value("train_amp_loss_scale") == scale
    assert page.value("train_guard_errors_total") == 0


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"])
def test_p11_without_a_loss_scale_nothing_is_divided(make_guard, scaler):
    """In bf16, without a scaler or with one that is switched off, the norm is 5.0 and there is no scale series."""
    job = make_guard(sgd_job(Lines(1).to(torch.bfloat16)), scaler=scaler, data=None)
    loss = job.model(5.0)
    loss.backward()
    job.guard.before_optimizer(loss)
    job.guard.end_step()
    assert job.guard.page.value("train_grad_norm") == 5.0
    assert job.guard.page.value("train_amp_loss_scale") is None


@pytest.mark.parametrize("overflows", [(), (0, 4, 5)], ids=["none", "three"])
def test_a04_a_change_of_scale_is_not_taken_for_a_skip(make_guard, overflows):
    """10 iterations, the scale set by hand in some: all but the overflows count; no warning, even at the very first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    job = sgd_job(tiny_model())
    job.scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    make_guard(job, scaler=scaler, data=None, **NO_CHECKPOINTS)
    for iteration in range(10):
        loss = job.model(torch.ones(1, 4)).sum()
        scaler.scale(loss).backward()
        if iteration in overflows:
            job.model[0].weight.grad[0, 0] = math.inf
        job.guard.before_optimizer(loss)
        scaler.step(job.optimizer)
        scaler.update(256.0 if iteration in (2, 7) else None)
        job.scheduler.step()
        job.optimizer.zero_grad()
        job.guard.end_step()
    position = 10 - len(overflows)
    assert job.scheduler.last_epoch == position
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**position)
    page = job.guard.page
    assert page.value("train_steps_applied_total") == position
    assert (page.value("train_steps_skipped_total", "amp_overflow") or 0) == len(overflows)


def test_a_step_that_cannot_be_measured_is_clipped_unscaled(make_guard):
    """A loop that gives no loss under a scaler is told, and its true gradient of 5.0 is clipped to 1.0."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    job = make_guard(sgd_job(Lines(1)), scaler=scaler, data=None)
    scaler.scale(job.model(5.0)).backward()
    before = job.weights()[0]
    job.guard.before_optimizer()
    scaler.step(job.optimizer)
    assert (before - job.weights()[0]).item() == pytest.approx(1e-3, rel=1e-3)
    assert job.guard.page.value("train_guard_errors_total") == 1


def test_fp16_weights_under_a_scaler_train_on_unmeasured(make_guard):
    """What torch itself refuses to unscale is told, neither measured nor clipped, and trains as without a guard."""
    fused = partial(one, torch.optim.SGD, fused=True)  # The only kind that torch trains so.
    setup = Setup(dtype=torch.float16, scaled=True, clip=None, optimizers=fused)
    loop, twin = Loop(setup), Loop(setup)
    loop.guard = make_guard(Job(loop.model, loop.optimizers[0]), scaler=loop.scaler, data=None).guard
    for number in range(3):
        loop.step(number)
        twin.step(number)
    assert equal(list(loop.state().values()), list(twin.state().values()))
    assert loop.guard.page.value("train_grad_norm") is None
    assert loop.guard.page.value("train_guard_errors_total") > 0

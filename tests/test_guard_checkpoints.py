"""Checkpoints in a training loop under a guard: proven restores, a scaler that comes or goes, full disks."""

import threading

import pytest
import torch
from tiers import rewrite
from torch import nn
from training import adamw_job, equal, spoil_weights, tiny_model

from trainer_plugin.checkpoints import manifest


def loss_fn(model, batch):
    """The loss of each sample, as the tests' loop has it in the mean."""
    return (model(batch) - batch.sum(1, keepdim=True)).square().squeeze(1)


def normed_job(seed: int = 0):
    """A job with dropout and batch norm, in which random numbers and buffers matter."""
    job = adamw_job(seed, scheduled=True)
    job.model = nn.Sequential(tiny_model(seed, dropout=0.3), nn.BatchNorm1d(1))
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
    job.scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.999)
    return job


def outcome(job) -> list[torch.Tensor]:
    """Weights, buffers, moments, and the next random numbers."""
    moments = [value for state in job.optimizer.state_dict()["state"].values() for value in state.values()]
    return [tensor.clone() for tensor in (*job.model.state_dict().values(), *moments, torch.rand(4))]


def proofs(job) -> tuple[float, float]:
    """How many restores gave their loss again, and how many did not."""
    return tuple(job.guard.page.value("train_restore_proofs_total", outcome) for outcome in ("equal", "different"))


def tamper(tmp_path, step: int) -> None:
    """Make a checkpoint whose files are as they were written and whose state is not the one that was probed."""
    for tier in ("local", "shared"):
        rewrite(tmp_path, tier, step, lambda snapshot: snapshot.tensors["model/0.0.weight"].add_(0.1), branch=1)


def test_a_probe_changes_no_bit_of_the_training(make_guard, tmp_path):
    """With loss_fn or without it, over checkpoints and a rollback, weights, buffers, moments and draws are the same."""
    results = []
    for name, function in (("with", loss_fn), ("without", None)):
        job = normed_job()
        make_guard(job, run=name, loss_fn=function)
        job.run(25)
        spoil_weights(job.model)
        job.step()
        assert job.guard.step == 20
        job.run(40)
        results.append((outcome(job), job.used))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    told = [manifest.read(tmp_path / "local" / name / "step-000000010-001") for name in ("with", "without")]
    assert isinstance(told[0].probe_loss, float)
    assert told[1].probe_loss is None


def test_c25_an_intact_restore_is_verified(make_guard):
    """A rollback and a restart each give the probe's loss again, and are counted as proven."""
    job = normed_job()
    make_guard(job, loss_fn=loss_fn)
    job.run(30)
    job.guard.close()
    again = normed_job(seed=1)
    make_guard(again, loss_fn=loss_fn)
    again.run(35)
    assert proofs(again) == (1, 0)
    spoil_weights(again.model)
    again.step()
    assert (again.guard.step, proofs(again)) == (30, (2, 0))


def test_c25_a_restart_from_a_changed_state_takes_the_next_older_one(make_guard, tmp_path, caplog):
    """One tensor off by 0.1, hashes and all: not taken up, told, counted, and the checkpoint before it is."""
    job = normed_job()
    make_guard(job, loss_fn=loss_fn)
    job.run(30)
    job.guard.close()
    tamper(tmp_path, 30)
    again = normed_job(seed=1)
    make_guard(again, loss_fn=loss_fn)
    assert again.guard.step == 20
    assert "checkpoint of step 30 is not taken: the probe batch has loss" in caplog.text
    again.step()
    assert proofs(again) == (1, 1)


def test_c25_a_rollback_to_a_changed_state_goes_on_to_the_next_older_one(make_guard, caplog):
    """What is wrong in memory only is seen as well: the rollback goes to the target before it, on disk."""
    job = normed_job()
    make_guard(job, loss_fn=loss_fn)
    job.run(25)
    job.guard._parts.checkpoints._slots.find("step-000000020-001").tensors["model/0.0.weight"].add_(0.1)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 10
    assert "rollback to step 20 is not possible: the probe batch has loss" in caplog.text
    assert proofs(job) == (1, 1)


def test_c25_another_loss_fn_is_no_restart_loop(make_guard, caplog):
    """When no checkpoint gives its loss the newest is taken all the same, and later rollbacks to it are not refused."""
    job = normed_job()
    make_guard(job, loss_fn=loss_fn)
    job.run(30)
    job.guard.close()
    again = normed_job(seed=1)
    make_guard(again, loss_fn=lambda model, batch: 3 * loss_fn(model, batch))
    assert again.guard.step == 30
    assert "no checkpoint proves itself by its loss" in caplog.text
    again.run(33)
    spoil_weights(again.model)
    again.step()
    assert again.guard.step == 30
    assert proofs(again) == (0, 3)


def test_without_data_a_loss_fn_is_told_to_be_idle(make_guard, caplog):
    """There is no batch to prove a restore by where the loop draws its own."""
    make_guard(loss_fn=loss_fn, data=None)
    assert caplog.text.count("loss_fn without data") == 1


@pytest.mark.parametrize("before", [True, False], ids=["on then off", "off then on"])
def test_c13_a_restart_may_turn_amp_on_or_off(make_guard, before, caplog):
    """A run goes on with a GradScaler that it had not, or without the one that it had, at the configured scale."""
    job = adamw_job()
    make_guard(job, scaler=torch.amp.GradScaler("cpu", init_scale=4.0, enabled=before))
    job.run(20)
    weights = job.weights()
    job.guard.close()
    again, scaler = adamw_job(seed=3), torch.amp.GradScaler("cpu", init_scale=512.0, enabled=not before)
    make_guard(again, scaler=scaler)
    assert again.guard.step == 20
    assert equal(again.weights(), weights)
    assert scaler.get_scale() == (1.0 if before else 512.0)
    assert caplog.text.count("no scale is restored") == 1


@pytest.mark.parametrize("moment", [False, True], ids=["weight", "moment"])
def test_c22_a_rollback_passes_over_what_is_not_finite(make_guard, moment):
    """With one NaN in a weight, or only in one exp_avg_sq, from step 15 on, what was saved at 20 is no target."""
    job = make_guard(mode="assist")  # `auto` would heal it before it is saved.
    job.run(15)
    if moment:
        job.optimizer.state[job.model[3].weight]["exp_avg_sq"][0, 3] = torch.nan
    else:
        job.model[3].weight.data[0, 3] = torch.nan
    job.run(25)
    checkpoints = job.guard._parts.checkpoints
    assert [m.step for m in checkpoints.targets(1 << 62, proven_only=False)] == [10]
    assert checkpoints._local.whole["step-000000020-001"].finite is False
    assert job.guard.page.value("train_checkpoint_failures_total", "local") == 1


def test_training_goes_on_with_no_tier_in_order(make_guard, tmp_path):
    """With a file in each folder's place each step is run, each failure counted, and what was whole is found again."""
    job = make_guard()
    job.run(15)
    folders = [tmp_path / tier / "tiny" for tier in ("local", "shared")]
    for folder in folders:
        folder.rename(folder.with_name("away"))
        folder.touch()
    job.run(45)
    page = job.guard.page
    assert job.guard.step == 45
    assert [page.value("train_checkpoint_failures_total", tier) for tier in ("local", "shared")] == [3, 3]
    assert [page.value("train_checkpoint_step", tier, "periodic") for tier in ("local", "shared")] == [10, 10]
    assert page.value("train_guard_errors_total") == 0
    for folder in folders:
        folder.unlink()
        folder.with_name("away").rename(folder)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 10


def test_memory_for_checkpoints_is_there_before_the_first_one(make_guard):
    """A few steps after the start, when the optimizer has its moments, there is memory for all of the state."""
    job = make_guard()
    job.run(5)
    for thread in threading.enumerate():
        if thread.name == "checkpoint-memory":
            thread.join()
    (slot,) = job.guard._parts.checkpoints._slots._slots
    kept = {name: tensor.data_ptr() for name, tensor in slot._memory.items()}
    assert kept.keys() == job.guard._parts.state.tensors().keys()
    assert any(name.endswith("exp_avg_sq") for name in kept)
    job.run(10)
    assert {name: tensor.data_ptr() for name, tensor in slot.snapshot.tensors.items()} == kept

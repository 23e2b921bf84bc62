"""Cases of checkpoints and restarts under a whole guard: places in the data, states without moments, or not ours."""

import shutil

import msgspec
import pytest
import torch
from loaders import LoaderJob, close, indices, loader
from test_guard_data import QUIET, ask_for_rollback
from tiers import checkpoint_folder, flip, rewrite, whole
from torch import nn
from training import adamw_job, equal, kick, spoil_weights

from trainer_plugin.checkpoints import manifest
from trainer_plugin.data.sampler import IndexSampler

WORKERS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
LOADERS = pytest.mark.parametrize(("kind", "workers"), [("index", 2), ("stateful", 0)])
TIERS = ("local", "shared")


@WORKERS
@LOADERS
@pytest.mark.timeout(120)
def test_c16_after_two_resumes_a_rollback_to_35_goes_on_with_batch_35(tmp_path, kind, workers):
    """Resumed at 30 and at 40 and taken back at 45, the run has used the order of one that was not disturbed.

    Two micro-batches a step and 14 steps an epoch. Suspect data count less here, so that none is left out.
    """
    sections = {
        "checkpoints": {"every": 5, "proof_steps": 10, "keep_local": 9},
        "actions": {"suspect_data": "reweight"},
    }
    used = []
    for until in (30, 40, 45):
        job = LoaderJob(tmp_path, kind, workers=workers, size=112, **sections)
        assert job.guard.step == len(used) // 2
        job.run(until)
        used += job.used
        if until < 45:
            close(job.guard)
    ask_for_rollback(job.guard)
    job.step()
    assert job.guard.step == 35
    used = used[: 2 * 35]
    job.used.clear()
    job.run(60)
    close(job.guard)
    straight = LoaderJob(tmp_path / "straight", kind, workers=workers, size=112, checkpoints={"every": 1000})
    straight.run(60)
    close(straight.guard)
    assert job.used[:2] == straight.used[70:72]
    assert used + job.used == straight.used


@WORKERS
@LOADERS
@pytest.mark.timeout(120)
def test_c17_a_checkpoint_at_an_epochs_end_leads_into_the_next_epoch(make_guard, kind, workers):
    """3 epochs of 10 batches, resumed from the checkpoint after batch 10: 20 more steps, the last one is step 30.

    Each epoch has every sample once, in the order of a run that was not stopped.
    """
    applied = {"stopped": [], "straight": []}
    for run, until in (("stopped", 10), ("stopped", 30), ("straight", 30)):
        job, used = adamw_job(), applied[run]
        make_guard(job, run=run, data=loader(kind, workers=workers, size=40), **QUIET)
        assert job.guard.step == len(used)
        while job.guard.step < until:
            batch = job.guard.next_batch()
            loss = nn.functional.mse_loss(job.model(batch[1]), batch[1].sum(1, keepdim=True))
            loss.backward()
            job.guard.before_optimizer(loss)
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.guard.end_step()
            used.append(indices(batch))
        close(job.guard)
        assert int(job.optimizer.state[job.model[0].weight]["step"]) == until
    assert len(applied["stopped"]) == 30
    assert applied["stopped"] == applied["straight"]
    if kind == "index":
        sampler = IndexSampler(40, batch_size=4, seed=5)
        assert applied["straight"] == [batch for _ in range(3) for batch in sampler]
    for epoch in range(3):
        drawn = [index for batch in applied["stopped"][10 * epoch : 10 * epoch + 10] for index in batch]
        assert sorted(drawn) == list(range(40))


def test_c23_a_run_that_only_overflowed_is_saved_and_goes_on(make_guard):
    """After 20 steps that AMP skipped a new process has no moments, and its next applied step is Adam's first."""

    def job_with_scaler():
        job, scaler = adamw_job(), torch.amp.GradScaler("cpu", init_scale=2.0**40)
        make_guard(job, scaler=scaler, **QUIET)
        return job, scaler

    def step(job, scaler, *, overflow):
        batch = job.guard.next_batch()
        loss = nn.functional.mse_loss(job.model(batch), batch.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        if overflow:
            job.model[3].weight.grad.fill_(torch.inf)
        job.guard.before_optimizer(loss)
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        job.guard.end_step()
        job.guard._parts.checkpoints.wait()

    job, scaler = job_with_scaler()
    for _ in range(20):
        step(job, scaler, overflow=True)
    job.guard.close()
    again, scaler = job_with_scaler()
    assert (again.guard.step, scaler.get_scale()) == (20, 2.0**20)
    assert not again.optimizer.state
    assert equal(again.weights(), job.weights())
    step(again, scaler, overflow=False)
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {1}


def test_c26_what_the_detectors_and_the_policy_know_comes_back(make_guard):
    """Saved after an incident, histories, cool-downs and budget of a new process are those of the checkpoint's step.

    The first checkpoints were saved when none of that was there yet.
    """
    job = make_guard()
    job.run(25)
    kick(job)
    while job.guard._parts.policy.open_incident is not None or job.guard.step % 10:
        job.step()
        assert job.guard.step < 200
    parts = job.guard._parts
    step, monitor, policy = job.guard.step, repr(parts.monitor.state_dict()), msgspec.json.encode(parts.policy.state)
    assert parts.policy.state.rollbacks
    job.guard.close()
    again = make_guard(adamw_job(seed=4))
    parts = again.guard._parts
    assert (again.guard.step, repr(parts.monitor.state_dict())) == (step, monitor)
    found = msgspec.json.decode(msgspec.json.encode(parts.policy.state))
    wanted = msgspec.json.decode(policy)
    for told in (found, wanted):
        told.pop("undone_until")  # Alerts of before the restart are over.
    assert found == wanted


def odd_monitor(snapshot):
    """What another version's detectors may have saved."""
    snapshot.plain["guard"]["monitor"] = {"ema": 1.0}


def without_guard(snapshot):
    """A state that another tool has saved."""
    del snapshot.plain["guard"]


def without_total(snapshot):
    """A state whose guard's part is not whole."""
    del snapshot.plain["guard"]["steps_total"]


def both(tmp_path, step, change):
    """Change a checkpoint in both tiers, hashes and all."""
    for tier in TIERS:
        rewrite(tmp_path, tier, step, change, branch=1)


def test_detectors_of_another_version_begin_anew(make_guard, tmp_path, caplog):
    """A checkpoint of before an upgrade is gone on from, its weights and all; only what was normal is learnt again."""
    job = make_guard()
    job.run(30)
    weights = job.weights()
    job.guard.close()
    both(tmp_path, 30, odd_monitor)
    again = make_guard(adamw_job(seed=4))
    assert again.guard.step == 30
    assert equal(again.weights(), weights)
    assert caplog.text.count("the detectors learn anew, what they had is of another version of this") == 1
    again.run(55)
    spoil_weights(again.model)
    again.step()
    assert again.guard.step == 50
    assert again.guard.page.value("train_guard_errors_total") == 0


def test_a_rollback_to_detectors_of_another_version_is_a_whole_one(make_guard, tmp_path):
    """Step, data and branch go back with the weights even where the detectors cannot."""
    job = make_guard()
    job.run(25)
    both(tmp_path, 20, odd_monitor)
    job.guard._parts.checkpoints._slots._slots[0].name = None  # From disk, as if the host had been another one.
    spoil_weights(job.model)
    job.step()
    assert (job.guard.step, job.data.position) == (20, 20)
    assert job.guard._parts.checkpoints.lineage.began_at == [0, 0, 20]
    assert job.guard.page.value("train_guard_errors_total") == 0


def test_a_rollback_passes_over_a_state_without_the_guards_part(make_guard, tmp_path):
    """It would leave the weights of one step and the count of another: the target before it is taken, whole."""
    job = make_guard()
    job.run(25)
    both(tmp_path, 20, without_guard)
    job.guard._parts.checkpoints._slots._slots[0].name = None
    spoil_weights(job.model)
    job.step()
    assert (job.guard.step, job.data.position) == (10, 10)
    assert job.guard._parts.checkpoints.lineage.began_at == [0, 0, 10]


@pytest.mark.parametrize("change", [without_guard, without_total])
def test_a_start_passes_over_a_state_whose_guards_part_is_not_whole(make_guard, tmp_path, change):
    """The checkpoint before it is gone on from, and the log says why."""
    job = make_guard()
    job.run(20)
    job.guard.close()
    both(tmp_path, 20, change)
    again = make_guard(adamw_job(seed=4))
    assert (again.guard.step, again.data.position) == (10, 10)


def test_a_start_never_begins_anew_beside_checkpoints_that_cannot_be_loaded(make_guard, tmp_path):
    """With every copy damaged the start is refused in one line, and nothing is deleted; `never` is how one begins anew.

    What is mended meanwhile is gone on from.
    """
    job = make_guard()
    job.run(20)
    job.guard.close()
    damaged = [checkpoint_folder(tmp_path, tier, step, 1) / "__0_0.distcp" for tier in TIERS for step in (10, 20)]
    for path in damaged:
        flip(path)
    with pytest.raises(ValueError, match=r"no checkpoint that lies there can be gone on from .* `never`") as caught:
        make_guard(adamw_job())
    assert "\n" not in str(caught.value)
    assert all(path.exists() for path in damaged)
    flip(damaged[0])
    again = make_guard(adamw_job())
    assert again.guard.step == 10
    again.guard.close()
    for path in (damaged[0], damaged[2]):  # The other copy was mended from this one.
        flip(path)
    assert make_guard(adamw_job(), resume="never").guard.step == 0


def test_a_checkpoint_of_another_run_is_never_trained_on(make_guard, tmp_path, caplog):
    """Copied by hand into this run's folders it is left alone: beside own ones these are taken, alone it is refused."""
    other = make_guard(run="other")
    other.run(40)
    other.guard.close()
    job = make_guard(adamw_job(seed=3))
    job.run(30)
    weights = job.weights()
    job.guard.close()
    theirs = [tmp_path / tier / "tiny" / "step-000000040-001" for tier in TIERS]
    for path in theirs:
        shutil.copytree(path.parents[1] / "other" / path.name, path)
    again = make_guard(adamw_job(seed=4))
    assert again.guard.step == 30
    assert equal(again.weights(), weights)
    assert caplog.text.count("left alone: another run's checkpoint") == 2
    again.run(100)
    again.guard.close()
    assert all(manifest.read(path).run == "other" for path in theirs)
    for path in theirs:
        for own in path.parent.iterdir():
            if own != path:
                shutil.rmtree(own)
    with pytest.raises(ValueError, match="step-000000040-001: left alone: another run's checkpoint"):
        make_guard(adamw_job())


def test_c19_an_outage_of_the_shared_disk_over_a_rollback_leads_to_no_abandoned_branch(make_guard, tmp_path):
    """Run folder and shared tier away while the run goes back, then an end: the newest branch is gone on with.

    state.json then knows of no rollback, and the shared tier still holds what was left behind.
    """
    options = {"checkpoints": {"proof_steps": 12}}
    job = make_guard(**options)
    job.run(31)
    job.guard._parts.loop.flush(5.0)
    away = [(tmp_path / "shared", tmp_path / "away"), (tmp_path / "runs" / "tiny", tmp_path / "runs" / "away")]
    for here, there in away:
        here.rename(there)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 10
    job.run(20)
    weights = job.weights()
    job.guard.close()
    for here, there in away:
        there.rename(here)
    assert set(whole(tmp_path, "shared")) == {10, 20, 30}
    again = make_guard(adamw_job(seed=4), **options)
    assert again.guard.step == 20
    assert equal(again.weights(), weights)
    assert len(again.guard._parts.policy.state.rollbacks) == 1

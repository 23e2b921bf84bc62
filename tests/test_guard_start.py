"""The Guard's start: what it refuses, what it takes back, and where a run goes on."""

import shutil

import pytest
import torch
from torch import nn
from training import adamw_job, hooks, kick, settings, tiny_model

from trainer_plugin.guard import Guard
from trainer_plugin.run_folder import RunInUseError


def test_what_is_wrong_with_the_loop_is_told_before_anything_is_made(tmp_path):
    """A state that cannot be stored, an unknown option or a strange optimizer leaves no folder and no hook behind."""

    class Odd:
        def state_dict(self):
            return {"deep": object()}

    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    strange = torch.optim.AdamW(tiny_model().parameters())
    for options, told in (
        ({"optimizer": optimizer, "scheduler": Odd()}, "`scheduler.deep`"),
        ({"optimizer": strange}, "not a parameter of the model"),
        ({"optimizer": optimizer, "run": "../up"}, "`run` must be"),
    ):
        with pytest.raises(ValueError, match=told) as caught:
            Guard(settings(tmp_path), model=model, **options)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert hooks(optimizer) == 0


def test_a_start_that_fails_half_way_takes_everything_back(tmp_path):
    """When the last folder cannot be made, the lock, the hooks and the server of the first ones are gone again."""
    job = adamw_job()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "targets").touch()
    with pytest.raises(OSError, match="targets"):
        Guard(settings(tmp_path), model=job.model, optimizer=job.optimizer)
    assert hooks(job.optimizer) == 0
    (tmp_path / "runs" / "targets").unlink()
    Guard(settings(tmp_path), model=job.model, optimizer=job.optimizer).close()


def test_require_wants_a_checkpoint(make_guard):
    """`require` fails on a new run in one line, lets the folder go, and goes on where there is a checkpoint."""
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        make_guard(resume="require")
    job = make_guard()
    job.run(12)
    job.guard.close()
    assert make_guard(resume="require").guard.step == 10


def test_never_begins_anew_and_leaves_the_old_weights_alone(make_guard):
    """`never` starts at step 0, and nothing of the earlier job is gone back to afterwards."""
    job = make_guard()
    job.run(25)
    job.guard.close()
    job = make_guard(adamw_job(seed=5), resume="never")
    assert job.guard.step == 0
    job.run(6)
    assert job.guard._parts.checkpoints.targets(1 << 62, proven_only=False) == []
    job.run(13)
    job.guard.close()
    assert make_guard().guard.step == 10


def test_another_model_is_refused_at_the_start(make_guard):
    """A checkpoint of another shape stops the start with a line that names what differs, and frees the folder."""
    job = make_guard()
    job.run(12)
    job.guard.close()
    other = adamw_job()
    other.model[3] = nn.Linear(8, 2)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    with pytest.raises(ValueError, match=r"does not fit.*model/3.weight is \[1, 8\]"):
        make_guard(other)
    assert hooks(other.optimizer) == 0
    assert make_guard().guard.step == 10


def test_a_job_that_died_in_an_incident_goes_on_before_it(make_guard, caplog):
    """With an incident open, a restart takes the newest checkpoint before the first bad step, and says why."""
    job = make_guard()
    job.run(27)
    kick(job)
    job.run(31)
    assert job.guard._parts.checkpoints.targets(1 << 62, proven_only=False)[0].step == 30
    job.guard.close()
    assert make_guard().guard.step == 20
    assert "goes on from step 20 (local tier, the newest before incident 1)" in caplog.text


def test_the_run_comes_back_from_the_shared_tier(make_guard, tmp_path, caplog):
    """With the local tier lost, a restart goes on from the shared one and says so."""
    job = make_guard()
    job.run(22)
    weights = job.model.state_dict()
    job.guard.close()
    shutil.rmtree(tmp_path / "local")
    job = make_guard(adamw_job(seed=4))
    assert job.guard.step == 20
    assert "goes on from step 20 (shared tier, the newest whole one)" in caplog.text
    assert weights.keys() == job.model.state_dict().keys()


def test_a_run_of_another_guard_is_refused(make_guard, tmp_path):
    """A folder locked from elsewhere is refused before a checkpoint is touched."""
    job = make_guard()
    elsewhere = settings(tmp_path, runs=str(tmp_path / "link"))
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    with pytest.raises(RunInUseError, match="in use by process"):
        Guard(elsewhere, model=job.model, optimizer=job.optimizer)
    assert hooks(job.optimizer) == 4


def test_without_data_there_are_no_batches(tmp_path):
    """A guard without `data` watches all the same, and says what `next_batch` would need."""
    job = adamw_job()
    guard = Guard(settings(tmp_path), model=job.model, optimizer=job.optimizer)
    with pytest.raises(ValueError, match="next_batch needs `data`"):
        guard.next_batch()
    guard.close()


def test_a_lost_run_folder_is_made_good_from_the_newest_checkpoint(make_guard, tmp_path):
    """With state.json and quarantine gone, the checkpoints' copy keeps branches, incidents, budget and quarantine."""
    job = make_guard()
    job.run(30)
    kick(job)
    job.run(60)
    (rollback,) = job.guard._parts.policy.state.rollbacks
    quarantine, began_at = list(job.guard._parts.data.quarantine), list(job.guard._parts.checkpoints.lineage.began_at)
    assert quarantine
    job.guard.close()
    shutil.rmtree(tmp_path / "runs" / "tiny")

    again = make_guard()

    assert again.guard.step == 60
    assert again.guard._parts.policy.state.rollbacks == [rollback]
    assert again.guard._parts.data.quarantine == quarantine
    assert again.guard._parts.checkpoints.lineage.began_at == [*began_at, 60]
    assert len((tmp_path / "runs/tiny/quarantine.jsonl").read_text().splitlines()) == len(quarantine)


def test_what_a_loop_leaves_out_is_said_once(make_guard, caplog):
    """No before_optimizer, no next_batch, a scheduler that was not given: one line each, soon after the start."""
    job = adamw_job(scheduled=True)
    job.scheduler, scheduler = None, job.scheduler
    guard = make_guard(job).guard
    for _ in range(6):
        job.optimizer.step()
        scheduler.step()
        guard.end_step()
    for words in ("before_optimizer is not called", "next_batch is not called", "a scheduler steps the learning rate"):
        assert caplog.text.count(words) == 1


def test_a_loop_that_leaves_nothing_out_hears_nothing(make_guard, caplog):
    """The plain loop of the README is not warned of anything."""
    make_guard(adamw_job(scheduled=True)).run(6)
    assert "not called" not in caplog.text
    assert "was not given" not in caplog.text


def test_tiers_that_are_one_folder_are_refused(make_guard, tmp_path):
    """A link from one tier to the other would have each save destroy itself: told at the start."""
    (tmp_path / "local").mkdir()
    (tmp_path / "shared").symlink_to(tmp_path / "local")
    with pytest.raises(ValueError, match="must be two folders"):
        make_guard()


def test_a_mask_of_minus_infinity_is_no_damage(make_guard):
    """A buffer that holds -inf from the start keeps no checkpoint from being a target; one that becomes NaN does."""
    job = adamw_job()
    job.model.register_buffer("mask", torch.full((3,), -torch.inf))
    job.model.register_buffer("mean", torch.zeros(3))
    make_guard(job).run(20)
    assert [m.step for m in job.guard._parts.checkpoints.targets(100, proven_only=False)] == [20, 10]
    job.model.mean.fill_(torch.nan)
    job.run(30)
    assert [m.step for m in job.guard._parts.checkpoints.targets(100, proven_only=False)] == [20, 10]


def test_a_dead_local_tier_leaves_the_shared_one_going(make_guard, tmp_path):
    """With a file in the place of the local folder checkpoints go to the shared one, also over a restart."""
    job = make_guard()
    job.run(10)
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "local").touch()
    job.run(30)
    assert next(m.step for m in job.guard._parts.checkpoints.targets(100, proven_only=False)) == 30
    job.guard.close()
    again = make_guard()
    assert again.guard.step == 30


def test_a_restart_never_throws_whole_checkpoints_away(make_guard):
    """With an open incident that is older than every checkpoint, the newest is taken, not step 0."""
    job = make_guard()
    job.run(40)
    incident = job.guard._parts.policy.state.open(5, 5, 5)
    assert incident is job.guard._parts.policy.open_incident
    job.guard.close()
    assert make_guard().guard.step == 40

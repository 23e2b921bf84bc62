"""The Guard after it went back: what the abandoned branch saved is set aside, and step numbers come again in peace."""

import torch
from training import adamw_job, equal, spoil_weights


def saved(job) -> list[tuple[int, int]]:
    """Step and branch of every checkpoint that a restart would go on from, the newest first."""
    return [(m.step, m.branch) for m in job.guard._parts.checkpoints.targets(1 << 62, proven_only=False)]


def ruin(job) -> None:
    """Make the weights NaN, and train until the run has gone back."""
    spoil_weights(job.model)
    before = job.guard.step
    job.step()
    assert job.guard.step < before


def test_c19_steps_that_come_again_are_saved_beside_the_abandoned_ones(make_guard):
    """Back from 45 to 40 and on to 50': once healed, a restart goes on from the new branch, with its own weights."""
    job = make_guard()
    job.run(44)
    ruin(job)
    assert job.guard.step == 40
    assert saved(job)[0] == (40, 1)
    job.run(50)
    assert saved(job)[:2] == [(50, 2), (40, 1)]
    while job.guard.page.value("train_incident_open"):
        job.step()
        assert job.guard.step < 200
    last = job.guard.step // 10 * 10 + 10
    job.run(last)
    weights = job.weights()
    job.guard.close()
    job = make_guard(adamw_job(seed=7))
    assert job.guard.step == last
    assert equal(job.weights(), weights)


def test_c19_a_checkpoint_of_the_abandoned_branch_is_never_gone_back_to(make_guard):
    """Saved at 30 while the fault was on its way, left behind by a rollback to 20: no rollback or restart takes it."""
    job = make_guard(checkpoints={"proof_steps": 12})
    job.run(31)
    damaged = [weights.clone() for weights in job.weights()]
    ruin(job)
    assert job.guard.step == 10  # 20 was not proven yet.
    assert saved(job) == [(10, 1)]
    job.run(14)
    job.guard.close()
    job = make_guard(adamw_job(seed=7), checkpoints={"proof_steps": 12})
    assert job.guard.step == 10
    assert not equal(job.weights(), damaged)
    job.run(30)
    assert saved(job)[:2] == [(30, 3), (20, 3)]


def test_c20_the_newest_is_the_previous_one_until_the_writer_has_ended(make_guard):
    """While a checkpoint is being written the page shows the one before it; then the new one."""
    job = make_guard()
    job.run(19)
    checkpoints, page = job.guard._parts.checkpoints, job.guard.page
    with checkpoints._local._held():  # The writer stands before its first file.
        job.guard.next_batch()
        job.guard.before_optimizer(torch.tensor(1.0))
        job.guard.end_step()
        job.guard.before_optimizer(torch.tensor(1.0))
        job.guard.end_step()
        assert job.guard.step == 21
        assert page.value("train_checkpoint_step", "local", "periodic") == 10
        assert page.value("train_checkpoint_step", "shared", "periodic") == 10
        assert saved(job) == [(10, 1)]
    assert checkpoints.wait(8.0)
    job.step()
    assert page.value("train_checkpoint_step", "shared", "periodic") == 20
    assert saved(job)[0] == (20, 1)

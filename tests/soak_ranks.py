"""Long runs of several ranks (`make soak`): 150 steps, a kill and the rest; one rank of four killed 20 times."""

import os
import signal
from functools import partial

import pytest
import torch
from ranks import RanksJob, assert_equal, run_ranks, start_ranks, wait_for_end
from ranks_kills import kill_one_again_and_again

pytestmark = pytest.mark.soak
RUN_SECONDS = 600.0


def train(folder, until, pause_at, scaled, rank):
    """FSDP2 to a step; killed at `pause_at`, in the middle of whatever the writers do."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=40) if scaled else None
    options = {"scaler": scaler} if scaled else {}
    job = RanksJob(folder, "fsdp2", rank=rank, size=2, **options)
    while job.guard.step < until:
        job.step()
        if job.guard.step % 10 == 0:
            job.guard._parts.checkpoints.wait()
        if job.guard.step == pause_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return job.finish()


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_150_and_kill_and_resume_to_300_equals_300_straight(tmp_path, scaled):
    """Weights, moments, schedule, scaler, random draws and the order of the samples are those of an undisturbed run."""
    straight = run_ranks(2, partial(train, tmp_path / "straight", 300, 0, scaled), tmp_path / "a", RUN_SECONDS)
    killed = start_ranks(2, partial(train, tmp_path / "run", 300, 155, scaled), tmp_path / "b")
    wait_for_end(killed, RUN_SECONDS)
    assert -signal.SIGKILL in [one.code for one in killed]
    resumed = run_ranks(2, partial(train, tmp_path / "run", 300, 0, scaled), tmp_path / "b", RUN_SECONDS)
    for here, there in zip(resumed, straight, strict=True):
        assert_equal(here, there, steps=150)


@pytest.mark.timeout(3000)
def test_one_rank_of_four_killed_leaves_a_way_on(tmp_path):
    """Twenty times, at random moments."""
    proven, steps = kill_one_again_and_again(tmp_path, 20, seed=2)
    assert proven >= 18
    assert steps == sorted(steps)

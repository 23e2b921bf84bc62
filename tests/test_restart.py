"""Restarts of real processes: killed in mid-run, a job goes on as if nothing had been, and alone in its folder."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from kills import kill_again_and_again
from loaders import LoaderJob, assert_equal_but_for_the_start, close
from tiers import open_checkpoints, whole
from training import adamw_job, outcome, seeded_job, settings, snapshot
from waiting import wait_for

from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.guard import Guard
from trainer_plugin.run_folder import RunInUseError

PROGRAM = Path(__file__).with_name("training.py")


def start(folder: Path, *arguments: str, pause_at: int, until: int, program: Path = PROGRAM) -> subprocess.Popen:
    """A job in a process of its own, which waits at a step to be killed."""
    return subprocess.Popen(
        [sys.executable, program, folder, *arguments, str(pause_at), str(until)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(job: subprocess.Popen) -> None:
    """End a job as a machine that loses power would."""
    job.kill()  # SIGKILL; one that has ended is left alone.
    job.wait()
    job.stdin.close()
    job.stdout.close()


@pytest.mark.live
@pytest.mark.timeout(60)
def test_30_and_kill_and_resume_to_60_equals_60_straight(tmp_path):
    """A job killed after step 35 goes on from step 30 in a new process and ends bit-identical; nobody else gets in.

    Weights, moments, schedule, data and the next random numbers are those of an undisturbed run, dropout and all.
    """
    first = start(tmp_path, pause_at=35, until=60)
    try:
        assert first.stdout.readline() == "from 0 0.001 0.001\n"
        assert first.stdout.readline() == "at 35\n"
        other = seeded_job()
        with pytest.raises(RunInUseError) as caught:
            Guard(settings(tmp_path), model=other.model, optimizer=other.optimizer)
        assert str(caught.value).endswith(f"in use by process {first.pid} on {os.uname().nodename}")
        assert "\n" not in str(caught.value)
    finally:
        kill(first)

    second = start(tmp_path, pause_at=0, until=60)
    try:
        # C07: in a fresh process the optimizer has the rate that the scheduler says, before the first step.
        assert second.stdout.readline() == "from 30 0.01 0.01\n"
        assert second.wait(50) == 0
    finally:
        kill(second)
    resumed = torch.load(tmp_path / "outcome.pt", weights_only=False)

    straight = seeded_job()
    straight.guard = Guard(
        settings(tmp_path / "straight"),
        model=straight.model,
        optimizer=straight.optimizer,
        scheduler=straight.scheduler,
        data=straight.data,
    )
    straight.run(60)
    close(straight.guard)
    wanted = outcome(straight)
    assert resumed["used"] == wanted["used"][30:]
    assert resumed["draws"] == wanted["draws"]
    assert resumed["scheduler"] == wanted["scheduler"]
    for name, tensor in wanted["model"].items():
        assert torch.equal(resumed["model"][name], tensor)
    for number, state in wanted["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(resumed["optimizer"]["state"][number][name], tensor)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("kind", "workers"), [("index", 0), ("index", 2), ("stateful", 0), ("stateful", 2)])
def test_a_resume_from_a_loader_is_exact(tmp_path, kind, workers):
    """20 steps and a new guard in the middle of an epoch end as 20 straight ones, to the bit.

    Two micro-batches a step, dropout, fp16 with its scaler, a schedule; five batches are an epoch.
    """
    straight = LoaderJob(tmp_path / "straight", kind, workers=workers)
    straight.run(20)
    close(straight.guard)
    wanted = straight.outcome()
    first = LoaderJob(tmp_path, kind, workers=workers, checkpoints={"every": 9})
    first.run(12)
    close(first.guard)
    resumed = LoaderJob(tmp_path, kind, workers=workers, checkpoints={"every": 9})
    assert resumed.guard.step == 9
    resumed.run(20)
    close(resumed.guard)
    assert_equal_but_for_the_start(resumed.outcome(), wanted, steps=9)


@pytest.mark.live
@pytest.mark.timeout(120)
def test_p22_three_jobs_killed_leave_one_target_and_the_counter_goes_on(tmp_path):
    """Three processes, each killed with -9 five steps past its save, are scraped in turn at the one target there is.

    The counter of steps goes on from what was saved: the five steps beyond are run again, and were never counted.
    """
    for saved in (0, 10, 20):
        job = start(tmp_path, pause_at=saved + 15, until=100)
        try:
            assert job.stdout.readline().startswith(f"from {saved} ")
            assert job.stdout.readline() == f"at {saved + 15}\n"
            (path,) = (tmp_path / "runs" / "targets").iterdir()
            ((address,),) = [entry["targets"] for entry in json.loads(path.read_text())]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                page = answer.read().decode()
            assert f'train_steps_total{{run="tiny",rank="0"}} {saved + 15}.0\n' in page
            assert f'train_step{{run="tiny",rank="0"}} {saved + 15}.0\n' in page
        finally:
            kill(job)
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=5)
        assert [entry.name for entry in path.parent.iterdir()] == ["tiny-0.json"]


def test_c07_the_restored_rate_is_the_schedulers(make_guard):
    """With a warm-up of ten steps and a checkpoint at 50, rate and schedule agree on 0.01 before the first step."""
    job = make_guard(adamw_job(scheduled=True))
    job.run(50)
    job.guard.close()
    fresh = adamw_job(seed=2, scheduled=True)
    assert fresh.optimizer.param_groups[0]["lr"] == 0.001
    make_guard(fresh)
    assert fresh.guard.step == 50
    assert fresh.optimizer.param_groups[0]["lr"] == fresh.scheduler.get_last_lr()[0] == 0.01
    fresh.watch_rates()
    fresh.step()
    assert fresh.rates == [0.01]


def _save_for_ever(checkpoints: Checkpoints, first: int) -> None:
    """In a process of its own: save as fast as the disk takes it."""
    for step in range(first, 1 << 30, 10):
        checkpoints.save(snapshot(step), step)
        checkpoints.wait()


def _saving(folder: Path, moment: str, *, after: int) -> bool:
    """Whether a checkpoint beyond a step has come as far as this moment."""
    tier, _, name = moment.partition("/")
    paths = (folder / tier / "tiny").glob(f"step-*/{name}" if name else "step-*")
    return any(f"step-{after + 1:09d}" < path.relative_to(folder / tier / "tiny").parts[0] for path in paths)


@pytest.mark.parametrize(
    "moment",
    [
        "local",
        "local/plain.pt",
        "local/*.distcp",
        "local/.metadata",
        "local/manifest.json",
        "shared",
        "shared/plain.pt",
    ],
)
def test_c01_a_kill_during_a_save_leaves_whole_checkpoints_only(tmp_path, moment):
    """Killed at any point of a save, the newest whole checkpoint loads, and the next start removes the leftovers."""
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(snapshot(10), 10)
    checkpoints.wait()
    context = multiprocessing.get_context("fork")
    for round_ in range(3):
        first = 1000 * (round_ + 1)
        process = context.Process(target=_save_for_ever, args=(checkpoints, first), daemon=True)
        process.start()
        try:
            wait_for(lambda first=first: _saving(tmp_path, moment, after=first))
        finally:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        checkpoints = open_checkpoints(tmp_path)
        for name in ("local", "shared"):
            found = whole(tmp_path, name)
            assert found
            assert not any(found.values())
        target = checkpoints.targets(1 << 62)[0]
        assert target.step >= first
        assert checkpoints.load(target).snapshot.plain["guard"]["step"] == target.step


@pytest.mark.live
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_c01_a_job_killed_at_any_moment_leaves_a_way_on(tmp_path):
    """A job that saves, copies, rotates and goes back all the time, killed three times (`make soak`: 50 times)."""
    moments = kill_again_and_again(tmp_path, 3, seed=1)
    assert moments["with a proven checkpoint"] >= 1

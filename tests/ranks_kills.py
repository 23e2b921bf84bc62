"""A job of four ranks that saves all the time, one of which is killed, and what its folders hold afterwards."""

import os
import random
import signal
import threading
from functools import partial
from pathlib import Path

import msgspec
from ranks import RanksJob, start_ranks, wait_for_end
from tiers import open_checkpoints, whole
from waiting import wait_for

from trainer_plugin.checkpoints import manifest
from trainer_plugin.run_folder import RunState

SIZE = 4
_LIMIT_SECONDS = 60.0


def train(folder: Path, rank: int) -> None:
    """Train for ever: a checkpoint at every second step."""
    checkpoints = {"every": 2, "proof_steps": 1, "keep_local": 2, "keep_shared": 3}
    job = RanksJob(folder, "fsdp2", rank=rank, size=SIZE, checkpoints=checkpoints, ranks={"timeout_seconds": 5.0})
    job.run(1 << 30)


def kill_one_again_and_again(folder: Path, times: int, seed: int) -> tuple[int, list[int]]:
    """Start the job, kill one rank at a random moment as for want of memory, and wait until all have ended.

    How often a proven checkpoint was left, and the step of the newest one each time.

    Raises:
        AssertionError: something half was listed, a target could not be loaded, or there was no way on.
    """
    generator, proven, steps = random.Random(seed), 0, []
    for _ in range(times):
        before = _sealed(folder)
        started = start_ranks(SIZE, partial(train, folder), folder / "ranks")
        wait_for(lambda before=before: len(_sealed(folder) - before) >= generator.randint(1, 3), _LIMIT_SECONDS)
        threading.Event().wait(generator.uniform(0.0, 0.3))  # A moment of chance, not for anything to be ready.
        victim = started[generator.randrange(SIZE)]
        os.kill(victim.process.pid, signal.SIGKILL)
        wait_for_end(started, _LIMIT_SECONDS)
        assert victim.code == -signal.SIGKILL
        assert all(one.code not in (0, -signal.SIGKILL) for one in started if one is not victim)  # By themselves.
        told = msgspec.json.decode((folder / "runs/tiny/state.json").read_bytes(), type=RunState)
        checkpoints = open_checkpoints(folder, lineage=told.lineage, proven=told.proven_step)
        for tier in ("local", "shared"):
            assert not any(whole(folder, tier).values()), whole(
                folder, tier
            )  # Nothing half is listed, and no leftover is there.
        targets = checkpoints.targets(1 << 62)
        assert targets or not proven
        for target in targets:
            loaded = checkpoints.load(target)
            assert loaded.snapshot.plain["guard"]["step"] == target.step
            assert loaded.snapshot.finite
        proven += bool(targets)
        steps.append(max((one.step for one in targets), default=-1))
    return proven, steps


def _sealed(folder: Path) -> set[Path]:
    """The checkpoints that are there."""
    return set((folder / "shared" / "tiny").glob(f"step-*/{manifest.NAME}"))

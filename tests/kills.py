"""A training job that saves and goes back all the time, killed with SIGKILL, and what its folders hold afterwards."""

import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import msgspec
import torch
from tiers import open_checkpoints, whole
from torch import nn
from training import Job, settings, spoil_weights
from waiting import wait_for

from trainer_plugin.checkpoints import manifest
from trainer_plugin.guard import Guard
from trainer_plugin.run_folder import RunState

_SPOILT_EVERY_STEPS = 37


def loss_fn(model, batch):
    """The loss of each sample."""
    return (model(batch) - batch.sum(1, keepdim=True)).square().squeeze(1)


def train(folder: Path) -> None:
    """Train for ever: a checkpoint of 4 MB at every second step, a rollback now and then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50_000), nn.Tanh(), nn.Linear(50_000, 1))
    job = Job(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))
    options = settings(
        folder,
        checkpoints={"every": 2, "proof_steps": 1, "keep_local": 2, "keep_shared": 3},
        budget={"rollbacks_per_day": 1_000_000, "same_target": 1_000_000},
    )
    job.guard = guard = Guard(
        options, model=model, optimizer=job.optimizer, data=job.data, loss_fn=loss_fn, local_only=True
    )
    for number in range(1, 1 << 30):
        loss = loss_fn(model, guard.next_batch()).mean()
        loss.backward()
        guard.before_optimizer(loss)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if number % _SPOILT_EVERY_STEPS == 0:
            spoil_weights(model)
        guard.end_step()
        assert not guard.stopping


def kill_again_and_again(folder: Path, times: int, seed: int) -> Counter:
    """Start the job, kill it at a random moment, look: counted are the moments that were hit, as they can be seen.

    Raises:
        AssertionError: something half was listed or left, or there was no way on although there had been one.
    """
    moments, generator, had_proven = Counter(), random.Random(seed), False
    context = multiprocessing.get_context("fork")
    for _ in range(times):
        job = context.Process(target=train, args=(folder,), daemon=True)
        job.start()
        before = _sealed(folder)
        if generator.random() < 0.7:  # The others are killed while they start, and are restored.
            wait_for(lambda before=before: _sealed(folder) - before, 20.0)
        threading.Event().wait(generator.uniform(0.0, 0.4))  # A moment of chance, not for anything to be ready.
        os.kill(job.pid, signal.SIGKILL)
        job.join()
        assert job.exitcode == -signal.SIGKILL  # It had not ended by itself.
        moments.update(_halves(folder))
        state = folder / "runs" / "tiny" / "state.json"
        if not state.exists():
            moments["before its first state"] += 1
            continue
        told = msgspec.json.decode(state.read_bytes(), type=RunState)
        checkpoints = open_checkpoints(folder, lineage=told.lineage, proven=told.proven_step)
        for tier in ("local", "shared"):
            assert not any(whole(folder, tier).values())  # Nothing half is listed, and no leftover is there.
        targets = checkpoints.targets(1 << 62)
        assert targets or not had_proven
        had_proven = had_proven or bool(targets)
        for target in targets:
            loaded = checkpoints.load(target)
            assert loaded.snapshot.plain["guard"]["step"] == target.step
            assert loaded.snapshot.finite
        moments["with a proven checkpoint"] += bool(targets)
    return moments


def _sealed(folder: Path) -> set[Path]:
    """The checkpoints that are there."""
    return set((folder / "local" / "tiny").glob(f"step-*/{manifest.NAME}"))


def _halves(folder: Path) -> list[str]:
    """What a killed job has left half-done."""
    found = []
    for tier in ("local", "shared"):
        for path in (folder / tier / "tiny").glob("step-*"):
            if not (path / manifest.NAME).exists():
                # What is removed loses its manifest first: its files are all there, or already fewer.
                full = {"plain.pt", ".metadata", "__0_0.distcp"} <= {file.name for file in path.iterdir()}
                found.append(f"{tier}: {'sealed or removed' if full else 'written, copied or removed'}")
    return found or ["between writes"]

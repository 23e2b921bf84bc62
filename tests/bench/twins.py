"""The fault-free twin of a seed: the checkpoints that trials fork from, and its held-out loss along the way."""

import json
import shutil
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from trainer_plugin.demo.gpt import held_out_loss, sample_losses
from trainer_plugin.demo.job import CONTEXT, Workbench
from trainer_plugin.demo.text import Corpus, held_out_batches
from trainer_plugin.guard import Guard

RUN = "recovery"
# The plan's last step stays before the decay of the schedule, which begins at 80 % of these.
SCHEDULED_STEPS = 3400
# Half of the demo's: all trials in one go on two cores.
_WIDTH = 64
_HELD_OUT_ROWS = 64
_HISTORY_STEPS = 300


class Fork(NamedTuple):
    """The twin at one of its checkpoints. `history` is loss and gradient norm of the steps before, oldest first."""

    step: int
    folder: Path
    state: dict
    history: list


@lru_cache(maxsize=1)
def corpus():
    """The text, read once a process."""
    return Corpus.load()


@lru_cache(maxsize=1)
def _held_out():
    return held_out_batches(corpus(), CONTEXT, batch_size=_HELD_OUT_ROWS, tokens=_HELD_OUT_ROWS * CONTEXT)


def look(model):
    """The held-out loss (nats a byte) on a set that is small enough to be looked at every few steps."""
    return held_out_loss(model, _held_out())


def workbench(seed, faults=None):
    """Model, optimizer, schedule and data of a seed, at step 0; the data with the faults that lie in them."""
    return Workbench(corpus(), seed=seed, steps=SCHEDULED_STEPS, faults=faults, width=_WIDTH)


def options(folder, plan, **sections):
    """guard.yaml of a run below `folder`: the defaults, but for checkpoints that are as far apart as runs are short."""
    tiers = {"local": str(folder / "local"), "shared": str(folder / "shared"), "every": plan.every}
    return {"run": RUN, "runs": str(folder / "runs"), "metrics": {"port": 0}, "checkpoints": tiers, **sections}


class Twins:
    """The twins of all seeds, each below `folder` once it has been trained."""

    def __init__(self, folder, plan):
        self._folder = folder
        self._plan = plan

    def train(self, seed):
        """Train a seed's twin if it is not there yet, under a guard that only observes, which changes no bit of it."""
        plan, home = self._plan, self._folder / f"twin-{seed}"
        if (home / "curve.json").exists():
            return
        shutil.rmtree(home, ignore_errors=True)  # Of a run that was cut off.
        bench, history, curve = workbench(seed), deque(maxlen=_HISTORY_STEPS), {}
        guard = Guard(
            options(home / "live", plan, mode="observe"),
            model=bench.model,
            optimizer=bench.optimizer,
            scheduler=bench.scheduler,
            data=bench.data,
            local_only=True,
            on_signals=lambda signals: history.append((signals.loss, signals.grad_norm)),
        )
        while guard.step < plan.twin_steps:
            step_loss = sample_losses(bench.model, guard.next_batch()["tokens"]).mean()
            step_loss.backward()
            guard.before_optimizer(step_loss)
            bench.optimizer.step()
            bench.scheduler.step()
            bench.optimizer.zero_grad()
            guard.end_step()
            if guard.step % plan.look_every == 0:
                curve[guard.step] = look(bench.model)
            if guard.step in plan.forks():
                self._fork(home, guard, bench, list(history))
        guard.close()
        shutil.rmtree(home / "live")
        draft = home / "curve.draft"
        draft.write_text(json.dumps(curve))
        draft.rename(home / "curve.json")  # Last: what has a curve is whole.

    def curve(self, seed):
        """The twin's held-out loss by applied steps."""
        curve = json.loads((self._folder / f"twin-{seed}" / "curve.json").read_text())
        return {int(step): value for step, value in curve.items()}

    def fork(self, seed, step):
        """The twin of a seed at a step."""
        folder = self._folder / f"twin-{seed}" / f"fork-{step}"
        kept = torch.load(folder / "state.pt", weights_only=True)
        return Fork(step, folder, kept["state"], kept["history"])

    @staticmethod
    def _fork(home, guard, bench, history):
        """Keep the run as a job that is killed now leaves it on disk, and the state for loops without a guard."""
        parts = guard._parts
        assert parts.checkpoints.wait(60)
        assert parts.loop.flush(60)
        folder = home / f"fork-{guard.step}"
        shutil.copytree(home / "live", folder, ignore=shutil.ignore_patterns("lock"))
        state = {name: getattr(bench, name).state_dict() for name in ("model", "optimizer", "scheduler", "data")}
        torch.save({"state": state, "history": history}, folder / "state.pt")

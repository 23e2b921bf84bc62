"""A tiny training job for the tests: its model, data that can go back, a plain loop, and a process that runs it."""

import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.guard import Guard


class Clock:
    """Unix seconds that only pass when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.now += seconds


class Batches:
    """Endless batches, each made from its position alone; `drawn` is every position ever handed out."""

    def __init__(self) -> None:
        self.position = 0
        self.drawn: list[int] = []

    def __iter__(self):
        while True:
            self.drawn.append(self.position)
            self.position += 1
            yield self.batch(self.drawn[-1])

    @staticmethod
    def batch(position: int) -> torch.Tensor:
        """The batch at a position."""
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(position))

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.position = state["position"]


def tiny_model(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    """Two layers, 65 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """A guard.yaml for runs of a few dozen steps, with everything below one folder."""
    config: dict[str, Any] = {
        "run": "tiny",
        "runs": str(folder / "runs"),
        "metrics": {"port": 0},
        "detection": {"warmup_steps": 20, "window": 20, "robust_window": 20, "sustained_steps": 8},
        "actions": {"lr_hold_steps": 10, "lr_return_steps": 4},
        "checkpoints": {
            "local": str(folder / "local"),
            "shared": str(folder / "shared"),
            "every": 10,
            "proof_steps": 3,
            "keep_local": 5,
        },
    }
    for name, value in sections.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, Mapping) else value
    return config


@dataclass
class Job:
    """A model in training, with the guard that watches it (if any) at its two places in the loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    data: Batches = field(default_factory=Batches)
    guard: Guard | None = None
    used: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    disk_seconds: float | None = None

    def watch_rates(self) -> None:
        """Keep the learning rate that each step really uses; after the guard, whose hooks then come first."""
        self.optimizer.register_step_pre_hook(lambda *_: self.rates.append(float(self.optimizer.param_groups[0]["lr"])))

    def step(self, damage: Callable[[nn.Module], None] | None = None) -> float:
        """One step of the plain loop; `damage` is done to the model once its gradients are there."""
        batch = self.guard.next_batch()
        self.used.append(self.guard._parts.data.position - 1)
        loss = nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        if damage is not None:
            damage(self.model)
        self.guard.before_optimizer(loss)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.guard.end_step()
        self.guard._parts.checkpoints.wait(self.disk_seconds)  # A step here is quicker than a disk.
        return loss.item()

    def run(self, until: int) -> None:
        """Train on."""
        while self.guard.step < until and not self.guard.stopping:
            self.step()

    def weights(self) -> list[torch.Tensor]:
        """A copy of the weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def adamw_job(seed: int = 0, *, dropout: float = 0.0, lr: float = 1e-2, scheduled: bool = False) -> Job:
    """A job on AdamW."""
    model = tiny_model(seed, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up) if scheduled else None
    return Job(model=model, optimizer=optimizer, scheduler=scheduler)


def warm_up(step: int) -> float:
    """Ten steps up to the full rate."""
    return min(1.0, (step + 1) / 10)


def kick(job: Job, times: float = 300.0, steps: int = 3) -> None:
    """Train some steps at a rate that ruins the weights, then at the right one again."""
    group = job.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], group["lr"] * times
    for _ in range(steps):
        job.step()
    group["lr"] = rate


def spoil_weights(model: nn.Module) -> None:
    """Make every weight NaN."""
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)


def spoil_gradient(model: nn.Module) -> None:
    """Make one element of one gradient NaN."""
    model[3].weight.grad[0, 0] = math.nan


def hooks(optimizer) -> int:
    """How many step hooks an optimizer has."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are the same bit for bit, NaNs included."""
    return all(
        torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0)) and a.dtype == b.dtype
        for a, b in zip(first, second, strict=True)
    )


def snapshot(step: int, *, weight: float = 1.0, moment: float = 1.0) -> Snapshot:
    """A state that says its step."""
    tensors = {
        "model/weight": torch.full((64,), weight),
        "optimizer/0/weight/exp_avg_sq": torch.tensor([0.5, moment]),
        "model/count": torch.tensor(step),
    }
    return Snapshot(tensors=tensors, plain={"guard": {"step": step}})


def seeded_job() -> Job:
    """The job of the restart tests: dropout draws from torch's generator, everything else is seeded too."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is part of the state
    return adamw_job(seed=1, dropout=0.2, scheduled=True)


def outcome(job: Job) -> dict[str, Any]:
    """All that must be equal at the end of two runs: weights, moments, schedule, and the next random draws."""
    return {
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scheduler": job.scheduler.state_dict(),
        "draws": [torch.rand(2).tolist(), random.random(), float(np.random.rand())],  # noqa: NPY002 - the globals
        "used": job.used,
    }


def main(folder: Path, pause_at: int, until: int) -> None:
    """Train in `folder` up to a step; wait to be killed at `pause_at`; leave the outcome as `outcome.pt`."""
    torch.set_num_threads(1)
    job = seeded_job()
    job.guard = Guard(
        settings(folder), model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, data=job.data
    )
    print("from", job.guard.step, job.optimizer.param_groups[0]["lr"], *job.scheduler.get_last_lr(), flush=True)
    while job.guard.step < until:
        job.step()
        if job.guard.step == pause_at:
            print("at", pause_at, flush=True)
            sys.stdin.read()
    torch.save(outcome(job), folder / "outcome.pt")
    job.guard.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

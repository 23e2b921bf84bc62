"""Data loaders that can go back, and a job that trains from one: dropout, accumulation, AMP in fp16, a schedule."""

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from training import outcome, settings, tiny_model, warm_up

from trainer_plugin.data.sampler import IndexSampler
from trainer_plugin.guard import Guard

BATCH_SIZE = 4
# Of the long runs: 14 steps are an epoch, so that a checkpoint may lie at the end of one (210) or within (150).
LONG_SIZE = 112


class Samples(Dataset):
    """Map-style data: sample i is its index and four numbers made from it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(4, generator=torch.Generator().manual_seed(index))


def loader(kind: str, *, workers: int = 0, size: int = 20, **options: Any) -> Any:
    """A loader over `size` samples, shuffled: torch's by our sampler (`index`), or torchdata's (`stateful`).

    `both` is torchdata's by our sampler, `bare` our sampler itself.
    """
    sampler = IndexSampler(size, batch_size=BATCH_SIZE, seed=5)
    if kind == "bare":
        return sampler
    drawn = {"batch_size": BATCH_SIZE, "shuffle": True} if kind == "stateful" else {"batch_sampler": sampler}
    make = DataLoader if kind == "index" else StatefulDataLoader
    with warnings.catch_warnings():  # torchdata calls something of torch's that is on its way out.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return make(Samples(size), num_workers=workers, **drawn, **options)


def close(guard: Guard) -> None:
    """Close a guard, and end its loader's workers: found by the garbage collector, they take 5 s each."""
    guard.close()
    batches = guard._data._source._batches
    if isinstance(batches, StatefulDataLoader):  # It holds its own iterator, and is itself in the guard's circles.
        batches._iterator = None


def indices(batch: Any) -> list[int]:
    """Which samples are in a batch."""
    return batch if isinstance(batch[0], int) else batch[0].tolist()


class LoaderJob:
    """A guard on a loop with two micro-batches a step; `used` has the samples of each micro-batch."""

    def __init__(self, folder: Path, kind: str, *, workers: int = 0, size: int = 20, **sections: Any) -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator is part of the state
        self.model = tiny_model(seed=1, dropout=0.2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
        self.used: list[list[int]] = []
        sections.setdefault("detection", {"warmup_steps": 1000})
        self.guard = Guard(
            settings(folder, **sections),
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            data=loader(kind, workers=workers, size=size),
            local_only=True,
        )

    def micro_step(self) -> None:
        """One micro-batch."""
        numbers, inputs = self.guard.next_batch()
        self.used.append(numbers.tolist())
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(self.model(inputs).float(), inputs.sum(1, keepdim=True))
        self.scaler.scale(loss / 2).backward()
        self.guard.micro_step(loss, tokens=len(numbers), sample_ids=[str(number) for number in self.used[-1]])

    def step(self) -> None:
        """One step."""
        self.micro_step()
        self.micro_step()
        self.guard.before_optimizer()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.guard.end_step()
        self.guard._parts.checkpoints.wait()  # A step here is quicker than a disk.

    def run(self, until: int) -> None:
        """Train on."""
        while self.guard.step < until:
            self.step()

    def outcome(self) -> dict[str, Any]:
        """All that must be equal at the end of two runs."""
        return {**outcome(self), "scaler": self.scaler.state_dict()}


def assert_equal_but_for_the_start(resumed: dict[str, Any], straight: dict[str, Any], *, steps: int) -> None:
    """Hold the end of a job that was resumed after so many steps against that of one that was not: bit for bit."""
    assert resumed["used"] == straight["used"][2 * steps :]
    for part in ("scheduler", "scaler", "draws"):
        assert resumed[part] == straight[part]
    for name, tensor in straight["model"].items():
        assert torch.equal(resumed["model"][name], tensor)
    for number, state in straight["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(resumed["optimizer"]["state"][number][name], tensor)


def main(folder: Path, kind: str, workers: int, pause_at: int, until: int) -> None:
    """Train in `folder` up to a step; wait to be killed at `pause_at`; leave the outcome as `outcome.pt`."""
    torch.set_num_threads(1)
    job = LoaderJob(folder, kind, workers=workers, size=LONG_SIZE)
    print("from", job.guard.step, flush=True)
    while job.guard.step < until:
        job.step()
        if job.guard.step == pause_at:
            print("at", pause_at, flush=True)
            sys.stdin.read()
    torch.save(job.outcome(), folder / "outcome.pt")
    close(job.guard)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))

"""Jobs of several ranks for the tests: real processes that meet in a gloo group, and the same job on one process."""

import gc
import logging
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import settings, warm_up

from trainer_plugin.data.sampler import IndexSampler
from trainer_plugin.guard import Guard

GLOBAL_BATCH = 16
SAMPLES = 4096


class Ended:
    """What came of one rank: what its work returned, or the text of its error; `code` is the process's exit code."""

    def __init__(self, process: Any, path: Path) -> None:
        self.process = process
        self._path = path

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return self.process.exitcode

    @property
    def result(self) -> Any:
        """What the work returned.

        Raises:
            AssertionError: it did not return.
        """
        kind, value = "ended with", self.code
        if self._path.exists():
            kind, value = pickle.loads(self._path.read_bytes())  # noqa: S301 - our own
        assert kind == "returned", f"{kind}\n{value}"
        return value

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._path.with_suffix(".log").read_text()


def start_ranks(size: int, work: Callable[[int], Any], folder: Path) -> list[Ended]:
    """Start `work(rank)`, a function of a module or a `partial` of one, in processes that have met in a gloo group."""
    folder.mkdir(parents=True, exist_ok=True)
    # Children of one process that has torch loaded, and has never used it: autograd's threads do not survive a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "trainer_plugin.guard"])
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    started = []
    for rank in range(size):
        path = folder / f"rank-{rank}.pickle"
        path.unlink(missing_ok=True)
        process = context.Process(target=_run, args=(work, rank, size, meeting, path))
        process.start()
        started.append(Ended(process, path))
    return started


def run_ranks(size: int, work: Callable[[int], Any], folder: Path, seconds: float = 50.0) -> list[Any]:
    """What `work(rank)` returns on each rank.

    Raises:
        AssertionError: a rank has failed, or did not end in time.
    """
    started = start_ranks(size, work, folder)
    wait_for_end(started, seconds)
    return [one.result for one in started]


def wait_for_end(started: list[Ended], seconds: float) -> None:
    """Wait until all have ended; those that have not by then are killed."""
    timer = threading.Timer(seconds, lambda: [one.process.kill() for one in started])
    timer.start()
    for one in started:
        one.process.join()
    timer.cancel()


def _run(work: Callable[[int], Any], rank: int, size: int, meeting: Path, path: Path) -> None:
    code = 1
    logging.basicConfig(filename=path.with_suffix(".log"), filemode="w", force=True)
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        kept = "returned", work(rank)
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - told to whoever asks
        kept = "raised", traceback.format_exc()
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(kept))
    draft.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Not through pytest's own end, which is the parent's.


def model_of() -> nn.Sequential:
    """Three layers of odd sizes: their shards differ from rank to rank, and one rank of four has none of the last."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 1))


def spread(model: nn.Module, kind: str) -> nn.Module:
    """The model as several ranks train it: `ddp`, `fsdp2`, `fsdp1`, or `alone` as it is."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for place in (0, 2, 4):
            fully_shard(model[place])
        return fully_shard(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return model


class RanksJob:
    """One rank of a job, or the whole job on one process (`kind` is `alone`): the same global batches in any case.

    `signals` is what the guard has read of each step, `draws` are numbers that the loop draws for itself.
    """

    def __init__(self, folder: Path, kind: str, *, rank: int = 0, size: int = 1, seed: int = 0, **options: Any) -> None:
        arguments = ("resume", "loss_fn", "local_only", "clock", "scaler")
        given = {"local_only": True, **{name: options.pop(name) for name in arguments if name in options}}
        fused = options.pop("fused", False)
        self.rank, self.size = rank, size
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.model = spread(model_of(), kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)
        self.data = IndexSampler(SAMPLES, batch_size=GLOBAL_BATCH // size, seed=seed, rank=rank, world_size=size)
        self.signals: list[Any] = []
        self.used: list[list[int]] = []
        self.draws: list[float] = []
        self.scaler = given.get("scaler")
        self.guard = Guard(
            settings(folder, **options),
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            data=self.data,
            on_signals=self.signals.append,
            **given,
        )

    def loss(self, batch: list[int]) -> torch.Tensor:
        """The mean loss of this rank's samples."""
        inputs = self.inputs[batch]
        return nn.functional.mse_loss(self.model(inputs), inputs.square().mean(1, keepdim=True))

    def step(self, damage: Callable[["RanksJob", torch.Tensor], torch.Tensor | None] | None = None) -> None:
        """One step; `damage` is done once the gradients are there, and may return another loss to tell."""
        batch = self.guard.next_batch()
        self.used.append(batch)
        self.draws.append(torch.rand(()).item())
        loss = self.loss(batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if damage is not None:
            loss = damage(self, loss)
        self.guard.before_optimizer(loss, sample_ids=[str(one) for one in batch])
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.guard.end_step()

    def run(self, until: int, damages: dict[int, Callable[["RanksJob", torch.Tensor], torch.Tensor]] | None = None):
        """Train on; `damages` by the number of the optimizer step, repeated ones counted on."""
        while self.guard.step < until and not self.guard.stopping:
            self.step((damages or {}).get(self.guard._parts.history.steps_total + 1))
        return self

    def finish(self) -> dict[str, Any]:
        """Close the guard; all that must be equal at the end of two runs."""
        told = {
            "weights": self.weights(),
            "moments": self.moments(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "draws": [*self.draws, torch.rand(()).item()],
            "used": self.used,
            "step": self.guard.step,
        }
        self.guard.close()
        return told

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights, by name; all ranks have to ask."""
        with torch.no_grad():
            inner = getattr(self.model, "module", self.model)
            return {name: whole(parameter).clone() for name, parameter in inner.named_parameters()}

    def moments(self) -> dict[str, torch.Tensor]:
        """The whole optimizer state, by parameter and name; all ranks have to ask."""
        inner = getattr(self.model, "module", self.model)
        with torch.no_grad():
            return {
                f"{name}/{key}": whole(value).clone()
                for name, parameter in inner.named_parameters()
                for key, value in self.optimizer.state[parameter].items()
            }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this rank may have a part."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def assert_equal(here: dict[str, Any], there: dict[str, Any], *, steps: int = 0) -> None:
    """What `finish` returns of two runs is the same bit for bit, the first of which began `steps` later."""
    for name in ("weights", "moments"):
        assert here[name].keys() == there[name].keys()
        for key, tensor in there[name].items():
            assert torch.equal(here[name][key], tensor), key
    for name in ("scheduler", "scaler", "step"):
        assert here[name] == there[name], name
    for name in ("draws", "used"):
        assert here[name] == there[name][steps:], name


def times(factor: float) -> Callable[[RanksJob, torch.Tensor], torch.Tensor]:
    """Multiply every gradient, on every rank."""

    def damage(job: RanksJob, loss: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.grad.mul_(factor)
        return loss

    return damage

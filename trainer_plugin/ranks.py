"""The ranks of a job: which one this process is, and what they tell each other beside a step's one reduction.

Called from the training's own thread and in the same order on every rank, as everything on the training's group has to
be. A process alone asks nobody.
"""

import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn

_T = TypeVar("_T")


class RanksError(RuntimeError):
    """A rank is gone, or they do not agree: no further step can be run by all of them. Never held back."""


class Ranks:
    """All processes that train one model; `first` says whether this is the one that decides.

    `alone`: there is nobody to ask. One process whose model lies in DTensors is not alone: it is a group of one.
    """

    def __init__(self, *, rank: int = 0, size: int = 1, alone: bool = True) -> None:
        self.rank = rank
        self.size = size
        self.alone = alone
        self.first = rank == 0
        # What all ranks would say alike, the first one says.
        self.said = logging.WARNING if self.first else logging.DEBUG
        self.hosts = [socket.gethostname()] if alone else self.gather(socket.gethostname())
        lower_on_this_host = self.hosts[:rank].count(self.hosts[rank])
        self.local_rank = 0 if alone else int(os.environ.get("LOCAL_RANK", lower_on_this_host))

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The ranks that this process belongs to.

        Raises:
            ValueError: it is one of several that have not met yet.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if dist.is_available() and dist.is_torchelastic_launched() and os.environ.get("WORLD_SIZE", "1") != "1":
                raise ValueError("started by torchrun: torch.distributed.init_process_group must come before the guard")
            return cls()
        size = dist.get_world_size()
        if size == 1 and not any(is_sharded(parameter) for parameter in model.parameters()):
            return cls()
        return cls(rank=dist.get_rank(), size=size, alone=False)

    def add_up(self, vector: Tensor) -> None:
        """Replace a vector by its sum over all ranks. Nothing is read on the host."""
        self._ask("the step's reduction", lambda: dist.all_reduce(vector))

    def gather(self, value: _T) -> list[_T]:
        """What each rank has, by rank; small and rare."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        self._ask("an exchange", lambda: dist.all_gather_object(values, value))
        return values

    def from_first(self, value: _T) -> _T:
        """What the first rank has; small and rare."""
        if self.alone:
            return value
        values = [value]
        self._ask("a word of rank 0", lambda: dist.broadcast_object_list(values, src=0))
        return values[0]

    def first_does(self, work: Callable[[], _T]) -> _T | None:
        """What `work` returns on the first rank, None on the others, which wait for it.

        Raises:
            RanksError: it has failed on the first rank, where its own error is raised.
        """
        done, error = None, None
        if self.first:
            try:
                done = work()
            except Exception as raised:  # noqa: BLE001 - told to all first
                error = raised
        told = self.from_first(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if told is not None:
            raise RanksError(f"rank 0 cannot go on: {told}")
        return done

    def together(self, work: Callable[..., _T], *arguments: object) -> _T:
        """What `work` returns on this rank, once it has returned on all; it may use no collective that could be missed.

        Raises:
            Exception: its own error, or else that of another rank.
        """
        done, error = None, None
        try:
            done = work(*arguments)
        except RanksError:
            raise
        except Exception as raised:
            if self.alone:
                raise
            error = raised
        errors = self.gather(None if error is None else _portable(error))
        if error is not None:
            raise error
        for rank, theirs in enumerate(errors):
            if theirs is not None:
                kind, text = theirs
                raise kind(f"rank {rank}: {text}")
        return cast("_T", done)

    def must_agree(self, what: str, value: object) -> None:
        """Hold what must be the same on all ranks against what they have.

        Raises:
            ValueError: a rank has something else.
        """
        for rank, theirs in enumerate(self.gather(value)):
            if theirs != value:
                raise ValueError(f"rank {rank} has another {what} than rank {self.rank}: {theirs!r}, here {value!r}")

    def _ask(self, what: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise RanksError(f"rank {self.rank} of {self.size}: {what} failed, a rank is gone: {reason}") from error


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel: its names are those of one process.

    Raises:
        ValueError: the model is sharded in a way that leaves its parameters without names.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError("the model is in FullyShardedDataParallel: shard it with fully_shard (FSDP2) instead")
    inner = getattr(model, "_orig_mod", model)  # Of torch.compile, where that came last.
    return inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else model


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is one of all ranks together, a DTensor. Asked without loading what makes them."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has: all of it, but for a DTensor. To be used without gradients."""
    if not is_sharded(tensor):
        return tensor
    placements = tensor.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        whole = [_replicate() if placement.is_partial() else placement for placement in placements]
        tensor = tensor.redistribute(placements=whole)  # type: ignore[attr-defined]
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """A DTensor that lies as `like` does, of which this rank has `part`; `part` itself where `like` is none."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    whole: Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    return whole


def offsets_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Where this rank's part of a DTensor begins in the whole; None of a tensor that is here as a whole."""
    if not is_sharded(tensor) or all(one.is_replicate() for one in tensor.placements):  # type: ignore[attr-defined]
        return None
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(chunk.offsets)


def _portable(error: Exception) -> tuple[type[Exception], str]:
    """What another rank can raise too."""
    kind = type(error)
    try:
        kind("")
    except Exception:  # noqa: BLE001 - it takes more than a text
        return OSError if isinstance(error, OSError) else RuntimeError, f"{kind.__name__}: {error}"
    return kind, str(error)


def _replicate() -> Any:  # noqa: ANN401 - a placement
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - takes its time, and is there already

    return Replicate()

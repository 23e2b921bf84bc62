"""Where the parts of tensors lie that several ranks hold together, and who of them stores what."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_plugin.ranks import Ranks, local, offsets_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a part lies in a tensor of all ranks: the shape of the whole, offsets and shape of the part."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tensors, by name, that `holders` have alike; their files begin with `prefix`."""

    prefix: str
    names: tuple[str, ...]
    holders: tuple[int, ...]


@torch.no_grad()
def parts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of each tensor."""
    return {name: local(tensor.detach()) for name, tensor in tensors.items()}


def place_of(value: Any) -> Place | None:  # noqa: ANN401 - what is in a state_dict
    """Where this rank's part of a tensor lies in it; None of one that it has all of, and of no tensor."""
    if not isinstance(value, Tensor) or (offsets := offsets_of(value)) is None:
        return None
    sizes = tuple(parts_of({"": value})[""].shape)
    return Place(shape=tuple(value.shape), offsets=offsets, sizes=sizes)


def pieces_of(tensors: dict[str, Tensor], places: dict[str, Place], ranks: Ranks) -> tuple[Piece, ...]:
    """The pieces in which this rank's tensors are stored: those that it has a part of, and those that it has whole.

    All ranks have to ask. A piece is named after the lowest of those that have just the same.
    """
    parts = tuple(name for name in tensors if name in places and tensors[name].numel())
    wholes = tuple(name for name in tensors if name not in places)
    told = [_digest([f"{name} {places[name].offsets}" for name in parts]), _digest(wholes)]
    everyone = ranks.gather(told)
    pieces = []
    for number, (names, letter) in enumerate(((parts, ""), (wholes, "w"))):
        if names:
            holders = tuple(rank for rank, theirs in enumerate(everyone) if theirs[number] == told[number])
            pieces.append(Piece(prefix=f"__{holders[0]}_{letter}", names=names, holders=holders))
    return tuple(pieces)


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()

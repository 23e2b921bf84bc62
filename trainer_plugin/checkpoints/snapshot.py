"""A snapshot: the state of one step, apart from the objects that it was taken of."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer_plugin.checkpoints.places import Piece, Place, parts_of
from trainer_plugin.checkpoints.plain import plain_copy
from trainer_plugin.ranks import whole_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The rewinding state of one step: tensors by name, and everything else as plain values.

    `unjudged` are the tensors that need not be finite: buffers that never were, such as a mask of -inf. Of several
    ranks it is what this one has; `places` are those of the tensors of which that is a part, `pieces` those in which it
    is stored. `unknown` are tensors of the model that a checkpoint has, and nobody here.
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any] = field(default_factory=dict)
    unjudged: frozenset[str] = frozenset()
    places: dict[str, Place] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()
    unknown: frozenset[str] = frozenset()

    @property
    def finite(self) -> bool:
        """Whether every number in it that ought to be finite is."""
        return all(_finite(tensor) for name, tensor in self.tensors.items() if name not in self.unjudged)


def kept_moments(snapshot: Snapshot) -> dict[tuple[int, str], dict[str, Any]]:
    """What a snapshot holds of each parameter's optimizer state, by the optimizer's number and the parameter's name."""
    kept = {
        (number, name): dict(state)
        for number, entry in enumerate(snapshot.plain["optimizers"])
        for name, state in entry["state"].items()
    }
    for key, value in snapshot.tensors.items():
        if key.startswith("optimizer/"):
            number, name_and_kind = key.removeprefix("optimizer/").split("/", 1)
            name, kind = name_and_kind.rsplit("/", 1)
            kept.setdefault((int(number), name), {})[kind] = value
    return kept


def moments_of(kept: dict[str, Any], parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
    """Copies of what is kept of one parameter's optimizer state, each where torch keeps it in `group`."""
    here = parts_of({"": parameter})[""]
    state: dict[str, Any] = {}
    for kind, value in kept.items():
        if not isinstance(value, Tensor):
            state[kind] = plain_copy(value)
            continue
        part = value.to(_state_device(kind, parameter, group), copy=True)
        # A tensor of each step alone (`step`) is no part of anything.
        state[kind] = whole_of(part, parameter) if part.shape == here.shape and part.dim() else part
    return state


def _finite(tensor: Tensor) -> bool:
    """Whether every element is; by the norm first, which is quick, and finite only where they are."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # float8 knows neither norm nor isfinite.
        tensor = tensor.float()
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return bool(torch.linalg.vector_norm(tensor, dtype=wide).isfinite()) or bool(torch.isfinite(tensor).all())


def _state_device(kind: str, parameter: nn.Parameter, group: dict[str, Any]) -> torch.device:
    """Where torch's optimizers keep a state tensor: step counts stay on the host unless a kernel needs them."""
    if kind == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device

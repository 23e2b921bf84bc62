"""The state that rewinds (R14), captured and restored by name, all of it or none.

A snapshot holds copies only: nothing in it is a live tensor, and restoring copies out of it, so that one snapshot can
be restored any number of times.
"""

import io
import random
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.data import Data

Moments = Literal["restore", "reset", "keep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The rewinding state of one step: CPU tensors by name, and everything else as plain values.

    `unjudged` are the tensors that need not be finite: buffers that never were, such as a mask of -inf.
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Any] = field(default_factory=dict)
    unjudged: frozenset[str] = frozenset()


class TrainingState:
    """Everything of a training loop that goes back together: model, optimizers, scheduler, scaler, RNG, data."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: list[Optimizer],
        scheduler: Any = None,  # noqa: ANN401 - anything with state_dict and load_state_dict
        scaler: Any = None,  # noqa: ANN401
        data: Data | None = None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._scheduler = scheduler
        self._scaler = scaler
        self._data = data
        self._unjudged = frozenset(
            f"model/{name}"
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and not bool(torch.isfinite(buffer).all())
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names: list[list[list[str]]] = []
        for number, optimizer in enumerate(optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        raise ValueError(
                            f"optimizer {number}, group {group_number}, parameter {place} (shape "
                            f"{list(parameter.shape)}) is not a parameter of the model: its state has no name"
                        )
            self._names.append([[names[id(p)] for p in group["params"]] for group in optimizer.param_groups])

    def capture(self, guard: dict[str, Any]) -> Snapshot:
        """Copy the whole state to the host; `guard` is the guard's own rewinding part (plain values)."""
        tensors: dict[str, Tensor] = {}
        model_plain: dict[str, Any] = {}
        for name, value in self._model.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"model/{name}"] = _copy(value)
            else:
                model_plain[name] = value
        optimizers = []
        for number, optimizer in enumerate(self._optimizers):
            plain_state: dict[str, dict[str, Any]] = {}
            for group, names in zip(optimizer.param_groups, self._names[number], strict=True):
                for parameter, name in zip(group["params"], names, strict=True):
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor):
                            tensors[f"optimizer/{number}/{name}/{key}"] = _copy(value)
                        else:
                            plain_state.setdefault(name, {})[key] = value
            groups = [
                {"params": names, **{key: value for key, value in group.items() if key != "params"}}
                for group, names in zip(optimizer.param_groups, self._names[number], strict=True)
            ]
            optimizers.append({"groups": groups, "state": plain_state})
        plain = {
            "model": model_plain,
            "optimizers": optimizers,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "data": self._data.state_dict() if self._data is not None else None,
            "rng": rng_state(),
            "guard": guard,
        }
        return Snapshot(tensors=tensors, plain=_plain(plain), unjudged=self._unjudged)

    def mismatches(self, snapshot: Snapshot) -> list[str]:
        """What of a snapshot does not fit this training loop, by name; empty when it can be restored."""
        problems = []
        wanted = {f"model/{name}": v for name, v in self._model.state_dict().items() if isinstance(v, Tensor)}
        stored = {name for name in snapshot.tensors if name.startswith("model/")}
        problems += [f"{name} is missing in the checkpoint" for name in sorted(wanted.keys() - stored)]
        problems += [f"{name} is not in this model" for name in sorted(stored - wanted.keys())]
        for name in sorted(wanted.keys() & stored):
            here, there = wanted[name], snapshot.tensors[name]
            if here.shape != there.shape or here.dtype != there.dtype:
                there_is, here_is = (f"{list(t.shape)} {t.dtype}" for t in (there, here))
                problems.append(f"{name} is {there_is} in the checkpoint, {here_is} here")
        saved = snapshot.plain["optimizers"]
        if len(saved) != len(self._optimizers):
            problems.append(f"the checkpoint has {len(saved)} optimizers, this loop {len(self._optimizers)}")
            return problems
        for number, (entry, names) in enumerate(zip(saved, self._names, strict=True)):
            stored_names = [sorted(group["params"]) for group in entry["groups"]]
            if stored_names != [sorted(group) for group in names]:
                problems.append(f"optimizer {number} has other parameters in its groups than the checkpoint")
        for part in ("scheduler", "scaler"):
            if (snapshot.plain[part] is None) != (getattr(self, f"_{part}") is None):
                has, lacks = ("this loop", "the checkpoint")
                if getattr(self, f"_{part}") is None:
                    has, lacks = lacks, has
                problems.append(f"{has} has a {part}, {lacks} has none")
        return problems

    def restore(self, snapshot: Snapshot, *, moments: Moments = "restore") -> None:
        """Bring everything back to a snapshot; the optimizer's moments as R12 has it: restored, reset, or kept.

        Raises:
            ValueError: it does not fit (nothing has been changed then); the message names every mismatch.
        """
        problems = self.mismatches(snapshot)
        if problems:
            raise ValueError("checkpoint does not fit: " + "; ".join(problems))
        model = {name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name.startswith("model/")}
        plain = _plain(snapshot.plain)  # Some objects keep what they load, and would change it here.
        self._model.load_state_dict({**model, **plain["model"]})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(plain["scheduler"])
        # After the scheduler, and with the groups' own rates: a scheduler's load does not write them.
        for number, entry in enumerate(plain["optimizers"]):
            self._restore_optimizer(number, entry, snapshot, moments)
        if self._scaler is not None:
            self._scaler.load_state_dict(plain["scaler"])
        if self._data is not None and plain["data"] is not None:
            self._data.load_state_dict(plain["data"])
        self._check_rates(snapshot.plain)
        set_rng_state(plain["rng"])
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _check_rates(self, plain: dict[str, Any]) -> None:
        """Where schedule and optimizer agreed on the rates when they were saved, they agree on the same ones now."""
        schedule = plain["scheduler"]
        scheduled = schedule.get("_last_lr") if isinstance(schedule, dict) else None
        saved = [float(group["lr"]) for entry in plain["optimizers"] for group in entry["groups"]]
        if not scheduled or [float(rate) for rate in scheduled] != saved:
            return
        now = [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        told = [float(rate) for rate in self._scheduler.get_last_lr()]
        if not now == told == saved:
            raise ValueError(f"learning rates after the restore: optimizer {now}, schedule {told}, saved {saved}")

    def _restore_optimizer(self, number: int, entry: dict[str, Any], snapshot: Snapshot, moments: Moments) -> None:
        optimizer = self._optimizers[number]
        if moments != "keep":
            optimizer.state.clear()
        for group, names, saved in zip(optimizer.param_groups, self._names[number], entry["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            if moments != "restore":
                continue
            for parameter, name in zip(group["params"], names, strict=True):
                state = moments_of(snapshot, number, name, parameter, group)
                if state:
                    optimizer.state[parameter] = state


def moments_of(
    snapshot: Snapshot, number: int, name: str, parameter: nn.Parameter, group: dict[str, Any]
) -> dict[str, Any]:
    """Copies of what a snapshot holds of one parameter's optimizer state, each where torch keeps it; empty if nothing.

    `number` is the optimizer's, `name` the parameter's in the model, `group` the one that it is in now.
    """
    prefix = f"optimizer/{number}/{name}/"
    state: dict[str, Any] = _plain(snapshot.plain["optimizers"][number]["state"].get(name, {}))
    for key, value in snapshot.tensors.items():
        if key.startswith(prefix):
            kind = key.removeprefix(prefix)
            state[kind] = value.to(_state_device(kind, parameter, group), copy=True)
    return state


def encode_plain(plain: dict[str, Any]) -> bytes:
    """The plain half of a snapshot as bytes that can be read back without running any code.

    Raises:
        ValueError: something in it is no plain value; the message says what.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
        decode_plain(buffer.getvalue())
    except Exception as error:
        reason = _odd_value(plain, "") or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"a state_dict holds what cannot be stored as plain values: {reason}") from error
    return buffer.getvalue()


def decode_plain(content: bytes) -> dict[str, Any]:
    """The inverse of `encode_plain`; refuses anything but plain values and tensors."""
    plain: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return plain


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _plain(value: Any) -> Any:  # noqa: ANN401 - any tree of plain values
    """A deep copy, numpy scalars turned into Python's own."""
    if isinstance(value, dict):
        copied = copy(value)  # Keeps its type: a scheduler's milestones are a Counter.
        for key, item in value.items():
            copied[key] = _plain(item)
        return copied
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    return value.clone() if isinstance(value, Tensor) else value


def _odd_value(value: Any, path: str) -> str | None:  # noqa: ANN401 - any tree
    """Where in a tree the first value lies that is not plain, and what it is."""
    if value is None or isinstance(value, bool | int | float | str | bytes | Tensor | torch.dtype | torch.device):
        return None
    if isinstance(value, dict):
        found = (_odd_value(item, f"{path}.{key}" if path else str(key)) for key, item in value.items())
    elif isinstance(value, list | tuple):
        found = (_odd_value(item, f"{path}[{place}]") for place, item in enumerate(value))
    else:
        return f"`{path}` is a {type(value).__name__}"
    return next(filter(None, found), None)


def _state_device(kind: str, parameter: nn.Parameter, group: dict[str, Any]) -> torch.device:
    """Where torch's optimizers keep a state tensor: step counts stay on the host unless a kernel needs them."""
    if kind == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device


def rng_state() -> dict[str, Any]:
    """The random generators that training code draws from, as they are now, in plain values."""
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002 - the global generator is what training code draws from
    return {
        "python": random.getstate(),
        "numpy": {
            "keys": torch.from_numpy(numpy_state[1].astype(np.int64)),
            "position": int(numpy_state[2]),
            "has_gauss": int(numpy_state[3]),
            "gauss": float(numpy_state[4]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Bring the generators back to a state; GPUs' only where there are any."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        ("MT19937", keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

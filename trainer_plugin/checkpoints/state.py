"""The state that rewinds (R14), captured and restored by name, all of it or none.

Restoring copies out of a snapshot, so that one can be restored any number of times.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.checkpoints.places import Place, parts_of, place_of
from trainer_plugin.checkpoints.plain import plain_copy
from trainer_plugin.checkpoints.proof import Proof
from trainer_plugin.checkpoints.rng import RNG_PARTS, rng_state, seed_generators, set_rng_state
from trainer_plugin.checkpoints.snapshot import Snapshot, kept_moments, moments_of
from trainer_plugin.data.batches import Data
from trainer_plugin.ranks import Ranks, whole_of

_log = logging.getLogger(__name__)

Moments = Literal["restore", "reset", "keep"]
_PARTS = ("model", "optimizers", "scheduler", "scaler", "data", "rng", "guard")


class TrainingState:
    """Everything of a training loop that goes back together: model, optimizers, scheduler, scaler, RNG, data.

    With a `proof`, each state is taken with the loss of a probe batch, and proven by it when it is back.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: list[Optimizer],
        scheduler: Any = None,  # noqa: ANN401 - anything with state_dict and load_state_dict
        scaler: Any = None,  # noqa: ANN401
        data: Data | None = None,
        proof: Proof | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._model = model
        self._optimizers = optimizers
        self._scheduler = scheduler
        self._scaler = scaler
        self._data = data
        self.proof = proof
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
        """A copy of the whole state on the host; `guard` is the guard's own rewinding part (plain values)."""
        live = self.live(guard)
        return replace(live, tensors={name: tensor.to("cpu", copy=True) for name, tensor in live.tensors.items()})

    def live(self, guard: dict[str, Any]) -> Snapshot:
        """The state as it is: the live tensors themselves, which the next step changes, and copies of all else."""
        probe = self.proof.take() if self.proof is not None else None  # First: of several ranks all have to come to it.
        plain = {
            "model": {name: value for name, value in self._model.state_dict().items() if not isinstance(value, Tensor)},
            "optimizers": [self._plain_half(number) for number in range(len(self._optimizers))],
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "data": self._data.state_dict() if self._data is not None else None,
            "rng": rng_state(),
            "probe": probe,
            "guard": guard,
            "ranks": self._ranks.size,
            "seed": torch.initial_seed(),
        }
        wholes = self._wholes()
        places = {name: place for name, tensor in wholes.items() if (place := place_of(tensor)) is not None}
        return Snapshot(tensors=parts_of(wholes), plain=plain_copy(plain), unjudged=self._unjudged, places=places)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of model and optimizers by name, as far as this rank has them."""
        return parts_of(self._wholes())

    def wanted(self, stored: dict[str, tuple[int, ...]]) -> dict[str, Place | None]:
        """Which of the stored tensors, by their shapes, belong to this rank, and which part; None for all of it.

        An optimizer's tensor of the shape of its parameter lies as that one does.
        """
        places = {f"model/{name}": place_of(value) for name, value in self._model.state_dict().items()}
        parameters = dict(self._model.named_parameters())
        known = [{name for group in names for name in group} for names in self._names]
        for name, shape in stored.items():
            if name.startswith("optimizer/"):
                number, rest = name.removeprefix("optimizer/").split("/", 1)
                parameter = rest.rpartition("/")[0]
                if int(number) < len(known) and parameter in known[int(number)]:
                    place = place_of(parameters[parameter])
                    places[name] = place if place is not None and place.shape == shape else None
        return {name: place for name, place in places.items() if name in stored}

    def _wholes(self) -> dict[str, Tensor]:
        found = {f"model/{name}": v.detach() for name, v in self._model.state_dict().items() if isinstance(v, Tensor)}
        for number in range(len(self._optimizers)):
            for name, key, value in self._optimizer_state(number):
                if isinstance(value, Tensor):
                    found[f"optimizer/{number}/{name}/{key}"] = value.detach()
        return found

    def _plain_half(self, number: int) -> dict[str, Any]:
        """The groups of an optimizer, by the names of their parameters, and what of its state is no tensor."""
        groups = [
            {"params": names, **{key: value for key, value in group.items() if key != "params"}}
            for group, names in zip(self._optimizers[number].param_groups, self._names[number], strict=True)
        ]
        state: dict[str, dict[str, Any]] = {}
        for name, key, value in self._optimizer_state(number):
            if not isinstance(value, Tensor):
                state.setdefault(name, {})[key] = value
        return {"groups": groups, "state": state}

    def _optimizer_state(self, number: int) -> Iterator[tuple[str, str, Any]]:
        """Every entry as it is, by the name of its parameter: an optimizer that has not stepped has none (C24)."""
        optimizer = self._optimizers[number]
        for group, names in zip(optimizer.param_groups, self._names[number], strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield name, key, value

    def mismatches(self, snapshot: Snapshot) -> list[str]:
        """What of a snapshot does not fit this training loop, by name; empty when it can be restored."""
        problems = [f"its part `{part}` is missing in the checkpoint" for part in _PARTS if part not in snapshot.plain]
        if problems:
            return problems
        wanted = parts_of({f"model/{n}": v for n, v in self._model.state_dict().items() if isinstance(v, Tensor)})
        stored = {name for name in snapshot.tensors if name.startswith("model/")}
        problems += [f"{name} is missing in the checkpoint" for name in sorted(wanted.keys() - stored)]
        problems += [f"{name} is not in this model" for name in sorted((stored - wanted.keys()) | snapshot.unknown)]
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
        if (snapshot.plain["scheduler"] is None) != (self._scheduler is None):
            has, lacks = ("this loop", "the checkpoint")
            if self._scheduler is None:
                has, lacks = lacks, has
            problems.append(f"{has} has a scheduler, {lacks} has none")
        missing = [part for part in RNG_PARTS if part not in snapshot.plain["rng"]]
        problems += [f"the random state of {part} is missing in the checkpoint" for part in missing]
        return problems

    def restore(self, snapshot: Snapshot, *, moments: Moments = "restore", unproven: bool = False) -> None:
        """Bring everything back to a snapshot; the optimizer's moments as R12 has it: restored, reset, or kept.

        Raises:
            ValueError: it does not fit (nothing has been changed then); the message names every mismatch.
            ProofError: it is back, and is not the state that was saved; not with `unproven`.
            Exception: of several ranks, what has come to another one.
        """
        ranks, proof = self._ranks, self.proof
        ranks.together(self._must_fit, snapshot)
        ranks.together(self._bring_back, snapshot, moments)
        if proof is not None:
            ranks.together(partial(proof.check, unproven=unproven), snapshot.plain.get("probe"))

    def _must_fit(self, snapshot: Snapshot) -> None:
        problems = self.mismatches(snapshot)
        if problems:
            raise ValueError("checkpoint does not fit: " + "; ".join(problems))

    def _bring_back(self, snapshot: Snapshot, moments: Moments) -> None:
        model = {
            name: whole_of(snapshot.tensors[f"model/{name}"].to(value.device), value)
            for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }
        plain = plain_copy(snapshot.plain)  # Some objects keep what they load, and would change it here.
        self._model.load_state_dict({**model, **plain["model"]})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(plain["scheduler"])
        # After the scheduler, and with the groups' own rates: a scheduler's load does not write them.
        for number, entry in enumerate(plain["optimizers"]):
            self._restore_optimizer(number, entry, snapshot, moments)
        self._restore_scaler(plain["scaler"])
        self._restore_data(plain)
        self._check_rates(snapshot.plain)
        self._restore_generators(plain)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _restore_generators(self, plain: dict[str, Any]) -> None:
        """To where they were; those of another number of ranks are begun anew, each with a seed of its own."""
        before, now = plain.get("ranks", 1), self._ranks
        if before == now.size:
            set_rng_state(plain["rng"])
            return
        seed_generators(plain.get("seed", 0), plain["guard"].get("step", 0), now.rank)
        _log.log(
            now.said,
            "saved by %d ranks, gone on with by %d: tensors are laid out anew, random generators begin anew from "
            "(seed, step, rank)",
            before,
            now.size,
        )

    def _restore_data(self, plain: dict[str, Any]) -> None:
        """A run may be given its data later, or no more: then they do not go back, and that is said."""
        saved = plain["data"]
        if self._data is not None and saved is not None:
            self._data.load_state_dict(saved, split_anew=plain.get("ranks", 1) != self._ranks.size)
        elif self._data is not None:
            _log.warning("the checkpoint has no place in the data: they go on with batch %d", self._data.position)
        elif saved is not None:
            _log.warning("the checkpoint has a place in the data, this loop has given none: they do not go back")

    def _restore_scaler(self, saved: dict[str, Any] | None) -> None:
        """A run may change its precision: a scaler without a saved scale keeps the one it was built with (C13)."""
        scaled = self._scaler is not None and self._scaler.is_enabled()
        if scaled and saved:
            self._scaler.load_state_dict(saved)
        elif scaled or saved:
            there, here = ("no", "one") if scaled else ("a", "none")
            _log.warning("the checkpoint has %s GradScaler, this loop has %s: no scale is restored", there, here)

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
        optimizer, kept = self._optimizers[number], kept_moments(snapshot)
        if moments != "keep":
            optimizer.state.clear()
        for group, names, saved in zip(optimizer.param_groups, self._names[number], entry["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            if moments != "restore":
                continue
            for parameter, name in zip(group["params"], names, strict=True):
                state = moments_of(kept.get((number, name), {}), parameter, group)
                if state:
                    optimizer.state[parameter] = state

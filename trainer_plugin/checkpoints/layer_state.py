"""The state of single layers: weights, buffers and moments, taken back out of a snapshot by name, all or none of it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.checkpoints.places import parts_of
from trainer_plugin.checkpoints.snapshot import Snapshot, kept_moments, moments_of
from trainer_plugin.checkpoints.state import Moments
from trainer_plugin.step.probe import layer_of, plain_name


class LayerState:
    """The layers of one model, as the probe names them, and the optimizers that train them.

    A tied weight belongs to the layer that names it first, here as in the norms: it goes back with that one, once.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            self._parameters.setdefault(layer_of(plain_name(name)), {})[name] = parameter

    def mismatches(self, snapshot: Snapshot, layers: Sequence[str], *, moments: Moments = "restore") -> list[str]:
        """What of these layers does not fit between a snapshot and this loop, by name; empty if they can go back."""
        problems = [f"this model has no layer {layer}" for layer in layers if layer not in self._parameters]
        for name, here in parts_of(self._tensors(layers)).items():
            problems += _differences(f"model/{name}", here, snapshot.tensors.get(f"model/{name}"))
        if moments == "restore":
            for place, _, kept in self._places(layers):
                problems += self._misplaced(snapshot, *place)
                for kind, here in kept.items():
                    key = f"optimizer/{place[0]}/{place[1]}/{kind}"
                    # No moments there yet is no mismatch: the layer then begins anew.
                    if isinstance(here, Tensor) and key in snapshot.tensors:
                        problems += _differences(key, parts_of({key: here})[key], snapshot.tensors[key])
        return problems

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, layers: Sequence[str], *, moments: Moments = "restore") -> None:
        """Bring these layers back to a snapshot; every other weight, moment and option stays, bit for bit.

        Raises:
            ValueError: something does not fit (nothing has been changed then); the message names it all.
        """
        problems = self.mismatches(snapshot, layers, moments=moments)
        if problems:
            raise ValueError("checkpoint does not fit: " + "; ".join(problems))
        tensors = parts_of(self._tensors(layers))
        # All that can fail comes first: what follows only copies and assigns.
        weights = {name: snapshot.tensors[f"model/{name}"].to(here.device) for name, here in tensors.items()}
        kept = kept_moments(snapshot) if moments == "restore" else {}
        states: list[tuple[Optimizer, nn.Parameter, dict[str, Any]]] = []
        for (number, name), parameter, _ in self._places(layers) if moments != "keep" else ():
            optimizer, state = self._optimizers[number], {}
            if moments == "restore":
                group = next(g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
                state = moments_of(kept.get((number, name), {}), parameter, group)
            states.append((optimizer, parameter, state))
        for name, here in tensors.items():
            here.copy_(weights[name])
        for optimizer, parameter, state in states:
            if state:
                optimizer.state[parameter] = state
            else:
                _begin_anew(optimizer, parameter)
        for layer in layers:
            for parameter in self._parameters[layer].values():
                parameter.grad = None

    def _tensors(self, layers: Iterable[str]) -> dict[str, Tensor]:
        """Weights and buffers of the layers, live, by their name in the model's state; each tensor once."""
        there = self._model.state_dict()
        found: dict[str, Tensor] = {}
        for layer in layers:
            found |= {name: parameter.detach() for name, parameter in self._parameters.get(layer, {}).items()}
        for name, buffer in self._model.named_buffers():
            if name in there and layer_of(plain_name(name)) in layers:
                found[name] = buffer
        return found

    def _places(self, layers: Iterable[str]) -> list[tuple[tuple[int, str], nn.Parameter, dict[str, Any]]]:
        """Number of the optimizer and name, parameter, and its optimizer state, for what is optimized."""
        numbers = {
            id(parameter): number
            for number, optimizer in enumerate(self._optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        places = []
        for name, parameter in (item for layer in layers for item in self._parameters.get(layer, {}).items()):
            number = numbers.get(id(parameter))
            if number is not None:
                places.append(((number, name), parameter, self._optimizers[number].state.get(parameter, {})))
        return places

    @staticmethod
    def _misplaced(snapshot: Snapshot, number: int, name: str) -> list[str]:
        entries = snapshot.plain["optimizers"]
        if number < len(entries) and any(name in group["params"] for group in entries[number]["groups"]):
            return []
        return [f"{name} is not in optimizer {number} of the checkpoint"]


def _differences(name: str, here: Tensor, there: Tensor | None) -> list[str]:
    if there is None:
        return [f"{name} is missing in the checkpoint"]
    if here.shape == there.shape and here.dtype == there.dtype:
        return []
    there_is, here_is = (f"{list(t.shape)} {t.dtype}" for t in (there, here))
    return [f"{name} is {there_is} in the checkpoint, {here_is} here"]


def _begin_anew(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Leave a parameter as if it had never been stepped; the others go on."""
    state = optimizer.state.get(parameter)
    if state and set(state) == {"momentum_buffer"} and isinstance(state["momentum_buffer"], Tensor):
        # SGD's. torch's fused SGD wants a buffer for all parameters or for none; one of zeros makes the same step.
        state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
    else:
        optimizer.state.pop(parameter, None)

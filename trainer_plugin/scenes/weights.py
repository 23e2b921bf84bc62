"""The weights with which a step began, kept until it is judged: an applied step can then be run again as it was.

Undoing the optimizer's step from its moments would need no copy, but a formula for each optimizer and a step that was
finite; on an accelerator, where a step is judged when the next one has been run, it could not be done at all.
"""

import logging
from collections import deque
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from trainer_plugin.checkpoints.places import parts_of

_log = logging.getLogger(__name__)


def wants_weights(option: Literal["auto", "before", "after"], model: nn.Module) -> bool:
    """Whether the weights of each step's beginning are to be kept; by itself only where that is a copy within the host.

    From an accelerator they would take the bus to the host in every step, beside what else needs it: that is asked for.
    """
    on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return option == "before" or (option == "auto" and on_host)


class StepWeights:
    """One copy of a model's state on the host, or two where steps are judged one late; their memory is used again.

    Only the steps of loops that let the guard hand out their batches: without those a step cannot be run again. On an
    accelerator the copy goes beside forward and backward pass, in a stream of its own and into pinned memory. `late`:
    several ranks hear of an incident one boundary late, too.
    """

    def __init__(self, model: nn.Module, *, late: bool = False) -> None:
        self._model = model
        self._names = frozenset(model.state_dict())
        self._kept_steps = 2 if late or any(parameter.is_cuda for parameter in model.parameters()) else 1
        self._now: dict[str, Tensor] | None = None
        self._past: deque[tuple[int, dict[str, Tensor]]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._off = False

    def keep(self) -> None:
        """Copy the weights as they are, unless that was done in this step; to be called before the forward pass."""
        if self._now is not None or self._off:
            return
        memory = self._past.popleft()[1] if len(self._past) == self._kept_steps else {}
        try:
            self._now = self._copied(memory)
        except RuntimeError as error:
            self._off = True
            self._past.clear()
            _log.warning("weights are not kept from step to step any more, scenes have those after theirs: %s", error)

    def settle(self) -> None:
        """The optimizer is about to change the weights: let it wait for the copy, on the device."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def end_step(self, step: int) -> None:
        """Step number `step` has been run."""
        if self._now is not None:
            self._past.append((step, self._now))
            self._now = None

    def take(self, step: int) -> dict[str, Tensor] | None:
        """What the model had when a step began, by its name in a snapshot, for good; None where it is not known."""
        found = next((one for one in reversed(self._past) if one[0] == step), None)
        if found is None:
            return None
        self._past.remove(found)
        for stream in self._streams.values():
            stream.synchronize()
        return found[1]

    @torch.no_grad()
    def _copied(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        live: dict[str, Tensor] = {}
        first_names: dict[int, str] = {}  # A tied weight is copied once.
        copies: dict[str, Tensor] = {}
        parameters = self._model.named_parameters(remove_duplicate=False)
        for name, tensor in chain(parameters, self._model.named_buffers(remove_duplicate=False)):
            if name not in self._names:
                continue
            first = first_names.setdefault(id(tensor), f"model/{name}")
            if first not in live:
                live[first] = parts_of({first: tensor})[first]
                copies[first] = _memory_for(live[first], memory.get(first))
            copies[f"model/{name}"] = copies[first]
        on_host = {name: tensor for name, tensor in live.items() if not tensor.is_cuda}
        if on_host:
            torch._foreach_copy_([copies[name] for name in on_host], list(on_host.values()))
        for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for name, tensor in live.items():
                    if tensor.device == device:
                        copies[name].copy_(tensor, non_blocking=True)
        return copies


def _memory_for(tensor: Tensor, memory: Tensor | None) -> Tensor:
    if memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype:
        return memory
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

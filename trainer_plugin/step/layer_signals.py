"""Layer signals: weight norm, update ratio, moment norms and largest activation of each layer, at a lower cadence.

The layers take turns, so that each is read every so many steps and no single step pays for all: what is copied to
measure an update is a part of the weights, for the length of one optimizer step. Nothing here reads the host; the
values travel beside the next step's row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.signals import LayerReading
from trainer_plugin.step.norms import tensor_norms
from trainer_plugin.step.untraced import untraced

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq", "square_avg")


class LayerSignals:
    """The layers of one model by turns; `every` is the number of steps in which each has one.

    `layers` maps a layer to its parameters, `modules` to the module whose largest absolute output is wanted too.
    """

    _COLUMNS = 6

    def __init__(
        self,
        layers: dict[str, list[nn.Parameter]],
        optimizers: list[Optimizer],
        *,
        every: int,
        modules: dict[str, nn.Module] | None = None,
    ) -> None:
        self._layers = layers
        self._optimizers = optimizers
        self._every = every
        self._turns: dict[int, list[str]] = {}
        for number, layer in enumerate(layers):
            self._turns.setdefault(number * every // len(layers), []).append(layer)
        self._copies: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        self._largest: dict[str, Tensor] = {}
        self._due: frozenset[str] = frozenset()
        self._hooks = [
            module.register_forward_hook(untraced(self._listener(layer))) for layer, module in (modules or {}).items()
        ]

    def moments(self) -> dict[str, tuple[str, ...]]:
        """The layers that are trained now, and which moments their optimizer will keep, as its options tell."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        known = {}
        for layer, parameters in self._layers.items():
            trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
            theirs = [group for group in groups if trained & {id(parameter) for parameter in group["params"]}]
            first = any(group.get("betas") or group.get("momentum") for group in theirs)
            second = any(group.get("betas") for group in theirs)
            if theirs:
                known[layer] = ("first",) * first + ("second",) * second
        return known

    def due(self, step: int) -> tuple[str, ...]:
        """The layers whose turn step number `step` is."""
        return tuple(self._turns.get(step % self._every, ()))

    def listen(self, step: int) -> None:
        """Step number `step` comes next: the forward pass of the layers whose turn it is will be listened to."""
        self._due = frozenset(self.due(step))
        self._largest.clear()

    def before_optimizer(self, step: int) -> None:
        """Copy the weights of the layers whose turn it is."""
        self._copies = {
            layer: [(weight, weight.detach().clone()) for weight in self._layers[layer] if weight.requires_grad]
            for layer in self.due(step)
        }

    def after_optimizer(self) -> tuple[tuple[str, ...], Tensor] | None:
        """The layers that had their turn, and their values in one float32 vector on the device; None if none had."""
        copies = {layer: pairs for layer, pairs in self._copies.items() if pairs}
        self._copies = {}
        if not copies:
            return None
        values = [value for layer, pairs in copies.items() for value in self._measure(layer, pairs)]
        device = values[0].device
        return tuple(copies), torch.stack([value.to(device).float() for value in values])

    def nothing(self, step: int) -> tuple[tuple[str, ...], Tensor | None]:
        """What stands for the values of step number `step` where they are not there."""
        del step
        return (), None

    @classmethod
    def read(cls, layers: tuple[str, ...], values: tuple[float, ...]) -> dict[str, LayerReading]:
        """The vector of `after_optimizer`, once it has arrived on the host."""
        readings = {}
        for number, layer in enumerate(layers):
            weight, update, elements, *rest = values[number * cls._COLUMNS : (number + 1) * cls._COLUMNS]
            first, second, activation = (None if value == -1.0 else value for value in rest)
            readings[layer] = reading_of(
                weight=weight, update=update, elements=elements, first=first, second=second, activation=activation
            )
        return readings

    def forget(self) -> None:
        """Drop the copies: the run has gone back."""
        self._copies = {}

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _measure(self, layer: str, pairs: list[tuple[nn.Parameter, Tensor]]) -> list[Tensor]:
        weights = [weight.detach() for weight, _ in pairs]
        updates = [wide(copy).sub_(wide(weight)) for weight, (_, copy) in zip(weights, pairs, strict=True)]
        states = [self._state(weight) for weight, _ in pairs]
        firsts = [state[key] for state in states for key in FIRST_MOMENTS if isinstance(state.get(key), Tensor)]
        seconds = [state[key] for state in states for key in SECOND_MOMENTS if isinstance(state.get(key), Tensor)]
        missing = torch.full((), -1.0, device=weights[0].device)
        sums = [second.sum(dtype=torch.float32) for second in seconds]
        return [
            _norm(weights),
            _norm(updates),
            torch.full((), float(sum(weight.numel() for weight in weights)), device=missing.device),
            _norm(firsts) if firsts else missing,
            torch.stack(sums).sum().sqrt() if sums else missing,
            self._largest.pop(layer, missing),
        ]

    def _state(self, weight: nn.Parameter) -> dict[str, Any]:
        return next((optimizer.state[weight] for optimizer in self._optimizers if weight in optimizer.state), {})

    def _listener(self, layer: str) -> Callable[..., None]:
        def listen(module: nn.Module, _inputs: object, output: object) -> None:
            if layer not in self._due or not module.training:
                return
            parts = output if isinstance(output, tuple | list) else (output,)
            first = next((part for part in parts if isinstance(part, Tensor) and part.is_floating_point()), None)
            if first is not None and first.numel():
                largest = first.detach().abs().amax().float()
                before = self._largest.get(layer)
                self._largest[layer] = largest if before is None else torch.maximum(before, largest)

        return listen


def reading_of(
    *,
    weight: float,
    update: float,
    elements: float | None,
    first: float | None,
    second: float | None,
    activation: float | None,
) -> LayerReading:
    """What the norms of a layer's weights and of their last update, and what else is known of it, come to."""
    return LayerReading(
        weight_norm=weight,
        update_ratio=update / weight if weight != 0.0 else None,
        first_moment_norm=first,
        second_moment_norm=second,
        activation_max=activation,
        elements=None if elements is None else round(elements),
    )


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: the difference of two bfloat16 numbers is none of three digits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _norm(tensors: list[Tensor]) -> Tensor:
    """2-norm of them all together; float64 on the way, since squares of small moments are beyond float32."""
    norms = torch.stack(tensor_norms(tensors))
    total: Tensor = torch.linalg.vector_norm(norms if norms.device.type == "mps" else norms.double())
    return total.float()

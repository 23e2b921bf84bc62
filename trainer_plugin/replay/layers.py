"""Which layer it was: the first that is not finite, and the one whose weights have moved."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.replay.material import Begin
from trainer_plugin.replay.stage import Stage, model_tensors
from trainer_plugin.step.probe import layer_of, plain_name


class Walk(msgspec.Struct, kw_only=True):
    """One forward pass, watched: the layers in the order in which they ran.

    `module` is the first whose output is not finite although its inputs and weights are, None where all are.
    """

    order: list[str]
    module: str | None = None


def walk(stage: Stage, begin: Begin, weights: Snapshot) -> Walk:
    """Run the forward pass of a step, and look at what goes in and out of each module."""
    found = Walk(order=[])
    layers = set(stage.layers)
    with ExitStack() as hooks, stage.prepared(weights):
        for name, module in stage.model.named_modules():
            watch = module.register_forward_hook(_watch(found, plain_name(name), layers), with_kwargs=True)
            hooks.callback(watch.remove)
        for number in range(len(begin.batches)):
            stage.forward(begin, number)
    return found


def nonfinite_layers(stage: Stage, weights: Snapshot) -> list[str]:
    """The layers that have weights which are not finite."""
    return list(dict.fromkeys(layer for layer, tensor, _ in _weights(stage, weights) if not _is_finite(tensor)))


def weight_changes(stage: Stage, weights: Snapshot, earlier: Snapshot) -> dict[str, float]:
    """How far each layer has moved since an earlier state: norm of the difference over the norm it had then."""
    squares: dict[str, list[float]] = {}
    then = model_tensors(earlier)
    for layer, tensor, name in _weights(stage, weights):
        before = then[name].double()
        sums = squares.setdefault(layer, [0.0, 0.0])
        sums[0] += float((tensor.double() - before).square().sum())
        sums[1] += float(before.square().sum())
    return {layer: math.sqrt(moved / max(was, 1e-30)) for layer, (moved, was) in squares.items()}


def _weights(stage: Stage, weights: Snapshot) -> Iterator[tuple[str, Tensor, str]]:
    """Layer, tensor and name of each parameter; buffers such as a mask of -inf are what they are."""
    stored = model_tensors(weights)
    for name in (plain_name(name) for name, _ in stage.model.named_parameters()):
        yield layer_of(name), stored[name], name


def _watch(found: Walk, name: str, layers: set[str]) -> Callable[[nn.Module, Any, Any, Any], None]:
    """A forward hook of the module of that name."""

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401 - torch's own hook type
        if not any(True for _ in module.children()):
            layer = layer_of(f"{name}.")
            if layer in layers and layer not in found.order:
                found.order.append(layer)
        if found.module is None and not _tree_is_finite(output) and _tree_is_finite((args, kwargs)):
            found.module = name

    return look


def _tree_is_finite(value: Any) -> bool:  # noqa: ANN401 - whatever goes into a module
    if isinstance(value, Tensor):
        return _is_finite(value)
    if isinstance(value, dict):
        return all(map(_tree_is_finite, value.values()))
    return all(map(_tree_is_finite, value)) if isinstance(value, list | tuple) else True


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())

"""The factory: a function of the user's that builds the model anew, named as `module:function`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_plugin.checkpoints.proof import LossFn
from trainer_plugin.scenes.scene import factory_name

_LONGEST = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a factory gives: a model, on its device and in its mode, and `loss_fn(model, batch)`, each sample's loss.

    `batch_of(sample_ids)` makes a batch anew, for scenes that could not store theirs; None where there is none.
    """

    model: nn.Module
    loss_fn: LossFn
    batch_of: Callable[[list[str]], Any] | None = None


def build(name: str) -> Built:
    """Import a factory and call it.

    Raises:
        ValueError: it is not there, fails, or gives something else; in one line.
    """
    module_name, _, path = factory_name(name).partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # A training script may end the process when it is imported.
        raise ValueError(f"factory {name}: {module_name} cannot be imported: {told(error)}") from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(f"factory {name}: {module_name} has no function {path}")  # noqa: TRY004 - bad input
    try:
        built = found()
    except (Exception, SystemExit) as error:
        raise ValueError(f"factory {name} failed: {told(error)}") from error
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[0], nn.Module):
        raise ValueError(
            f"factory {name}: `(model, loss_fn)` or `(model, loss_fn, batch_of)` wanted, found {_kind(built)}"
        )
    if not all(map(callable, built[1:])):
        raise ValueError(f"factory {name}: what stands beside the model must be functions, found {_kind(built)}")
    return Built(model=built[0], loss_fn=built[1], batch_of=built[2] if len(built) == 3 else None)


def told(error: BaseException) -> str:
    """An error of the user's own code, in one line of a length that can be read."""
    try:
        words = " ".join(str(error)[: 10 * _LONGEST].split())
    except Exception:  # noqa: BLE001 - an error of one's own may fail to tell itself
        words = ""
    return f"{type(error).__name__}: {words[:_LONGEST]}"


def _kind(value: Any) -> str:  # noqa: ANN401 - whatever a factory gives
    kinds = [type(item).__name__ for item in value] if isinstance(value, tuple) else [type(value).__name__]
    return f"({', '.join(kinds)})" if isinstance(value, tuple) else kinds[0]

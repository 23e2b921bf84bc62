"""The guard inside a training process: `Guard` with its `Config`, and `IndexSampler` for data that can go back."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_plugin.config import Config
    from trainer_plugin.data.sampler import IndexSampler
    from trainer_plugin.guard import Guard

_MODULES = {"Config": "config", "Guard": "guard", "IndexSampler": "data.sampler"}
__all__ = ["Config", "Guard", "IndexSampler"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the classes
    """Import a class when it is asked for: torch takes seconds, and what reads old logs does without it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

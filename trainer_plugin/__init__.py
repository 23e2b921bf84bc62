"""The guard inside a training process: `Guard` and its `Config`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_plugin.config import Config
    from trainer_plugin.guard import Guard

__all__ = ["Config", "Guard"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - either class
    """Import a class when it is asked for: torch takes seconds, and what reads old logs does without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)

"""Faults on purpose, for fire drills: `Faults().lr_jump(at=700, times=100, steps=10)` hurts a run, then ends."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_plugin.faults.injector import Faults

__all__ = ["Faults"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    if name == "Faults":  # Only then: the command line lists the scenarios without waiting for torch.
        from trainer_plugin.faults.injector import Faults  # noqa: PLC0415 - see above

        return Faults
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The schedule follows applied steps: where an update was withheld, the scheduler's step after it is taken back.

The loop steps its scheduler as ever, between `before_optimizer` and `end_step`. Where values are read at once (CPU)
the schedule is exact; on an accelerator the one step after a withheld one still runs a notch ahead.
"""

import copy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# What torch's schedulers change in a parameter group.
_SCHEDULED = ("lr", "momentum", "betas")


class Schedule:
    """Any scheduler with `state_dict` and `load_state_dict`; None does nothing. `scaled`: AMP scales the loss."""

    def __init__(self, scheduler: Any, optimizers: list[Optimizer], *, scaled: bool = False) -> None:  # noqa: ANN401
        self._scheduler = scheduler
        self._optimizers = optimizers
        self._scaled = scaled
        self._state: Any = None
        self._values: list[dict[str, Any]] = []

    def mark(self) -> None:
        """Remember where the schedule stands before the loop steps it."""
        if self._scheduler is not None:
            self._state = copy.deepcopy(self._scheduler.state_dict())
            self._values = [{key: _copy(group[key]) for key in _SCHEDULED if key in group} for group in self._groups()]
            for optimizer in self._optimizers if self._scaled else ():
                # A scaler that overflows at the very first step does not call it: no reason to warn of a wrong order.
                optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own mark

    def take_back(self) -> None:
        """Put it where it stood at the last mark."""
        if self._scheduler is None or self._state is None:
            return
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, values in zip(self._groups(), self._values, strict=False):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _copy(value: Any) -> Any:  # noqa: ANN401 - a number, a tuple of numbers or a tensor
    return value.clone() if isinstance(value, Tensor) else value

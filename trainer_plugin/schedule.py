"""The schedule follows applied steps: where an update was withheld, the scheduler's step after it is taken back.

The loop steps its scheduler as ever, between `before_optimizer` and `end_step`. Where values are read at once (CPU)
the schedule is exact; on an accelerator the one step after a withheld one still runs a notch ahead.
"""

import copy
from typing import Any

import torch
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
        # Of each group that the scheduler steps: what it holds, and what the schedule says.
        self._marked: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def mark(self) -> None:
        """Remember where the schedule stands before the loop steps it."""
        if self._scheduler is not None:
            self._state = copy.deepcopy(self._scheduler.state_dict())
            held = [{key: _copy(group[key]) for key in _SCHEDULED if key in group} for group in self._groups()]
            self._marked = list(zip(held, self._said(held), strict=True))
            for optimizer in self._optimizers if self._scaled else ():
                # A scaler that overflows at the very first step does not call it: no reason to warn of a wrong order.
                optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own mark

    def take_back(self) -> None:
        """Put it where it stood at the last mark.

        A rate that the loop had changed for that step only is the loop's to put back, and not kept here: it would be
        changed once more in each step that is withheld. What nothing has moved since the mark stays as it is.
        """
        if self._scheduler is None or self._state is None:
            return
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, (held, said) in zip(self._groups(), self._marked, strict=False):
            for key, value in said.items():
                if group[key] == held[key]:
                    continue
                if isinstance(group[key], Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _groups(self) -> list[dict[str, Any]]:
        """Those of the scheduler's own optimizer, where it tells; the others' rates are the loop's own."""
        own = getattr(self._scheduler, "optimizer", None)
        optimizers = [own] if isinstance(own, Optimizer) else self._optimizers
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    def _said(self, held: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the schedule says each group holds: the rates that it set last, and for the rest what is held."""
        tell = getattr(self._scheduler, "get_last_lr", None)
        rates = [_copy(rate) for rate in tell()] if tell is not None else []
        if len(rates) != len(held):
            return held
        return [values | {"lr": rate} for values, rate in zip(held, rates, strict=True)]


def _copy(value: Any) -> Any:  # noqa: ANN401 - a number, a tuple of numbers or a tensor
    return value.clone() if isinstance(value, Tensor) else value

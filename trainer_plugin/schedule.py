"""The schedule follows applied steps: where an update was withheld, the scheduler's step after it is taken back.

The loop steps its scheduler as ever, between `before_optimizer` and `end_step`. Where values are read at once (CPU)
the schedule is exact; on an accelerator the one step after a withheld one still runs a notch ahead. A scheduler that
steps more rarely than the optimizer, as once an epoch, counts no updates, and is not taken back.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# What torch's schedulers change in a parameter group, beside the rate.
_MOMENTS = ("momentum", "betas")


class Schedule:
    """Any scheduler with `state_dict` and `load_state_dict`; None does nothing.

    Args:
        scheduler: stepped by the loop.
        optimizers: those whose rates it sets; it may set only some of them.
        rates: the rate of each group, optimizer after optimizer, as the loop knows it.
        scaled: AMP scales the loss.
    """

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - anything with state_dict and load_state_dict
        optimizers: list[Optimizer],
        rates: Callable[[], list[float | Tensor]],
        *,
        scaled: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._optimizers = optimizers
        self._rates = rates
        self._scaled = scaled
        # The scheduler's state at the mark, and at the mark of the applied step before.
        self._state: Any = None
        self._state_before: Any = None
        self._is_taken_back = False
        # What the groups held when the boundary was left, and at the mark: a loop may change it in between.
        self._left: list[dict[str, Any]] = []
        self._marked: list[dict[str, Any]] = []
        self.leave()

    def mark(self) -> None:
        """Remember where the schedule stands before the loop steps it."""
        if self._scheduler is None:
            return
        if not self._is_taken_back:
            self._state_before = self._state
        self._is_taken_back = False
        self._state = None  # Should the scheduler fail to tell its own, an older one must not be put back.
        self._state, self._marked = copy.deepcopy(self._scheduler.state_dict()), self._held()
        for optimizer in self._optimizers if self._scaled else ():
            # A scaler that overflows at the very first step does not call it: no reason to warn of a wrong order.
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own mark

    def leave(self) -> None:
        """The boundary is behind the run: what the groups hold now, the next step begins with."""
        if self._scheduler is not None:
            self._left = self._held()

    def take_back(self) -> None:
        """Put it where it stood at the last mark.

        What the loop has changed since it left the boundary may be for this step only, and put back by the loop itself
        before it stepped the scheduler: kept, it would be changed once more in each step that is withheld. So of the
        two values the one comes back that the scheduler has gone on from, which is the nearer one.
        """
        if self._scheduler is None or self._state is None or _same(self._scheduler.state_dict(), self._state):
            return
        if self._state_before is not None and _same(self._state_before, self._state):
            return
        self._is_taken_back = True
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        left = self._left if len(self._left) == len(self._marked) else self._marked
        for group, before, marked in zip(self._groups(), left, self._marked, strict=False):
            for key, value in marked.items():
                other = before.get(key, value)
                nearer = _distance(group[key], value) <= _distance(group[key], other)
                _set(group, key, value if nearer else other)

    def _held(self) -> list[dict[str, Any]]:
        return [
            {"lr": _copy(rate), **{key: _copy(group[key]) for key in _MOMENTS if key in group}}
            for group, rate in zip(self._groups(), self._rates(), strict=True)
        ]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _copy(value: Any) -> Any:  # noqa: ANN401 - a number, a tuple of numbers or a tensor
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401 - as above
    if isinstance(group[key], Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _distance(value: Any, other: Any) -> float:  # noqa: ANN401 - as above
    if isinstance(value, tuple | list):
        return sum(map(_distance, value, other))
    return abs(float(value) - float(other))


def _same(state: Any, other: Any) -> bool:  # noqa: ANN401 - whatever a scheduler keeps
    """Whether two states are equal; of what cannot be compared it is not known, and taken for no."""
    try:
        return bool(state == other)
    except (RuntimeError, TypeError, ValueError):
        return False

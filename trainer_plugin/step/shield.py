"""The shield: a bad step never reaches weights, moments or step counts, whatever the optimizer's implementation.

Never by multiplying with zero: 0 x NaN is NaN, and a zero gradient still moves weights through momentum and decay.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_plugin.step.untraced import untraced


class Shield:
    """Withholds the next step of every optimizer when the flag it was armed with is set.

    A fused optimizer takes the flag on the device (`found_inf`, its own way to skip a step). Any other is shown
    parameters without gradients, which is a true no-op; that needs the flag on the host, inside its step.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        # How often each optimizer has ended a step, by its id: a closure asks the guard after the step has begun.
        self.steps_ended = {id(optimizer): 0 for optimizer in optimizers}
        # Which evaluation of a closure is under way in the optimizer's step, from 1; 0 outside of one.
        self.evaluation = 0
        self._bad: Tensor | None = None
        self._is_bad: Callable[[], bool] = bool
        self._optimizers = optimizers
        self._hidden: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._flagged: set[int] = set()
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def arm(self, bad: Tensor, is_bad: Callable[[], bool]) -> None:
        """Guard the coming step with a float32 scalar on the device (1.0: withhold); `is_bad` reads it on the host."""
        self._bad, self._is_bad = bad, is_bad

    def disarm(self) -> None:
        """Let the coming step through."""
        self._bad = None

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            self._unflag(optimizer)

    @untraced
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:  # noqa: ANN401 - torch's own hook type
        self._unflag(optimizer)  # Left over only if the last step raised.
        self._hidden.clear()
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._withhold(optimizer)
            return None
        evaluations = itertools.count(1)

        # The closure makes the gradients, and the guard is asked within it: only then the flag is this step's.
        def shielded() -> Any:  # noqa: ANN401 - the closure's own
            self._reveal()
            self.evaluation = next(evaluations)
            try:
                loss = closure()
            finally:
                self.evaluation = 0
            self._withhold(optimizer)
            return loss

        return (args[0], shielded), {key: value for key, value in kwargs.items() if key != "closure"}

    def _withhold(self, optimizer: Optimizer) -> None:
        if self._bad is None:
            return
        if is_fused(optimizer) and not _starts_momentum(optimizer):
            # Under a GradScaler the scaler has put its own flag here, and takes it away again itself.
            theirs: Tensor | None = getattr(optimizer, "found_inf", None)
            if theirs is None or id(optimizer) in self._flagged:
                optimizer.found_inf = self._bad  # type: ignore[attr-defined]
                self._flagged.add(id(optimizer))
            else:
                optimizer.found_inf = torch.maximum(theirs, self._bad.to(theirs.device))  # type: ignore[attr-defined]
        elif self._is_bad():  # The one deliberate host read: these optimizers take no flag, or not yet.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._hidden.append((parameter, parameter.grad))
                        parameter.grad = None

    @untraced
    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
        self.steps_ended[id(optimizer)] += 1
        self._unflag(optimizer)
        self._reveal()

    def _reveal(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _unflag(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._flagged:
            self._flagged.discard(id(optimizer))
            del optimizer.found_inf  # type: ignore[attr-defined]


def is_fused(optimizer: Optimizer) -> bool:
    """Whether every parameter group runs torch's fused implementation, in a class of torch's own.

    One that is derived from it may do more in its step than the flag withholds.
    """
    ours = type(optimizer).__module__.startswith("torch.optim.")
    knows_the_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
    return ours and knows_the_flag and all(group.get("fused") for group in optimizer.param_groups)


def _starts_momentum(optimizer: Optimizer) -> bool:
    """Whether this step makes a momentum buffer (SGD): fused and withheld, it would be left as uninitialised memory."""
    return any(
        group.get("momentum") and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )

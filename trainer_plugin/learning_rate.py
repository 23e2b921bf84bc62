"""The guard's factor on the learning rate: a layer over whatever schedule the training loop has.

The factor is on the optimizer's groups only while the optimizer steps, so no scheduler ever sees it: one that
recomputes from a base rate cannot undo it, one that chains on the current rate cannot compound it, and a checkpoint
holds the schedule alone.
"""

from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer

from trainer_plugin.step.untraced import untraced


class LrState(msgspec.Struct, kw_only=True):
    """The factor and its way back, in optimizer steps run (`train_steps_total`, which never goes back)."""

    lowered_to: float = 1.0
    hold_until: int = 0
    return_until: int = 0


class LrFactor:
    """Effective learning rate = schedule x factor, for every group of every optimizer."""

    def __init__(self, optimizers: list[Optimizer], *, state: LrState | None = None) -> None:
        self.state = state or LrState()
        self.factor = 1.0
        self._schedule: list[tuple[dict[str, Any], Any]] = []
        self._optimizers = optimizers
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def lower(self, by: float, *, floor: float, now: int, hold_steps: int, return_steps: int, stack: bool) -> float:
        """Multiply the factor with `by` for `hold_steps`, then lead it back to 1 over `return_steps`; return it.

        `stack` multiplies a factor that is still lowered; without it the factor becomes `by` again, or stays where it
        is lower already. `floor` is the least factor.
        """
        lowered_to = self.factor * by if stack else min(by, self.factor)
        self.state = LrState(
            lowered_to=max(lowered_to, floor),
            hold_until=now + hold_steps,
            return_until=now + hold_steps + return_steps,
        )
        return self.advance(now)

    def advance(self, now: int) -> float:
        """Set and return the factor for the step after `now` optimizer steps run."""
        self._restore()  # Left over only if the last step raised: no scheduler or checkpoint must see it.
        state = self.state
        if now < state.hold_until:
            self.factor = state.lowered_to
        elif now < state.return_until:
            way_back = (now - state.hold_until + 1) / (state.return_until - state.hold_until + 1)
            self.factor = state.lowered_to + (1.0 - state.lowered_to) * way_back
        else:
            self.factor = 1.0
        return self.factor

    def effective(self) -> list[float | Tensor]:
        """The rate of each group in the coming step, group after group, optimizer after optimizer.

        A rate that is a tensor stays one, and on its device: whether to read it is not decided here.
        """
        return [rate * self.factor for rate in self.scheduled()]

    def scheduled(self) -> list[float | Tensor]:
        """The schedule's own rate of each group, also within the optimizer's step, where a closure asks for it."""
        own = {id(group): rate for group, rate in self._schedule}
        return [own.get(id(group), group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def remove(self) -> None:
        """Take the hooks off the optimizers and leave the schedule's own rates behind."""
        self._restore()
        for hook in self._hooks:
            hook.remove()

    @untraced
    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's own hook type
        self._restore()  # Left over only if the last step raised.
        if self.factor != 1.0:
            for group in optimizer.param_groups:
                rate = group["lr"]
                self._schedule.append((group, rate))
                # Replaced, never changed in place: a tensor given once is the same object in every group.
                group["lr"] = rate * self.factor

    @untraced
    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
        self._restore()

    def _restore(self) -> None:
        for group, rate in self._schedule:
            group["lr"] = rate
        self._schedule.clear()

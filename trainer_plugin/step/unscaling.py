"""AMP's loss scale: gradients are divided by it once a step, and given it back where no optimizer step came of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Unscaling:
    """Of one GradScaler of any device; None does nothing.

    A loop may leave a step out (a caught error, an optimizer that steps every third time). Then its gradients, or those
    that are added to them, are scaled ones again, and the scaler must not take them for unscaled.
    """

    def __init__(self, scaler: Any, optimizers: list[Optimizer]) -> None:  # noqa: ANN401
        self._scaler = scaler
        self._optimizers = optimizers
        # Those unscaled here, and by what, since the last boundary.
        self._ours: list[tuple[Optimizer, Tensor]] = []

    @property
    def scaled(self) -> bool:
        """Whether AMP scales the loss."""
        return self._scaler is not None

    def scale(self, device: torch.device) -> Tensor | None:
        """The loss scale, shape [], on a device."""
        if self._scaler is None:
            return None
        scale: Tensor = self._scaler.scale(torch.ones((), device=device))
        return scale

    def unscale(self, *, again: bool = False) -> None:
        """Divide the gradients by the scale, unless the loop has done so already in this step; `again` in one step."""
        if self._scaler is None:
            return
        if not again:
            for optimizer, _ in self._ours:  # No boundary since: the gradients now are new ones.
                self._reset(optimizer)
            self._ours.clear()
        for optimizer in self._optimizers:
            gradients = _gradients(optimizer)
            if not gradients:  # The scaler would complain.
                continue
            scale = self._scaler.scale(torch.ones((), device=gradients[0].device))
            try:
                self._scaler.unscale_(optimizer)
            except RuntimeError as error:
                if "already been called" not in str(error):
                    raise
            else:
                self._ours.append((optimizer, scale))

    def share(self, overflow: Tensor) -> None:
        """Let the scaler know of an overflow on any rank (1.0, shape []): all must leave the step out, or none."""
        for optimizer, _ in self._ours:
            state = getattr(self._scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
            for found in state.get("found_inf_per_device", {}).values():
                found.copy_(torch.maximum(found, overflow.to(found.device)))

    @torch.no_grad()
    def settle(self, has_stepped: Callable[[Optimizer], bool]) -> None:
        """At the boundary: give the gradients of an optimizer that has not stepped their scale back."""
        for optimizer, scale in self._ours:
            if not has_stepped(optimizer):
                for gradient in _gradients(optimizer):
                    gradient.mul_(scale.to(gradient.device))
                self._reset(optimizer)
        self._ours.clear()

    def _reset(self, optimizer: Optimizer) -> None:
        """Let the scaler know that what it has unscaled is gone: it has no call for that."""
        state = getattr(self._scaler, "_per_optimizer_states", {}).get(id(optimizer))
        if state is not None and state["stage"].name == "UNSCALED":
            state["stage"] = type(state["stage"]).READY
            state["found_inf_per_device"] = {}


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

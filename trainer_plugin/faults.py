"""Faults on purpose, for fire drills: `Faults().lr_jump(at=700, times=100, steps=10)` hurts a run, then ends."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:  # The command line lists the scenarios without waiting for torch.
    from torch import nn
    from torch.optim import Optimizer

Kind = Literal["lr_jump", "grad_scale", "nan_gradient"]


@dataclass(kw_only=True)
class _Fault:
    """One fault: when it begins, how often it fires, and at which steps it has fired so far."""

    kind: Kind
    at: int
    steps: int
    times: float = 1.0
    parameter: str | None = None
    fired_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.at < 0 or self.steps < 1:
            raise ValueError(f"{self.kind}: at >= 0 and steps >= 1 wanted, found at={self.at}, steps={self.steps}")
        if not (math.isfinite(self.times) and self.times > 0):
            raise ValueError(f"{self.kind}: times must be finite and above 0, found {self.times}")


class Faults:
    """Injects the faults it was told of into a training loop, each for so many steps and never again.

    The injector counts the optimizer steps that it sees, those repeated after a rollback included. A fault with
    `at=700` leaves 700 steps clean and fires first in the 701st; once it has fired `steps` times it is over, so a run
    that goes back does not meet it again. In the loop:

        loss.backward()
        faults.on_gradients(model)
        guard.before_optimizer(loss)
        faults.before_step(optimizer)
        optimizer.step()
        faults.after_step(optimizer)

    The two calls stand around `step` on purpose, rather than in hooks of the optimizer: torch runs pre-hooks and
    post-hooks alike in the order of registration, so two pairs of hooks that each put back what they found would not
    nest. Around the call they always do: what hooks make of the learning rate, they make of the faulty one.
    """

    def __init__(self) -> None:
        self._faults: list[_Fault] = []
        self._steps_run = 0
        self._lrs: list[Any] | None = None

    def lr_jump(self, *, at: int, times: float, steps: int = 1) -> Self:
        """For `steps` steps after `at` clean ones, the learning rate of every group is `times` as high."""
        return self._add(_Fault(kind="lr_jump", at=at, times=times, steps=steps))

    def grad_scale(self, *, at: int, times: float, steps: int = 1) -> Self:
        """For `steps` steps after `at` clean ones, every gradient is `times` as large."""
        return self._add(_Fault(kind="grad_scale", at=at, times=times, steps=steps))

    def nan_gradient(self, *, at: int, steps: int = 1, parameter: str | None = None) -> Self:
        """For `steps` steps after `at` clean ones, one element of a gradient is NaN.

        Args:
            at: clean steps before.
            steps: how often it fires.
            parameter: name of the parameter whose gradient is hit; the first that has a gradient if None.
        """
        return self._add(_Fault(kind="nan_gradient", at=at, steps=steps, parameter=parameter))

    def on_gradients(self, model: "nn.Module") -> None:
        """Damage the gradients if it is time. Call it once a step, after `backward`, before anything looks at them.

        Raises:
            ValueError: the model has no gradient where `nan_gradient` was to put its NaN.
        """
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for fault in self._firing("grad_scale"):
            for gradient in gradients.values():
                gradient.mul_(fault.times)
        for fault in self._firing("nan_gradient"):
            name = fault.parameter or next(iter(gradients), None)
            if name not in gradients:
                raise ValueError(
                    f"nan_gradient: parameter with a gradient wanted, found {name} among {list(gradients)}"
                )
            gradients[name][(0,) * gradients[name].dim()] = math.nan

    def before_step(self, optimizer: "Optimizer") -> None:
        """Raise the learning rates if it is time. Call it right before `optimizer.step()`."""
        self._lrs = [group["lr"] for group in optimizer.param_groups]
        for fault in self._firing("lr_jump"):
            for group in optimizer.param_groups:
                # A new value, never in place: the rate may be a tensor that others hold too.
                group["lr"] = group["lr"] * fault.times

    def after_step(self, optimizer: "Optimizer") -> None:
        """Put the learning rates back, the very objects, and count the step. Call it right after `optimizer.step()`."""
        if self._lrs is None:
            raise RuntimeError("after_step wanted after before_step, found no step under way")
        for group, lr in zip(optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        self._lrs = None
        self._steps_run += 1

    @property
    def steps_run(self) -> int:
        """Optimizer steps seen so far, repeated ones included."""
        return self._steps_run

    @property
    def fired(self) -> dict[str, int]:
        """How often each kind of fault has fired; kinds that were not asked for are absent."""
        counts: dict[str, int] = {}
        for fault in self._faults:
            counts[fault.kind] = counts.get(fault.kind, 0) + len(fault.fired_at)
        return counts

    def first_step(self, kind: Kind) -> int | None:
        """The first step that this kind of fault hit, numbered from 1 on as `steps_run` counts; None if none yet."""
        return min(self._fired_at(kind), default=None)

    def last_step(self, kind: Kind) -> int | None:
        """The last step that this kind of fault hit, numbered from 1 on as `steps_run` counts; None if none yet."""
        return max(self._fired_at(kind), default=None)

    def _add(self, fault: _Fault) -> Self:
        self._faults.append(fault)
        return self

    def _fired_at(self, kind: Kind) -> list[int]:
        return [step for fault in self._faults if fault.kind == kind for step in fault.fired_at]

    def _firing(self, kind: Kind) -> list[_Fault]:
        """The faults of a kind that fire in the step under way, which is counted for each of them."""
        step = self._steps_run + 1
        firing = [f for f in self._faults if f.kind == kind and step > f.at and len(f.fired_at) < f.steps]
        for fault in firing:
            fault.fired_at.append(step)
        return firing

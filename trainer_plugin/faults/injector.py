"""The injector: a plan's faults at their places in a training loop."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.faults import damage
from trainer_plugin.faults.plan import Fault, Plan

_MOST_NAMED = 5


class Faults(Plan):
    """Injects the faults it was told of into a training loop, each for so many steps and never again.

    The injector counts the optimizer steps that it sees, those repeated after a rollback included. A fault with
    `at=700` leaves 700 steps clean and fires first in the 701st; once it has fired `steps` times it is over, so a run
    that goes back does not meet it again. What lies in the data does come again: `at` is a position there, batches
    drawn before. In the loop:

        inputs, targets = faults.on_data(position, inputs, targets)  # Where the batch is made, before the guard's eyes.
        faults.on_forward(model)
        losses = faults.on_losses(losses)                            # One of each sample; then their mean.
        loss.backward()
        faults.on_gradients(model)
        faults.before_step(optimizer)
        guard.before_optimizer(loss)
        optimizer.step()
        faults.after_step(optimizer)

    Only the calls that a drill needs have to be there, but for the last two, which count the steps: once each, with all
    optimizers of the loop. A fault fires once a step: of several micro-batches in the first that asks. Those around
    `step` stand there on purpose, rather than in hooks of the optimizer: torch runs pre-hooks and post-hooks alike in
    the order of registration, so two pairs of hooks that each put back what they found would not nest. `before_step`
    comes before the guard's call, so that it sees the rate as it sees one of a schedule gone wrong.

    Args:
        seed: of what is random in a fault.
        sleep: waits so many seconds.
    """

    def __init__(self, *, seed: int = 0, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self._seed = seed
        self._sleep = sleep
        self._lrs: list[tuple[dict[str, Any], Any]] | None = None
        self._norms: list[tuple[Any, nn.LayerNorm, float]] = []

    def on_data(self, position: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the batch at `position`, damaged if there is a fault: rows first, labels last."""
        for fault in self._at(position, "stalled_loader"):
            self._sleep(fault.seconds)
        if self._at(position, "garbage_text"):
            tensors = tuple(damage.garbage(tensor, self._random(position)) for tensor in tensors)
        if self._at(position, "shuffled_labels"):
            tensors = (*tensors[:-1], damage.shuffled(tensors[-1], self._random(position)))
        if self._at(position, "duplicated_document"):
            tensors = tuple(tensor[:1].expand_as(tensor).clone() for tensor in tensors)
        return tensors

    def on_losses(self, losses: Tensor) -> Tensor:
        """The losses of a batch, one of each sample."""
        for fault in self._firing("huge_sample"):
            weights = losses.new_ones(losses.shape)
            weights[0] = fault.times
            losses = losses * weights
        return losses

    @torch.no_grad()
    def on_forward(self, model: nn.Module) -> None:
        """Damage weights and layers, and report what the machine has to say, if it is time: before the forward pass."""
        for fault in (*self._firing("xid"), *self._firing("ecc"), *self._firing("network_errors")):
            if fault.tell is not None:
                fault.tell()
        for fault in self._firing("slow_rank"):
            self._sleep(fault.seconds)
        for fault in self._firing("bit_flip"):
            damage.flip_bit(next(iter(_named(fault, dict(model.named_parameters())).values())), fault.bit)
        for fault in self._firing("weight_noise"):
            for parameter in _named(fault, dict(model.named_parameters())).values():
                damage.add_noise(parameter, fault.times, self._random(fault.at))
        if self._firing("layer_norm_eps"):
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    hook = module.register_forward_pre_hook(damage.constant_row)
                    self._norms.append((hook, module, module.eps))
                    module.eps = 0.0

    def on_gradients(self, model: nn.Module) -> None:
        """Damage the gradients if it is time. Call it once a step, after `backward`, before anything looks at them.

        Raises:
            ValueError: the model has no gradient where a fault was to hit one.
        """
        for hook, module, eps in self._norms:
            hook.remove()
            module.eps = eps
        self._norms.clear()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for fault in (*self._firing("grad_scale"), *self._firing("exploding_layer")):
            for gradient in _named(fault, gradients).values():
                gradient.mul_(fault.times)
        broken = [damage.overflow] * bool(self._firing("fp16_overflow")) + [damage.fill_inf] * bool(
            self._firing("amp_collapse")
        )
        for gradient in gradients.values():
            for break_it in broken:
                break_it(gradient)
        for fault in self._firing("nan_gradient"):
            damage.put_nan(next(iter(_named(fault, gradients).values())))

    def before_step(self, *optimizers: Optimizer) -> None:
        """Raise the learning rates if it is time. Call it once a step, before all its optimizers step.

        Raises:
            RuntimeError: the step before has not been ended by `after_step`; its rates have been put back.
        """
        if self._lrs is not None:
            self._put_back()
            raise RuntimeError(
                "before_step wanted once a step, with all its optimizers: after_step has not been called"
            )
        self._lrs = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
        for fault in (*self._firing("lr_jump"), *self._firing("lr_peak")):
            for group, _ in self._lrs:
                # A new value, never in place: the rate may be a tensor that others hold too.
                group["lr"] = group["lr"] * fault.times

    def after_step(self, *_optimizers: Optimizer) -> None:
        """Put the learning rates back, the very objects, and count the step. Call it right after they have stepped.

        Raises:
            RuntimeError: there was no `before_step`.
        """
        if self._lrs is None:
            raise RuntimeError("after_step wanted after before_step, found no step under way")
        self._put_back()
        self._steps_run += 1

    def _put_back(self) -> None:
        for group, lr in self._lrs or ():
            group["lr"] = lr
        self._lrs = None

    def _random(self, number: int) -> torch.Generator:
        """The same for the same fault, whenever it comes."""
        return torch.Generator().manual_seed(((self._seed << 20) + number) % (1 << 63))


def _named(fault: Fault, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin as the fault says; all of them if it says nothing.

    Raises:
        ValueError: there are none.
    """
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(fault.parameter or "")}
    if not found:
        wanted = "parameter with a gradient wanted"
        there = ", ".join(list(tensors)[:_MOST_NAMED]) or "none"
        more = f" and {len(tensors) - _MOST_NAMED} more" if len(tensors) > _MOST_NAMED else ""
        raise ValueError(f"{fault.kind}: {wanted}, found {fault.parameter} among {there}{more}")
    return found

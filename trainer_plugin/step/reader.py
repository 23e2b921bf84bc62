"""The reader of a step: measures it before the optimizer, shields it, and has its `Signals` at the boundary."""

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.signals import LayerReading, Signals
from trainer_plugin.step.accumulation import Accumulation
from trainer_plugin.step.layer_signals import LayerSignals
from trainer_plugin.step.probe import Limits, Probe
from trainer_plugin.step.row import Row, RowValues, Withhold
from trainer_plugin.step.shield import Shield, is_fused
from trainer_plugin.step.unscaling import Unscaling

_log = logging.getLogger(__name__)
# Fewer may be the own way of a loop, such as leaving out an update that it does not like.
_UNHEARD_STEPS = 10
# One of several may step more rarely than the others.
_UNHEARD_STEPS_OF_ONE = 100
# Steps on their way at most: a loop that never comes to a boundary must not fill the memory.
_MOST_TAKEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """A step that was measured and whose values are on their way, those beside its row in the order of the fields.

    A rate of None is a tensor and beside the row; so are the values of `layers`.
    """

    step: int
    row: Row
    limits: Limits
    sample_ids: tuple[str, ...]
    tokens: int | None
    loss_mean: str
    rates: tuple[float | None, ...]
    layers: tuple[str, ...]
    steps_ended: dict[int, int]
    again: bool


class StepReader:
    """One for a run. With `shielded`, a step that is not finite is withheld from the optimizers."""

    def __init__(
        self,
        probe: Probe,
        optimizers: list[Optimizer],
        learning_rate: LrFactor,
        *,
        scaler: Any = None,  # noqa: ANN401 - a GradScaler of any device
        shielded: bool,
        layer_signals: LayerSignals | None = None,
    ) -> None:
        self._probe = probe
        self._optimizers = optimizers
        self._learning_rate = learning_rate
        self._unscaling = Unscaling(scaler, optimizers)
        self._shield = Shield(optimizers)
        self._shielded = shielded
        self._layer_signals = layer_signals
        self._layers_read: tuple[tuple[str, ...], Tensor] | None = None
        self.accumulation = Accumulation()
        self._taken: deque[_Taken] = deque()
        self._values: RowValues | None = None
        self._steps_ended = dict(self._shield.steps_ended)
        self._unheard_steps_each = [0 for _ in optimizers]
        self.grad_norm: Tensor | None = None
        self.nonfinite_parameters: list[str] = []
        self.measured = 0
        self.unheard_steps = 0
        # On an accelerator the values of a step are read at the next boundary, when they have long arrived.
        self._lag_steps = 1 if any(p.is_cuda for p in probe.parameters.values()) else 0

    @property
    def scaled(self) -> bool:
        """Whether AMP scales the loss."""
        return self._unscaling.scaled

    @property
    def moments(self) -> dict[str, tuple[str, ...]]:
        """The layers that are read by turns, each with the moments that its optimizer keeps."""
        return self._layer_signals.moments() if self._layer_signals is not None else {}

    @property
    def shield_kind(self) -> str:
        """How a bad step is withheld: `found_inf` (on the device), `hook` (by a host read) or `off`."""
        if not self._shielded:
            return "off"
        return "found_inf" if all(is_fused(optimizer) for optimizer in self._optimizers) else "hook"

    @torch.no_grad()
    def take(self, loss: object, *, step: int, limits: Limits, sample_ids: Sequence[str] | None) -> None:
        """Unscale, measure, clip and shield step number `step`. No host read.

        `loss` is the step's own, or None where it comes from the micro-batches.

        Raises:
            ValueError: neither a loss nor a micro-batch was given.
        """
        self._shield.disarm()  # Should the measuring fail, the flag of an earlier step must not decide this one.
        accumulated, tokens, ids = self.accumulation.finish(), None, list(sample_ids or ())
        if accumulated is not None:
            mean, tokens, earlier = accumulated
            loss, ids = mean if loss is None else loss, [*earlier, *ids]
        value = self._loss(loss)
        self._unscaling.unscale()
        self._pass_on(value, step, limits, tuple(ids), tokens)

    @torch.no_grad()
    def protect(self, limits: Limits, *, step: int) -> None:
        """Clip and shield a step whose loss, or whatever else, could not be read: it has no signals, but a guard."""
        del step
        self.unscale_again()
        self._measure(None, limits, None, [])

    def _loss(self, loss: object) -> Tensor | None:
        return as_tensor(loss, self._probe.device)

    def _pass_on(
        self, loss: Tensor | None, step: int, limits: Limits, sample_ids: tuple[str, ...], tokens: int | None
    ) -> None:
        """Measure a step, and have its row on its way to the host."""
        layers, layer_values = self._readings(step)
        rates = self._learning_rate.effective()
        beside = [rate.reshape(1) for rate in rates if isinstance(rate, Tensor)]
        if layer_values is not None:
            beside.append(layer_values)
        scale = self._unscaling.scale(self._probe.device if loss is None else loss.device)
        row = self._measure(loss, limits, scale, beside)
        if len(self._taken) == _MOST_TAKEN:
            _log.warning("step %d: end_step is not called: nothing is judged, healed or saved", step)
            self._taken.clear()
        taken = _Taken(
            step=step,
            row=row,
            limits=limits,
            sample_ids=sample_ids,
            tokens=tokens,
            loss_mean=self.accumulation.mean,
            rates=tuple(None if isinstance(rate, Tensor) else rate for rate in rates),
            layers=layers,
            steps_ended=self._steps_ended,
            again=self._is_again,
        )
        self._taken.append(taken)
        self.grad_norm = row.norm
        self.measured += 1

    def _readings(self, step: int) -> tuple[tuple[str, ...], Tensor | None]:
        """What the layers have shown after the step before this one."""
        del step
        read, self._layers_read = self._layers_read, None
        return read or ((), None)

    def _measure(self, loss: Tensor | None, limits: Limits, scale: Tensor | None, beside: list[Tensor]) -> Row:
        self._steps_ended = dict(self._shield.steps_ended)
        row, bad = self._probe.measure(loss, limits, scale=scale, beside=beside, again=self._is_again)
        if self._shielded:
            self._shield.arm(bad, row.bad)
        return row

    @property
    def _is_again(self) -> bool:
        """Whether this update was measured before: a closure makes its gradients as often as the optimizer asks."""
        return self._shield.evaluation > 1

    def unscale_again(self) -> None:
        """Divide the gradients by AMP's loss scale, unless that was done already in this step."""
        self._unscaling.unscale(again=True)

    def watch_layers(self, step: int) -> None:
        """Step number `step` goes to the optimizer: keep what its layers' signals need."""
        if self._layer_signals is not None:
            self._layer_signals.before_optimizer(step)

    def settle(self, step: int) -> None:
        """Step number `step` has left the optimizer: measure its layers. Their values go with the next row."""
        self._unscaling.settle(lambda optimizer: self._has_stepped_since(self._steps_ended, optimizer))
        if self._layer_signals is not None:
            self._layers_read = self._layer_signals.after_optimizer()
            self._layer_signals.listen(step + 1)

    def arrived(self, *, step_seconds: float, data_wait_seconds: float, data_position: int | None) -> Iterator[Signals]:
        """The signals of the steps whose values are due; `nonfinite_parameters` goes with the one yielded last."""
        while self._taken and self._is_due():
            taken = self._taken.popleft()
            values = self._values = taken.row.read()
            norm = values.grad_norm
            finite_norm = norm is None or math.isfinite(norm)
            self.nonfinite_parameters = [] if finite_norm else taken.row.nonfinite_parameters()
            self._listen(taken, finite=values.withhold != Withhold.NONFINITE)
            withheld = self._withheld(values)
            beside = iter(values.beside)
            yield Signals(
                step=taken.step,
                loss=values.loss,
                grad_norm=norm,
                layer_grad_norms=values.layer_grad_norms,
                clip_coefficient=values.clip_coefficient,
                huge=values.withhold == Withhold.HUGE,
                # What is withheld needs no other remedy.
                surge=withheld is None and norm is not None and finite_norm and norm > taken.limits.surge_above,
                withheld=withheld,
                amp_loss_scale=values.amp_loss_scale if self._unscaling.scaled else None,
                learning_rates=tuple(next(beside) if rate is None else rate for rate in taken.rates),
                step_seconds=step_seconds,
                data_wait_seconds=data_wait_seconds,
                data_position=data_position,
                sample_ids=taken.sample_ids,
                tokens=taken.tokens,
                loss_mean=taken.loss_mean,
                layers=self._read_layers(taken.layers, tuple(beside)),
                again=taken.again,
            )

    def _is_due(self) -> bool:
        # What the shield has read in the optimizer's step is here already.
        return len(self._taken) > self._lag_steps or self._taken[0].row.known

    def forget(self) -> None:
        """Drop what is on its way: the run has gone back."""
        self._taken.clear()
        self._probe.forget()
        self.accumulation.clear()
        self._layers_read = None
        if self._layer_signals is not None:
            self._layer_signals.forget()

    def remove(self) -> None:
        """Take the shield off the optimizers, and the hooks off the model."""
        self._shield.remove()
        if self._layer_signals is not None:
            self._layer_signals.remove()

    def _listen(self, taken: _Taken, *, finite: bool) -> None:
        """Count the good steps in a row that an optimizer has not made, as far as its hooks tell; say so once."""
        if not finite:  # At an overflow the scaler leaves the optimizer out by itself.
            return
        for number, optimizer in enumerate(self._optimizers):
            heard = self._has_stepped_since(taken.steps_ended, optimizer)
            self._unheard_steps_each[number] = 0 if heard else self._unheard_steps_each[number] + 1
        self.unheard_steps = min(self._unheard_steps_each)
        if self.unheard_steps == _UNHEARD_STEPS or _UNHEARD_STEPS_OF_ONE in self._unheard_steps_each:
            whose = "the optimizer" if self.unheard_steps else "one of the optimizers"
            _log.warning(
                "step %d: for %d steps no step hook of %s has run: nothing is shielded, and the "
                "learning rate cannot be lowered; is it this optimizer that steps, and through its own `step`?",
                taken.step,
                max(self._unheard_steps_each),
                whose,
            )

    def _has_stepped_since(self, steps_ended: dict[int, int], optimizer: Optimizer) -> bool:
        return self._shield.steps_ended[id(optimizer)] != steps_ended[id(optimizer)]

    def _read_layers(self, layers: tuple[str, ...], values: tuple[float, ...]) -> dict[str, LayerReading]:
        return self._layer_signals.read(layers, values) if self._layer_signals is not None else {}

    def _withheld(self, values: RowValues) -> str | None:
        """Why no update came of a step, if none did."""
        norm_finite = values.grad_norm is None or math.isfinite(values.grad_norm)
        if self._unscaling.scaled and not norm_finite and math.isfinite(values.loss):
            return "amp_overflow"
        if not self._shielded or values.withhold == Withhold.NO:
            return None
        return "nonfinite" if values.withhold == Withhold.NONFINITE else "spike"


def as_tensor(loss: object, device: torch.device) -> Tensor:
    """The step's loss as a tensor of one element: a plain number will do as well."""
    if loss is None:
        raise ValueError("before_optimizer needs a loss, or a micro_step before it")
    if isinstance(loss, Real):
        return torch.tensor(float(loss), device=device)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"before_optimizer needs the step's loss as a tensor of one element, found {kind}")
    return loss

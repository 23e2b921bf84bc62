"""The step reader: true norms under any loss scale, the reason why a step was withheld, and signals in step order."""

import functools
import math

import pytest
import torch
from torch import nn

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.step.layer_signals import LayerSignals
from trainer_plugin.step.probe import Limits, Probe
from trainer_plugin.step.reader import StepReader


class Line(nn.Module):
    """One weight of two elements whose gradient is always [3, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> torch.Tensor:
        """3 x + 4 y."""
        return (self.weight * torch.tensor([3.0, 4.0])).sum()


class Reading:
    """A model, its optimizer and their reader."""

    def __init__(self, *, scale: float | None = None, shielded: bool = True, kind=torch.optim.SGD, **options) -> None:
        self.model = Line()
        self.optimizer = kind(self.model.parameters(), lr=1e-3, **options)
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        self.learning_rate = LrFactor([self.optimizer])
        self.reader = StepReader(
            Probe(self.model), [self.optimizer], self.learning_rate, scaler=self.scaler, shielded=shielded
        )
        self.steps = 0

    def step(self, *, unscale: bool = False, gradient: float = 1.0, loss: float = 1.0, limits: Limits | None = None):
        """One step; what is in `gradient` and `loss` is multiplied in. The signals that arrive."""
        self.steps += 1
        self.optimizer.zero_grad()
        value = self.model()
        (value if self.scaler is None else self.scaler.scale(value)).backward()
        self.model.weight.grad.mul_(gradient)
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.reader.take(value * loss, step=self.steps, limits=limits or Limits(), sample_ids=("a",))
        self.gradient = self.model.weight.grad.clone()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return list(self.reader.arrived(step_seconds=0.5, data_wait_seconds=0.1, data_position=7))


def test_signals_say_what_the_step_was():
    """Every field of the signals is the step's own."""
    (signals,) = Reading().step(limits=Limits(max_norm=1.0))
    assert signals.step == 1
    assert signals.loss == 7.0
    assert signals.grad_norm == 5.0
    assert signals.layer_grad_norms == {"weight": 5.0}
    assert signals.clip_coefficient == pytest.approx(0.2)
    assert signals.learning_rates == (1e-3,)
    assert (signals.step_seconds, signals.data_wait_seconds, signals.data_position) == (0.5, 0.1, 7)
    assert signals.sample_ids == ("a",)
    assert (signals.withheld, signals.surge, signals.amp_loss_scale) == (None, False, None)


def test_p09_the_norm_is_the_true_one_under_any_loss_scale():
    """At scale 65536 the norm of [3, 4] is 5.0, and stays 5.0 when the scale halves; no detector sees a spike."""
    reading = Reading(scale=65536.0)
    monitor = Monitor(DetectionConfig(warmup_steps=10, window=10, robust_window=10))
    scales, verdicts = [], []
    for number in range(60):
        if number in (40, 50):
            reading.scaler.update(new_scale=reading.scaler.get_scale() / 2)
        (signals,) = reading.step(limits=Limits(max_norm=1.0))
        assert signals.grad_norm == 5.0
        assert reading.gradient.norm().item() == pytest.approx(1.0, rel=1e-5)
        scales.append(signals.amp_loss_scale)
        verdicts += monitor.update(signals)[1]
    assert sorted(set(scales)) == [16384.0, 32768.0, 65536.0]
    assert verdicts == []


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", [{}, {"fused": True}], ids=["loop", "fused"])
def test_p10_gradients_are_unscaled_exactly_once(unscale, kind):
    """Whether the loop has called `unscale_` itself or not, norm and gradient are right and nothing raises."""
    reading = Reading(scale=65536.0, **kind)
    for _ in range(3):
        before = reading.model.weight.detach().clone()
        (signals,) = reading.step(unscale=unscale)
        assert signals.grad_norm == 5.0
        assert reading.gradient.tolist() == [3.0, 4.0]
        moved = before - reading.model.weight.detach()
        assert moved.tolist() == pytest.approx([3e-3, 4e-3], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "damage", "withheld"),
    [
        ({}, {"gradient": math.nan}, "nonfinite"),
        ({}, {"loss": math.inf}, "nonfinite"),
        ({"scale": 8.0}, {"gradient": math.inf}, "amp_overflow"),
        ({"scale": 8.0}, {"loss": math.nan}, "nonfinite"),
        ({"shielded": False}, {"gradient": math.nan}, None),
    ],
)
def test_a_withheld_step_says_why(options, damage, withheld):
    """A NaN of the run's own, or an overflow of the scaler; without a shield nothing is withheld."""
    reading = Reading(**options)
    before = reading.model.weight.detach().clone()
    (signals,) = reading.step(**damage)
    assert signals.withheld == withheld
    assert torch.equal(before, reading.model.weight) == (withheld is not None)
    assert reading.reader.nonfinite_parameters == (["weight"] if "gradient" in damage else [])
    reading.model.weight.data.fill_(1.0)
    (signals,) = reading.step()
    assert signals.withheld is None
    assert reading.reader.nonfinite_parameters == []


def test_only_a_scalers_own_overflow_halves_the_scale():
    """An overflow halves the scale; a NaN loss over good gradients, withheld by the shield, does not."""
    reading = Reading(scale=8.0)
    reading.step(loss=math.nan)
    assert reading.scaler.get_scale() == 8.0
    reading.step(gradient=math.inf)
    assert reading.scaler.get_scale() == 4.0


def test_rates_that_are_tensors_arrive_with_their_step():
    """A tensor rate travels beside the row, in its place among plain ones, and is that of the step itself."""
    reading = Reading()
    rate = torch.tensor(0.25)
    reading.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": rate})
    reading.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    reading.model().backward()
    reading.reader.take(torch.tensor(1.0), step=1, limits=Limits(), sample_ids=())
    rate.fill_(9.0)
    (signals,) = reading.reader.arrived(step_seconds=0.0, data_wait_seconds=0.0, data_position=None)
    assert signals.learning_rates == (1e-3, 0.25, 0.5)


def test_layers_arrive_with_the_next_step():
    """What was read of a layer after one step is among the signals of the next; a rollback drops it."""
    reading = Reading()
    reading.reader._layer_signals = LayerSignals({"weight": [reading.model.weight]}, [reading.optimizer], every=1)
    for number in range(3):
        reading.reader.watch_layers(number)
        (signals,) = reading.step()
        assert list(signals.layers) == (["weight"] if number else [])
        reading.reader.settle(number)
    assert signals.layers["weight"].update_ratio == pytest.approx(5e-3 / math.sqrt(2.0), rel=2e-2)
    reading.reader.forget()
    assert reading.step()[0].layers == {}


def test_a_surge_is_told():
    """A finite norm above the surge limit is a surge; one that is not finite is none."""
    limits = Limits(max_norm=1.0, surge_above=4.0, surge_clip=0.5)
    reading = Reading()
    (signals,) = reading.step(limits=limits)
    assert signals.surge
    assert signals.clip_coefficient == pytest.approx(0.1)
    (signals,) = reading.step(limits=limits, gradient=math.inf)
    assert not signals.surge


def test_what_is_on_its_way_can_be_forgotten():
    """After a rollback no signal of the undone steps arrives."""
    reading = Reading()
    reading.model().backward()
    reading.reader.take(torch.tensor(1.0), step=1, limits=Limits(), sample_ids=())
    reading.reader.forget()
    assert list(reading.reader.arrived(step_seconds=0.0, data_wait_seconds=0.0, data_position=None)) == []


def test_the_flag_of_an_earlier_step_does_not_decide_a_later_one():
    """When a step cannot be measured, the bad one before it does not withhold it too."""
    reading = Reading()
    reading.step(gradient=math.nan)
    before = reading.model.weight.detach().clone()
    with pytest.raises(ValueError, match="needs a loss"):
        reading.reader.take(None, step=2, limits=Limits(), sample_ids=())
    reading.model.weight.grad.fill_(1.0)
    reading.optimizer.step()
    assert not torch.equal(before, reading.model.weight)


@pytest.mark.parametrize(
    ("options", "kind"), [({}, "hook"), ({"fused": True}, "found_inf"), ({"shielded": False}, "off")]
)
def test_the_kind_of_shield_is_known(options, kind):
    """How a bad step would be withheld is told for `train_info`."""
    assert Reading(**options).reader.shield_kind == kind


@pytest.mark.parametrize("lag_steps", [0, 1])
def test_steps_that_no_hook_hears_of_are_told_once(lag_steps, caplog):
    """An optimizer stepped past its hooks is not shielded: said after ten such steps, and not again."""
    reading = Reading()
    reading.reader._lag_steps = lag_steps
    reading.step()
    reading.optimizer.step = functools.partial(torch.optim.SGD.step.__wrapped__, reading.optimizer)
    for _ in range(14):
        reading.step()
    assert caplog.text.count("no step hook of the optimizer has run") == 1
    assert reading.reader.unheard_steps == 14 - lag_steps
    del reading.optimizer.step
    for _ in range(1 + lag_steps):
        reading.step()
    assert reading.reader.unheard_steps == 0


@pytest.mark.parametrize("kind", [{}, {"fused": True}], ids=["loop", "fused"])
def test_a_scaler_that_leaves_the_optimizer_out_is_not_taken_for_it(kind, caplog):
    """Overflows in a row, in which the scaler does not step the optimizer at all, are nothing to warn of."""
    reading = Reading(scale=2.0**40, **kind)
    for _ in range(14):
        reading.step(gradient=math.inf)
    assert reading.reader.unheard_steps == 0
    assert "no step hook" not in caplog.text

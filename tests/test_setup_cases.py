"""Cases of training by their numbers: tied weights, micro-batches, withheld runs, no gradients, host transfers."""

import math
from collections import Counter

import pytest
import torch
from setups import NO_CHECKPOINTS, Lines, sgd_job
from torch import nn
from torch.overrides import TorchFunctionMode
from training import spoil_gradient, tiny_model

from trainer_plugin.step.probe import Limits, Probe

TO_HOST = {"item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}


class Transfers(TorchFunctionMode):
    """Counts the calls by which a value of a tensor comes to the host, whoever makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in TO_HOST:
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))


def test_p07_a_tied_weight_is_measured_and_shown_once(make_guard):
    """Embedding(10, 4) tied with the output: 0.7071 of the norm of the list with duplicates, and one series."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    job = make_guard(sgd_job(model), data=None)
    loss = nn.functional.cross_entropy(model(torch.arange(10)), torch.arange(10).roll(1))
    loss.backward()
    duplicated = [module.weight.grad.double() for module in model]
    twice = sum(gradient.square().sum() for gradient in duplicated).sqrt().item()
    job.guard.before_optimizer(loss)
    job.guard.end_step()
    page = job.guard.page
    assert page.value("train_grad_norm") / twice == pytest.approx(0.7071, abs=5e-5)
    shown = [line for line in page.render().decode().splitlines() if line.startswith("train_layer_grad_norm{")]
    assert len(shown) == 1
    assert 'layer="0"' in shown[0]
    assert page.value("train_layer_grad_norm", "0") == page.value("train_grad_norm")


def test_p12_more_micro_batches_raise_no_spike(make_guard):
    """Going from 1 to 4 micro-batches of the same data changes neither loss nor norm, and nothing is detected."""
    heard = []
    job = make_guard(sgd_job(tiny_model()), mode="observe", data=None, on_signals=heard.append, **NO_CHECKPOINTS)
    for step in range(60):
        batches = torch.randn(4, 16, 4, generator=torch.Generator().manual_seed(0))
        for batch in batches if step >= 40 else [batches.flatten(0, 1)]:
            loss = nn.functional.mse_loss(job.model(batch), batch.sum(1, keepdim=True))
            (loss / (4 if step >= 40 else 1)).backward()
            job.guard.micro_step(loss)
        job.guard.before_optimizer()
        job.optimizer.zero_grad()  # No step of it: the same data has the same loss all along.
        job.guard.end_step()
    for before, after in zip(heard[20:40], heard[40:], strict=True):
        assert after.loss == pytest.approx(before.loss, rel=1e-5)
        assert after.grad_norm == pytest.approx(before.grad_norm, rel=1e-5)
    page = job.guard.page.render().decode()
    assert not [s for s in page.splitlines() if s.startswith("train_detections_total") and not s.endswith(" 0.0")]


def test_p15_a_run_without_updates_is_seen(make_guard):
    """20 withheld iterations are 20 skipped, 0 applied and an update of 0; at the tenth, TrainNoUpdates reads 10."""
    job = make_guard(metrics={"layers_every": 1}, **NO_CHECKPOINTS)
    page, weights = job.guard.page, job.weights()
    for iteration in range(20):
        job.step(spoil_gradient)
        if iteration == 9:
            assert page.value("train_steps_withheld") == 10
    assert page.value("train_steps_skipped_total", "nonfinite") == 20
    assert page.value("train_steps_applied_total") == 0
    assert [page.value("train_layer_update_ratio", layer) for layer in ("0", "3")] == [0.0, 0.0]
    assert all(torch.equal(before, after) for before, after in zip(weights, job.weights(), strict=True))
    job.step()
    job.step()
    assert page.value("train_steps_applied_total") == 2
    assert page.value("train_layer_update_ratio", "0") > 0.0
    assert page.value("train_steps_withheld") == 0


def test_p16_without_gradients_there_is_no_norm(make_guard):
    """With every gradient None the norm is absent and not available, never 0.0, and no detector speaks of it."""
    heard = []
    job = make_guard(sgd_job(tiny_model()), data=None, on_signals=heard.append, **NO_CHECKPOINTS)
    page = job.guard.page

    def step(*, gradients: bool) -> None:
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(job.guard.step % 5))
        loss = nn.functional.mse_loss(job.model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        if not gradients:
            job.optimizer.zero_grad()
        job.guard.before_optimizer(loss)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.guard.end_step()

    for _ in range(30):
        step(gradients=True)
    assert page.value("train_grad_norm") > 0.0
    for _ in range(30):
        step(gradients=False)
        assert page.value("train_grad_norm") is None
        assert page.value("train_grad_norm_available") == 0.0
        assert page.value("train_layer_grad_norm", "0") is None
    assert [signals.grad_norm for signals in heard[30:]] == [None] * 30
    shown = page.render().decode().splitlines()
    assert not [s for s in shown if s.startswith("train_detections_total") and not s.endswith(" 0.0")]
    assert not [s for s in shown if s.startswith(("train_grad_norm{", "train_layer_grad_norm{"))]
    step(gradients=True)
    assert page.value("train_grad_norm_available") == 1.0


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_p28_a_step_costs_one_host_transfer(make_guard, options):
    """96 layers, accumulation 4, 10 steps: one `tolist` a step brings all, and the norms are those before the clip.

    Counted is every call of `TO_HOST` in the whole step, the optimizer's own included. A `float` comes on top, on a CPU
    alone, where it is no transfer: the second look at a norm that is not finite. The next test shows that it goes.
    """
    heard = []
    job = make_guard(sgd_job(Lines(96), **options), data=None, on_signals=heard.append, **NO_CHECKPOINTS)
    transfers = Transfers()
    for _ in range(10):
        with transfers:
            for _ in range(4):
                loss = job.model(5.0)
                (loss / 4).backward()
                assert job.guard.micro_step(loss) is None
            job.guard.before_optimizer()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.guard.end_step()
    assert transfers.calls == {"tolist": 10, "__float__": 10}
    assert len(heard) == 10
    for signals in heard:
        assert len(signals.layer_grad_norms) == 96
        assert set(signals.layer_grad_norms.values()) == {5.0}  # 4 x 1.25.
        assert signals.grad_norm == pytest.approx(5.0 * math.sqrt(96))
        assert signals.clip_coefficient == pytest.approx(1.0 / signals.grad_norm)
    assert job.guard.page.value("train_guard_errors_total") == 0


def test_p28_away_from_a_cpu_measuring_makes_no_transfer():
    """On the meta device, which has no values, 96 layers are measured and clipped without any call for one."""
    model = Lines(96).to("meta")
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)
    with Transfers() as transfers:
        Probe(model).measure(torch.empty((), device="meta"), Limits(max_norm=1.0))
    assert transfers.calls == {}

"""What the job puts on its page after each step."""

import math
from dataclasses import replace

import numpy as np
import pytest
from curves import signals
from msgspec import to_builtins
from prometheus_client.parser import text_string_to_metric_families

from exporter.catalog import CATALOG, THRESHOLDS
from exporter.page import Page
from trainer_plugin.config import read_config
from trainer_plugin.detection.detectors import DetectionConfig, Verdict
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.readings import Readings
from trainer_plugin.metrics import Metrics, Standing
from trainer_plugin.policy.budget import BudgetConfig

LAYERS = ("h.0", "h.1")
INFO = {
    "framework": "torch", "torch": "2.13.0", "world_size": "1", "mode": "auto", "data_rewind": "exact",
    "loss_mean": "none", "shield": "hook",
}  # fmt: skip
UNKNOWN = Monitor(read_config({}).detection).update(signals(0, math.nan, grad_norm=None))[0]
STANDING = Standing(
    steps_total=1, lr_factor=1.0, clip_max_norm=1.0, incident_open=False, loop_up=True, rollback_target_step=-1,
    checkpoint_steps={"local": -1, "shared": -1}, checkpoint_seconds={},
    scene_step=-1,
)  # fmt: skip


def found(page):
    """Every series of the page: (name, label values without run and rank) -> value."""
    return {
        (sample.name, *(value for key, value in sample.labels.items() if key not in ("run", "rank"))): sample.value
        for family in text_string_to_metric_families(page.render().decode())
        for sample in family.samples
    }


def known(**changes):
    """Readings of a run under way."""
    fields = dict.fromkeys(Readings.__struct_fields__, 1.0)
    fields |= {"loss_high_steps": dict.fromkeys((1.2, 1.5, 2.0, 3.0), 0), "loss_unrecovered_steps": 0}
    fields |= {"grad_norm_high_steps": dict.fromkeys((3.0, 10.0), 0), "withheld_steps": 0, "amp_scale_collapsed": False}
    return Readings(**{**fields, **changes})


def verdict(detector, signal):
    """A verdict of the last step."""
    return Verdict(detector=detector, signal=signal, step=1, value=1.0, baseline=1.0, first_step=1)


@pytest.fixture
def page():
    """A page of rank 0."""
    return Page(run="gpt-0")


@pytest.fixture
def metrics(page):
    """A job's metrics, before the first step."""
    return Metrics(page, read_config({}), layers=LAYERS, info=INFO, scaled=True)


def test_before_the_first_step_the_known_is_there(metrics, page):
    """Layers' counters at 0, the thresholds and what runs are on the page before any step."""
    del metrics
    series = found(page)
    for layer in LAYERS:
        assert series["train_layer_nonfinite_total", layer] == 0.0
    assert series["train_info", *INFO.values()] == 1.0
    assert series["train_steps_total",] == 0.0
    assert ("train_loss",) not in series


def test_info_has_the_labels_of_the_catalog():
    """The job's facts come in the order of the catalog's labels."""
    (metric,) = [m for m in CATALOG if m.name == "train_info"]
    assert tuple(key for key, _ in metric.labels) == tuple(INFO)


def test_thresholds_are_the_jobs_own(page):
    """Each threshold on the page is the one that this job was given (R21)."""
    config = read_config(
        {
            "detection": {"warmup_steps": 7, "loss_ratio": 2.5, "sustained_steps": 90, "robust_score": 9.5},
            "actions": {"alert_grace_seconds": 4.5},
            "budget": {"rollbacks_per_day": 8, "lr_floor": 0.25},
            "checkpoints": {"every": 70},
        }
    )
    Metrics(page, config, layers=(), info=INFO)
    shown = {key[1]: value for key, value in found(page).items() if key[0] == "train_threshold"}
    assert tuple(shown) == THRESHOLDS
    given = {
        "warmup_steps": 7, "loss_ratio": 2.5, "sustained_steps": 90, "robust_score": 9.5, "alert_grace_seconds": 4.5,
        "rollbacks_per_day": 8, "lr_floor": 0.25, "checkpoint_every_steps": 70,
    }  # fmt: skip
    defaults = {**to_builtins(DetectionConfig()), **to_builtins(BudgetConfig())}
    del defaults["planned_change_steps"]  # No number.
    assert shown == {**defaults, **given}


def test_a_step_is_on_the_page_as_it_was(metrics, page):
    """Loss, norms, rates, times and readings are shown under their names."""
    step = signals(
        1, 2.5, grad_norm=0.5, layer_grad_norms={"h.0": 0.3, "h.1": 0.4}, learning_rates=(1e-3, 1e-4),
        amp_loss_scale=1024.0, sample_ids=("a", "b"), step_seconds=0.2, data_wait_seconds=0.03,
    )  # fmt: skip
    readings = known(
        loss_ema=2.4, loss_mean=2.3, loss_robust_center=2.2, grad_norm_robust_scale=0.7, loss_unrecovered_steps=9,
        withheld_steps=3, loss_high_steps={1.2: 4, 1.5: 3, 2.0: 2, 3.0: 1}, grad_norm_high_steps={3.0: 6, 10.0: 5},
    )  # fmt: skip
    metrics.show(step, readings, [], now=100.0)
    metrics.stand(1, STANDING)
    series = found(page)
    expected = {
        ("train_loss",): 2.5, ("train_grad_norm",): 0.5, ("train_layer_grad_norm", "h.1"): 0.4,
        ("train_learning_rate", "0"): 1e-3, ("train_learning_rate", "1"): 1e-4, ("train_amp_loss_scale",): 1024.0,
        ("train_samples_total",): 2.0, ("train_step_seconds_sum",): 0.2, ("train_data_wait_seconds_sum",): 0.03,
        ("train_loss_ema",): 2.4, ("train_loss_mean",): 2.3, ("train_loss_robust_center",): 2.2,
        ("train_grad_norm_robust_scale",): 0.7, ("train_loss_unrecovered_steps",): 9.0, ("train_steps_withheld",): 3.0,
        ("train_loss_high_steps", "1.2"): 4.0, ("train_loss_high_steps", "3"): 1.0,
        ("train_grad_norm_high_steps", "10"): 5.0, ("train_loss_ema_ratio_count",): 1.0,
    }  # fmt: skip
    assert {key: series[key] for key in expected} == expected


def test_what_is_not_there_is_absent_and_what_is_not_known_yet_is_nan(metrics, page):
    """Without a gradient or a scaler there is no series for it; a baseline to come is NaN; neither is ever 0."""
    metrics.show(signals(1, 2.0, grad_norm=None), UNKNOWN, [], now=0.0)
    series = found(page)
    for name in ("train_grad_norm", "train_amp_loss_scale", "train_grad_norm_recent_max"):
        assert (name,) not in series
    for name in ("train_loss_ema", "train_loss_mean", "train_loss_robust_scale"):
        assert math.isnan(series[name,])
    assert series["train_grad_norm_available",] == 0.0
    assert series["train_loss_ema_ratio_count",] == series["train_loss_zscore_count",] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_shown_and_spoils_nothing(metrics, page, value):
    """NaN and Inf are on the page as such; histograms and recent maxima go on without them (R5)."""
    metrics.show(signals(1, 2.0), known(), [], now=0.0)
    step = signals(2, value, grad_norm=value, layer_grad_norms={"h.0": 1.0, "h.1": value})
    metrics.show(step, known(loss_ema_ratio=value, loss_robust_score=value), [], now=1.0)
    series = found(page)
    assert repr(series["train_loss",]) == repr(series["train_grad_norm",]) == repr(value)
    assert series["train_loss_ema_ratio_count",] == series["train_loss_robust_score_count",] == 1.0
    assert math.isfinite(series["train_loss_ema_ratio_sum",])
    assert series["train_loss_recent_max",] == 2.0
    assert (series["train_layer_nonfinite_total", "h.0"], series["train_layer_nonfinite_total", "h.1"]) == (0.0, 1.0)


def test_verdicts_are_counted(metrics, page):
    """Each verdict counts by detector and signal; what is not finite also by place."""
    said = [verdict("robust", "loss"), verdict("nonfinite", "loss"), verdict("nonfinite", "grad_norm")]
    for _ in range(2):
        metrics.show(signals(1, 2.0), known(), said, now=0.0)
    series = found(page)
    assert series["train_detections_total", "robust", "loss"] == 2.0
    assert series["train_detections_total", "nonfinite", "grad_norm"] == 2.0
    assert [series["train_nonfinite_total", where] for where in ("loss", "grad", "weight")] == [2.0, 2.0, 0.0]


@pytest.mark.parametrize("reason", ["nonfinite", "amp_overflow", "spike"])
def test_withheld_updates_are_counted_by_reason(metrics, page, reason):
    """A withheld step counts under its reason; AMP's own also as an overflow."""
    metrics.show(signals(1, 2.0, withheld=reason), known(), [], now=0.0)
    series = found(page)
    assert series["train_steps_skipped_total", reason] == 1.0
    assert sum(value for key, value in series.items() if key[0] == "train_steps_skipped_total") == 1.0
    assert series["train_amp_overflows_total",] == (reason == "amp_overflow")


def test_a_spike_between_two_scrapes_is_seen(metrics, page):
    """One step at 9.0 is in the histogram for good and in the maximum for a minute, for any scraper (case R18)."""
    for second, loss in enumerate([2.0] * 5 + [9.0] + [2.0] * 5):
        metrics.show(signals(second, loss), known(loss_ema_ratio=loss / 2.0), [], now=float(second))
    for _ in range(2):
        series = found(page)
        assert series["train_loss",] == 2.0
        assert series["train_loss_recent_max",] == 9.0
        above = series["train_loss_ema_ratio_count",] - series["train_loss_ema_ratio_bucket", "3.0"]
        assert above == 1.0
    metrics.show(signals(20, 2.0), known(), [], now=65.0)
    assert found(page)["train_loss_recent_max",] == 9.0
    metrics.show(signals(21, 2.0), known(), [], now=65.5)
    assert found(page)["train_loss_recent_max",] == 2.0


def test_the_recent_maximum_is_that_of_the_last_minute(metrics, page):
    """At every step the maximum is that of the finite values of the last 60 s, as counted the slow way."""
    rng = np.random.default_rng(0)
    now, history = 0.0, []
    for step in range(500):
        now += float(rng.exponential(5.0))
        loss = math.nan if step % 7 == 0 else float(rng.lognormal())
        history.append((now, loss))
        metrics.show(signals(step, loss), known(), [], now=now)
        recent = [value for at, value in history if now - at <= 60.0 and math.isfinite(value)]
        assert page.value("train_loss_recent_max") == (max(recent) if recent else None)


def test_a_maximum_that_is_over_goes_away(metrics, page):
    """When a whole minute had no finite value there is no maximum, rather than an old one."""
    metrics.show(signals(1, 2.0), known(), [], now=0.0)
    metrics.show(signals(2, math.nan), known(), [], now=61.0)
    assert ("train_loss_recent_max",) not in found(page)


def test_the_standing_is_on_the_page(metrics, page):
    """Step, counters and state are shown; the counter of steps only ever goes up, the step goes back."""
    metrics.stand(500, replace(STANDING, steps_total=500, checkpoint_steps={"local": 400, "shared": 300}))
    standing = replace(
        STANDING, steps_total=501, lr_factor=0.5, clip_max_norm=0.25, incident_open=True, loop_up=False,
        rollback_target_step=300, checkpoint_steps={"local": 400, "shared": 400}, checkpoint_seconds={"local": 1.5},
        scene_step=350, restore_proofs={"equal": 2, "different": 1},
    )  # fmt: skip
    metrics.stand(301, standing)
    series = found(page)
    expected = {
        ("train_step",): 301.0, ("train_steps_total",): 501.0, ("train_lr_factor",): 0.5,
        ("train_clip_max_norm",): 0.25, ("train_incident_open",): 1.0, ("train_control_loop_up",): 0.0,
        ("train_rollback_target_step",): 300.0, ("train_checkpoint_step", "shared", "periodic"): 400.0,
        ("train_checkpoint_seconds", "local"): 1.5, ("train_restore_proofs_total", "equal"): 2.0,
        ("train_restore_proofs_total", "different"): 1.0,
        ("train_checkpoint_step", "shared", "scene"): 350.0,
    }  # fmt: skip
    assert {key: series[key] for key in expected} == expected
    metrics.stand(302, standing)
    assert found(page)["train_restore_proofs_total", "equal"] == 2.0


def test_a_run_that_does_not_clip_shows_no_limit(metrics, page):
    """Without a clip there is no number for it."""
    metrics.stand(1, replace(STANDING, clip_max_norm=None))
    assert ("train_clip_max_norm",) not in found(page)


def test_series_do_not_grow_in_a_long_and_eventful_run(page):
    """10,000 steps with spikes, NaN, skips and rollbacks show as many series as the first step (case P24)."""
    layers = tuple(f"h.{number}" for number in range(48))
    metrics, rng = Metrics(page, read_config({}), layers=layers, info=INFO), np.random.default_rng(0)
    said = [[], [verdict("robust", "loss")], [verdict("nonfinite", "grad_norm"), verdict("ema_ratio", "grad_norm")]]
    reasons = (None, "nonfinite", "amp_overflow", "spike")
    counts = set()
    for number in range(10_000):
        loss = math.nan if number % 211 == 210 else float(rng.lognormal())
        eventful = number % 200 == 199
        step = signals(
            number % 2000, loss, grad_norm=float(rng.lognormal()), amp_loss_scale=1024.0, data_position=number,
            layer_grad_norms=dict.fromkeys(layers, loss), withheld=reasons[number % 4] if eventful else None,
            sample_ids=(f"sample-{number}",),
        )  # fmt: skip
        metrics.show(step, known(loss_ema_ratio=loss), said[number % 3] if eventful else [], now=number * 0.1)
        metrics.stand(number % 2000, replace(STANDING, steps_total=number + 1, checkpoint_seconds={"local": 1.0}))
        if number % 3333 == 0:
            counts.add(len(found(page)))
    assert len(counts) == 1
    assert b"sample-" not in page.render()

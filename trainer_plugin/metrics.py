"""What the job shows after each step: signals, readings and state, put on the metrics page."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from exporter.catalog import THRESHOLDS, TIERS
from exporter.page import Page
from trainer_plugin.config import Config
from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.readings import Readings
from trainer_plugin.signals import Signals

_RECENT_SECONDS = 60.0
# Readings whose field is the metric's name without its prefix; NaN means "not known yet".
_READING_GAUGES = (
    "loss_ema",
    "grad_norm_ema",
    "loss_mean",
    "loss_stddev",
    "loss_robust_center",
    "loss_robust_scale",
    "grad_norm_robust_center",
    "grad_norm_robust_scale",
)
_READING_HISTOGRAMS = (
    "loss_ema_ratio",
    "grad_norm_ema_ratio",
    "loss_zscore",
    "loss_robust_score",
    "grad_norm_robust_score",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the run stands at a boundary, beside its signals."""

    steps_total: int
    lr_factor: float
    clip_max_norm: float | None
    incident_open: bool
    loop_up: bool
    rollback_target_step: int
    checkpoint_steps: dict[str, int]
    checkpoint_seconds: dict[str, float]
    scene_step: int
    restore_proofs: dict[str, int] = field(default_factory=dict)


class Metrics:
    """The job's page, filled. Every series that can be known beforehand exists before the first step.

    `layers` are all layers; `moments` those that are read by turns, each with the moments that its optimizer keeps.
    """

    def __init__(
        self,
        page: Page,
        config: Config,
        *,
        layers: Iterable[str],
        info: dict[str, str],
        scaled: bool = False,
        steps_total: int = 0,
        moments: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.page = page
        self._recent = {"loss": _RecentMax(), "grad_norm": _RecentMax()}
        self._layers_shown: frozenset[str] = frozenset()
        for layer in layers:
            page.add("train_layer_nonfinite_total", 0.0, layer)
        # NaN until the first value: a series that comes later would be a gap in every rule that needs it.
        for layer, kept in (moments or {}).items():
            page.set("train_layer_weight_norm", math.nan, layer)
            page.set("train_layer_update_ratio", math.nan, layer)
            for moment in kept:
                page.set("train_layer_moment_norm", math.nan, layer, moment)
            if config.metrics.activations:
                page.set("train_layer_activation_max", math.nan, layer)
        for tier in TIERS:
            page.set("train_checkpoint_seconds", math.nan, tier)
        # From the first scrape on: a counter that begins at 0 and then jumps is a burst of steps to every rate().
        page.add("train_steps_total", float(steps_total))
        if scaled:
            page.add("train_amp_overflows_total", 0.0)
        for name, value in _thresholds(config).items():
            page.set("train_threshold", value, name)
        self._info = info
        page.set("train_info", 1.0, *info.values())

    def show(self, signals: Signals, readings: Readings, verdicts: list[Verdict], now: float) -> None:
        """Put one step on the page. The caller holds `page.update()` around this and `stand`."""
        page = self.page
        self._show_signals(signals, now)
        self._show_layers(signals)
        self._show_data(signals)
        for name in _READING_GAUGES:
            page.set(f"train_{name}", getattr(readings, name))
        for name in _READING_HISTOGRAMS:
            page.observe(f"train_{name}", getattr(readings, name))
        for signal, counts in (("loss", readings.loss_high_steps), ("grad_norm", readings.grad_norm_high_steps)):
            for level, steps in counts.items():
                page.set(f"train_{signal}_high_steps", steps, f"{level:g}")
        page.set("train_loss_unrecovered_steps", readings.loss_unrecovered_steps)
        page.set("train_steps_withheld", readings.withheld_steps)
        for verdict in verdicts:
            page.add("train_detections_total", 1.0, verdict.detector, verdict.signal)
            if verdict.detector == "nonfinite":
                page.add("train_nonfinite_total", 1.0, "loss" if verdict.signal == "loss" else "grad")

    def show_own(self, signals: Signals, rank: int) -> None:
        """Put on the page what every rank shows of itself, where this is not the first one."""
        page = self.page
        page.observe("train_step_seconds", signals.step_seconds)
        page.observe("train_data_wait_seconds", signals.data_wait_seconds)
        if rank in signals.loss_ranks:
            page.add("train_nonfinite_total", 1.0, "loss")
        if rank in signals.gradient_ranks:
            page.add("train_nonfinite_total", 1.0, "grad")

    def _show_signals(self, signals: Signals, now: float) -> None:
        page = self.page
        page.set("train_loss", signals.loss)
        page.set_known("train_grad_norm", signals.grad_norm)
        page.set("train_grad_norm_available", float(signals.grad_norm is not None))
        if signals.huge:
            page.add("train_grad_norm_huge_total")
        for signal, value in (("loss", signals.loss), ("grad_norm", signals.grad_norm)):
            page.set_known(f"train_{signal}_recent_max", self._recent[signal].update(now, value))
        for group, rate in enumerate(signals.learning_rates):
            page.set("train_learning_rate", rate, str(group))
        if signals.amp_loss_scale is not None:
            page.set("train_amp_loss_scale", signals.amp_loss_scale)
        if signals.withheld == "amp_overflow":
            page.add("train_amp_overflows_total")
        if signals.withheld is not None:
            page.add("train_steps_skipped_total", 1.0, signals.withheld)
        else:
            page.add("train_steps_applied_total")
        page.observe("train_step_seconds", signals.step_seconds)
        page.observe("train_data_wait_seconds", signals.data_wait_seconds)

    def _show_layers(self, signals: Signals) -> None:
        """Gradient norms of this step, and what the layers whose turn it was have read."""
        page = self.page
        for layer in self._layers_shown.difference(signals.layer_grad_norms):
            page.clear("train_layer_grad_norm", layer)  # No gradient in this step: its last norm is not this step's.
        self._layers_shown = frozenset(signals.layer_grad_norms)
        for layer, norm in signals.layer_grad_norms.items():
            page.set("train_layer_grad_norm", norm, layer)
            if not math.isfinite(norm):
                page.add("train_layer_nonfinite_total", 1.0, layer)
        for layer, reading in signals.layers.items():
            page.set("train_layer_weight_norm", reading.weight_norm, layer)
            self._keep("train_layer_update_ratio", reading.update_ratio, layer)
            self._keep("train_layer_moment_norm", reading.first_moment_norm, layer, "first")
            self._keep("train_layer_moment_norm", reading.second_moment_norm, layer, "second")
            self._keep("train_layer_activation_max", reading.activation_max, layer)

    def _keep(self, name: str, value: float | None, *labels: str) -> None:
        """What was there at the start is NaN where a turn has read nothing, such as moments before the first update."""
        there = self.page.value(name, *labels) is not None
        self.page.set_known(name, math.nan if value is None and there else value, *labels)

    def _show_data(self, signals: Signals) -> None:
        """What the loop tells of its data; absent where it tells nothing."""
        page = self.page
        samples = len(signals.sample_ids) if signals.samples is None else signals.samples
        if samples:
            page.add("train_samples_total", samples)
        if signals.tokens is not None:
            page.add("train_tokens_total", signals.tokens)
        if signals.loss_mean != self._info["loss_mean"]:
            page.clear("train_info", *self._info.values())
            self._info = {**self._info, "loss_mean": signals.loss_mean}
            page.set("train_info", 1.0, *self._info.values())

    def stand(self, step: int, standing: Standing) -> None:
        """Put the state of the run on the page."""
        page = self.page
        page.set("train_step", step)
        page.add("train_steps_total", standing.steps_total - (page.value("train_steps_total") or 0.0))
        page.set("train_lr_factor", standing.lr_factor)
        if standing.clip_max_norm is not None:
            page.set("train_clip_max_norm", standing.clip_max_norm)
        page.set("train_incident_open", float(standing.incident_open))
        page.set("train_control_loop_up", float(standing.loop_up))
        page.set("train_rollback_target_step", standing.rollback_target_step)
        for tier, saved in standing.checkpoint_steps.items():
            page.set("train_checkpoint_step", saved, tier, "periodic")
        # They lie in the run's folder, which job and receiver share.
        page.set("train_checkpoint_step", standing.scene_step, "shared", "scene")
        for tier, seconds in standing.checkpoint_seconds.items():
            page.set("train_checkpoint_seconds", seconds, tier)
        for outcome, count in standing.restore_proofs.items():
            name = "train_restore_proofs_total"
            page.add(name, count - (page.value(name, outcome) or 0.0), outcome)


class _RecentMax:
    """The largest finite value of the last minute, in amortised constant time and for any number of scrapers."""

    def __init__(self) -> None:
        self._falling: deque[tuple[float, float]] = deque()

    def update(self, now: float, value: float | None) -> float | None:
        while self._falling and now - self._falling[0][0] > _RECENT_SECONDS:
            self._falling.popleft()
        if value is not None and math.isfinite(value):
            while self._falling and self._falling[-1][1] <= value:
                self._falling.pop()
            self._falling.append((now, value))
        return self._falling[0][1] if self._falling else None


def _thresholds(config: Config) -> dict[str, float]:
    options = {
        **msgspec.to_builtins(config.detection),
        **msgspec.to_builtins(config.budget),
        "alert_grace_seconds": config.actions.alert_grace_seconds,
        "checkpoint_every_steps": max(tier.every for tier in config.checkpoints.tiers.values()),
    }
    return {name: options[name] for name in THRESHOLDS}

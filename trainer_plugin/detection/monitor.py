"""The monitor: all detectors over one run's signals, step by step, and the readings that the job exports."""

import math
from typing import Any

from exporter.catalog import GRAD_NORM_RATIO_LEVELS, LOSS_RATIO_LEVELS
from trainer_plugin.detection.continuity import Continuity
from trainer_plugin.detection.detectors import DetectionConfig, EmaRatio, RollingSigma, Verdict
from trainer_plugin.detection.drift import Drift
from trainer_plugin.detection.hard_batches import HardBatches
from trainer_plugin.detection.layer_baselines import LayerBaselines
from trainer_plugin.detection.level import Level
from trainer_plugin.detection.loss_scale import LossScale
from trainer_plugin.detection.nonfinite import NonFinite
from trainer_plugin.detection.oscillation import Oscillation
from trainer_plugin.detection.readings import Readings
from trainer_plugin.detection.recovery import HighSteps, Recovery
from trainer_plugin.detection.robust import Robust
from trainer_plugin.detection.spikes import Spikes
from trainer_plugin.detection.weight_jumps import WeightJumps
from trainer_plugin.signals import Signals

# In a log of every nth step a new level must be seen for some lines before it is believed.
_LEAST_LEVEL_VALUES = 50
# A level is a median of 32 values: it wanders by a fifth of their deviation, or more where they hang together.
_LEVEL_SCORE = 4.0
_NOTHING_SAID = (None,) * 8


class Monitor:
    """Every detector over one run. `ACTING` names those whose verdicts open an incident (R5, R7, R10)."""

    ACTING = frozenset(
        {
            ("nonfinite", "loss"), ("nonfinite", "grad_norm"), ("robust", "loss"), ("robust", "grad_norm"),
            ("ema_ratio", "grad_norm"), ("drift", "loss"), ("drift", "grad_norm"), ("oscillation", "loss"),
            ("drift", "amp_loss_scale"),
        }
    )  # fmt: skip

    _BACK_RATIO = 0.5  # Half of the least score that is a verdict: well inside the band again.

    def __init__(self, config: DetectionConfig) -> None:
        self._config = config
        warmup = config.warmup_steps
        self._loss_ema = EmaRatio("loss", alpha=config.ema_alpha, ratio=config.loss_ratio, warmup_steps=warmup)
        self._grad_norm_ema = EmaRatio(
            "grad_norm", alpha=config.ema_alpha, ratio=config.grad_norm_ratio, warmup_steps=warmup
        )
        self._loss_sigma = RollingSigma("loss", window=config.window, sigma=config.sigma, warmup_steps=warmup)
        robust = {"window": config.robust_window, "score": config.robust_score, "warmup_steps": warmup}
        self._loss_robust = Robust("loss", **robust, least_ratio=config.robust_least_ratio)  # type: ignore[arg-type]
        self._grad_norm_robust = Robust("grad_norm", **robust, log=True, least_ratio=config.loss_ratio)  # type: ignore[arg-type]
        self._drift = Drift("loss", limit=config.drift_limit, least_ratio=config.drift_least_ratio)
        self._loss_level = Level("loss", least_ratio=config.level_least_ratio)
        self._grad_norm_level = Level("grad_norm", least_ratio=config.grad_norm_ratio)
        self._oscillation = Oscillation(
            "loss", spikes=config.oscillation_spikes, window=config.robust_window, least_ratio=config.robust_least_ratio
        )
        self._hard_batches = HardBatches()
        self._recovery = Recovery()
        self._norm_recovery = Recovery()
        self._loss_scale = LossScale(
            floor=config.amp_scale_floor, ceiling=config.amp_scale_ceiling, tell_steps=config.sustained_steps
        )
        self._nonfinite = NonFinite()
        self._layers = LayerBaselines(alpha=config.ema_alpha)
        self._weight_jumps = WeightJumps()
        self._spikes = Spikes()
        self._continuity = Continuity(
            gap_steps=config.relearn_steps, window=config.robust_window, planned=config.planned_change_steps
        )
        self._loss_high_steps = HighSteps(LOSS_RATIO_LEVELS)
        self._grad_norm_high_steps = HighSteps(GRAD_NORM_RATIO_LEVELS)
        self._rewound: dict[str, Any] = {
            "loss_ema": self._loss_ema, "grad_norm_ema": self._grad_norm_ema, "loss_sigma": self._loss_sigma,
            "loss_robust": self._loss_robust, "grad_norm_robust": self._grad_norm_robust, "drift": self._drift,
            "loss_level": self._loss_level, "grad_norm_level": self._grad_norm_level, "layers": self._layers,
            "oscillation": self._oscillation, "continuity": self._continuity, "hard_batches": self._hard_batches,
            "recovery": self._recovery, "norm_recovery": self._norm_recovery, "loss_scale": self._loss_scale,
            "loss_high_steps": self._loss_high_steps, "grad_norm_high_steps": self._grad_norm_high_steps,
            "nonfinite": self._nonfinite, "weight_jumps": self._weight_jumps, "spikes": self._spikes,
        }  # fmt: skip
        # Of the step judged last; NaN for what is not known.
        self._knows_hard_batches = False
        self._judged = self._loss_ratio = self._grad_norm_ratio = self._loss_score = self._grad_norm_score = math.nan

    @property
    def warm(self) -> bool:
        """Whether finite values are judged by now."""
        return self._loss_robust.warm

    @property
    def surge_above(self) -> float:
        """The gradient norm above which the next step is a surge (R10); infinite during warm-up."""
        ema = self._grad_norm_ema.ema
        if ema is None or ema <= 0.0 or not self._grad_norm_robust.warm:
            return math.inf
        return self._config.grad_norm_ratio * ema

    @property
    def grad_norm_baseline(self) -> float:
        """The outlier-free baseline of the gradient norm before clipping; infinite while there is none."""
        return math.inf if self._grad_norm_ema.ema is None else self._grad_norm_ema.ema

    @property
    def band_limits(self) -> tuple[float, float]:
        """Loss and gradient norm above which the next one is out of its band; infinite during warm-up."""
        return self._loss_robust.limit, self._grad_norm_robust.limit

    def spike_limits(self, step: int, *, all_spikes: bool) -> tuple[float, float]:
        """Loss and norm above which this step, the next, is a spike: in a row by R1, or all of them by their bands."""
        if self._continuity.is_announced(step) or not (all_spikes or self._spikes.alone(step)):
            return math.inf, math.inf
        return self.band_limits if all_spikes else (max(self._loss_robust.limit, self._loss_ema.limit), math.inf)

    def update(self, signals: Signals) -> tuple[Readings, list[Verdict]]:
        """Take in one step; return what to export and what the detectors say."""
        verdicts = self.judge(signals)
        return self.readings(), verdicts

    def judge(self, signals: Signals) -> list[Verdict]:
        """Take in one step; return what the detectors say."""
        loss, step = signals.loss, signals.step
        grad_norm = math.nan if signals.grad_norm is None else signals.grad_norm
        overflow = signals.withheld == "amp_overflow"  # The scaler's own business: no verdict, nothing learnt.
        verdicts = self._nonfinite.update(signals)
        scale_verdict = self._loss_scale.update(step, signals.amp_loss_scale)
        change = self._continuity.update(step, signals.learning_rates)
        if change is not None:
            self._meet(change)
        # Ratios and scores are to the baselines of the steps before, which have not learnt from this one.
        warm = self._loss_robust.warm
        self._loss_ratio = self._loss_ema.ratio(loss) if warm else math.nan  # R1: in warm-up nothing finite is a spike.
        self._grad_norm_ratio = self._grad_norm_ema.ratio(grad_norm) if warm else math.nan
        self._loss_high_steps.update(self._loss_ratio)
        self._grad_norm_high_steps.update(self._grad_norm_ratio)
        sigma_verdict = self._loss_sigma.update(step, loss)

        settled = self._recovery.unrecovered_steps == 0 and not overflow
        loss_verdict, drift, oscillation = self._judge_loss(step, loss, judge=settled and warm, learn=settled)
        self._knows_hard_batches = self._hard_batches.update(loss_verdict)
        left = drift or loss_verdict
        norm_verdict = self._grad_norm_robust.update(step, grad_norm, learn=settled and left is None)
        if settled and not (left or norm_verdict or self._norm_recovery.unrecovered_steps):
            norm_verdict = self._judge_norm_level(step, grad_norm)
        self._loss_score = self._loss_robust.shown_score if warm else math.nan
        self._grad_norm_score = self._grad_norm_robust.shown_score if warm else math.nan
        self._judged = loss if warm else math.nan
        if left or norm_verdict or not settled or self._norm_recovery.unrecovered_steps:
            self._count_recoveries(step, left, norm_verdict)
        learn = settled and left is None and norm_verdict is None
        loss_high = self._loss_ema.update(step, loss, learn=learn)
        norm_high = self._grad_norm_ema.update(step, grad_norm, learn=learn)
        if signals.layer_grad_norms or self._layers.ratios:
            self._layers.update(signals.layer_grad_norms, learn=learn)
        self._weight_jumps.update(step - 1, signals.layers, learn=learn)  # What the step before has made of them.
        if not learn or self._norm_recovery.unrecovered_steps:
            self._accept_what_lasts()
        spike = loss_verdict is not None and self._loss_ratio > self._config.loss_ratio
        unknown = signals.again or (signals.grad_norm is not None and not math.isfinite(grad_norm))
        self._spikes.update(step, math.nan if unknown else loss, spike=spike)
        said = (scale_verdict, sigma_verdict, loss_verdict, norm_verdict, drift, oscillation, loss_high, norm_high)
        if said != _NOTHING_SAID:
            verdicts.extend([verdict for verdict in said if verdict is not None])
        return verdicts

    def readings(self) -> Readings:
        """What there is to export about the step judged last."""
        return Readings(
            loss_ema=math.nan if self._loss_ema.ema is None else self._loss_ema.ema,
            grad_norm_ema=math.nan if self._grad_norm_ema.ema is None else self._grad_norm_ema.ema,
            loss_ema_ratio=self._loss_ratio,
            grad_norm_ema_ratio=self._grad_norm_ratio,
            loss_mean=self._loss_sigma.mean,
            loss_stddev=self._loss_sigma.stddev,
            loss_zscore=self._loss_sigma.zscore(self._judged),
            loss_robust_center=self._loss_robust.center,
            loss_robust_scale=self._loss_robust.scale,
            loss_robust_score=self._loss_score,
            grad_norm_robust_center=self._grad_norm_robust.center,
            grad_norm_robust_scale=self._grad_norm_robust.scale,
            grad_norm_robust_score=self._grad_norm_score,
            loss_high_steps=self._loss_high_steps.counts.copy(),
            grad_norm_high_steps=self._grad_norm_high_steps.counts.copy(),
            loss_unrecovered_steps=self._recovery.unrecovered_steps,
            loss_back_in_steps=self._recovery.back_in_steps,
            withheld_steps=self._nonfinite.withheld_steps,
            amp_scale_collapsed=self._loss_scale.collapsed,
            hard_batches=self._knows_hard_batches,
            repeated_spike=self._spikes.repeated,
            layer_ratios=self._layers.ratios,
            rate_rise=self._continuity.last_rise,
            weight_jump=self._weight_jumps.last,
        )

    def _meet(self, change: str) -> None:
        if change in ("elsewhere", "announced"):
            self._accept_new_level()
            if change == "announced":
                self._forget_levels()
        elif change == "back":
            self._loss_robust.go_back()
            self._grad_norm_robust.go_back()
        else:
            self._loss_robust.widen(self._config.robust_window)
            self._grad_norm_robust.widen(self._config.robust_window)

    def _judge_loss(
        self, step: int, loss: float, *, judge: bool, learn: bool
    ) -> tuple[Verdict | None, Verdict | None, Verdict | None]:
        """What the robust detector, drift or level, and the oscillation detector say; drift of calm times only."""
        robust = self._loss_robust
        center, tail = robust.reference, robust.tail.ratio
        spike = robust.update(step, loss, learn=learn)
        score, patient, drift, oscillation = robust.last_score, robust.widened, None, None
        if robust.warm and not patient:
            oscillation = self._oscillation.update(
                step, loss, score=score, center=center, tail_ratio=tail, settled=learn
            )
        else:
            self._oscillation.reset()
        if judge and not patient:
            drift = self._drift.update(step, loss, score=score, center=center, tail_ratio=tail)
        else:
            self._drift.reset()
        if learn and drift is None and spike is None and self._loss_level.is_due(step):
            drift = self._loss_level.update(
                step, loss, center=robust.center, least_rise=_LEVEL_SCORE * robust.scale,
                learn=not robust.dropped, judge=judge and not patient,
            )  # fmt: skip
        if drift is not None:
            robust.hold(drift.baseline, drift.value)
        return spike, drift, oscillation

    def _judge_norm_level(self, step: int, grad_norm: float) -> Verdict | None:
        """Only from the end of warm-up on: until then a gradient may well begin near zero."""
        robust = self._grad_norm_robust
        if not robust.warm or not self._grad_norm_level.is_due(step):
            return None
        verdict = self._grad_norm_level.update(
            step, grad_norm, center=robust.center, least_rise=0.0, learn=not robust.dropped, judge=not robust.widened
        )
        if verdict is not None:
            robust.hold(verdict.baseline, verdict.value)
        return verdict

    def _count_recoveries(self, step: int, loss: Verdict | None, norm: Verdict | None) -> None:
        """Count how long each signal has been out of its band, from its verdict (if any) and its score."""
        back_below, level = self._config.robust_score * self._BACK_RATIO, self._loss_robust.reference
        # What another mix of data makes is no reason to go back.
        high = self._judged - level > (self._config.drift_least_ratio - 1.0) * abs(level)
        for recovery, verdict, score, far in (
            (self._recovery, loss, self._loss_score, high), (self._norm_recovery, norm, self._grad_norm_score, False)
        ):  # fmt: skip
            if verdict is not None or recovery.unrecovered_steps:
                # What began long ago but is found only now has had no remedy: half of its time is left.
                left_at = None if verdict is None else max(verdict.first_step, step - self._config.sustained_steps // 2)
                recovery.update(step, left_at=left_at, inside=score < back_below, distance=score, far=far)

    def _accept_what_lasts(self) -> None:
        """R7: a level is believed after its limit; a norm over a calm loss is no fault, and is believed sooner."""
        unrecovered = self._recovery.unrecovered_steps
        if unrecovered >= self._config.relearn_steps and self._recovery.values >= _LEAST_LEVEL_VALUES:
            self._accept_new_level()
            self._forget_levels()
        elif unrecovered == 0 and self._norm_recovery.unrecovered_steps >= self._config.sustained_steps:
            self._accept_new_norm()
            self._grad_norm_level.forget()

    def _forget_levels(self) -> None:
        self._loss_level.forget()
        self._grad_norm_level.forget()

    def _accept_new_norm(self) -> None:
        self._grad_norm_robust.relearn()
        self._grad_norm_ema.ema = None
        self._norm_recovery.clear()

    def _accept_new_level(self) -> None:
        """What has lasted, or is met elsewhere in the run, is the new level, for better or worse."""
        self._loss_robust.relearn()
        self._loss_level.wait()
        self._grad_norm_level.wait()
        self._loss_ema.ema = None
        self._drift.reset()
        self._oscillation.reset()
        self._accept_new_norm()
        self._loss_high_steps.clear()
        self._grad_norm_high_steps.clear()
        self._recovery.clear()

    def state_dict(self) -> dict[str, Any]:
        """Everything that rewinds with the weights, as plain numbers."""
        return {name: part.state_dict() for name, part in self._rewound.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        for name, part in self._rewound.items():
            part.load_state_dict(state.get(name, {}))  # The youngest parts have a checkpoint of before there were any.

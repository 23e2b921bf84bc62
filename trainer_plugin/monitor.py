"""The monitor: all detectors over one run's signals, step by step, and the readings that the job exports."""

import math
from dataclasses import dataclass
from typing import Any

from exporter.catalog import GRAD_NORM_RATIO_LEVELS, LOSS_RATIO_LEVELS
from trainer_plugin.detectors import DetectionConfig, EmaRatio, Robust, RollingSigma, Verdict
from trainer_plugin.loss_scale import LossScale
from trainer_plugin.recovery import Recovery
from trainer_plugin.signals import Signals

# A scaler halves its scale at most this often before the first step fits; overflows that go on are a fault.
_SCALE_SEARCH_STEPS = 20
# A spike that goes on is not one bad batch: to withhold it for ever would be no training at all.
_MOST_SPIKES_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """What the detectors hold after a step. NaN stands for "not known yet"."""

    loss_ema: float
    grad_norm_ema: float
    loss_ema_ratio: float
    grad_norm_ema_ratio: float
    loss_mean: float
    loss_stddev: float
    loss_zscore: float
    loss_robust_center: float
    loss_robust_scale: float
    loss_robust_score: float
    grad_norm_robust_center: float
    grad_norm_robust_scale: float
    grad_norm_robust_score: float
    loss_high_steps: dict[float, int]
    grad_norm_high_steps: dict[float, int]
    loss_unrecovered_steps: int
    withheld_steps: int
    amp_scale_collapsed: bool


class Monitor:
    """Every detector over one run. `ACTING` names those whose verdicts open an incident (R5, R7, R10)."""

    ACTING = frozenset(
        {
            ("nonfinite", "loss"),
            ("nonfinite", "grad_norm"),
            ("robust", "loss"),
            ("robust", "grad_norm"),
            ("ema_ratio", "grad_norm"),
            ("drift", "amp_loss_scale"),
        }
    )

    # Half of the least score that is a verdict: well inside the band again.
    _BACK_RATIO = 0.5

    def __init__(self, config: DetectionConfig) -> None:
        self._config = config
        warmup = config.warmup_steps
        self._loss_ema = EmaRatio("loss", alpha=config.ema_alpha, ratio=config.loss_ratio, warmup_steps=warmup)
        self._grad_norm_ema = EmaRatio(
            "grad_norm", alpha=config.ema_alpha, ratio=config.grad_norm_ratio, warmup_steps=warmup
        )
        self._loss_sigma = RollingSigma("loss", window=config.window, sigma=config.sigma, warmup_steps=warmup)
        robust = {"window": config.robust_window, "score": config.robust_score, "warmup_steps": warmup}
        self._loss_robust = Robust("loss", **robust)  # type: ignore[arg-type]
        self._grad_norm_robust = Robust("grad_norm", **robust, log=True, least_ratio=config.loss_ratio)  # type: ignore[arg-type]
        self._recovery = Recovery()
        self._norm_recovery = Recovery()
        self._loss_scale = LossScale(
            floor=config.amp_scale_floor, ceiling=config.amp_scale_ceiling, tell_steps=config.sustained_steps
        )
        self._overflow_steps = 0
        self._spikes_in_a_row = 0
        self._high_steps = {
            "loss": dict.fromkeys(LOSS_RATIO_LEVELS, 0),
            "grad_norm": dict.fromkeys(GRAD_NORM_RATIO_LEVELS, 0),
        }
        self._withheld_steps = 0

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
    def spike_limits(self) -> tuple[float, float]:
        """Loss and gradient norm above both of which the next step is a spike to withhold, if that is asked for."""
        if self._spikes_in_a_row >= _MOST_SPIKES_IN_A_ROW:
            return math.inf, math.inf
        return self._loss_robust.limit, self._grad_norm_robust.limit

    def update(self, signals: Signals) -> tuple[Readings, list[Verdict]]:
        """Take in one step; return what to export and what the detectors say."""
        loss, step = signals.loss, signals.step
        grad_norm = math.nan if signals.grad_norm is None else signals.grad_norm
        overflow = signals.withheld == "amp_overflow"  # The scaler's own business: no verdict, nothing learnt.
        self._overflow_steps = self._overflow_steps + 1 if overflow else 0
        stuck = self._overflow_steps > _SCALE_SEARCH_STEPS
        verdicts: list[Verdict | None] = []
        if not math.isfinite(loss):
            verdicts.append(_nonfinite("loss", step, loss))
        if signals.grad_norm is not None and not math.isfinite(grad_norm) and (stuck or not overflow):
            verdicts.append(_nonfinite("grad_norm", step, grad_norm))
        verdicts.append(self._loss_scale.update(step, signals.amp_loss_scale))
        counts = signals.withheld is not None and (stuck or not overflow)
        self._withheld_steps = self._withheld_steps + 1 if counts else 0

        # Scores and ratios are to the baselines of the steps before, so they are read before anything is learnt.
        ratios = {"loss": self._loss_ema.ratio(loss), "grad_norm": self._grad_norm_ema.ratio(grad_norm)}
        scores = {"loss": self._loss_robust.score(loss), "grad_norm": self._grad_norm_robust.score(grad_norm)}
        warm = self._loss_robust.warm
        if not warm:  # R1: in warm-up no finite value is a spike, here or in a rule.
            ratios = dict.fromkeys(ratios, math.nan)
            scores = dict.fromkeys(scores, math.nan)
        self._count_high_steps(ratios)
        verdicts.append(self._loss_sigma.update(step, loss))

        settled = self._recovery.unrecovered_steps == 0 and not overflow
        loss_verdict = self._loss_robust.update(step, loss, learn=settled)
        norm_verdict = self._grad_norm_robust.update(step, grad_norm, learn=settled and loss_verdict is None)
        verdicts += [loss_verdict, norm_verdict]
        if signals.withheld == "spike":
            self._spikes_in_a_row += 1
        elif loss_verdict is None and math.isfinite(loss):
            self._spikes_in_a_row = 0
        unrecovered = self._recovery.update(
            step,
            left_at=loss_verdict.first_step if loss_verdict else None,
            inside=scores["loss"] < self._config.robust_score * self._BACK_RATIO,
        )
        learn = settled and unrecovered == 0 and norm_verdict is None
        verdicts.append(self._loss_ema.update(step, loss, learn=learn))
        verdicts.append(self._grad_norm_ema.update(step, grad_norm, learn=learn))
        # A norm that has changed for good over a calm loss is no fault, and is believed sooner than a loss.
        away = self._norm_recovery.update(
            step,
            left_at=norm_verdict.first_step if norm_verdict else None,
            inside=scores["grad_norm"] < self._config.robust_score * self._BACK_RATIO,
        )
        if away >= self._config.sustained_steps and unrecovered == 0:
            self._accept_new_norm()
        if unrecovered >= self._config.relearn_steps:
            self._accept_new_level()
        zscore = self._loss_sigma.zscore(loss) if warm else math.nan
        return self._readings(ratios, scores, zscore), [verdict for verdict in verdicts if verdict is not None]

    def _count_high_steps(self, ratios: dict[str, float]) -> None:
        for signal, ratio in ratios.items():
            counts = self._high_steps[signal]
            for level in counts:
                # A value that is not finite is certainly not a good one: it goes on with a run, but begins none.
                if ratio > level or (counts[level] and not math.isfinite(ratio)):
                    counts[level] += 1
                else:
                    counts[level] = 0

    def _accept_new_norm(self) -> None:
        self._grad_norm_robust.relearn()
        self._grad_norm_ema.ema = None
        self._norm_recovery.clear()

    def _accept_new_level(self) -> None:
        """R7: what has lasted this long is the run's new level, for better or worse."""
        self._loss_robust.relearn()
        self._loss_ema.ema = None
        self._accept_new_norm()
        for counts in self._high_steps.values():
            counts.update(dict.fromkeys(counts, 0))
        self._recovery.clear()

    def _readings(self, ratios: dict[str, float], scores: dict[str, float], zscore: float) -> Readings:
        return Readings(
            loss_ema=_or_nan(self._loss_ema.ema),
            grad_norm_ema=_or_nan(self._grad_norm_ema.ema),
            loss_ema_ratio=ratios["loss"],
            grad_norm_ema_ratio=ratios["grad_norm"],
            loss_mean=self._loss_sigma.mean,
            loss_stddev=self._loss_sigma.stddev,
            loss_zscore=zscore,
            loss_robust_center=self._loss_robust.center,
            loss_robust_scale=self._loss_robust.scale,
            loss_robust_score=scores["loss"],
            grad_norm_robust_center=self._grad_norm_robust.center,
            grad_norm_robust_scale=self._grad_norm_robust.scale,
            grad_norm_robust_score=scores["grad_norm"],
            loss_high_steps=dict(self._high_steps["loss"]),
            grad_norm_high_steps=dict(self._high_steps["grad_norm"]),
            loss_unrecovered_steps=self._recovery.unrecovered_steps,
            withheld_steps=self._withheld_steps,
            amp_scale_collapsed=self._loss_scale.collapsed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that rewinds with the weights, as plain numbers."""
        return {
            "loss_ema": self._loss_ema.state_dict(),
            "grad_norm_ema": self._grad_norm_ema.state_dict(),
            "loss_sigma": self._loss_sigma.state_dict(),
            "loss_robust": self._loss_robust.state_dict(),
            "grad_norm_robust": self._grad_norm_robust.state_dict(),
            "recovery": self._recovery.state_dict(),
            "norm_recovery": self._norm_recovery.state_dict(),
            "loss_scale": self._loss_scale.state_dict(),
            "overflow_steps": self._overflow_steps,
            "spikes_in_a_row": self._spikes_in_a_row,
            "high_steps": {signal: list(counts.values()) for signal, counts in self._high_steps.items()},
            "withheld_steps": self._withheld_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._loss_ema.load_state_dict(state["loss_ema"])
        self._grad_norm_ema.load_state_dict(state["grad_norm_ema"])
        self._loss_sigma.load_state_dict(state["loss_sigma"])
        self._loss_robust.load_state_dict(state["loss_robust"])
        self._grad_norm_robust.load_state_dict(state["grad_norm_robust"])
        self._recovery.load_state_dict(state["recovery"])
        self._norm_recovery.load_state_dict(state["norm_recovery"])
        self._loss_scale.load_state_dict(state["loss_scale"])
        self._overflow_steps = state["overflow_steps"]
        self._spikes_in_a_row = state["spikes_in_a_row"]
        for signal, counts in self._high_steps.items():
            counts.update(zip(counts, state["high_steps"][signal], strict=True))
        self._withheld_steps = state["withheld_steps"]


def _nonfinite(signal: str, step: int, value: float) -> Verdict:
    return Verdict(detector="nonfinite", signal=signal, step=step, value=value, baseline=math.nan, first_step=step)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

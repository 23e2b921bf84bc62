"""Detectors: what one step's values say about the run. Pure: no torch, no clock, no files.

Each detector takes the values of one signal in step order and answers with a `Verdict` or None. A non-finite value
never enters a state. `state_dict()` holds plain numbers and rewinds with the weights.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

# Turns a median absolute deviation into the standard deviation of a normal distribution: 1 / Phi^-1(3/4).
_MAD_TO_SIGMA = 1.4826


class DetectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detection:` of guard.yaml. Steps are optimizer steps; ratios are to the outlier-free EMA."""

    warmup_steps: int = 500
    ema_alpha: float = 0.99
    loss_ratio: float = 3.0
    grad_norm_ratio: float = 10.0
    window: int = 50
    sigma: float = 3.5
    sustained_steps: int = 200
    robust_window: int = 128
    robust_score: float = 8.0
    relearn_steps: int = 2000
    amp_scale_floor: float = 1.0
    amp_scale_ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("window", "sustained_steps", "robust_window", "relearn_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, found {getattr(self, name)}")
        if self.warmup_steps < 0:
            raise ValueError(f"`warmup_steps` must be at least 0, found {self.warmup_steps}")
        if not 0.0 < self.ema_alpha < 1.0:
            raise ValueError(f"`ema_alpha` must be between 0 and 1, found {self.ema_alpha}")
        for name in ("loss_ratio", "grad_norm_ratio"):
            if not getattr(self, name) > 1.0:
                raise ValueError(f"`{name}` must be above 1, found {getattr(self, name)}")
        for name in ("sigma", "robust_score"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"`{name}` must be above 0, found {getattr(self, name)}")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.sustained_steps >= self.relearn_steps:
            raise ValueError(
                f"`sustained_steps` must be below `relearn_steps` ({self.relearn_steps}), found "
                f"{self.sustained_steps}: the new level would be accepted before anybody acts"
            )
        if not 0.0 < self.amp_scale_floor < self.amp_scale_ceiling:
            raise ValueError(
                f"`amp_scale_floor` must be between 0 and `amp_scale_ceiling` ({self.amp_scale_ceiling:g}), found "
                f"{self.amp_scale_floor}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a detector says about one step. `first_step` is where the deviation it belongs to began."""

    detector: str
    signal: str
    step: int
    value: float
    baseline: float
    first_step: int


class EmaRatio:
    """R1: a value above `ratio` x its exponential moving average `e = alpha e + (1 - alpha) x`.

    The textbook form takes the value into the average first and compares then, so that a lasting spike hides itself
    (at alpha 0.99 even an infinite one after 40 steps). The other form compares with the average of the steps before,
    and whoever calls decides by `learn` whether the value enters it.
    """

    def __init__(self, signal: str, *, alpha: float, ratio: float, warmup_steps: int, textbook: bool = False) -> None:
        self._signal = signal
        self._alpha = alpha
        self._threshold = ratio
        self._warmup_steps = warmup_steps
        self._textbook = textbook
        self.ema: float | None = None
        self._seen = 0

    def ratio(self, value: float) -> float:
        """Value over the present average; NaN when there is none or it is not above zero."""
        return value / self.ema if self.ema is not None and self.ema > 0.0 else math.nan

    def update(self, step: int, value: float, *, learn: bool = True) -> Verdict | None:
        """Judge the value of one step, then take it in (unless not to `learn` from it)."""
        if not math.isfinite(value):
            return None
        if self._textbook:
            self._take_in(value)
        ratio = self.ratio(value)
        baseline = self.ema
        warm = self._seen >= self._warmup_steps
        if not self._textbook and learn:
            # Also in warm-up, where nothing is judged: one wild value must not blind the average for long.
            limit = self._threshold * self.ema if self.ema is not None and self.ema > 0.0 else math.inf
            self._take_in(min(value, limit))
        self._seen += 1
        if warm and baseline is not None and ratio > self._threshold:
            return Verdict(
                detector="ema_ratio", signal=self._signal, step=step, value=value, baseline=baseline, first_step=step
            )
        return None

    def _take_in(self, value: float) -> None:
        self.ema = value if self.ema is None else self._alpha * self.ema + (1.0 - self._alpha) * value

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of values seen."""
        return {"ema": self.ema, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.ema, self._seen = state["ema"], state["seen"]


class RollingSigma:
    """R2: a value strictly above mean + k sigma (population) of the window before it, masking included."""

    def __init__(self, signal: str, *, window: int, sigma: float, warmup_steps: int) -> None:
        self._signal = signal
        self._sigma = sigma
        self._warmup_steps = warmup_steps
        self._values: deque[float] = deque(maxlen=window)
        self._seen = 0
        self.mean = math.nan
        self.stddev = math.nan

    def zscore(self, value: float) -> float:
        """Deviations of `value` above the window that `update` last compared with; NaN for a constant window."""
        return (value - self.mean) / self.stddev if self.stddev > 0.0 else math.nan

    def update(self, step: int, value: float) -> Verdict | None:
        """Judge the value of one step, then take it in."""
        if not math.isfinite(value):
            return None
        verdict = None
        if len(self._values) == self._values.maxlen:
            window = np.asarray(self._values)
            self.mean, self.stddev = float(window.mean()), float(window.std())
            if self._seen >= self._warmup_steps and value > self.mean + self._sigma * self.stddev:
                verdict = Verdict(
                    detector="rolling_sigma",
                    signal=self._signal,
                    step=step,
                    value=value,
                    baseline=self.mean,
                    first_step=step,
                )
        self._values.append(value)
        self._seen += 1
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """The window and the number of values seen."""
        return {"values": list(self._values), "seen": self._seen, "mean": self.mean, "stddev": self.stddev}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._values.clear()
        self._values.extend(state["values"])
        self._seen, self.mean, self.stddev = state["seen"], state["mean"], state["stddev"]


class Robust:
    """R7: a value far above the median of the accepted values, in scaled median absolute deviations.

    Outliers are kept out of the window, so that a second spike is judged like the first. `log` takes the logarithm
    first: for a positive, skewed signal such as a gradient norm. `least_ratio` is how many times the center a value
    must be besides: a norm that doubles on one batch is the ordinary tail of a healthy run.
    """

    # A window without noise would make every value an outlier: one per mille of the level is no deviation.
    _LEAST_SCALE_RATIO = 1e-3
    # Scores above this, unbroken up to a verdict, belong to the deviation that it found.
    _ONSET_SCORE = 4.0

    def __init__(
        self,
        signal: str,
        *,
        window: int,
        score: float,
        warmup_steps: int,
        log: bool = False,
        least_ratio: float = 1.0,
    ) -> None:
        self._signal = signal
        self._threshold = score
        self._warmup_steps = warmup_steps
        self._log = log
        self._least_ratio = least_ratio
        self._values: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._onset: int | None = None
        self._center = math.nan
        self.scale = math.nan

    @property
    def center(self) -> float:
        """Median of the accepted values, in the signal's own unit."""
        return math.exp(self._center) if self._log else self._center

    @property
    def warm(self) -> bool:
        """Whether a finite value may be judged."""
        return self._seen >= self._warmup_steps and len(self._values) >= min(20, self._values.maxlen or 20)

    @property
    def limit(self) -> float:
        """The value above which the next one is an outlier, in the signal's own unit; infinite while none is judged."""
        if not self.warm:
            return math.inf
        edge = self._center + self._threshold * self.scale
        return max(math.exp(min(edge, 700.0)) if self._log else edge, self._least_ratio * self.center)

    def score(self, value: float) -> float:
        """Deviations of `value` above the center; NaN before the first accepted value."""
        return (self._scaled(value) - self._center) / self.scale if self.scale > 0.0 else math.nan

    def update(self, step: int, value: float, *, learn: bool = True) -> Verdict | None:
        """Judge the value of one step, then take it in unless it is an outlier (or not to be learnt from)."""
        if not math.isfinite(value):
            return None
        score = self.score(value)
        outlier = self.warm and score > self._threshold and value > self._least_ratio * self.center
        verdict = None
        if self.warm and score > self._ONSET_SCORE:
            self._onset = step if self._onset is None else self._onset
        else:
            self._onset = None
        if outlier:
            verdict = Verdict(
                detector="robust",
                signal=self._signal,
                step=step,
                value=value,
                baseline=self.center,
                first_step=self._onset if self._onset is not None else step,
            )
        elif learn:
            self._take_in(value)
        self._seen += 1
        return verdict

    def relearn(self) -> None:
        """Forget the level: it has changed for good. The next values are the new one."""
        self._values.clear()
        self._onset = None

    def _scaled(self, value: float) -> float:
        # A gradient norm of exactly 0 is no outlier above anything.
        return math.log(max(value, 1e-30)) if self._log else value

    def _take_in(self, value: float) -> None:
        self._values.append(self._scaled(value))
        window = np.asarray(self._values)
        center = float(np.median(window))
        deviation = float(np.median(np.abs(window - center)))
        least = self._LEAST_SCALE_RATIO * (1.0 if self._log else abs(center))
        self._center = center
        self.scale = max(_MAD_TO_SIGMA * deviation, least)

    def state_dict(self) -> dict[str, Any]:
        """The accepted values and what was made of them."""
        return {
            "values": list(self._values),
            "seen": self._seen,
            "onset": self._onset,
            "center": self._center,
            "scale": self.scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._values.clear()
        self._values.extend(state["values"])
        self._seen, self._onset = state["seen"], state["onset"]
        self._center, self.scale = state["center"], state["scale"]

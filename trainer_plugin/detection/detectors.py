"""Detectors: their options, their verdicts, and the two textbook rules. Pure: no torch, no clock, no files.

Each detector takes the values of one signal in step order and answers with a `Verdict` or None. A non-finite value
never enters a state. `state_dict()` holds plain numbers and rewinds with the weights.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec


class DetectionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detection:` of guard.yaml. Steps are optimizer steps; ratios are to the outlier-free EMA.

    `planned_change_steps` are the first steps of other data or batches: levels are learnt anew from there.
    """

    warmup_steps: int = 500
    ema_alpha: float = 0.99
    loss_ratio: float = 3.0
    grad_norm_ratio: float = 10.0
    window: int = 50
    sigma: float = 3.5
    sustained_steps: int = 200
    robust_window: int = 128
    robust_score: float = 8.0
    robust_least_ratio: float = 1.03
    drift_limit: float = 6.0
    drift_least_ratio: float = 1.06
    level_least_ratio: float = 1.2
    oscillation_spikes: int = 4
    relearn_steps: int = 2000
    amp_scale_floor: float = 1.0
    amp_scale_ceiling: float = 2.0**24
    planned_change_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for least, names in _LEAST.items():
            for name in names:
                if not getattr(self, name) >= least:
                    raise ValueError(f"`{name}` must be at least {least:g}, found {getattr(self, name)}")
        for bound, names in _ABOVE.items():
            for name in names:
                if not getattr(self, name) > bound:
                    raise ValueError(f"`{name}` must be above {bound:g}, found {getattr(self, name)}")
        if not 0.0 < self.ema_alpha < 1.0:
            raise ValueError(f"`ema_alpha` must be between 0 and 1, found {self.ema_alpha}")
        if self.sustained_steps >= self.relearn_steps:
            raise ValueError(
                f"`sustained_steps` must be below `relearn_steps` ({self.relearn_steps}), found "
                f"{self.sustained_steps}: the new level would be accepted before anybody acts"
            )
        if not self.amp_scale_floor < self.amp_scale_ceiling:
            raise ValueError(
                f"`amp_scale_floor` must be below `amp_scale_ceiling` ({self.amp_scale_ceiling:g}), found "
                f"{self.amp_scale_floor:g}"
            )


_LEAST = {
    0: ("warmup_steps",),
    1: (
        "window", "sustained_steps", "robust_window", "oscillation_spikes", "relearn_steps", "robust_least_ratio",
        "drift_least_ratio", "level_least_ratio",
    ),
}  # fmt: skip
_ABOVE = {0: ("sigma", "robust_score", "drift_limit", "amp_scale_floor"), 1: ("loss_ratio", "grad_norm_ratio")}


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
        self._first_step: int | None = None

    @property
    def limit(self) -> float:
        """The value above which the next one is too high; infinite while there is no average above zero."""
        return self._threshold * self.ema if self.ema is not None and self.ema > 0.0 else math.inf

    def ratio(self, value: float) -> float:
        """Value over the present average; NaN when there is none or it is not above zero."""
        return value / self.ema if self.ema is not None and self.ema > 0.0 else math.nan

    def update(self, step: int, value: float, *, learn: bool = True) -> Verdict | None:
        """Judge the value of one step, then take it in (unless not to `learn` from it)."""
        if not math.isfinite(value):
            return None
        if self._first_step is None:
            self._first_step = step
        baseline, alpha = self.ema, self._alpha
        if self._textbook:
            baseline = self.ema = value if baseline is None else alpha * baseline + (1.0 - alpha) * value
        limit = self._threshold * baseline if baseline is not None and baseline > 0.0 else math.inf
        if learn and not self._textbook:
            # Also in warm-up, where nothing is judged: one wild value must not blind the average for long.
            taken = value if value < limit else limit
            self.ema = taken if baseline is None else alpha * baseline + (1.0 - alpha) * taken
        if value > limit and baseline is not None and step - self._first_step >= self._warmup_steps:
            return Verdict(
                detector="ema_ratio", signal=self._signal, step=step, value=value, baseline=baseline, first_step=step
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """The average and the first step seen."""
        return {"ema": self.ema, "first_step": self._first_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.ema, self._first_step = state["ema"], state["first_step"]


class RollingSigma:
    """R2: a value strictly above mean + k sigma (population) of the window before it, masking included.

    The sums are of distances from a point near the mean and are made anew once a window, and as long as a value is in
    it that is so far out that sums would lose the others in rounding.
    """

    _FAR = 1e3

    def __init__(self, signal: str, *, window: int, sigma: float, warmup_steps: int) -> None:
        self._signal = signal
        self._sigma = sigma
        self._warmup_steps = warmup_steps
        self._window = window
        self._values: deque[float] = deque()
        self._first_step: int | None = None
        self._near = self._sum = self._sum_of_squares = 0.0
        self._trusted = 0
        self._far = 0
        self.mean = math.nan
        self.stddev = math.nan

    def zscore(self, value: float) -> float:
        """Deviations of `value` above the window that `update` last compared with; NaN for a constant window."""
        return (value - self.mean) / self.stddev if self.stddev > 0.0 else math.nan

    def update(self, step: int, value: float) -> Verdict | None:
        """Judge the value of one step, then take it in."""
        if not math.isfinite(value):
            return None
        values, verdict = self._values, None
        if self._first_step is None:
            self._first_step = step
        if len(values) < self._window:
            values.append(value)
            return None
        if self._trusted <= 0 or self._far > 0:
            self._sum_anew()
        offset = self._sum / self._window
        self.mean = mean = self._near + offset
        variance = self._sum_of_squares / self._window - offset * offset
        self.stddev = stddev = math.sqrt(variance) if variance > 0.0 else 0.0
        if value > mean + self._sigma * stddev and step - self._first_step >= self._warmup_steps:
            verdict = Verdict(
                detector="rolling_sigma", signal=self._signal, step=step, value=value, baseline=mean, first_step=step
            )
        entering, leaving = value - self._near, values.popleft() - self._near
        values.append(value)
        self._sum += entering - leaving
        self._sum_of_squares += entering * entering - leaving * leaving
        self._trusted -= 1
        self._far = self._window + 1 if abs(value - mean) > self._FAR * stddev else self._far - 1
        return verdict

    def _sum_anew(self) -> None:
        self._near = sum(self._values) / self._window
        distances = [value - self._near for value in self._values]
        self._sum = sum(distances)
        self._sum_of_squares = sum(distance * distance for distance in distances)
        self._trusted = self._window

    def state_dict(self) -> dict[str, Any]:
        """The window, its sums, and the first step seen."""
        return {
            "values": list(self._values),
            "sums": [self._near, self._sum, self._sum_of_squares],
            "trusted": self._trusted,
            "far": self._far,
            "first_step": self._first_step,
            "mean": None if math.isnan(self.mean) else self.mean,
            "stddev": None if math.isnan(self.stddev) else self.stddev,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._values.clear()
        self._values.extend(state["values"])
        self._near, self._sum, self._sum_of_squares = state["sums"]
        self._trusted, self._far, self._first_step = state["trusted"], state["far"], state["first_step"]
        self.mean = math.nan if state["mean"] is None else state["mean"]
        self.stddev = math.nan if state["stddev"] is None else state["stddev"]

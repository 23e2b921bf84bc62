"""Named loss curves with the steps at which they go wrong, and the signals of one step."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainer_plugin.signals import Signals

STEPS = 1200
# Every fault lies well behind the default warm-up of 500 steps, but for the one that is about it.
FAULT = 800
WARMUP_FAULT = 300

Values = NDArray[np.float64]


def decay(seed: int) -> Values:
    """A healthy run: the loss falls from 4 to 2, with batch noise."""
    noise = np.random.default_rng(seed).normal(0.0, 0.05, STEPS)
    return 2.0 * np.exp(-np.arange(STEPS) / 300) + 2.0 + noise


def plateau(seed: int) -> Values:
    """A healthy run that has stopped learning."""
    return 2.0 + np.random.default_rng(seed).normal(0.0, 0.05, STEPS)


def frozen(_: int) -> Values:
    """A loss that never changes: no deviation to measure in (case R03)."""
    return np.full(STEPS, 1.5990505637277868)


def spike(seed: int) -> Values:
    """One bad step."""
    return _times(decay(seed), {FAULT: 4.0})


def small_spike(seed: int) -> Values:
    """One bad step that no ratio of 3 can see."""
    return _times(decay(seed), {FAULT: 1.5})


def jump(seed: int) -> Values:
    """The loss goes up by half and stays there."""
    return _times(decay(seed), dict.fromkeys(range(FAULT, STEPS), 1.5))


def large_jump(seed: int) -> Values:
    """The loss goes up by far and stays there."""
    return _times(decay(seed), dict.fromkeys(range(FAULT, STEPS), 4.0))


def repeats(seed: int) -> Values:
    """A large spike and two smaller ones in the same window: the first hides the others from a plain deviation."""
    return _times(decay(seed), {FAULT: 4.0, FAULT + 10: 1.5, FAULT + 20: 1.5})


def not_finite(seed: int) -> Values:
    """NaN, then both infinities."""
    values = decay(seed)
    values[FAULT : FAULT + 3] = math.nan, math.inf, -math.inf
    return values


def after_nan(seed: int) -> Values:
    """NaN, with a spike right behind it."""
    values = _times(decay(seed), {FAULT + 1: 4.0})
    values[FAULT] = math.nan
    return values


def warmup_spike(seed: int) -> Values:
    """A spike in warm-up, and one after it."""
    return _times(decay(seed), {WARMUP_FAULT: 4.0, FAULT: 4.0})


def climb(seed: int) -> Values:
    """The loss climbs by 1 % a step for 30 steps."""
    return _times(decay(seed), {FAULT + i: 1.01 ** (i + 1) for i in range(30)})


def heavy_tails(seed: int) -> Values:
    """A healthy run whose noise has heavy tails (Student's t with 3 degrees of freedom)."""
    noise = np.random.default_rng(seed).standard_t(3, STEPS) * 0.05
    return 2.0 * np.exp(-np.arange(STEPS) / 300) + 2.0 + noise


CURVES: dict[str, Callable[[int], Values]] = {
    curve.__name__: curve
    for curve in (
        decay, plateau, frozen, spike, small_spike, jump, large_jump, repeats, not_finite, after_nan, warmup_spike,
        climb, heavy_tails,
    )
}  # fmt: skip
HEALTHY = ("decay", "plateau", "frozen")


def worked_example() -> Values:
    """Three spikes on a falling loss, each with an aftershock: numbers that can be looked up."""
    # The published numbers are those of numpy's older generator.
    noise = np.random.RandomState(42).normal(0.0, 0.05, 300)
    values = 2.0 * np.exp(-np.linspace(0.0, 3.0, 300)) + 0.3 + noise
    return _times(values, {100: 3.5, 101: 1.8, 180: 2.8, 181: 1.8, 240: 4.1, 241: 1.8})


def signals(step: int, loss: float, **changes: object) -> Signals:
    """What an uneventful step with this loss shows, with changes."""
    fields: dict[str, object] = {
        "step": step,
        "loss": float(loss),
        "grad_norm": 1.0,
        "layer_grad_norms": {},
        "clip_coefficient": 1.0,
        "surge": False,
        "withheld": None,
        "amp_loss_scale": None,
        "learning_rates": (1e-3,),
        "step_seconds": 0.1,
        "data_wait_seconds": 0.01,
        "data_position": None,
    }
    return Signals(**{**fields, **changes})  # type: ignore[arg-type]


def _times(values: Values, factors: dict[int, float]) -> Values:
    changed = values.copy()
    for step, factor in factors.items():
        changed[step] *= factor
    return changed

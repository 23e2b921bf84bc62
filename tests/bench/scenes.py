"""Synthetic scenes: loss and gradient norm of a run of known health, and the steps at which it goes wrong.

The first ten are those of PEERS.md, section 5: loss 2.3 + a decay with normal noise of 0.025, gradient norm 0.3,
lognormal by 10 %.
"""

import math
from dataclasses import dataclass

import numpy as np

STEPS = 4000
FAULT = 1500
# What follows a fault is shown for so long.
AFTER_STEPS = 120
WARMUP_SCENE_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Scene:
    """`faults` are the first steps of what is to be found, each before the next; without one every verdict is false."""

    loss: np.ndarray
    grad_norm: np.ndarray
    faults: tuple[int, ...] = ()
    warmup_steps: int = 500


def _run(seed, *, noise="normal", steps=FAULT + AFTER_STEPS):
    rng = np.random.default_rng(seed)
    draws = rng.normal(0.0, 1.0, steps) if noise == "normal" else rng.standard_t(int(noise[1:]), steps)
    loss = 2.3 + 1.5 * np.exp(-np.arange(steps) / 600) + 0.025 * draws
    return loss, 0.3 * np.exp(rng.normal(0.0, 0.1, steps))


def clean(seed):
    """Normal noise, 4,000 steps."""
    loss, norm = _run(seed, steps=STEPS)
    return Scene(loss=loss, grad_norm=norm)


def heavy_t3(seed):
    """Noise of Student's t with 3 degrees of freedom, 4,000 steps."""
    loss, norm = _run(seed, noise="t3", steps=STEPS)
    return Scene(loss=loss, grad_norm=norm)


def heavy_t4(seed):
    """Noise of Student's t with 4 degrees of freedom, 4,000 steps."""
    loss, norm = _run(seed, noise="t4", steps=STEPS)
    return Scene(loss=loss, grad_norm=norm)


def rounded(seed):
    """A loss that was rounded to bf16 before it was logged, 4,000 steps."""
    loss, norm = _run(seed, steps=STEPS)
    ulp = 2.0 ** (np.floor(np.log2(loss)) - 7)
    return Scene(loss=np.round(loss / ulp) * ulp, grad_norm=norm)


def one_step(seed):
    """One step with 1.5 x the loss and 10 x the gradient."""
    loss, norm = _run(seed)
    loss[FAULT] *= 1.5
    norm[FAULT] *= 10.0
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def toxic_batch(seed):
    """One step with 12 % more loss over a calm gradient."""
    loss, norm = _run(seed)
    loss[FAULT] *= 1.12
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def norm_only(seed):
    """One step with 5 x the gradient."""
    loss, norm = _run(seed)
    norm[FAULT] *= 5.0
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def sustained(seed):
    """From 2.3 to 5 within three steps, for good."""
    loss, norm = _run(seed)
    loss[FAULT:] += 2.7 * np.minimum(1.0, np.arange(1, len(loss) - FAULT + 1) / 3.0)
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def plateau_jump(seed):
    """The loss goes up by 8 % and stays there."""
    loss, norm = _run(seed)
    loss[FAULT:] *= 1.08
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def climb(seed):
    """The loss climbs by 1 % a step, for 60 steps."""
    loss, norm = _run(seed)
    loss[FAULT : FAULT + 60] *= 1.01 ** np.arange(1, 61)
    loss[FAULT + 60 :] *= 1.01**60
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def slow_climb(seed):
    """The loss climbs by 0.2 % a step, for 100 steps."""
    loss, norm = _run(seed)
    loss[FAULT : FAULT + 100] *= 1.002 ** np.arange(1, 101)
    loss[FAULT + 100 :] *= 1.002**100
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def norm_first(seed):
    """The gradient grows to 8 x within five steps, then the loss climbs by 8 % a step."""
    loss, norm = _run(seed)
    norm[FAULT : FAULT + 40] *= np.minimum(8.0, 1.6 ** np.arange(1, 41))
    loss[FAULT + 5 : FAULT + 40] *= np.minimum(1.08 ** np.arange(1, 36), 3.0)
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def after_nan(seed):
    """NaN in both, and 50 steps later one step with 4.5 x the loss; to be found: the spike."""
    loss, norm = _run(seed)
    loss[FAULT - 50] = norm[FAULT - 50] = math.nan
    loss[FAULT] *= 4.5
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def early(seed):
    """One step with 1.5 x the loss and 10 x the gradient at step 60, just behind a warm-up of 50 steps."""
    loss, norm = _run(seed, steps=60 + AFTER_STEPS)
    loss[60] *= 1.5
    norm[60] *= 10.0
    return Scene(loss=loss, grad_norm=norm, faults=(60,), warmup_steps=WARMUP_SCENE_STEPS)


def repeats(seed):
    """Ten single steps with 40 % more loss, 20 steps apart."""
    loss, norm = _run(seed, steps=FAULT + 10 * 20 + AFTER_STEPS)
    faults = tuple(range(FAULT, FAULT + 200, 20))
    loss[list(faults)] *= 1.4
    return Scene(loss=loss, grad_norm=norm, faults=faults)


def oscillation(seed):
    """Thrown out by 6 deviations and back within three steps, 25 steps apart, twelve times: none is much by itself."""
    loss, norm = _run(seed, steps=FAULT + 12 * 25 + AFTER_STEPS)
    for number, height in enumerate((6.0, 5.0, 3.0)):
        loss[FAULT + number : FAULT + 300 : 25] += height * 0.025
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def creep(seed):
    """The loss doubles over 2,000 steps."""
    loss, norm = _run(seed, steps=FAULT + 2000)
    loss[FAULT:] *= 1.0 + np.arange(2000) / 2000
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def norm_creep(seed):
    """The gradient grows a thousand times over 2,000 steps, under a calm loss."""
    loss, norm = _run(seed, steps=FAULT + 2000)
    norm[FAULT:] *= 1000.0 ** (np.arange(2000) / 2000)
    return Scene(loss=loss, grad_norm=norm, faults=(FAULT,))


def in_warm_up(seed):
    """At step 400 of a warm-up of 500 the loss goes up to twice what it was, and stays."""
    loss, norm = _run(seed)
    loss[400:] += 3.0
    return Scene(loss=loss, grad_norm=norm, faults=(400,))


def easy_stretch(seed):
    """Ten times, 100 steps of data with 10 % less loss, and back: nothing is wrong."""
    loss, norm = _run(seed, steps=STEPS)
    for first in range(600, 3600, 300):
        loss[first : first + 100] *= 0.9
    return Scene(loss=loss, grad_norm=norm)


def hard_batches(seed):
    """Every tenth batch is of another domain, with 15 % more loss: nothing is wrong."""
    loss, norm = _run(seed, steps=STEPS)
    loss[::10] *= 1.15
    return Scene(loss=loss, grad_norm=norm)


SCENES = {
    scene.__name__: scene
    for scene in (
        clean, heavy_t3, heavy_t4, rounded, one_step, toxic_batch, norm_only, sustained, plateau_jump, climb,
        slow_climb, norm_first, after_nan, early, repeats, oscillation, creep, norm_creep, in_warm_up, easy_stretch,
        hard_batches,
    )
}  # fmt: skip
# The one published spike of BLOOM-176B, iterations 31214 to 31222: loss and gradient norm, from the run's public log
# (bigscience, train/tr11-176B-ml/chronicles.md, 2022-04-12). Its gradient moves at 31215, its loss is highest at 31219.
BLOOM = (
    (2.198845, 0.242), (2.220424, 0.947), (2.595213, 2.390), (2.241558, 15.886), (2.345279, 145.119),
    (5.098124, 960.351), (3.492029, 353.201), (3.213059, 379.330), (2.804948, 650.246),
)  # fmt: skip
BLOOM_FIRST_STEP = 31214


def bloom(seed, *, calm_steps=600):
    """Step, loss and gradient norm of a calm run as it was before that spike, and then of the spike."""
    rng = np.random.default_rng(seed)
    first = BLOOM_FIRST_STEP - calm_steps
    for step in range(first, BLOOM_FIRST_STEP):
        yield step, 2.2 + float(rng.normal(0.0, 0.02)), 0.24 * math.exp(rng.normal(0.0, 0.1))
    for number, (loss, grad_norm) in enumerate(BLOOM):
        yield BLOOM_FIRST_STEP + number, loss, grad_norm

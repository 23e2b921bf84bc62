"""The level: the lowest a run has reached, and what has left it for good."""

import json

import numpy as np
import pytest
from curves import signals

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.level import LOOK_VALUES, Level
from trainer_plugin.detection.monitor import Monitor


def found(level, centers, *, first=0, least_rise=0.0, learn=True, judge=True):
    """Step, first step and baseline of each verdict over these centers."""
    said = (
        level.is_due(step)
        and level.update(step, center, center=center, least_rise=least_rise, learn=learn, judge=judge)
        for step, center in enumerate(centers, first)
    )
    return [(verdict.step, verdict.first_step, verdict.baseline) for verdict in said if verdict]


def level():
    """A fifth above the low is a verdict."""
    return Level("loss", least_ratio=1.2)


def test_what_is_a_fifth_above_its_low_has_left_it():
    """It is seen at the next look, and it began behind the last look before which all was near the low."""
    step, first_step, baseline = found(level(), [2.0] * 100 + [2.5] * 30)[0]
    assert 100 <= step < 100 + LOOK_VALUES
    assert 100 - 2 * LOOK_VALUES <= first_step <= 100
    assert baseline == 2.0
    assert found(level(), [2.0] * 100 + [2.39] * 30) == []
    assert found(level(), [2.0] * 100 + [2.5] * 30, least_rise=0.6) == []
    assert found(level(), [2.0] * 100 + [2.5] * 30, judge=False) == []


def test_a_climb_of_any_slowness_is_found():
    """What the other detectors' windows follow adds up here."""
    climb = [2.0 + 0.0002 * step for step in range(5000)]
    step, first_step, _ = found(level(), [2.0] * 100 + climb)[0]
    assert 2100 <= step < 2140
    assert 300 <= first_step <= 420  # Within 3 % of the low for 300 steps.


def test_a_low_that_is_not_above_zero_has_no_ratio():
    """Nothing is said of losses below zero, or of those that cross it."""
    assert found(level(), [-2.0] * 100 + [-1.0] * 100) == []
    assert found(level(), [-0.1] * 100 + [1.0] * 100 + [3.0] * 100)[:1] == [(207, 176, 1.0)]


def test_a_step_back_forgets_what_came_later():
    """After a restart the low is that of the step at which the run goes on, not one that it had not reached then."""
    falling = [4.0 - 0.01 * step for step in range(200)]
    detector = level()
    assert found(detector, falling) == []
    assert found(detector, falling[100:], first=100) == []
    assert found(detector, [1.6 * center for center in falling[100:]], first=100) != []


def test_it_learns_no_low_when_told_so():
    """A stretch of easier data is no low to come back from."""
    detector = level()
    assert found(detector, [2.0] * 100) == []
    assert found(detector, [1.0] * 100, first=100, learn=False) == []
    assert found(detector, [2.0] * 100, first=200) == []


def test_another_level_is_accepted():
    """What is forgotten is the low, and the next one takes a full window."""
    detector = level()
    found(detector, [2.0] * 100)
    detector.forget()
    assert found(detector, [4.0] * 100, first=100) == []
    assert found(detector, [5.0] * 100, first=200) != []


def test_its_lows_are_few():
    """However far a loss falls, no more is kept than 256 lows."""
    detector = level()
    found(detector, [10.0 * 0.999**step for step in range(20_000)])
    assert len(detector.state_dict()["lows"]) == 256


def test_its_state_goes_back():
    """Lows put back, through JSON, are still the ones to leave."""
    first, second = level(), level()
    found(first, [2.0] * 100)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert found(second, [3.0] * 20, first=100) == found(first, [3.0] * 20, first=100) != []


def acting(losses, *, norms=None, steps=None):
    """What the acting detectors say."""
    monitor, said = Monitor(DetectionConfig()), []
    for i, loss in enumerate(losses):
        seen = signals(i if steps is None else steps[i], loss, grad_norm=1.0 if norms is None else norms[i])
        said += [v for v in monitor.update(seen)[1] if (v.detector, v.signal) in Monitor.ACTING]
    return said


def calm(seed, steps):
    """A falling loss with noise."""
    return 2.5 + 6.0 * np.exp(-np.arange(steps) / 300) + np.random.default_rng(seed).normal(0.0, 0.03, steps)


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_doubles_slowly_is_found(seed):
    """Twice the loss over 2,000 steps is found when a fifth has been lost, since where it began."""
    said = acting(calm(seed, 6000)[:4000] * (1.0 + np.clip((np.arange(4000) - 2000) / 2000, 0.0, 1.0)))
    assert said[0].step <= 2480
    assert 1950 <= said[0].first_step <= 2120


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_grows_slowly_is_found(seed):
    """A norm that grows a thousand times over 2,000 steps is found at ten."""
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(0.0, 0.12, 3500)) * 1000.0 ** np.clip((np.arange(3500) - 1500) / 2000, 0.0, 1.0)
    first = acting(calm(seed, 3500), norms=norms.tolist())[0]
    assert (first.detector, first.signal) == ("drift", "grad_norm")
    assert 2160 <= first.step <= 2220


def test_a_run_that_jumps_in_warm_up_and_stays_is_found_at_its_end():
    """Nothing finite is judged in warm-up, but what it leaves behind is."""
    losses = calm(0, 700)
    losses[400:] = 9.0 + np.random.default_rng(1).normal(0.0, 0.03, 300)
    said = acting(losses)
    assert 500 <= said[0].step <= 500 + 3 * LOOK_VALUES
    assert 370 <= said[0].first_step <= 416


@pytest.mark.parametrize("ahead", [5000, -1000])
def test_neither_a_gap_nor_a_restart_hides_a_higher_level(ahead):
    """A run that comes back at 1.6 times its loss is found within three looks."""
    losses = calm(0, 2300)
    losses[2000:] *= 1.6
    steps = [*range(2000), *range(2000 + ahead, 2300 + ahead)]
    said = acting(losses, steps=steps)
    assert 0 < said[0].step - (2000 + ahead) <= 48


@pytest.mark.parametrize("seed", range(3))
def test_healthy_runs_stay_near_their_low(seed):
    """A falling loss with a falling norm, a plateau with a wandering one: nothing is said."""
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(0.0, 0.4, 4000) + 0.7 * np.sin(np.arange(4000) / 300))
    assert acting(calm(seed, 4000), norms=norms.tolist()) == []


@pytest.mark.parametrize(("noise", "times"), [(0.1, 2.0), (0.2, 10.0)])
def test_a_slow_divergence_in_a_noisy_loss_is_found(noise, times):
    """Noise of a tenth or a fifth of the loss hides no loss that grows for good to a multiple of it."""
    steps = np.arange(9000)
    losses = (1.0 + 1.5 * np.exp(-steps / 600)) * (1.0 + noise * np.random.default_rng(0).normal(size=9000))
    monitor = Monitor(DetectionConfig())
    said = [monitor.update(signals(step, float(loss)))[1] for step, loss in enumerate(losses[:5000])]
    assert not any(verdict.detector == "drift" for verdicts in said for verdict in verdicts)
    losses[5000:] *= times ** np.clip((steps[5000:] - 5000) / 3000, 0.0, 1.0)
    said = [monitor.update(signals(step, float(losses[step]))) for step in range(5000, 9000)]
    assert any(verdict.detector == "drift" for _, verdicts in said for verdict in verdicts)
    assert max(readings.loss_unrecovered_steps for readings, _ in said) >= 200

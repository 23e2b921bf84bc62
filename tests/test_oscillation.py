"""The oscillation detector: small spikes that come again and again."""

import json
import math

import numpy as np
import pytest
from curves import signals

from trainer_plugin.detectors import DetectionConfig
from trainer_plugin.monitor import Monitor
from trainer_plugin.oscillation import Oscillation

SPIKES = {20: 5.0, 50: 5.0, 80: 5.0, 110: 5.0}


def found(detector, spikes, *, steps=200, tail_ratio=1.0):
    """Step and first step of each verdict over a calm run with these scores in it."""
    said = (
        detector.update(step, 3.0, score=spikes.get(step, 0.0), tail_ratio=tail_ratio, center=2.0)
        for step in range(steps)
    )
    return [(verdict.step, verdict.first_step) for verdict in said if verdict is not None]


def oscillation():
    """Four spikes within 128 values."""
    return Oscillation("loss", spikes=4, window=128)


def test_the_fourth_spike_in_a_window_is_the_verdict():
    """Four within the window are an oscillation since the first; three, or four further apart, are none."""
    assert found(oscillation(), SPIKES) == [(110, 20)]
    assert found(oscillation(), dict(list(SPIKES.items())[:3])) == []
    assert found(oscillation(), {10: 5.0, 50: 5.0, 90: 5.0, 139: 5.0}) == []


def test_a_spike_lasts_until_it_is_back():
    """Steps of one excursion count once: it must be well inside the band again before the next."""
    assert found(oscillation(), dict.fromkeys(range(20, 60), 5.0)) == []
    assert found(oscillation(), {20: 5.0, 21: 3.0, 22: 5.0, 23: 3.0, 24: 5.0, 25: 3.0, 26: 5.0}) == []


def test_a_noisy_run_does_not_oscillate():
    """Where the run's own tail reaches that far, the same spikes are its noise."""
    heavy = {step: score / 2.0 for step, score in SPIKES.items()}
    assert found(oscillation(), heavy, tail_ratio=2.0) == []


def test_what_the_spikes_teach_the_tail_does_not_hide_them():
    """The tail is taken as it was before the first of the spikes."""
    detector, said = oscillation(), []
    for step in range(200):
        ratio = 1.0 if step < 60 else 2.0
        score = SPIKES.get(step, 0.0) / ratio
        said.append(detector.update(step, 3.0, score=score, tail_ratio=ratio, center=2.0))
    assert [verdict.step for verdict in said if verdict] == [110]


def test_its_state_goes_back():
    """Spikes put back, through JSON, are still counted."""
    first, second = oscillation(), oscillation()
    assert found(first, SPIKES, steps=100) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.update(100, 3.0, score=math.nan, tail_ratio=1.0, center=2.0) is None
    assert second.update(101, 3.0, score=5.0, tail_ratio=1.0, center=2.0).first_step == 20


@pytest.mark.parametrize("seed", range(3))
def test_periodic_small_spikes_are_found_by_the_monitor(seed):
    """From losses to the verdict: single steps 5.5 deviations up, every 25th, none a verdict by itself."""
    rng, monitor, said = np.random.default_rng(seed), Monitor(DetectionConfig()), []
    for step in range(1100):
        loss = 2.3 + rng.normal(0.0, 0.025) * (step < 800 or step % 25 != 0)
        loss += 0.025 * 5.5 * (step >= 800 and step % 25 == 0)
        said += [v for v in monitor.update(signals(step, loss))[1] if (v.detector, v.signal) in Monitor.ACTING]
    assert {verdict.detector for verdict in said} == {"oscillation"}
    assert 875 <= said[0].step <= 950

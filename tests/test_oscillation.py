"""The oscillation detector: small spikes that come again and again."""

import json
import math

import numpy as np
import pytest
from curves import signals

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.oscillation import Oscillation


def thrown_out(*first_steps):
    """Scores of excursions that begin at these steps and need a second one to fall back."""
    return {step + i: (5.0, 3.0)[i] for step in first_steps for i in range(2)}


SPIKES = thrown_out(20, 50, 80, 110)


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
    assert found(oscillation(), SPIKES) == [(111, 20)]
    assert found(oscillation(), thrown_out(20, 50, 80)) == []
    assert found(oscillation(), thrown_out(10, 50, 90, 139)) == []


def test_single_steps_are_of_the_data():
    """What is out for one value and back in the next is a batch, however often: every tenth, or all by chance."""
    assert found(oscillation(), dict.fromkeys(range(20, 200, 10), 7.0)) == []
    assert found(oscillation(), {step: 7.0 if step % 2 else 1.9 for step in range(20, 200)}) == []


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
    assert [verdict.step for verdict in said if verdict] == [111]


def test_its_state_goes_back():
    """Spikes put back, through JSON, are still counted."""
    first, second = oscillation(), oscillation()
    assert found(first, SPIKES, steps=111) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.update(111, 3.0, score=math.nan, tail_ratio=1.0, center=2.0) is None
    assert second.update(112, 3.0, score=3.0, tail_ratio=1.0, center=2.0).first_step == 20


@pytest.mark.parametrize("seed", range(3))
def test_periodic_small_spikes_are_found_by_the_monitor(seed):
    """From losses to the verdict: every 25th step 6 deviations up, and back in two more; none is a verdict."""
    rng, monitor, said = np.random.default_rng(seed), Monitor(DetectionConfig()), []
    for step in range(1100):
        out = {0: 6.0, 1: 5.0, 2: 3.0}.get(step % 25, 0.0) if step >= 800 else 0.0
        loss = 2.3 + 0.025 * (out or rng.normal(0.0, 1.0))
        said += [v for v in monitor.update(signals(step, loss))[1] if (v.detector, v.signal) in Monitor.ACTING]
    assert {verdict.detector for verdict in said} == {"oscillation"}
    assert 875 <= said[0].step <= 950


def spoken(extra, *, seed=0, steps=4000):
    """What the acting detectors say of a run with these values added from step 1,000 on."""
    rng, monitor, said = np.random.default_rng(seed), Monitor(DetectionConfig()), []
    for step in range(steps):
        loss = 2.5 + rng.normal(0.0, 0.03) + (extra(step, rng) if step >= 1000 else 0.0)
        said += [v for v in monitor.update(signals(step, loss))[1] if (v.detector, v.signal) in Monitor.ACTING]
    return said


@pytest.mark.parametrize("every", [20, 50, 100])
def test_batches_of_a_harder_domain_do_not_oscillate(every):
    """Every nth batch, or one in n by chance, is from another domain: nobody is to lower a learning rate for that."""
    assert {v.detector for v in spoken(lambda step, _: 0.3 * (step % every == 0))} <= {"robust"}
    assert {v.detector for v in spoken(lambda _, rng: 0.3 * (rng.random() < 1 / every))} <= {"robust"}


def test_spikes_that_are_verdicts_by_themselves_oscillate_too():
    """Two steps far up, time and again: each is found, and so is that there is no end to them."""
    said = spoken(lambda step, _: 0.5 * (step % 25 < 2), steps=1300)
    assert {v.detector for v in said} == {"robust", "oscillation"}
    assert next(v for v in said if v.detector == "oscillation").step == 1076


def test_the_way_back_from_a_jump_is_no_oscillation():
    """A loss that jumps and comes back up and down, in a run whose band is wide, is one deviation all the way."""
    monitor, rng, said = Monitor(DetectionConfig()), np.random.default_rng(0), []
    for step in range(1, 901):
        level = 2.0 if step <= 700 else 2.0 + 2.5 * math.exp((700 - step) / 60)
        wave = 0.7 * (step > 720 and step % 20 < 3)
        loss = level * (1.0 + rng.normal(0.0, 0.08)) + wave
        said += monitor.judge(signals(step, loss, grad_norm=1.0))
    assert {v.detector for v in said if v.signal == "loss"} >= {"robust"}
    assert "oscillation" not in {v.detector for v in said}

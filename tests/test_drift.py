"""The drift detector: climbs that no single step shows."""

import json
import math

import numpy as np
import pytest
from curves import CURVES, FAULT, decay, signals

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.drift import Drift
from trainer_plugin.detection.monitor import Monitor


def drift():
    """The detector with its shipped settings."""
    return Drift("loss", limit=DetectionConfig().drift_limit, least_ratio=DetectionConfig().drift_least_ratio)


def found(detector, scores, *, value=3.0, center=2.0):
    """Index and first step of each verdict over these scores."""
    said = (detector.update(i, value, score=score, center=center) for i, score in enumerate(scores))
    return [(verdict.step, verdict.first_step) for verdict in said if verdict is not None]


def test_scores_are_summed_above_the_allowance():
    """The sum of what is above 1 makes a verdict when it exceeds 6, and then begins anew."""
    assert found(drift(), [3.0] * 8) == [(3, 0), (7, 4)]
    assert found(drift(), [0.9] * 100) == []
    assert found(drift(), [3.0, 3.0, -9.0, 3.0, 3.0, 3.0, 3.0]) == [(6, 3)]  # What falls back was no climb.


def test_a_heavy_tail_takes_a_third_value():
    """Where single values are far out often, two in a row are chance."""
    said = [drift_ for heavy in (1.0, 2.0) for drift_ in [drift()]
            if any(drift_.update(i, 3.0, score=9.0, center=2.0, tail_ratio=heavy) for i in range(2))]  # fmt: skip
    assert len(said) == 1
    assert drift().update(0, 3.0, score=9.0, center=2.0, tail_ratio=2.0) is None


def test_no_single_value_makes_a_verdict():
    """However far out one value is, it counts for 4: that is the robust detector's business."""
    assert found(drift(), [1e9, 0.0, 0.0]) == []
    assert found(drift(), [1e9, 1e9]) == [(1, 0)]


@pytest.mark.parametrize(
    ("center", "value", "expected"), [(2.0, 2.11, 0), (2.0, 2.13, 1), (-2.0, -1.89, 0), (-2.0, -1.87, 1)]
)
def test_a_small_climb_is_none(center, value, expected):
    """A loss that has wandered up by less than 6 % of its level is left alone, also below zero."""
    assert len(found(drift(), [3.0] * 4, value=value, center=center)) == expected


def test_its_level_is_that_of_the_onset():
    """What a value is held against is the center at which the sum began, not the one that has followed."""
    detector, centers = drift(), (2.0, 2.05, 2.1, 2.15)
    said = [detector.update(i, 2.2, score=3.0, center=center) for i, center in enumerate(centers)]
    assert said[:3] == [None] * 3
    assert (said[3].baseline, said[3].first_step) == (2.0, 0)


@pytest.mark.parametrize("score", [math.nan, math.inf * 0])
def test_no_score_changes_nothing(score):
    """A step without a score leaves the sum as it was."""
    detector = drift()
    found(detector, [3.0, 3.0])
    before = detector.state_dict()
    assert found(detector, [score]) == []
    assert detector.state_dict() == before


def test_its_state_goes_back():
    """A sum put back, through JSON, goes on where it was."""
    first, second = drift(), drift()
    found(first, [0.0, 3.0, 3.0])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found(second, [3.0, 3.0]) == [(1, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_a_climb_of_one_percent_a_step_is_found_within_ten(seed):
    """From losses to the verdict: such a climb, in noise of 2 %, is found in at most 10 steps."""
    monitor, said = Monitor(DetectionConfig()), []
    for step, loss in enumerate(CURVES["climb"](seed)[: FAULT + 30]):
        said += [v for v in monitor.update(signals(step, loss))[1] if (v.detector, v.signal) in Monitor.ACTING]
    assert FAULT <= said[0].step <= FAULT + 9
    assert said[0].first_step >= FAULT - 5


def test_the_level_before_the_climb_is_the_one_to_come_back_to():
    """After a drift the loss counts as unrecovered until it is back where the climb began, not where it has led."""
    monitor, values = Monitor(DetectionConfig()), decay(0)
    rng = np.random.default_rng(1)
    for step in range(FAULT):
        monitor.update(signals(step, values[step]))
    level = values[FAULT - 30 : FAULT].mean()
    for step in range(FAULT, FAULT + 200):
        up = min(1.0 + 0.004 * (step - FAULT), 1.4)
        readings, _ = monitor.update(signals(step, level * up + rng.normal(0.0, 0.05)))
    assert readings.loss_unrecovered_steps > 150
    assert readings.loss_robust_center == pytest.approx(level, rel=0.05)
    for step in range(FAULT + 200, FAULT + 220):
        readings, _ = monitor.update(signals(step, level + rng.normal(0.0, 0.05)))
    assert readings.loss_unrecovered_steps == 0

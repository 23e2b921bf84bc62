"""Continuity: which steps go on from the one before, and which changes were planned."""

import json

import pytest

from trainer_plugin.detection.continuity import Continuity


def changes(steps, rates=None):
    """What is said of each of these steps."""
    continuity = Continuity(gap_steps=2000, window=128)
    return [continuity.update(step, () if rates is None else (rates[i],)) for i, step in enumerate(steps)]


@pytest.mark.parametrize(
    "steps",
    [
        range(5, 50),
        range(0, 50_000, 200),
        [0, 1, 2, 2, 2, 3],  # Lines told twice.
        [0, 1, 2, 1500, 1501],  # A few lines missing.
        [*range(0, 4000, 200), 7800, 8000],
    ],
)
def test_these_steps_go_on(steps):
    """Steps of any interval, some missing and some repeated, are one stretch of the run."""
    assert set(changes(steps)) == {None}


@pytest.mark.parametrize(
    ("steps", "at"),
    [([0, 1, 2, 2500, 2501], 3), ([*range(0, 4000, 200), 9000, 9200], 20), ([*range(3000, 3300), 0, 1], 300)],
)
def test_these_steps_are_elsewhere(steps, at):
    """Far ahead, or further back than a window, is another stretch of the run."""
    said = changes(steps)
    assert [i for i, change in enumerate(said) if change] == [at]
    assert said[at] == "elsewhere"


def test_a_short_way_back_is_told():
    """Within a window the level is nearly the same, but the steps come again."""
    said = changes([*range(300), 180, 181])
    assert [(i, change) for i, change in enumerate(said) if change] == [(300, "back")]


def test_a_ramp_of_the_learning_rate_was_planned():
    """Ten times the rate over 30 steps, or twice over 50, is as planned as a jump, and is told at each rise by half."""
    said = changes(range(300), [1e-5 * (1.0 + 9.0 * min(max(i - 200, 0) / 30, 1.0)) for i in range(300)])
    assert 3 <= said.count("planned") <= 5
    assert {i for i, change in enumerate(said) if change} <= set(range(201, 231))
    said = changes(range(400), [1e-5 * (1.0 + min(max(i - 200, 0) / 50, 1.0)) for i in range(400)])
    assert said.count("planned") == 1
    assert set(changes(range(400), [1e-5 * (1.0 + i / 400) for i in range(400)])) == {None}


def test_a_learning_rate_that_is_raised_at_once_was_planned():
    """A jump up by half or more is one; a fall, a warm-up and a decay are none."""
    assert changes(range(4), [1e-3, 1e-3, 2e-3, 2e-3]) == [None, None, "planned", None]
    assert set(changes(range(4), [1e-3, 5e-4, 1e-4, 0.0])) == {None}
    assert set(changes(range(50), [1e-5 * (100 + i) for i in range(50)])) == {None}
    assert set(changes(range(4), [1e-3, 0.0, 0.0, 1e-3])) == {None}
    assert set(changes(range(4))) == {None}


def test_its_state_goes_back():
    """What was last is put back through JSON."""
    first, second = (Continuity(gap_steps=2000, window=128) for _ in range(2))
    for step in (0, 200, 400):
        first.update(step, (1e-3,))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.update(600, (1e-3,)) is None
    assert second.update(800, (2e-3,)) == "planned"
    assert second.state_dict() != first.state_dict()


def test_a_planned_step_is_announced_once_in_any_log():
    """Crossing it is told at the first step from there on, in a log of every 50th too, and again after going back."""
    continuity = Continuity(gap_steps=2000, window=128, planned=(300, 120))
    assert [step for step in range(400) if continuity.update(step, ()) == "announced"] == [120, 300]
    assert continuity.update(290, ()) == "announced"
    assert continuity.update(300, ()) == "announced"
    sampled = Continuity(gap_steps=2000, window=128, planned=[120])
    assert [step for step in range(0, 400, 50) if sampled.update(step, ()) == "announced"] == [150]


def test_a_jump_of_the_rate_is_remembered_and_a_ramp_is_not():
    """More than twice the rate at once, and when; a warm-up, a halving taken back, or a step back is no jump."""
    continuity = Continuity(gap_steps=2000, window=128)
    rates = [*(0.01 * (step + 1) for step in range(100)), *[0.5] * 200, *[1.0] * 100]
    for step, rate in enumerate(rates):
        continuity.update(step, (rate,))
    early, continuity.last_rise = continuity.last_rise, None
    assert early is None or early[0] < 5  # From next to nothing, where nothing is judged yet.
    for step, rate in enumerate([1.0, 30.0, 30.0, 1.0], start=len(rates)):
        continuity.update(step, (rate,))
    assert continuity.last_rise == (401, 30.0)
    continuity.load_state_dict(continuity.state_dict())
    assert continuity.last_rise is None

"""The ordered window: the newest values, in both orders."""

import random

import numpy as np
import pytest

from trainer_plugin.detection.ordered_window import OrderedWindow


def test_it_holds_the_newest_in_both_orders():
    """After any number of values, equal ones included, it holds the last `size` by age and by size."""
    rng, window, all_values = random.Random(0), OrderedWindow(7), []
    for _ in range(200):
        all_values.append(rng.choice((rng.random(), 0.5, -1e300)))
        window.add(all_values[-1])
        assert window.values == all_values[-7:]
        assert window.ordered == sorted(all_values[-7:])


def test_it_is_filled_anew():
    """Values put in at once replace what was there, and the oldest of them leaves first."""
    window = OrderedWindow(3)
    window.add(9.0)
    window.fill([3.0, 1.0, 2.0])
    window.add(0.0)
    assert window.values == [1.0, 2.0, 0.0]
    assert window.ordered == [0.0, 1.0, 2.0]


def test_deviations_are_those_of_noise_that_reaches_as_far():
    """Both are right for normal noise; between two kinds of values the tenths stay; of none they are 0."""
    window = OrderedWindow(4000)
    assert window.deviations() == (0.0, 0.0)
    window.fill(np.random.default_rng(0).normal(1.0, 0.5, 4000))
    assert window.deviations() == pytest.approx((0.5, 0.5), rel=0.05)
    window.fill([0.0] * 3200 + [1.0] * 800)
    assert window.deviations() == pytest.approx((0.0, 0.39), abs=0.01)

"""The ordered window: the newest values, in both orders."""

import random

import numpy as np

from trainer_plugin.ordered_window import OrderedWindow


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


def test_the_deviation_is_that_of_noise_that_reaches_as_far():
    """Right for normal noise, never less than what lies between two kinds of values, and 0 of none."""
    window = OrderedWindow(4000)
    assert window.deviation() == 0.0
    window.fill(np.random.default_rng(0).normal(1.0, 0.5, 4000))
    assert 0.47 < window.deviation() < 0.53
    window.fill([0.0] * 3200 + [1.0] * 800)
    assert window.deviation() > 0.35

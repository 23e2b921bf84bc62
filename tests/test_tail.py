"""The tail: what a run's own noise teaches about how far it reaches."""

import json

import numpy as np
import pytest

from trainer_plugin.detection.tail import Tail


def learnt(scores, size=1024):
    """A tail that has seen these scores."""
    tail = Tail(size)
    for score in scores:
        tail.update(float(score))
    return tail


@pytest.mark.parametrize("seed", range(3))
def test_normal_noise_has_a_tail_of_about_one(seed):
    """Of normal noise the ratio is 1, within the error of a quantile of 1,024 values."""
    assert learnt(np.random.default_rng(seed).normal(size=3000)).ratio < 1.25


@pytest.mark.parametrize("seed", range(3))
def test_heavy_noise_has_a_heavy_tail(seed):
    """Of Student's t3, in deviations by its quartiles, the ratio is about 2.3; never more than 3 whatever the noise."""
    scores = np.random.default_rng(seed).standard_t(3, 5000) / 1.134
    assert 1.6 < learnt(scores).ratio <= 3.0
    assert learnt(np.random.default_rng(seed).standard_cauchy(5000)).ratio == 3.0


def test_what_comes_in_a_row_is_not_learnt():
    """Scores of which the next is as high are what goes wrong, not noise."""
    calm = np.random.default_rng(0).normal(size=1000)
    before = learnt(calm).ratio
    assert learnt([*calm, *[7.0] * 50]).ratio == before
    assert learnt([*calm, *[7.0, 0.0] * 50]).ratio > 2.0


def test_no_two_values_move_it():
    """With two values far out, each alone, the ratio is no more than the largest of the others makes it."""
    calm = np.random.default_rng(1).normal(size=1000)
    assert learnt([*calm, 50.0, 0.0, 50.0, 0.0]).ratio <= max(calm) / 2.8


def test_it_forgets_what_is_older_than_its_size():
    """A stretch with a heavy tail is forgotten after `size` scores."""
    calm = np.random.default_rng(2).normal(size=3000)
    tail = learnt([*[7.0, 0.0] * 20, *calm[:500]])
    assert tail.ratio > 2.0
    for score in calm[:1100]:
        tail.update(float(score))
    assert tail.ratio < 1.25


def test_its_state_goes_back():
    """A tail put back, through JSON, goes on like the first."""
    scores = np.random.default_rng(3).standard_t(3, 3000)
    first, second = learnt(scores[:2000]), Tail(1024)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for score in scores[2000:]:
        first.update(float(score))
        second.update(float(score))
        assert second.ratio == first.ratio
    assert second.state_dict() == first.state_dict()

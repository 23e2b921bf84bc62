"""What was normal before a scene, from its recorded steps."""

import math

import pytest

from trainer_plugin.replay.normal import earliest_surge, normal_of


def steps(count: int, **last):
    """Recorded steps with a loss of about 2 and two layers, the last one with changes."""
    plain = [
        {
            "step": number, "loss": 2.0 + 0.1 * (number % 5 - 2), "grad_norm": 1.0 + 0.1 * (number % 3 - 1),
            "layer_grad_norms": {"a": 1.0 + 0.01 * (number % 4), "b": 3.0},
        }
        for number in range(1, count + 1)
    ]  # fmt: skip
    plain[-1].update(last)
    return plain


def test_normal_is_the_median_and_the_spread_of_the_steps_before():
    """The scene's own step and what is not finite are no part of it; a spread is never 0."""
    history = steps(40, loss=900.0)
    history[3]["loss"] = "nan"
    normal = normal_of(history)
    assert normal.loss == pytest.approx(2.0)
    assert 0.1 < normal.loss_scale < 0.2
    assert normal.loss_score(3.0) > 5.0
    assert normal.grad_norm == pytest.approx(1.0, rel=0.05)
    assert normal.norm_score(100.0) > 20.0
    flat = normal_of([{"loss": 2.0, "grad_norm": 1.0}] * 9)
    assert flat.loss_scale > 0.0
    assert flat.grad_norm_log_scale > 0.0


def test_without_steps_before_nothing_is_normal_and_nothing_fails():
    """A scene of a run's first step, without a gradient norm."""
    normal = normal_of([{"loss": "inf", "grad_norm": None}])
    assert math.isnan(normal.loss)
    assert normal.norm_score(5.0) == 0.0
    assert earliest_surge([{"step": 1, "layer_grad_norms": {"a": 1.0}}]) is None


def test_the_layer_that_left_its_past_first_is_told():
    """Of several in one step the one that went furthest; a NaN is a surge; what is in the past already is normal."""
    history = steps(40, layer_grad_norms={"a": 900.0, "b": 900.0})
    history[-3]["layer_grad_norms"] = {"a": 1.0, "b": 30.0}
    surge = earliest_surge(history)
    assert (surge.layer, surge.step, round(surge.ratio)) == ("b", 38, 10)
    surge = earliest_surge(steps(40, layer_grad_norms={"a": "nan", "b": 900.0}))
    assert (surge.layer, surge.step) == ("a", 40)
    assert earliest_surge(steps(40)) is None

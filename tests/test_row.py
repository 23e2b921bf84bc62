"""Rows: what a step's vector says once it is on the host."""

import math

import pytest
import torch

from trainer_plugin.step.row import HUGE_NORM, Row, Withhold


def row(*values: float, layers=(), norms=(("a",), [1.0])) -> Row:
    """A row of these values; `norms` are names and the norms of single gradients."""
    return Row(torch.tensor(values), layers, (norms[0], torch.tensor(norms[1])) if norms else None)


def test_every_value_has_its_name():
    """Loss, norm, coefficient, scale, verdict, layers and what travels beside them come out as they went in."""
    values = row(2.0, 5.0, 0.5, 8.0, 0.0, 3.0, 4.0, 7.0, 9.0, layers=("a", "b")).read()
    assert (values.loss, values.grad_norm, values.clip_coefficient, values.amp_loss_scale) == (2.0, 5.0, 0.5, 8.0)
    assert values.withhold is Withhold.NO
    assert values.layer_grad_norms == {"a": 3.0, "b": 4.0}
    assert values.beside == (7.0, 9.0)


@pytest.mark.parametrize("verdict", Withhold)
def test_a_step_is_bad_if_there_is_any_reason(verdict):
    """Every verdict but NO withholds the update; a row is known once somebody has read it."""
    one = row(2.0, 5.0, 1.0, 1.0, float(verdict))
    assert not one.known
    assert one.bad() == (verdict is not Withhold.NO)
    assert one.known


def test_a_huge_norm_is_at_least_so_much():
    """Where the device saw only that squares overflowed, the norm is the root of the largest float32, not Inf."""
    values = row(2.0, math.inf, 1.0, 1.0, float(Withhold.HUGE), math.inf, 2.0, layers=("a", "b")).read()
    assert values.grad_norm == values.layer_grad_norms["a"] == HUGE_NORM == pytest.approx(1.8446743e19, rel=1e-6)
    assert values.layer_grad_norms["b"] == 2.0
    assert row(2.0, 1e21, 1.0, 1.0, float(Withhold.HUGE)).read().grad_norm == pytest.approx(1e21)


def test_an_infinite_norm_stays_infinite():
    """What is not finite is not made to look so."""
    assert row(2.0, math.inf, 1.0, 1.0, float(Withhold.NONFINITE)).read().grad_norm == math.inf


def test_without_gradients_there_is_no_norm():
    """A row without norms has None for the total, and no parameter to name."""
    empty = row(2.0, math.nan, math.nan, math.nan, 0.0, norms=None)
    assert empty.read().grad_norm is None
    assert empty.nonfinite_parameters() == []


def test_parameters_gone_bad_are_named():
    """The names of the gradients that are not finite, in their order."""
    assert row(1.0, 1.0, 1.0, 1.0, 1.0, norms=(("a", "b", "c"), [math.nan, 1.0, math.inf])).nonfinite_parameters() == [
        "a",
        "c",
    ]

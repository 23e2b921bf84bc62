"""The loss scale: a search for it is no fault, a collapse or a scale that only grows is."""

import math

from trainer_plugin.detection.loss_scale import LossScale


def judge(scales, *, tell_steps=200):
    """The steps, counted from 0, at which these scales get a verdict, and the detector after them."""
    detector = LossScale(floor=1.0, ceiling=2.0**24, tell_steps=tell_steps)
    verdicts = [detector.update(step, scale) for step, scale in enumerate(scales)]
    return [verdict for verdict in verdicts if verdict is not None], detector


def test_a13_a_search_for_the_scale_is_no_fault():
    """From 65536 by five overflows to 2048, and growing again to 2^24: nothing is said."""
    scales = [2.0**power for power in (*range(16, 10, -1), *range(11, 25))]
    assert judge(scales)[0] == []


def test_a_collapse_is_told_from_its_first_step_on():
    """Ten halvings down and below 1, each step has a verdict that knows where it began, until the scale is back."""
    verdicts, detector = judge([512.0 / 2**halvings for halvings in range(12)])
    assert [(verdict.step, verdict.first_step, verdict.value) for verdict in verdicts] == [
        (10, 10, 0.5),
        (11, 10, 0.25),
    ]
    assert (verdicts[0].detector, verdicts[0].signal, verdicts[0].baseline) == ("drift", "amp_loss_scale", 1.0)
    assert detector.collapsed
    assert detector.update(12, 1.0) is None
    assert not detector.collapsed
    assert detector.update(13, 0.5).first_step == 13


def test_a_run_may_live_at_small_scales():
    """A loss that is summed has a small scale for good: around 1, and 128 times below its best, is no collapse."""
    assert judge([2.0 ** (7 - step // 300 % 8) for step in range(5000)])[0] == []
    assert judge([0.25] * 100)[0] == []


def test_a_scale_that_stays_low_is_the_new_level():
    """2,000 steps after the fall the scale is what it is, and no collapse any more."""
    verdicts, detector = judge([65536.0, *[0.5] * 2500], tell_steps=10**6)
    assert [verdicts[0].step, verdicts[-1].step] == [1, 2000]
    assert not detector.collapsed


def test_a_search_may_begin_far_up():
    """From 2^32 down to 2^17: where a scaler begins is its own choice."""
    assert judge([2.0**power for power in range(32, 16, -1)])[0] == []
    assert judge([2.0**32] * 100)[0] == []


def test_a12_a_scale_that_only_grows_is_told():
    """Above 2^24, and at +Inf, there is a verdict; it is no collapse."""
    verdicts, detector = judge([2.0**24, 2.0**25, math.inf])
    assert [(verdict.step, verdict.baseline) for verdict in verdicts] == [(1, 2.0**24), (2, 2.0**24)]
    assert not detector.collapsed


def test_one_stay_is_not_told_for_ever():
    """After so many steps whoever listens knows; a second stay is told anew."""
    verdicts, _ = judge([1024.0] + [2.0**30] * 10 + [1024.0] + [2.0**30] * 10, tell_steps=4)
    assert [verdict.step for verdict in verdicts] == [1, 2, 3, 4, 12, 13, 14, 15]


def test_without_a_scaler_nothing_is_said():
    """No scale, or one that is NaN, is no verdict and changes no state."""
    verdicts, detector = judge([None, math.nan, None])
    assert verdicts == []
    assert detector.state_dict() == judge([])[1].state_dict()


def test_the_state_goes_back():
    """A detector with the state of another goes on as that one would."""
    _, first = judge([1024.0, *[2.0**30] * 3], tell_steps=4)
    second = judge([], tell_steps=4)[1]
    second.load_state_dict(first.state_dict())
    assert second.update(4, 2.0**30) == first.update(4, 2.0**30) is not None
    assert second.update(5, 2.0**30) is None

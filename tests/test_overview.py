"""The whole run at a glance: few numbers, none of them wrong."""

import math
import random
from itertools import pairwise

from curves import signals

from trainer_plugin.scenes.overview import MOST_STRETCHES, Overview, read_overview


def grown(folder, losses, *, now=lambda: 0.0, branch=lambda _: 0):
    """An overview that has seen these losses, from step 1 on; what it writes is written at once."""
    overview = Overview(folder, write=lambda job: job(), clock=now)
    for step, loss in enumerate(losses, 1):
        overview.add(signals(step, loss, grad_norm=loss / 2.0), steps_total=step, branch=branch(step))
    return overview


def test_few_stretches_hold_the_whole_run(tmp_path):
    """From the first step to the last without a gap, each value in one of them."""
    rng = random.Random(3)
    losses = [rng.gauss(3.0, 0.2) for _ in range(50_000)]
    stretches = grown(tmp_path, losses).stretches
    assert len(stretches) <= MOST_STRETCHES
    assert stretches[0].first_step == 1
    assert stretches[-1].last_step == 50_000
    assert all(before.last_step + 1 == after.first_step for before, after in pairwise(stretches))
    assert sum(one.loss.count for one in stretches) == 50_000
    some = stretches[7]
    seen = losses[some.first_step - 1 : some.last_step]
    assert (some.loss.least, some.loss.largest) == (min(seen), max(seen))
    assert math.isclose(some.loss.mean, sum(seen) / len(seen), rel_tol=1e-9)
    assert math.isclose(some.grad_norm.mean, some.loss.mean / 2.0, rel_tol=1e-9)


def test_one_spike_is_never_smoothed_away(tmp_path):
    """The largest value stays the largest, however many steps share its stretch."""
    losses = [2.0] * 30_000
    losses[12_345] = 90.0
    assert max(one.loss.largest for one in grown(tmp_path, losses).stretches) == 90.0


def test_what_is_not_finite_is_counted_and_enters_no_mean(tmp_path):
    """A NaN leaves the others as they are."""
    [only] = grown(tmp_path, [2.0] * 1).stretches
    assert only.nonfinite == 0
    stretches = grown(tmp_path, [2.0, math.nan, math.inf, 2.0] * 1000).stretches
    assert sum(one.nonfinite for one in stretches) == 2000
    assert all(one.loss.mean == 2.0 for one in stretches if one.loss.count)


def test_a_rollback_begins_a_stretch(tmp_path):
    """Steps that come again are beside those that were undone, not in them."""
    overview = grown(tmp_path, [2.0] * 4000)
    for step in range(3000, 3500):
        overview.add(signals(step, 3.0), steps_total=step + 1001, branch=1)
    of_first = [one for one in overview.stretches if one.branch == 0]
    of_second = [one for one in overview.stretches if one.branch == 1]
    assert of_first[-1].last_step == 4000
    assert of_second[0].first_step == 3000
    assert {one.loss.mean for one in of_second} == {3.0}


def test_it_is_written_every_half_minute_and_goes_on_after_a_restart(tmp_path):
    """What is on disk is taken up again; a file that cannot be read is begun anew."""
    times = iter(range(10_000))
    grown(tmp_path, [2.0] * 100, now=lambda: float(next(times)))
    known = read_overview(tmp_path)
    assert 60 <= sum(one.loss.count for one in known) <= 100
    assert len(Overview(tmp_path, write=lambda job: job()).stretches) == len(known)

    (tmp_path / "recorder.overview.json").write_text("[]")
    assert read_overview(tmp_path) == []
    assert Overview(tmp_path, write=lambda job: job()).stretches == []

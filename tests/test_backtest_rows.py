"""Tests of the order of logged steps: restarts, new runs, repeats, and what is in no order at all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import in_order


def told(steps, ids=None, losses=None):
    """(step, run, restart) of each row that comes of rows with these steps, and the notes."""
    notes = Notes()
    ids = ids or [None] * len(steps)
    losses = losses or [2.0 + place for place in range(len(steps))]
    found = [(place, step, loss, None, None, None, run_id)
             for place, (step, loss, run_id) in enumerate(zip(steps, losses, ids, strict=True), start=1)]  # fmt: skip
    return [(row.step, row.run, row.restart) for row in in_order(found, notes)], notes.listed()


def test_rising_steps_are_one_run():
    """Steps that rise, in whatever strides, are one run, and there is nothing to say."""
    rows, notes = told([0, 1, 2, 10, 20, 1000])

    assert {row[1:] for row in rows} == {(1, 0)}
    assert notes == []


def test_a_restart_from_a_checkpoint_is_counted():
    """Where steps come again from the middle, all rows stay, in order, and the second time is a restart."""
    steps = [*range(1, 251), *range(100, 300)]

    rows, notes = told(steps)

    assert [row[0] for row in rows] == steps
    assert [row[2] for row in rows] == [0] * 250 + [1] * 200
    assert {row[1] for row in rows} == {1}
    assert notes == ["steps 100 to 250 come twice (line 251): taken as a restart from a checkpoint"]


def test_a_fall_to_the_beginning_is_a_new_run():
    """Where steps begin again where the run began, or near it, another run begins."""
    rows, notes = told([*range(0, 5000, 10), *range(10, 300, 10)])

    assert [row[1:] for row in rows] == [(1, 0)] * 500 + [(2, 0)] * 29
    assert notes == ["after step 4990 comes step 10 (line 501): taken as a new run"]


def test_a_fall_to_before_the_log_is_a_new_run():
    """A log that begins at step 10000 and goes back to 9000 knows nothing of what came before 9000."""
    rows, _ = told([*range(10_000, 10_100), *range(9000, 9100)])

    assert [row[1:] for row in rows] == [(1, 0)] * 100 + [(2, 0)] * 100


def test_a_restart_in_the_last_row_counts():
    """A log that ends right after a restart ends with a row that is told from the run before."""
    rows, _ = told([*range(1, 101), 50])

    assert rows[-1] == (50, 1, 1)


def test_a_job_that_crashes_again_and_again():
    """Forty-four restarts from one checkpoint, three steps each, are restarts: five are told, the others counted."""
    rows, notes = told([*range(1, 501), *([400, 401, 402] * 44)])

    assert rows[-1] == (402, 1, 44)
    assert len(notes) == 6
    assert notes[-1] == "39 more restarts"


def test_a_late_row_is_no_restart():
    """One row whose step is too small, alone among others that rise, is kept where it is, and nothing begins anew."""
    rows, notes = told([1, 2, 4, 3, 5, 6])

    assert rows == [(step, 1, 0) for step in (1, 2, 4, 3, 5, 6)]
    assert notes == ["1 row with a step below the one before, and alone in it: kept where found (line 4)"]


def test_a_row_that_comes_twice_counts_once():
    """A row that is the same as the one before, as where two ranks print it, is left out; another value is kept."""
    rows, notes = told([1, 1, 2, 2, 3], losses=[2.0, 2.0, 2.5, math.nan, 2.0])

    assert [row[0] for row in rows] == [1, 2, 2, 3]
    assert notes == [
        "1 row the same as the one before: left out (line 2)",
        "1 row with the step of the one before and another value: kept (line 4)",
    ]


def test_nan_rows_that_come_twice_are_the_same():
    """NaN is not equal to NaN, but the row is."""
    assert len(told([1, 1], losses=[math.nan, math.nan])[0]) == 1


def test_runs_by_their_names():
    """Where a column names the run, each other name is a new one, and within it the steps tell as ever."""
    rows, notes = told([1, 2, 3, 4, 5, 1], ids=["a", "a", "b", "b", "c", "c"])

    assert [row[1:] for row in rows] == [(1, 0), (1, 0), (2, 0), (2, 0), (3, 0), (4, 0)]
    assert notes == [
        "run 'b' begins in line 3: a new run",
        "run 'c' begins in line 5: a new run",
        "after step 5 comes step 1 (line 6): taken as a new run",
    ]


@pytest.mark.parametrize(
    "steps",
    [
        range(5000, 0, -1),
        [place * 7919 % 5003 for place in range(5003)],
        [step for pair in zip(range(5000, 6000), range(1000), strict=True) for step in pair],
        [step for five in zip(*[range(start, start + 50) for start in (400, 300, 200, 100, 0)], strict=True)
         for step in five],
    ],
    ids=["newest first", "shuffled", "two runs mixed", "five runs mixed"],
)  # fmt: skip
def test_steps_in_no_order_are_refused(steps):
    """Rows that are in no order of time are refused with the line, and what to do."""
    with pytest.raises(ValueError, match=r"line \d+: the steps are in no order \(step \d+ after \d+"):
        told(list(steps))


def test_runs_that_are_mixed_are_refused():
    """Where a column names the run and rows of two alternate, no order can be made of them."""
    with pytest.raises(
        ValueError, match=r"line 3: the rows of several runs are mixed \(run 'a' comes again after 'b'\)"
    ):
        told([1, 1, 2, 2], ids=["a", "b", "a", "b"])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_every_row_is_kept_or_told(steps):
    """In whatever order steps come, rows stay in that order, runs and restarts only rise, and none is lost."""
    try:
        rows, _ = told(steps)
    except ValueError:
        return
    assert [row[0] for row in rows] == steps
    parts = [row[1:] for row in rows]
    assert parts == sorted(parts)
    assert parts[0] == (1, 0)

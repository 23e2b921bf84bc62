"""Tests of logs that count samples instead of steps."""

import json

import pytest
from old_logs import read, trainer_state_text, write

NOTE = "`{}` counts samples: 512 of them, as between the first two rows, are taken as a step"


@pytest.mark.parametrize("form", ["csv", "lines", "list"])
def test_samples_are_made_steps(tmp_path, form):
    """The interval between the first two rows is a step, in each format, and the user is told."""
    counts = [512, 1024, 1536, 2047, 2560, 5120]
    if form == "csv":
        name, text = "samples", "samples,loss\n" + "".join(f"{count},{count / 4}\n" for count in counts)
    else:
        name, found = "consumed_samples", [{"consumed_samples": count, "loss": count / 4} for count in counts]
        text = json.dumps(found) if form == "list" else "".join(json.dumps(entry) + "\n" for entry in found)

    rows, log = read(write(tmp_path, "log", text))

    assert [(row.step, row.loss) for row in rows] == [
        (step, count / 4) for step, count in zip((1, 2, 3, 4, 5, 10), counts, strict=True)
    ]
    assert log.notes == [NOTE.format(name)]


def test_samples_that_never_rise(tmp_path):
    """A log of one row, or of one count, stays as it is."""
    assert [row.step for row in read(write(tmp_path, "log", "samples,loss\n7,2.5\n"))[0]] == [7]
    text = "samples,loss\n" + "".join(f"7,{place}\n" for place in range(1200))
    assert {row.step for row in read(write(tmp_path, "log", text))[0]} == {7}


def test_steps_stay_steps(tmp_path):
    """Where a log has steps, nothing is divided."""
    assert [row.step for row in read(write(tmp_path, "log", trainer_state_text()))[0]] == [10, 20, 30, 40]

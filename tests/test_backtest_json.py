"""Tests of logs in JSON: a line or an entry for each step."""

import json
import math

import pytest
from old_logs import VALUES, json_lines_text, read, trainer_state_text, write


def test_lines_without_a_loss_are_left_out(tmp_path):
    """Configuration, evaluation and system lines tell of no step; they are counted."""
    lines = [
        {"config": {"lr": 0.1, "loss": "cross_entropy"}, "loss_scale": 0},
        {"step": 1, "loss": 2.5, "lr": 0.25},
        {"step": 1, "eval_loss": 2.4},
        {"_timestamp": 1.5, "system.gpu.0.temp": 60},
        {"step": 2, "loss": 2.25, "lr": 0.125},
    ]

    rows, log = read(write(tmp_path, "log", "".join(json.dumps(line) + "\n" for line in lines)))

    assert [(row.step, row.loss, row.learning_rate) for row in rows] == [(1, 2.5, 0.25), (2, 2.25, 0.125)]
    assert log.notes == ["3 rows without `loss`: left out (first: line 1)"]


def test_the_first_loss_may_come_late(tmp_path):
    """A thousand lines of something else before the first loss are left out."""
    text = '{"system": 1}\n' * 1000 + json_lines_text()

    rows, log = read(write(tmp_path, "log", text))

    assert len(rows) == 4
    assert log.notes == ["1000 rows without a loss: left out (first: line 1)"]


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 7, "loss": 2.5, "grad_norm": 0.5}',
        '{"step": 7.0, "loss": "2.5", "grad_norm": "0.5"}',
        '{"_step": 7, "train/loss": 2.5, "train/grad_norm": [0.5, 0.25]}',
        '{"step": 7, "train": {"loss": 2.5, "grad_norm": 0.5}}',
        '{"metrics": {"train": {"loss": 2.5, "gnorm": 0.5}}, "global_step": "7"}',
        '{"data": {"train/loss": 2.5, "step": 7, "train/grad_norm": 0.5}}',
        '2026-01-01 | INFO | {"num_updates": "7", "loss": "2.5", "gnorm": "0.5"}',
        '  {"iteration": 7, "lm loss": 2.5, "grad norm": 0.5, "text": "a NaN, an Infinity", "other": NaN} ',
        '{"step": 7, "loss": 2.5, "grad_norm": 0.5, "lr": {"group": NaN}, "x": ": NaN"}',
        '{"step": 7, "loss": 2.5, "grad_norm": 0.5, "l\\u0000r": 1, "te\\"xt": nan}',
    ],
)
def test_names_and_values_in_all_forms(tmp_path, line):
    """Numbers as text, nested objects, slashes, words before the object and words that JSON lacks are understood."""
    rows, log = read(write(tmp_path, "log", line + "\n"))

    assert [(row.step, row.loss, row.grad_norm) for row in rows] == [(7, 2.5, 0.5)]
    assert log.format == "jsonl"


@pytest.mark.parametrize("word", ["NaN", "nan", '"nan"', "NAN", '"NaN"', "-nan"])
def test_nan_in_all_forms(tmp_path, word):
    """A NaN is a NaN whoever wrote it."""
    (row,), _ = read(write(tmp_path, "log", f'{{"step": 1, "loss":{word}, "grad_norm": Infinity}}\n'))

    assert math.isnan(row.loss)
    assert row.grad_norm == math.inf


def test_lines_that_are_no_object(tmp_path):
    """Broken lines, lists and words are left out and counted; a loss that is no number too."""
    text = (
        '{"step": 1, "loss": 2.5}\n{"step": 2, "lo\n[1, 2]\n\nwords\n{"step": 3, "loss": [true]}\n'
        '{"step": 4, "loss": true}\n{"step": "x", "loss": 2.5}\n{"step": 5, "loss": 2.25}\n'
    )

    rows, log = read(write(tmp_path, "log", text))

    assert [row.step for row in rows] == [1, 5]
    assert log.notes == [
        "3 lines without a JSON object: left out (first: line 2)",
        "2 rows with a loss that is no number: left out (first: line 6)",
        "1 row without a step that is a whole number from 0 on: left out (line 8)",
    ]


def test_a_log_whose_first_line_is_broken(tmp_path):
    """A log that was rotated begins with half a line, and is one of lines all the same."""
    rows, log = read(write(tmp_path, "log", '{"step": 0, "lo\n' + json_lines_text()))

    assert (len(rows), log.format) == (4, "jsonl")


def test_lines_without_steps_are_counted(tmp_path):
    """Where no line names a step, lines with a loss are counted, and the user told."""
    rows, log = read(write(tmp_path, "log", '{"loss": 2.5}\n{"x": 1}\n{"loss": 2.25}\n'))

    assert [row.step for row in rows] == [1, 2]
    assert log.notes[0] == "no step is named: rows are counted from 1"


def test_lines_name_their_run(tmp_path):
    """A run's id, text or number, tells runs apart."""
    rows, _ = read(write(tmp_path, "log", "".join(f'{{"run_id": {i}, "step": 5, "loss": 2.5}}\n' for i in (1, 1, 2))))

    assert [row.run for row in rows] == [1, 2]


@pytest.mark.parametrize("finite", [True, False])
def test_the_trainers_nan_filter_is_told(tmp_path, finite):
    """That the Trainer hides a NaN loss is told of its logs, unless there is one in it."""
    _, log = read(write(tmp_path, "trainer_state.json", trainer_state_text(VALUES[:2] if finite else VALUES)))

    assert any("logging_nan_inf_filter" in note for note in log.notes) == finite


def test_a_trainers_history_on_one_line(tmp_path):
    """The same document without line ends is no log of lines."""
    text = json.dumps(json.loads(trainer_state_text()))

    assert read(write(tmp_path, "log", text))[1].format == "trainer_state"


def test_a_list_of_steps_is_a_document_too(tmp_path):
    """A JSON list of objects, as an export makes it, is read by its own names."""
    entries = [{"Step": 1, "pond - train/loss": 2.5}, "word", {"Step": 2, "pond - train/loss": 2.25}]

    for text in (json.dumps(entries), json.dumps(entries, indent=1)):
        rows, log = read(write(tmp_path, "log", text))

        assert [(row.step, row.loss) for row in rows] == [(1, 2.5), (2, 2.25)]
        assert log.notes == ["1 entry that is no JSON object: left out (entry 2)"]

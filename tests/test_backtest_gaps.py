"""Tests of losses that are missing for good: a NaN as pandas and JSON write it, and what only looks like one."""

import json
import math

import pytest
from old_logs import read, write

DEAD = range(200, 300)
NOTE = "100 rows with an empty loss, while its other columns go on as before: read as nan (first: line 202)"


def nan_steps(path):
    """The steps whose loss is read as NaN, how many rows there are, and the notes."""
    rows, log = read(path)
    return [row.step for row in rows if math.isnan(row.loss)], len(rows), log.notes


def csv(names, line):
    """A log of 300 steps; a line is made of the step and of what the loss is printed as."""
    return names + "\n" + "".join(line.format(step, "" if step in DEAD else 2.5) + "\n" for step in range(300))


def entries(**others):
    """A log of 300 objects, the last hundred with a loss of null, and with these values."""
    return [{"step": step, "loss": None if step in DEAD else 2.5, **others} for step in range(300)]


@pytest.mark.parametrize(
    "text",
    [
        csv("step,loss,grad_norm,lr", "{},{},1.0,0.1"),
        csv("step,loss", "{},{}"),
        csv("step,loss,grad_norm,lr", "{},{},,0.1"),
        csv("epoch,_step,train/loss,train/lr,eval/loss,time", "1,{},{},0.1,,2.0"),
        csv("step,split,loss", "{},train,{}"),
    ],
    ids=["all go on", "step alone", "no norm", "wandb", "split"],
)
def test_a_loss_that_goes_missing_is_nan(tmp_path, text):
    """Empty cells from one step on, while the rest of the row is as before, are a run that has died of NaN."""
    assert nan_steps(write(tmp_path, "log", text)) == ([*DEAD], 300, [NOTE])


@pytest.mark.parametrize("form", ["lines", "list", "history", "nested"])
def test_a_null_that_stays_is_nan(tmp_path, form):
    """A null in each object from one step on is the same, also where the gradient norm is null with it."""
    found = entries(learning_rate=0.1)
    found = [{**entry, "grad_norm": entry["loss"]} for entry in found]
    if form == "nested":
        found = [{"step": entry.pop("step"), "train": entry} for entry in found]
    text = {"list": json.dumps(found), "history": json.dumps({"log_history": found})}.get(
        form, "\n".join(map(json.dumps, found))
    )
    steps, rows, notes = nan_steps(write(tmp_path, "log", text + "\n"))

    assert (steps, rows) == ([*DEAD], 300)
    assert any("100 rows with an empty loss" in note for note in notes)


@pytest.mark.parametrize(
    "text",
    [
        csv("step,loss,grad_norm,lr,eval_loss", "{},{},,,2.5").replace("2.5,,,2.5", "2.5,1.0,0.1,"),
        csv("step,loss,eval_loss", "{},{},2.5").replace("2.5,2.5", "2.5,"),
        csv("step,loss,lr", "{},{},").replace("2.5,", "2.5,0.1"),
        csv("Step,a - train/loss,b - train/loss", "{},{},2.25"),
        csv("loss,lr", "{1},0.1"),
        "\n".join(json.dumps({key: v for key, v in entry.items() if v is not None}) for entry in entries(lr=0.1)),
        "\n".join(json.dumps({**e, "val_loss": 2.5 if e["loss"] is None else None}) for e in entries(lr=0.1)),
        "\n".join(json.dumps({**e, "lr": e["loss"]}) for e in entries()),
    ],
    ids=["evaluation", "nothing but evaluations", "no rate", "a run beside", "no step", "absent", "val", "null rate"],
)  # fmt: skip
def test_rows_of_something_else_stay_left_out(tmp_path, text):
    """Rows of evaluations and summaries, of the run beside, and without even an empty cell are no NaN."""
    steps, rows, notes = nan_steps(write(tmp_path, "log", text + "\n"))

    assert (steps, rows) == ([], 200)
    assert any("100 rows without" in note for note in notes)


def test_a_loss_in_every_tenth_row_is_no_nan(tmp_path):
    """Where the loss is logged less often than the rest, a gap is as usual, until it is much longer."""
    lines = [f"{step},{2.5 if step % 10 == 0 else ''},0.1,1.0\n" for step in range(2000)]
    head = "step,loss,lr,grad_norm\n"
    assert nan_steps(write(tmp_path, "log", head + "".join(lines)))[:2] == ([], 200)

    dead = "".join(f"{step},,0.1,1.0\n" for step in range(2000, 2500))
    steps, rows, _ = nan_steps(write(tmp_path, "log", head + "".join(lines) + dead))
    assert (steps[0], steps[-1], rows) == (1991, 2499, 709)


def test_a_loss_that_is_logged_less_often_from_here_on(tmp_path):
    """Two gaps of a new length are taken for NaN, and then it is known."""
    text = "".join(f"{step},{2.5 if step < 500 or step % 10 == 0 else ''},0.1\n" for step in range(1500))

    assert nan_steps(write(tmp_path, "log", "step,loss,lr\n" + text))[0] == [*range(501, 510), *range(511, 520)]


def test_one_or_two_gaps_are_no_nan(tmp_path):
    """A cell missing here or there is left out; three together, long after, are not."""
    gaps = {100, 150, 151, 200, 201, 202}
    text = "".join(f"{step},{'' if step in gaps else 2.5},0.1\n" for step in range(300))

    steps, rows, notes = nan_steps(write(tmp_path, "log", "step,loss,lr\n" + text))

    assert (steps, rows) == ([200, 201, 202], 297)
    assert notes[0] == "3 rows without a loss: left out (first: line 102)"


def test_what_begins_without_losses_is_no_nan(tmp_path):
    """Before ten losses nobody knows whether they should be there; a step that falls back tells nothing either."""
    text = "".join(f"{step},{2.5 if step < 9 else ''},0.1\n" for step in range(100))
    assert nan_steps(write(tmp_path, "log", "step,loss,lr\n" + text))[:2] == ([], 9)

    text = "".join(f"{step},2.5,0.1\n" for step in range(50)) + "49,,0.1\n" * 5
    assert nan_steps(write(tmp_path, "log", "step,loss,lr\n" + text))[:2] == ([], 50)


def test_each_run_begins_anew(tmp_path):
    """A run by its own name that logs no loss has not lost one."""
    text = "".join(f"{run},{step},{2.5 if run == 'a' else ''},0.1\n" for run in "ab" for step in range(100, 150))

    assert nan_steps(write(tmp_path, "log", "run,step,loss,lr\n" + text))[:2] == ([], 50)


@pytest.mark.parametrize(
    "text",
    [
        "step,split,loss\n" + "".join(f"{step},train,2.5\n{step},Val,9.0\n{step},test,9\n" for step in range(50)),
        "".join(f'{{"step": {s}, "mode": "{m}", "loss": 2.5}}\n' for s in range(50) for m in ("train", "eval", "val")),
    ],
)
def test_rows_of_an_evaluation_by_their_column(tmp_path, text):
    """Rows that say that they are none of training are left out, whatever their loss is called."""
    rows, log = read(write(tmp_path, "log", text))

    assert [row.step for row in rows] == [*range(50)]
    assert {row.loss for row in rows} == {2.5}
    assert log.notes[0].startswith("100 rows of an evaluation: left out (first: line ")

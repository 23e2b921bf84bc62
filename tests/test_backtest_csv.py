"""Tests of logs in columns: delimiters, names, missing cells, and what a second process does to a file."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from old_logs import read, write

from trainer_plugin.backtest.csv_log import Table, find_table


def steps_and_losses(path):
    """What the most of these tests look at, and the notes."""
    rows, log = read(path)
    assert log.format == "csv"
    return [(row.step, row.loss) for row in rows], log.notes


@pytest.mark.parametrize(
    "text",
    [
        "step,loss\n1,2.5\n2,2.25\n",
        "step;loss\n1;2,5\n2;2,25\n",
        "step\tloss\n1\t2.5\n2\t2.25\n",
        '"step","loss"\n"1","2.5"\n"2","2.25"\n',
        " Step , Train Loss \n 1 , 2.5 \n 2 , 2.25 \n",
        ",loss,step\n0,2.5,1.0\n1,2.25,2.0\n",
        "# made by hand\n\nstep,loss\n\n1,2.5\n# a word between\n2,2.25\n",
        "# step,loss\n1,2.5\n2,2.25\n",
        "loss,step,note\n2.5,1,\n2.25,2\n",
        'step,note,loss\n1,"a, b",2.5\n2,"7,8,9",2.25\n',
        'note,step,loss\n"1,2,3",1,2.5\n"a ""b"", 5",2,2.25\n',
    ],
    ids=["commas", "semicolons", "tabs", "quotes", "spaces", "pandas", "comments", "numpy", "short lines",
         "quoted delimiters", "quoted first"],
)  # fmt: skip
def test_the_usual_forms_are_read_alike(tmp_path, text):
    """Whatever stands between cells or around them, the rows are the same, and there is nothing to note."""
    assert steps_and_losses(write(tmp_path, "log", text)) == ([(1, 2.5), (2, 2.25)], [])


def test_all_values_are_read(tmp_path):
    """Gradient norm, learning rate and loss scale have their own columns; an empty cell is None, not 0."""
    rows, _ = read(write(tmp_path, "log", "step,loss,gnorm,lr,scale\n1,nan,inf,1e-4,65536\n2,2.5,,,\n3,2.5,x,n/a,-\n"))

    assert [str(row)[7:-19] for row in rows] == [
        "step=1, loss=nan, grad_norm=inf, learning_rate=0.0001, amp_loss_scale=65536.0",
        "step=2, loss=2.5, grad_norm=None, learning_rate=None, amp_loss_scale=None",
        "step=3, loss=2.5, grad_norm=None, learning_rate=None, amp_loss_scale=None",
    ]


def test_rows_without_a_value_are_left_out_and_counted(tmp_path):
    """No loss, a word for it, no step, a negative or a broken one: left out, counted, the first line told."""
    text = "step,loss\n1,2.5\n2,\n3,\n4,what\n,2.5\n-1,2.5\n1.5,2.5\n5,2.25\n"

    assert steps_and_losses(write(tmp_path, "log", text)) == (
        [(1, 2.5), (5, 2.25)],
        [
            "2 rows without a loss: left out (first: line 3)",
            "1 row with a loss that is no number: left out (line 5)",
            "3 rows without a step that is a whole number from 0 on: left out (first: line 6)",
        ],
    )


def test_without_steps_rows_are_counted(tmp_path):
    """A log of epochs, as Keras writes it, has no steps: its rows are counted, and the user told."""
    assert steps_and_losses(write(tmp_path, "log", "epoch,loss,val_loss\n0,2.5,3\n1,2.25,3\n")) == (
        [(1, 2.5), (2, 2.25)],
        ["no column of the step: rows are counted from 1"],
    )


def test_a_single_column_of_losses(tmp_path):
    """The poorest log of all is read."""
    assert steps_and_losses(write(tmp_path, "log", "loss\n2.5\n2.25\n"))[0] == [(1, 2.5), (2, 2.25)]


def test_tensorboards_own_export(tmp_path):
    """Its one column of values is taken for the loss, and that is told."""
    text = "Wall time,Step,Value\n1700000000.5,10,2.5\n1700000001.5,20,nan\n"

    (first, second), notes = steps_and_losses(write(tmp_path, "log", text))

    assert first == (10, 2.5)
    assert math.isnan(second[1])
    assert notes == ["no column is named as a loss usually is: `Value` is taken for it"]


def test_an_export_of_several_runs(tmp_path):
    """Of runs side by side, as Weights & Biases exports a panel, the first is read, and the others are named."""
    text = '"Step","a - train/loss","a - train/loss__MIN","b - train/loss"\n"1","","","3"\n"2","2.5","2.5",""\n'

    assert steps_and_losses(write(tmp_path, "log", text)) == (
        [(2, 2.5)],
        [
            "the loss is read from `a - train/loss`; there too: `b - train/loss`",
            "1 row without a loss: left out (line 2)",
        ],
    )


def test_names_that_come_again(tmp_path):
    """Where a second process has appended, its line of names is passed over, and its steps are a restart."""
    text = "step,loss\n" + "".join(f"{step},2.5\n" for step in range(1, 201))
    text += "step,loss\n" + "".join(f"{step},2.25\n" for step in range(101, 301))

    rows, notes = steps_and_losses(write(tmp_path, "log", text))

    assert len(rows) == 400
    assert notes == [
        "the names of the columns come again in line 202",
        "steps 101 to 200 come twice (line 203): taken as a restart from a checkpoint",
    ]


def test_names_in_another_order_hold_from_there_on(tmp_path):
    """If the second process has other columns, its rows are read by them."""
    text = "step,loss\n1,2.5\n2,2.25\nlr,train_loss,grad_norm,step\n0.5,2.0,0.25,3\nstep,lr,loss\n4,0.5,1.5\n"

    rows, log = read(write(tmp_path, "log", text))

    assert [(row.step, row.loss, row.grad_norm) for row in rows] == [
        (1, 2.5, None), (2, 2.25, None), (3, 2.0, 0.25), (4, 1.5, None)]  # fmt: skip
    assert len(log.notes) == 2


def test_a_column_of_runs(tmp_path):
    """Runs one below the other are told apart by their column."""
    rows, _ = read(write(tmp_path, "log", "run_id,step,loss\na,1,2.5\na,2,2.5\nb,2,9.0\nb,3,2.5\n"))

    assert [row.run for row in rows] == [1, 1, 2, 2]


def test_mixed_runs_are_refused(tmp_path):
    """Rows of several runs by turns are refused with file and line."""
    path = write(tmp_path, "log.csv", "run,step,loss\na,1,2.5\nb,1,2.5\na,2,2.5\n")

    with pytest.raises(ValueError, match=r"log\.csv: line 4: the rows of several runs are mixed"):
        read(path)


def test_a_cell_of_a_million_bytes(tmp_path):
    """More than Python's csv module takes in a cell is no trouble."""
    text = f'note,step,loss\n"{"x" * 1_000_000}",1,2.5\n{"y," * 1000}\n,2,2.25\n'

    assert steps_and_losses(write(tmp_path, "log", text))[0] == [(1, 2.5), (2, 2.25)]


def test_a_header_is_one_only_with_values_below():
    """Prose with the right words and commas is no table, and one without a loss is one only where that is asked."""
    assert find_table([b"step, loss and so on", b"are words, as are these"]) is None
    assert find_table([b"step,val_loss", b"1,2.5"]) is None
    assert find_table([b"step,val_loss", b"1,2.5"], loss_wanted=False) is not None
    index, table = find_table([b"", b"made on Monday, by hand", b"step,loss", b"1,2.5"])
    assert (index, table.names) == (2, ["step", "loss"])


@settings(deadline=None)
@given(st.lists(st.text(alphabet='ab,;" \t.1', max_size=6), min_size=3, max_size=3), st.floats(), st.integers(0, 2**53))
def test_quick_and_slow_lines_agree(tmp_path_factory, texts, loss, step):
    """A row is the same whether its line is plain or has quotes that need the long way."""
    folder = tmp_path_factory.mktemp("csv")
    head = "a,step,b,loss,c\n"
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    line = f"{quoted[0]},{step},{quoted[1]},{loss!r},{quoted[2]}\n"

    rows, _ = read(write(folder, "log", f"{head},{step},,{loss!r},\n"))
    quoted_rows, _ = read(write(folder, "log", f"{head},0,,2.5,\n{line}"))

    assert str(rows[0]) == str(quoted_rows[-1])
    assert Table(["a"], ",").cells(b"1")[-1] == ""

"""Tests of text logs as Megatron-LM and its relatives print them."""

import math

import pytest
from old_logs import megatron_line, read, write

# What each prints for step 7: loss 2.5, gradient norm 0.5 where it has one.
LINES = {
    "megatron": (
        " [2025-04-13 23:41:12] iteration        7/     100 | consumed samples:          448 | elapsed time per "
        "iteration (ms): 1147.6 | throughput per GPU (TFLOP/s/GPU): 490.0 | learning rate: 1.500000E-04 | global "
        "batch size:    64 | lm loss: 2.500000E+00 | seq_load_balancing_loss: 1.000203E+00 | mtp_1 loss: 9.0E+00 "
        "| loss scale: 1.0 | grad norm: 0.500 | num zeros: 11.0 | params norm: 8660.607 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
    ),
    "rank and no line end": (
        "1:  iteration       7/73242187 | consumed samples: 50 | elapsed time per iteration (ms): 87.0 | "
        "learning rate: 1.5E-04 | global batch size: 2 | lm loss: 2.5E+00 | loss scale: 1.0 | grad norm: 0.5 | "
        "number of skipped iterations: 0 | number of nan iterations:   0 |Number of parameters in billions:  6.98"
    ),
    "colors": (
        "[\x1b[32m20251202 09:12:08\x1b[0m][\x1b[36mrank-7/8\x1b[0m][--------trainer.py:2560] : iteration 7/ "
        "5000 | elapsed time per iteration (ms): 13372.8/13364.7 | learning rate: 1.5E-04 | lm loss:\x1b[1m "
        "2.5\x1b[0m | loss scale: 1.0 | grad norm: 0.5 |\x1b[0m"
    ),
    "no colons": (
        " iteration        7/  500000 | elapsed time per iteration (ms): 318.6 | learning rate 1.500E-04 | lm "
        "loss 2.500000E+00 | loss scale 1.0 | grad norm 0.5 |"
    ),
    "bloom": (
        " iteration        7/  115311 | consumed samples: 14336 | consumed tokens: 29360128 | elapsed time per "
        "iteration (s): 104.57 | learning rate: 1.500E-04 | global batch size:  2048 | lm loss: 2.5E+00 | grad "
        "norm: 0.5 | number of skipped iterations:   0 | number of nan iterations:   0 | loss scale: 1.0 | "
        "TFLOPs: 150.2 |"
    ),
    "neox": (
        " samples/sec: 17.4 | iteration        7/  320000 | elapsed time per iteration (ms): 918.5 | learning "
        "rate: 1.500E-04 | approx flops per GPU: 12.3TFLOPS | lm_loss: 2.500000E+00 | loss scale: 1.0 | grad "
        "norm: 0.5 |"
    ),
    "nemo": (
        "[default0]:Training epoch 3, iteration 1/99 | lr: 1.5e-04 | global_batch_size: 64 | global_step: 7 | "
        "loss_scale: 1.0 | reduced_train_loss: 2.5 | train_step_timing in s: 12.22 | grad_norm: 0.5 | val_loss: "
        "2.861"
    ),
    "nanotron": (
        "[default7]:06/01/2025 [INFO|DP=0|PP=0|TP=0]: iteration: 7 / 100 | consumed_tokens: 93.2K | "
        "time_per_iteration_ms: 90.4 | tokens_per_sec: 11.3K | grad_norm: 0.5 | lr: 1.5e-04 | lm_loss: 2.5 | "
        "loss_scale: 1.0 | model_tflops_per_gpu: 0.784"
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_many_trainers(tmp_path, name):
    """The relatives' lines, with whatever stands before and after, give the same values."""
    (row,), log = read(write(tmp_path, "log", LINES[name] + "\n"))

    assert log.format == "megatron"
    assert (row.step, row.loss, row.grad_norm, row.learning_rate, row.amp_loss_scale) == (7, 2.5, 0.5, 1.5e-4, 1.0)
    assert log.notes == []


def test_steps_that_print_no_loss(tmp_path):
    """Skipped iterations are left out; a NaN, which Megatron does not print as one, is a NaN."""
    text = (
        megatron_line(1, None, None, 0.5, skipped=1)
        + megatron_line(2, 2.5, 0.5, 0.5)
        + megatron_line(3, None, math.nan, 0.5, skipped=1, nans=1)
        + megatron_line(4, None, math.nan, 0.5)
        + megatron_line(10, 2.25, 0.5, 0.5, skipped=1, nans=1)
        + megatron_line(11, 2.25, 0.5, 0.5)
    )

    rows, log = read(write(tmp_path, "log", text))

    assert str([(row.step, row.loss) for row in rows]) == "[(2, 2.5), (3, nan), (4, nan), (10, nan), (11, 2.25)]"
    assert math.isnan(rows[2].grad_norm)
    assert log.notes == [
        "1 row of nothing but skipped iterations, which print no loss: left out (line 1)",
        "2 rows with nan iterations in it: its loss is read as nan (first: line 3)",
        "1 row without a loss though nothing was skipped, as Megatron prints a NaN: read as nan (line 4)",
    ]


def test_a_run_that_is_nan_from_the_start(tmp_path):
    """A log without a single loss is all NaN, not empty."""
    rows, _ = read(write(tmp_path, "log", "".join(megatron_line(step, None, math.nan, 0.5) for step in range(5))))

    assert [math.isnan(row.loss) for row in rows] == [True] * 5


def test_another_loss_does_not_stand_in(tmp_path):
    """Where the loss itself is NaN and so not printed, that of a part is not taken for it."""
    with_part = [megatron_line(step, loss, 0.5, 0.5).replace(" loss scale", " sop loss: 0.5 | loss scale")
                 for step, loss in ((1, 2.5), (2, None), (3, 2.25))]  # fmt: skip

    rows, _ = read(write(tmp_path, "log", "".join(with_part)))

    assert str([row.loss for row in rows]) == "[2.5, nan, 2.25]"


def test_a_line_that_was_cut_and_written_on(tmp_path):
    """Where a process died within a line and another wrote behind it, the second line counts, with its own step."""
    text = (
        megatron_line(1, 2.5, 0.5, 0.5)
        + megatron_line(2, 2.25, 0.5, 0.5)[:150]
        + megatron_line(3, 2.0, 0.5, 0.5, prefix="[2026-01-01] ")
        + megatron_line(4, 1.5, 0.5, 0.5).partition("+00")[0]
        + "\n"
        + megatron_line(5, 1.0, 0.5, 0.5)
    )

    rows, log = read(write(tmp_path, "log", text))

    assert [(row.step, row.loss) for row in rows] == [(1, 2.5), (3, 2.0), (5, 1.0)]
    assert log.notes[0] == "1 line cut off in the middle of the log: left out (line 2)"


def test_labels_may_change(tmp_path):
    """A log that another version went on with is read by that version's names."""
    text = LINES["megatron"] + "\n" + LINES["neox"].replace("   7/", "   8/") + "\n"
    text += LINES["nemo"].replace("step: 7", "step: 9") + "\n"

    rows, _ = read(write(tmp_path, "log", text))

    assert [(row.step, row.loss, row.grad_norm) for row in rows] == [(7, 2.5, 0.5), (8, 2.5, 0.5), (9, 2.5, 0.5)]


def test_a_part_that_comes_later_is_not_missed(tmp_path):
    """A value or a count of NaN that the first lines did not have is read as soon as it is there."""
    text = "".join(
        f"iteration {step}/ 9 | lm loss: 2.5 |{more}\n"
        for step, more in enumerate(
            ["", "", " grad norm: 0.5 |", "", " number of nan iterations: 1 |", " grad norm: 0.25"], start=1
        )
    )

    rows, _ = read(write(tmp_path, "log", text))

    assert str([(row.loss, row.grad_norm) for row in rows]) == (
        "[(2.5, None), (2.5, None), (2.5, 0.5), (2.5, None), (nan, None), (2.5, 0.25)]"
    )


def test_the_last_value_of_a_line_needs_no_bar(tmp_path):
    """A value at the very end of a line keeps its last digit."""
    (row, _), _ = read(
        write(tmp_path, "log", "iteration 7/ 9 | lm loss: 2.5 | grad norm: 0.125\niteration 8/ 9 | lm loss: 2 |\n")
    )

    assert row.grad_norm == 0.125


def test_restarts_in_a_log_of_several_jobs(tmp_path):
    """A log that jobs were appended to has all their rows, and its restarts are counted."""
    text = "".join(megatron_line(step, 2.5, 0.5, 0.5) for step in [*range(1, 301), *range(201, 401)])

    rows, log = read(write(tmp_path, "log", text))

    assert [row.restart for row in rows] == [0] * 300 + [1] * 200
    assert log.notes == ["steps 201 to 300 come twice (line 301): taken as a restart from a checkpoint"]

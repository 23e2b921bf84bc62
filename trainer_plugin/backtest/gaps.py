"""Losses that are missing for good: a NaN that was written as an empty cell, or as null."""

import re
from collections.abc import Iterable, Iterator

from trainer_plugin.backtest.columns import EVALUATION, Columns, plain
from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow

# The loss of a row that has none but looks like one that should: a NaN that is told from others by identity.
EMPTY_LOSS = float("nan")
# Before so many losses nobody knows how often they come.
_LEAST_LOSSES = 10
_LEAST_ROWS = 3
# If there were two stretches of empty losses among so many losses, a log has its loss only in some rows. There a third
# is odd if it is so many times longer.
_USUAL_LOSSES = 20
_TIMES_LONGER = 4
_MOST_HELD_ROWS = 10_000
_READ = "with an empty loss, while its other columns go on as before: read as nan"
_LEFT_OUT = "without a loss: left out"


def goes_on(filled: set[str], before: set[str], columns: Columns) -> bool:
    """Whether a row without a loss is otherwise like the last one with a loss: not an evaluation's, nor a summary.

    Nothing may be filled that was not, the learning rate must still be, and half of whatever else was; the gradient
    norm is not asked for, because it is NaN where the loss is.

    Args:
        filled: the names of its columns that hold something.
        before: those of the last row with a loss.
        columns: what the names stand for.
    """
    if columns.step is None or columns.loss is None or columns.guessed or columns.loss in filled:
        return False
    run = columns.loss.rpartition(" - ")[0]
    if any(" - " in name and name.rpartition(" - ")[0] != run for name in filled):
        return False  # Of runs side by side, the one that is read is over.
    rate = columns.learning_rate
    if not {columns.step} | ({rate} & before) <= filled <= before:
        return False
    if rate not in filled and any(EVALUATION & set(re.split("_", plain(name))) for name in filled):
        return False
    others = before - {columns.step, columns.loss, columns.grad_norm}
    return 2 * len(others & filled) >= len(others)


def judge_gaps(found: Iterable[FoundRow], notes: Notes) -> Iterator[FoundRow]:
    """Rows with a loss as they are; those with an `EMPTY_LOSS` where they are so many that it must be a NaN.

    That is where ten losses came before, and three of them or more follow each other. A log that has its loss only in
    every tenth row stays without the others, unless suddenly four times as many follow each other.
    """
    losses, last, run_id = 0, -1, None
    # After how many losses the last two stretches came, and their rows.
    stretches = [(-_USUAL_LOSSES, 0)] * 2
    rows, held, lost = 0, list[FoundRow](), False
    for row in found:
        if row[2] is not EMPTY_LOSS:
            if row[6] != run_id:
                losses, run_id = 0, row[6]
            if rows:
                _leave_out(held, notes)
                stretches = [stretches[1], (losses, rows)]
                rows, held, lost = 0, [], False
            losses += 1
            last = row[1]
            yield row
            continue
        rises, last = row[1] > last, row[1]
        usual = max(length for _, length in stretches) if losses - stretches[0][0] < _USUAL_LOSSES else 0
        wanted = max(_LEAST_ROWS, _TIMES_LONGER * usual + 1)
        if not rises or row[6] != run_id or losses < _LEAST_LOSSES or wanted > _MOST_HELD_ROWS:
            rows += rises
            notes.count(_LEFT_OUT, row[0])
            continue
        rows += 1
        held.append(row)
        if lost or rows >= wanted:
            lost = True
            for one in held:
                notes.count(_READ, one[0])
            yield from held
            held.clear()
    _leave_out(held, notes)


def _leave_out(rows: list[FoundRow], notes: Notes) -> None:
    for row in rows:
        notes.count(_LEFT_OUT, row[0])

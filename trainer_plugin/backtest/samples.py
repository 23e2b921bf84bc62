"""Logs that count samples: rows by step, as the detectors count."""

from collections.abc import Iterable, Iterator
from itertools import chain

from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow

_MOST_HELD_ROWS = 1000


def in_steps(found: Iterable[FoundRow], name: str, notes: Notes) -> Iterator[FoundRow]:
    """The rows with a step for each interval between the first two: a warm-up of 500 steps is then one of 500 rows.

    Args:
        found: rows that count samples.
        name: the column in which they do, as it is shown.
        notes: where it tells what it does.
    """
    rows = iter(found)
    held: list[FoundRow] = []
    interval = 1
    for row in rows:
        held.append(row)
        if row[1] > held[0][1]:
            interval = row[1] - held[0][1]
            break
        if len(held) == _MOST_HELD_ROWS:
            break
    if held:
        notes.say(f"{name} counts samples: {interval} of them, as between the first two rows, are taken as a step")
    for row in chain(held, rows):
        yield row[0], round(row[1] / interval), *row[2:]

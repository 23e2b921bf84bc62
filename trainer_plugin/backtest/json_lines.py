"""Logs with one JSON object a line, also behind something else in the line."""

from collections.abc import Callable, Iterator
from itertools import chain, islice

from trainer_plugin.backtest.columns import Columns, missing_loss
from trainer_plugin.backtest.json_entries import BROKEN, Entries, Values, choose_keys, decoder, load_line, pick
from trainer_plugin.backtest.log_files import LogFile
from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow
from trainer_plugin.backtest.samples import in_steps

# By so many lines with a loss among them the names are chosen.
_SAMPLE_LINES = 200
_MOST_NAMES_SHOWN = 100


def read_json_lines(file: LogFile, notes: Notes) -> Iterator[FoundRow]:
    """The rows of a log with an object a line.

    Raises:
        ValueError: it has no loss, or cannot be read.
    """
    lines = enumerate(file.lines(), start=1)
    sample, columns = _sample(file, lines, notes)
    rows = _rows(file, chain(sample, lines), columns, notes)
    yield from rows if columns.samples is None else in_steps(rows, columns.samples, notes)
    file.tell_if_cut(notes)


def _rows(file: LogFile, lines: Iterator[tuple[int, bytes]], columns: Columns, notes: Notes) -> Iterator[FoundRow]:
    entries = Entries(columns, notes)
    decode = decoder(columns)
    for place, line in lines:
        values: Values | None
        try:
            values = decode(line)
        except BROKEN:
            values = _odd(line, decode, columns)
        if values is not None:
            row = entries.row(values, place, line)
            if row is not None:
                yield row
        elif line.strip():
            _leave_out(file, notes, place)


def _sample(file: LogFile, lines: Iterator[tuple[int, bytes]], notes: Notes) -> tuple[list[tuple[int, bytes]], Columns]:
    """The first lines in which there is a loss, and by which names its values go; those before are left out."""
    seen: dict[str, None] = {}
    while sample := list(islice(lines, _SAMPLE_LINES)):
        loaded = [entry for _, line in sample if (entry := load_line(line)) is not None]
        columns = choose_keys(loaded)
        if columns.loss is not None:
            return sample, columns
        for entry in loaded:
            if len(seen) < _MOST_NAMES_SHOWN:
                seen |= dict.fromkeys(entry)
        for place, line in sample:
            if line.strip():
                notes.count("without a loss: left out", place)
    raise ValueError(f"{file.path}: {missing_loss(seen)}")


def _odd(line: bytes, decode: Callable[[bytes], Values], columns: Columns) -> Values | None:
    """The values in a line that is not just an object."""
    # What Python writes, and a run that has gone wrong does so in every line.
    quoted = line
    for word in (b"NaN", b"-Infinity", b"Infinity"):
        quoted = quoted.replace(b": " + word, b': "' + word + b'"')
    try:
        return decode(quoted)
    except BROKEN:
        entry = load_line(line)
        return None if entry is None else pick(entry, columns)


def _leave_out(file: LogFile, notes: Notes, place: int) -> None:
    if file.unfinished:
        notes.say(f"cut off in line {place}: read up to there")
    else:
        notes.count("without a JSON object: left out", place, noun="line")

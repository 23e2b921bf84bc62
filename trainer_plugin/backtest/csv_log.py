"""Logs in columns: separated by commas, semicolons or tabs, below a line with the names."""

import csv
from collections.abc import Generator, Iterator
from itertools import chain, islice
from operator import itemgetter

from trainer_plugin.backtest.cells import number, says_nothing, try_number, whole_step
from trainer_plugin.backtest.columns import choose, is_evaluation, missing_loss
from trainer_plugin.backtest.gaps import EMPTY_LOSS, goes_on
from trainer_plugin.backtest.log_files import LogFile
from trainer_plugin.backtest.notes import EVALUATED, Notes
from trainer_plugin.backtest.rows import FoundRow
from trainer_plugin.backtest.samples import in_steps

_DELIMITERS = ",;\t"
# Below how many lines of something else the names may stand.
_MOST_PREAMBLE_LINES = 20
_MOST_HEADER_BYTES = 1 << 16
# Longer ones may be no step; the slow way knows.
_MOST_DIGITS = 15


class Table:
    """Where the values are in each line.

    Args:
        names: of the columns, in order.
        delimiter: what stands between two cells.
    """

    def __init__(self, names: list[str], delimiter: str) -> None:
        self.names = names
        self.delimiter = delimiter
        self.columns = choose(names)
        wanted = [self.columns.step, self.columns.loss, self.columns.grad_norm, self.columns.learning_rate,
                  self.columns.amp_loss_scale, self.columns.run, self.columns.split]  # fmt: skip
        # What is missing is read from one more, empty cell at the end of every line.
        self.places = [-1 if name is None else names.index(name) for name in wanted]

    def cells(self, line: bytes) -> list[str]:
        """A line as text cells without quotes, at least one more than there are names; the last is empty.

        Raises:
            ValueError: it cannot be divided.
        """
        cells = _divided(line.decode(errors="replace"), self.delimiter)
        # A line may end early where its last cells are empty.
        return cells + [""] * max(1, len(self.names) + 1 - len(cells))


def find_table(lines: list[bytes], *, loss_wanted: bool = True) -> tuple[int, Table] | None:
    """Which of the first lines has the names (counted from 0), and the table that begins there; None if none has.

    Args:
        lines: the first lines of a log.
        loss_wanted: whether a table without a loss is none.
    """
    for index, line in enumerate(lines[:_MOST_PREAMBLE_LINES]):
        if not line.strip() or len(line) > _MOST_HEADER_BYTES:
            continue
        below = next((later for later in lines[index + 1 :] if later.strip()), None)
        text = line.decode(errors="replace").lstrip("\ufeff# ")
        tables = [Table(_divided(text, delimiter), delimiter) for delimiter in _DELIMITERS]
        table = max(tables, key=lambda table: (table.columns.loss is not None, len(table.names)))
        if _fits(table, below) and (table.columns.loss is not None or not loss_wanted):
            return index, table
    return None


def read_csv(file: LogFile, notes: Notes) -> Iterator[FoundRow]:
    """The rows of a log in columns.

    Raises:
        ValueError: it has no loss, or cannot be read.
    """
    lines = file.lines()
    first = list(islice(lines, _MOST_PREAMBLE_LINES + 1))
    index, table = find_table(first) or find_table(first, loss_wanted=False) or (0, Table([], ","))
    if table.columns.loss is None:
        raise ValueError(f"{file.path}: {missing_loss(table.names)}")
    samples = table.columns.samples
    rows = _rows(_Reader(file, notes, table), chain(first[index + 1 :], lines), index + 2)
    yield from rows if samples is None else in_steps(rows, samples, notes)
    file.tell_if_cut(notes)


def _rows(reader: "_Reader", lines: Iterator[bytes], start: int) -> Iterator[FoundRow]:
    places = enumerate(lines, start=start)
    more = True
    while more:
        quick = reader.table.columns.step is not None and reader.table.columns.split is None
        more = yield from _quick_rows(reader, places) if quick else reader.rows(places)


def _quick_rows(reader: "_Reader", places: Iterator[tuple[int, bytes]]) -> Generator[FoundRow, None, bool]:
    """Plain lines, quickly; whatever is odd is left to the reader. Returns whether other names have come."""
    table = reader.table
    delimiter, quote = table.delimiter.encode(), b'"'
    most, delimiters = max(table.places) + 1, len(table.names) - 1
    pick = itemgetter(*table.places)
    # What hardly changes from line to line is converted when it does.
    last_rate, rate_value, last_scale, scale_value, last_run, run_id = b"", None, b"", None, b"", None
    latest = b""
    for place, whole_line in places:
        line = whole_line
        quoted = quote in line
        if quoted and line.count(delimiter) == delimiters:
            # No delimiter is inside quotes, so they mean nothing.
            line, quoted = line.replace(quote, b""), False
        cells = line.split(delimiter, most)
        cells.append(b"")
        try:
            digits, loss, norm, rate, scale, run, _ = pick(cells)
            quick = digits.isdigit() and len(digits) <= _MOST_DIGITS
            counted = int(digits) if quick else whole_step(digits)
            loss_value = float(loss)
            norm_value = float(norm) if norm else None
            if rate != last_rate:
                rate_value = float(rate) if rate else None
                last_rate = rate
            if scale != last_scale:
                scale_value = float(scale) if scale else None
                last_scale = scale
        except (ValueError, IndexError):
            counted = None
        if counted is not None and not quoted:
            if run != last_run:
                last_run = run
                run_id = run.decode(errors="replace").strip() or None
            latest = whole_line
            yield place, counted, loss_value, norm_value, rate_value, scale_value, run_id
            continue
        reader.latest = latest or reader.latest
        latest = b""
        row = reader.row(whole_line, place)
        if row is not None:
            yield row
        if reader.table is not table:
            return True
    return False


class _Reader:
    """Lines one by one, whatever they may hold."""

    def __init__(self, file: LogFile, notes: Notes, table: Table) -> None:
        self._file = file
        self._notes = notes
        self._losses = 0
        self._use(table)

    def rows(self, places: Iterator[tuple[int, bytes]]) -> Generator[FoundRow, None, bool]:
        """The rows of these lines, each with its number. Returns whether other names have come."""
        table = self.table
        for place, line in places:
            row = self.row(line, place)
            if row is not None:
                yield row
            if self.table is not table:
                return True
        return False

    def row(self, line: bytes, place: int) -> FoundRow | None:
        """The row in a line; None where there is none."""
        if not line.strip() or line.lstrip().startswith(b"#"):
            return None
        cells = self.table.cells(line)
        step, loss, *others, run, split = (cells[at] for at in self.table.places)
        if is_evaluation(split):
            self.leave_out(EVALUATED, place)
            return None
        comma = self.table.delimiter != ","
        try:
            value = number(loss, decimal_comma=comma)
        except ValueError:
            if not self._takes_names(line, place):
                self.leave_out("with a loss that is no number: left out", place)
            return None
        if value is None:
            if self._file.unfinished or not self._goes_on(cells):
                self.leave_out("without a loss: left out", place)
                return None
            value = EMPTY_LOSS
        self._losses += 1
        counted = self._losses if self.table.columns.step is None else whole_step(step)
        if counted is None:
            self.leave_out("without a step that is a whole number from 0 on: left out", place)
            return None
        if value is not EMPTY_LOSS:
            self.latest = line
        norm, rate, scale = (try_number(cell, decimal_comma=comma) for cell in others)
        return place, counted, value, norm, rate, scale, run.strip() or None

    def leave_out(self, what: str, place: int) -> None:
        """Count a row that is none, or tell that the log is cut off in it."""
        if self._file.unfinished:
            self._notes.say(f"cut off in line {place}: read up to there")
        else:
            self._notes.count(what, place)

    def _goes_on(self, cells: list[str]) -> bool:
        """Whether a row without a loss is like the last one with one."""
        return bool(self.latest) and goes_on(
            self._filled(cells), self._filled(self.table.cells(self.latest)), self.table.columns
        )

    def _filled(self, cells: list[str]) -> set[str]:
        return {name for name, cell in zip(self.table.names, cells, strict=False) if not says_nothing(cell)}

    def _use(self, table: Table) -> None:
        self.table = table
        # The last line with a loss, by these names.
        self.latest = b""
        for remark in table.columns.remarks:
            self._notes.say(remark)
        if table.columns.step is None:
            self._notes.say("no column of the step: rows are counted from 1")

    def _takes_names(self, line: bytes, place: int) -> bool:
        """Whether a line has names once more, as where another process went on writing: they hold from here on."""
        names = _divided(line.decode(errors="replace"), self.table.delimiter)
        if names != self.table.names:
            table = Table(names, self.table.delimiter)
            if table.columns.loss is None or table.columns.guessed:
                return False
            self._use(table)
        self._notes.say(f"the names of the columns come again in line {place}", kind="lines with names")
        return True


def _divided(text: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([text], delimiter=delimiter), [])]
    except csv.Error:
        # Longer than the module takes, for example.
        return [cell.strip() for cell in text.split(delimiter)]


def _fits(table: Table, below: bytes | None) -> bool:
    """Whether the line below the names has values where they should be."""
    if below is None:
        return table.columns.loss is not None and not table.columns.guessed
    cells = table.cells(below)
    if table.columns.loss is None:
        alike = len(table.names) > 1 and len(cells) == len(table.names) + 1
        return alike and any(try_number(cell) is not None for cell in cells)
    try:
        value = number(cells[table.places[1]], decimal_comma=table.delimiter != ",")
    except ValueError:
        return below.decode(errors="replace").strip() == table.delimiter.join(table.names)
    # A first value may be missing, but only from a line that is like the names.
    return value is not None or (not table.columns.guessed and len(cells) == len(table.names) + 1 > 2)

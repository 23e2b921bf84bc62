"""Old logs of five formats as rows: which format a file has, and its rows one after the other."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from trainer_plugin.backtest.csv_log import find_table, read_csv
from trainer_plugin.backtest.event_files import find_event_files, is_event_file, read_events
from trainer_plugin.backtest.gaps import judge_gaps
from trainer_plugin.backtest.json_entries import choose_keys, load_line
from trainer_plugin.backtest.json_lines import read_json_lines
from trainer_plugin.backtest.log_files import LogFile
from trainer_plugin.backtest.megatron_log import ITERATION, read_megatron
from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow, LogRow, in_order
from trainer_plugin.backtest.trainer_state import read_trainer_state

FORMATS = ("csv", "jsonl", "trainer_state", "megatron", "tensorboard")
_FIRST_LINES = 21
_READERS = {"csv": read_csv, "jsonl": read_json_lines, "trainer_state": read_trainer_state, "megatron": read_megatron}
_PLACES = {"trainer_state": "entry", "tensorboard": "event"}


class Log:
    """One log. Iterating reads it from the beginning, again each time, and keeps no rows (but for event files).

    `format` is one of `FORMATS`. `notes` says what the user should know; it is whole when the rows are through.

    Args:
        path: a file, or a folder with the event files of one run.

    Raises:
        ValueError: it cannot be read, or has none of the formats. Iterating may raise it too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._event_files: list[Path] = []
        if path.is_dir():
            self.format = "tensorboard"
            self._event_files = find_event_files(path)
            return
        self._file = LogFile(path)
        self.format = _format(self._file)
        if self.format == "tensorboard":
            self._event_files = [path]

    def __iter__(self) -> Iterator[LogRow]:
        notes = Notes(_PLACES.get(self.format, "line"))
        try:
            runs = yield from in_order(judge_gaps(self._found(notes), notes), notes)
        except ValueError as error:
            # Wherever it was noticed, the user hears which file it is.
            message = str(error)
            raise ValueError(message if message.startswith(str(self.path)) else f"{self.path}: {message}") from error
        finally:
            self.notes = notes.listed()
        if not runs:
            why = "; ".join(self.notes)
            raise ValueError(f"{self.path}: no step with a loss in it, as {self.format}{why and f' ({why})'}")

    def _found(self, notes: Notes) -> Iterator[FoundRow]:
        if self._event_files:
            return read_events(self._event_files, notes, name=self.path)
        return _READERS[self.format](self._file, notes)


def read_log(path: str | Path) -> Log:
    """A log, whose format is found out by what is in it.

    Raises:
        ValueError: it cannot be read, or has none of the formats.
    """
    try:
        return Log(Path(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def _format(file: LogFile) -> str:
    head = next(file.unpacked(), b"")
    if is_event_file(file.path, head):
        return "tensorboard"
    if not file.is_text():
        raise ValueError(f"{file.path}: a log wanted ({', '.join(FORMATS)}), found a binary file")
    first = [line for line in islice(file.lines(), _FIRST_LINES) if line.strip()]
    start = first[0].lstrip() if first else b""
    if start.startswith(b"{"):
        return _kind_of_json(first)
    if start.startswith(b"[") and (start[1:].lstrip()[:1] in (b"{", b"]") or start.strip() == b"["):
        return "trainer_state"
    if not any(ITERATION.search(line) for line in first) and find_table(first):
        return "csv"
    return _kind_of_text(file, first)


def _kind_of_json(first: list[bytes]) -> str:
    """Objects line by line, or one document: the first lines tell, also where one of them is broken."""
    entries = [load_line(line) for line in first[:2]]
    one_line = entries[0] is not None
    if one_line and entries[0] is not None:
        return "trainer_state" if "log_history" in entries[0] else "jsonl"
    return "jsonl" if entries[1:] and entries[1] is not None else "trainer_state"


def _kind_of_text(file: LogFile, first: list[bytes]) -> str:
    """What the first line that tells of a step looks like: logs begin with all sorts of things."""
    for line in file.lines():
        if b"iteration" in line and ITERATION.search(line):
            return "megatron"
        entry = load_line(line) if b"{" in line else None
        if entry is not None and (columns := choose_keys([entry])).loss is not None and not columns.guessed:
            return "jsonl"
    if find_table(first, loss_wanted=False):
        return "csv"
    shown = first[0].decode(errors="replace").strip()[:60] if first else ""
    raise ValueError(f"{file.path}: a log wanted ({', '.join(FORMATS)}), found none of them; it begins with {shown!r}")

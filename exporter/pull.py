"""Runs whose folder is not shared with the receiver: their jobs pull their commands and report what came of them.

The receiver keeps a folder for each of them that looks like any other run's. `reported.json` in it is what the job told
last, and the mark by which such a folder is known: one that a job made here itself is never written to for another.
"""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from exporter.commands import Command, Inbox, Record, read_plain_file
from exporter.runs import STATES, Heartbeat, RunFolder, valid_run_name, write_atomically

SCHEMA = 1
NAME = "reported.json"
# As many commands go into one answer; the rest come when these are decided.
MOST_COMMANDS = 100
MOST_REPORT_BYTES = 10_000


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is told: its commands, oldest first, and the last sign of life of the outer loop."""

    commands: list[Command]
    heartbeat: Heartbeat | None = None
    schema: int = SCHEMA


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a job tells: what came of its commands, and its states as `receiver_run_state` shows them."""

    records: list[Record] = []
    states: dict[str, bool] = {}
    schema: int = SCHEMA


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """The states that a job told last, and when that was, in Unix seconds."""

    at: float
    states: dict[str, bool]
    schema: int = SCHEMA


class NotPulledError(Exception):
    """A run that cannot be pulled here: `known` if there is one of that name."""

    def __init__(self, message: str, *, known: bool) -> None:
        super().__init__(message)
        self.known = known


class PulledRuns:
    """The folders of such runs. Every method may raise OSError, and NotPulledError."""

    def __init__(self, runs: Path, now: Callable[[], float]) -> None:
        self._runs = runs
        self._now = now

    def waiting(self, run: str) -> Waiting:
        """What waits for a run's job."""
        folder = self._find(run)
        return Waiting(commands=folder.inbox.waiting()[:MOST_COMMANDS], heartbeat=folder.heartbeat())

    def report(self, run: str, report: Report) -> None:
        """Keep what a job tells; its first report makes the run's folder."""
        try:
            folder = self._find(run)
        except NotPulledError as error:
            if error.known or not valid_run_name(run) or run == "targets":
                raise
            self._make(run)
            folder = self._find(run)
        for record in report.records:
            # Only what was asked here: a job makes up no history.
            if record.command.run == run and folder.inbox.knows(record.command.id):
                folder.inbox.finish(record)
        self._write(folder.path, {state: holds for state, holds in report.states.items() if state in STATES})

    def _find(self, run: str) -> RunFolder:
        path = self._runs / run if valid_run_name(run) else None
        if path is None or not path.is_dir() or path.is_symlink():
            raise NotPulledError("no job of that name has reported here", known=False)
        folder = RunFolder(self._runs, run)
        if read_report(path) is None or not folder.exists():
            raise NotPulledError("this run's folder is its job's own: leave `pull` out of guard.yaml", known=True)
        return folder

    def _make(self, run: str) -> None:
        """Whole or not at all: a half-made one would look like a job's own."""
        draft = self._runs / f".{run}.{secrets.token_hex(8)}"
        try:
            draft.mkdir(mode=0o700)
            Inbox(draft).create()
            self._write(draft, {})
            draft.rename(self._runs / run)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _write(self, path: Path, states: dict[str, bool]) -> None:
        write_atomically(path / NAME, msgspec.json.encode(Reported(at=self._now(), states=states)))


def decode_report(body: bytes) -> Report:
    """Read a job's report.

    Raises:
        ValueError: it is none; one line that names the field.
    """
    try:
        report = msgspec.json.decode(body, type=Report)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no report of a job: {error}") from error
    if report.schema != SCHEMA:
        raise ValueError(f"schema {report.schema}, written by another version; this reads {SCHEMA}")
    return report


def read_report(folder: Path) -> Reported | None:
    """What the job of a pulled run told last; None where there is nothing that can be read."""
    try:
        reported = msgspec.json.decode(read_plain_file(folder / NAME, MOST_REPORT_BYTES), type=Reported)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return reported if reported.schema == SCHEMA else None

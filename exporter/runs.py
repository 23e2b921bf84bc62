"""The folders of the runs as the outer loop sees them: which runs there are, their inboxes, their heartbeats."""

import os
import re
import secrets
from pathlib import Path

import msgspec

from exporter.commands import Inbox, read_plain_file

SCHEMA = 1
MAX_HEARTBEAT_BYTES = 1000
# What is told of a run, as `receiver_run_state` has it.
STATES = ("running", "incident_open", "budget_spent", "stopped_by_guard")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The last sign of life of the outer loop: when the watchdog alert came in (Unix seconds), and how often so far."""

    received: float
    count: int
    schema: int = SCHEMA


def valid_run_name(name: str) -> bool:
    """Whether `name` may be a run: letters, digits, `.`, `_` and `-`, up to 100, beginning with a letter or digit."""
    return _NAME.fullmatch(name) is not None


class RunFolder:
    """One run's folder: `<runs>/<run>`."""

    def __init__(self, runs: Path, run: str) -> None:
        if not valid_run_name(run):
            raise ValueError(f"run name must be letters, digits, '.', '_' or '-', found {run!r}")
        self.path = runs / run
        self.inbox = Inbox(self.path)
        self.heartbeat_path = self.path / "heartbeat.json"

    def exists(self) -> bool:
        """Whether a job has ever made this folder (a link in its place does not count)."""
        return self.path.is_dir() and not self.path.is_symlink() and self.inbox.exists()

    def beat(self, now: float) -> None:
        """Write the next heartbeat.

        Raises:
            OSError: the folder cannot be written.
        """
        last = self.heartbeat()
        beat = Heartbeat(received=now, count=1 if last is None else last.count + 1)
        write_atomically(self.heartbeat_path, msgspec.json.encode(beat))

    def heartbeat(self) -> Heartbeat | None:
        """The last heartbeat, or None if there is none that can be read."""
        try:
            return msgspec.json.decode(read_plain_file(self.heartbeat_path, MAX_HEARTBEAT_BYTES), type=Heartbeat)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None


def find_run(runs: Path, run: str) -> RunFolder | None:
    """The folder of a run that some job has made, or None; a hostile name is simply not found."""
    if not valid_run_name(run):
        return None
    folder = RunFolder(runs, run)
    return folder if folder.exists() else None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, finds the old content or the new one, whole."""
    # A name of its own for each writer: two at a time, also on two hosts, must not finish each other's draft.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

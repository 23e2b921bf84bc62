"""Commands to a running job, and the folder in which they wait, are taken once, and stay as a record.

The receiver (or an operator) puts a command; the job takes it and gives it an outcome. Both may be killed at any
moment and may sit on different hosts with a shared file system between them, so every step is one atomic rename or
link, and the name of a command's file is its identity: the same command put twice is one file.
"""

import contextlib
import errno
import hashlib
import heapq
import itertools
import logging
import os
import stat
import time
from pathlib import Path
from typing import Literal

import msgspec

Action = Literal["clip", "lower_lr", "skip_batch", "rollback", "partial_rollback", "checkpoint", "note", "stop"]
Outcome = Literal["done", "failed", "refused_cooldown", "refused_budget", "duplicate", "stale", "observed", "no_target"]
Source = Literal["alert", "local", "operator"]

SCHEMA = 1
MAX_COMMAND_BYTES = 16_384
# A record holds its command, and what came of it in so many letters at most, however each is written.
MAX_RECORD_BYTES = 2 * MAX_COMMAND_BYTES
_DETAIL_LETTERS = 2000
# Of a flooded inbox, so many files are looked at when only their number is wanted, and so many are read at a time.
_MOST_COUNTED = 1000
_MOST_READ = 1000
# What opening a file says that will never be a command of ours: a link, a socket, somebody else's. Any other error may
# pass (a busy file system, too many open files) and must not cost a command.
_HOPELESS = (None, errno.ELOOP, errno.ENXIO, errno.EACCES)

_log = logging.getLogger(__name__)


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A wish from outside, addressed to one run.

    `step` and `steps_total` are the run's `train_step` and `train_steps_total` when the alert was evaluated;
    `starts_at` is when the alert began to fire and `received` when the command was put, both in Unix seconds. `layers`
    are what a partial rollback shall take back; without them it takes those that surged most. `by` is the person who
    asked.
    """

    id: str
    run: str
    action: Action
    source: Source
    received: float
    schema: int = SCHEMA
    alert: str | None = None
    step: int | None = None
    steps_total: int | None = None
    starts_at: float | None = None
    reason: str = ""
    by: str = ""
    layers: tuple[str, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command and what came of it, as kept in `done/`."""

    command: Command
    outcome: Outcome
    decided: float
    at_step: int
    detail: str = ""
    schema: int = SCHEMA


def alert_identity(fingerprint: str, starts_at: str) -> str:
    """The id of the command that an alert leads to: equal for every delivery of one firing, new for the next firing."""
    return hashlib.sha256(f"{fingerprint}|{starts_at}".encode()).hexdigest()[:32]


class Inbox:
    """`commands/{new,done}` in a run's folder. Every method may raise OSError; none follows a symbolic link."""

    def __init__(self, run_folder: Path) -> None:
        self.new = run_folder / "commands" / "new"
        self.done = run_folder / "commands" / "done"

    def create(self) -> None:
        """Make the folders, closed to other users."""
        for folder in (self.new, self.done):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def exists(self) -> bool:
        """Whether some job has made the folders; a link in the place of one does not count."""
        return self.new.is_dir() and self._linked() is None

    def knows(self, command_id: str) -> bool:
        """Whether a command with this id is here, taken or not.

        Raises:
            ValueError: the id is not a plain file name.
        """
        name = _file_name(command_id)
        return any((folder / name).exists() for folder in (self.new, self.done))

    def put(self, command: Command, *, sync: bool = True) -> bool:
        """Queue `command` durably; False when a command with its id is already here, taken or not.

        Without `sync` it, or the one that is here, is durable only after a call of `sync()`: one for many commands.

        Raises:
            ValueError: the id is not a plain file name, or the command is larger than any that is read.
            OSError: the folder cannot be written.
        """
        name, content = _file_name(command.id), msgspec.json.encode(command)
        if len(content) > MAX_COMMAND_BYTES:
            raise ValueError(f"command has {len(content)} bytes, at most {MAX_COMMAND_BYTES} are read")
        self._refuse_links()
        if (self.done / name).exists():
            return False
        published = _publish(self.new / name, content)
        if sync:
            # Also when it was there already: whoever put it may not have come this far, and our caller is about to say
            # that it is safe.
            self.sync()
        return published

    def sync(self) -> None:
        """Make durable what has been put."""
        _sync_folder(self.new)

    def waiting(self) -> list[Command]:
        """The commands not yet decided, oldest first. A damaged or hostile file is set aside as `*.bad`.

        Of a flood, those that came first: once they are decided, or set aside, the next ones are read.
        """
        self._refuse_links()
        names = []
        for path in self.new.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # Taken meanwhile.
                names.append((path.lstat().st_mtime_ns, path))
        found = [self._read(path) for _, path in heapq.nsmallest(_MOST_READ, names)]
        return sorted([one for one in found if one is not None], key=lambda command: (command.received, command.id))

    def waits(self, now: float) -> list[float]:
        """How long each command not yet decided has waited, in seconds, by its file's time; none of them is read."""
        self._refuse_links()
        times = []
        with os.scandir(self.new) as entries:
            for entry in itertools.islice(entries, _MOST_COUNTED):
                if entry.name.endswith(".json"):
                    with contextlib.suppress(FileNotFoundError):  # Taken meanwhile.
                        times.append(entry.stat(follow_symlinks=False).st_mtime)
        return [max(0.0, now - time) for time in times]

    def finish(self, record: Record) -> None:
        """Keep the outcome of a command and take it out of the queue. Doing so twice changes nothing.

        Raises:
            ValueError: the id is not a plain file name: whoever tells of it must reach no other file by it.
        """
        name = _file_name(record.command.id)
        self._refuse_links()
        # Cut, because one that is too large to be read back would leave whoever asked without an answer.
        record = msgspec.structs.replace(record, detail=record.detail[:_DETAIL_LETTERS])
        _publish(self.done / name, msgspec.json.encode(record))
        _sync_folder(self.done)
        (self.new / name).unlink(missing_ok=True)

    def record(self, command_id: str) -> Record | None:
        """What came of a command; None while it is not decided, or where that cannot be read."""
        try:
            return msgspec.json.decode(read_plain_file(self.done / f"{command_id}.json", MAX_RECORD_BYTES), type=Record)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None

    def records(self) -> list[Record]:
        """Every decided command that can be read, oldest first."""
        self._refuse_links()
        found = [self.record(path.stem) for path in self.done.glob("*.json")]
        return sorted([record for record in found if record is not None], key=lambda record: record.decided)

    def _read(self, path: Path) -> Command | None:
        try:
            command = msgspec.json.decode(read_plain_file(path, MAX_COMMAND_BYTES), type=Command)
        except FileNotFoundError:
            return None  # Taken between the listing and the reading.
        except OSError as error:
            if error.errno in _HOPELESS:
                self._set_aside(path)
            return None
        except (msgspec.MsgspecError, RecursionError):
            self._set_aside(path)
            return None
        if command.schema != SCHEMA or f"{command.id}.json" != path.name:
            self._set_aside(path)
            return None
        if (self.done / path.name).exists():
            path.unlink(missing_ok=True)  # Decided already: the job died between the record and the removal.
            return None
        return command

    def _linked(self) -> Path | None:
        """The folder of the inbox in whose place there is a link, if any: whoever put it there would get our writes."""
        return next((folder for folder in (self.new.parent, self.new, self.done) if folder.is_symlink()), None)

    def _refuse_links(self) -> None:
        linked = self._linked()
        if linked is not None:
            raise OSError(errno.ELOOP, "a link where a folder of the inbox should be", str(linked))

    def _set_aside(self, path: Path) -> None:
        _log.warning("%s: no command that this can read, or not our own file: set aside as .bad", path)
        path.rename(path.with_suffix(".bad"))


def _file_name(command_id: str) -> str:
    if not command_id.isalnum() or not command_id.isascii() or len(command_id) > 64:
        raise ValueError(f"command id must be up to 64 ASCII letters and digits, found {command_id!r:.99}")
    return f"{command_id}.json"


def read_plain_file(path: Path, most_bytes: int) -> bytes:
    """The bytes of a small regular file.

    Raises:
        OSError: it is a link, no regular file, somebody else's, or larger than `most_bytes`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0):
            raise OSError(f"{path}: not a regular file of ours")
        if status.st_size > most_bytes:
            raise OSError(f"{path}: {status.st_size} bytes, at most {most_bytes} are read")
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _publish(path: Path, content: bytes) -> bool:
    """Write a file that is there whole or not at all; False if it is there already. Its folder is not synced."""
    draft = path.parent / f".{path.name}.{os.getpid()}.{time.monotonic_ns()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        return True
    finally:
        draft.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

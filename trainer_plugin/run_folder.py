"""A run's folder as its job sees it: the lock, the state that never rewinds, and the trail of incidents."""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from exporter.forks import let_go_in_children
from exporter.runs import RunFolder, write_atomically
from trainer_plugin.checkpoints.retention import Lineage
from trainer_plugin.config import Config
from trainer_plugin.data.batches import Quarantine
from trainer_plugin.learning_rate import LrState
from trainer_plugin.policy.state import PolicyState

_log = logging.getLogger(__name__)
SCHEMA = 1
# A lock on another host whose heartbeat is older than this belongs to a job that is gone.
_STALE_LOCK_SECONDS = 60.0


_CONFIG_HEAD = "# The options in effect, as the job wrote them when it last started (schema 1).\n"


class RunInUseError(RuntimeError):
    """Another job runs in this folder."""


class RunState(msgspec.Struct, kw_only=True):
    """What never rewinds (R14): it goes on over rollbacks and restarts."""

    steps_total: int = 0
    proven_step: int = -1
    policy: PolicyState = msgspec.field(default_factory=PolicyState)
    lineage: Lineage = msgspec.field(default_factory=Lineage)
    learning_rate: LrState = msgspec.field(default_factory=LrState)
    quarantine: list[Quarantine] = msgspec.field(default_factory=list)
    clip_until: int = 0
    schema: int = SCHEMA


class _Versioned(msgspec.Struct):
    schema: int


class _Holder(msgspec.Struct, kw_only=True):
    host: str
    pid: int
    heartbeat: float


class RunLock:
    """One job per run folder: an advisory lock for this host, a heartbeat for the others.

    A holder on another host may have died a moment ago, and this be its restart: `wait` waits for so many seconds until
    its heart beats, or is still for a minute.
    """

    def __init__(self, path: Path, *, wait: Callable[[float], object] = time.sleep) -> None:
        self._path = path
        self._wait = wait
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            self._acquire()
        except BaseException:
            os.close(self._descriptor)
            raise
        let_go_in_children(self)

    def _acquire(self) -> None:
        holder = self._holder()
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise RunInUseError(f"run folder {self._path.parent} is in use by {who}") from None
        if holder is not None and holder.host != socket.gethostname():
            self._outlast(holder)
        self.beat()

    def _outlast(self, holder: _Holder) -> None:
        who = f"process {holder.pid} on {holder.host}"
        said = False
        while (age_seconds := self._heartbeat_age_seconds()) < _STALE_LOCK_SECONDS:
            if not said:
                said = True
                _log.warning("run folder %s: was in use by %s %.0f s ago: waiting", self._path.parent, who, age_seconds)
            self._wait(1.0)
            now = self._holder()
            if now is None:
                return
            if now != holder:
                raise RunInUseError(f"run folder {self._path.parent} is in use by process {now.pid} on {now.host}")

    def let_go(self) -> None:
        """In a forked child: a worker that outlives its killed parent must not keep the folder locked."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def beat(self) -> None:
        """Show that this job is alive."""
        content = msgspec.json.encode(_Holder(host=socket.gethostname(), pid=os.getpid(), heartbeat=time.time()))
        os.pwrite(self._descriptor, content.ljust(200), 0)

    def release(self) -> None:
        """Let another job in."""
        # Forgotten first: a beat that comes late must not write into whatever file has the number next.
        descriptor, self._descriptor = self._descriptor, -1
        os.ftruncate(descriptor, 0)
        os.close(descriptor)

    def _heartbeat_age_seconds(self) -> float:
        """By the clock of the file system, which is one for all hosts: theirs need not agree."""
        mark = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            mark.touch(mode=0o600)
            return mark.stat().st_mtime - os.fstat(self._descriptor).st_mtime
        finally:
            mark.unlink(missing_ok=True)

    def _holder(self) -> _Holder | None:
        try:
            return msgspec.json.decode(os.pread(self._descriptor, 1000, 0), type=_Holder)
        except msgspec.MsgspecError:
            return None


class JobFolder:
    """`<runs>/<run>` with everything in it that the job owns.

    Of several ranks only the first one has it as its `own`: the others neither lock nor read nor write it, and are told
    what is in it.

    Raises (on construction):
        OSError: the folder cannot be made or written.
        RunInUseError: another job has it.
        ValueError: its state was written by another version.
    """

    lock: RunLock
    state: RunState | None
    quarantine: list[Quarantine]

    def __init__(self, runs: Path, run: str, *, own: bool = True, wait: Callable[[float], object] = time.sleep) -> None:
        folder = RunFolder(runs, run)
        self.path = folder.path
        self.inbox = folder.inbox
        self.outer = folder
        if not own:
            self.state, self.quarantine = None, []
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock = RunLock(self.path / "lock", wait=wait)
        except OSError as error:
            raise type(error)(f"run folder {self.path} cannot be written: {error.strerror}") from error
        try:
            for name in ("state.json", "guard.yaml"):
                for draft in self.path.glob(f".{name}.*"):  # Of a job that was killed while it wrote.
                    draft.unlink(missing_ok=True)
            self.inbox.create()
            self.state = self._load_state()
            self.quarantine = self._load_quarantine()
        except BaseException:
            self.lock.release()
            raise

    @property
    def _state_path(self) -> Path:
        return self.path / "state.json"

    def save_state(self, content: bytes) -> None:
        """Make an encoded `RunState` durable.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(self._state_path, content)

    def save_config(self, config: Config) -> None:
        """Write the options in effect as guard.yaml; one that somebody else has put there is left alone.

        Raises:
            OSError: it cannot be written.
        """
        path = self.path / "guard.yaml"
        if path.exists() and not path.read_bytes().startswith(_CONFIG_HEAD.encode()):
            _log.warning("%s: not written by a job, left as it is", path)
            return
        options = yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)
        write_atomically(path, (_CONFIG_HEAD + options).encode())

    def log(self, kind: str, entry: dict[str, Any]) -> None:
        """Add a line to the trail `incidents.jsonl`."""
        line = json.dumps({"schema": SCHEMA, "time": round(time.time(), 3), "kind": kind, **entry})
        _append(self.path / "incidents.jsonl", line.encode())

    def add_quarantine(self, entry: Quarantine) -> None:
        """Keep for good which data are suspect."""
        self.quarantine.append(entry)
        _append(self.path / "quarantine.jsonl", msgspec.json.encode(entry))

    def last_state(self, newest_branch: int, copy: Callable[[], dict[str, Any] | None]) -> RunState:
        """The folder's state; where it is gone, or was not written when the run went back, a checkpoint's `copy` of it.

        `newest_branch` is the highest that any checkpoint is of, 0 where there is none.
        """
        if self.state is not None and newest_branch <= self.state.lineage.branch:
            return self.state
        lasting = copy()
        if lasting is None:
            return self.state or RunState()
        what = "gone" if self.state is None else "older than the newest checkpoint"
        _log.warning("run %s: state.json is %s: its copy in that one is used", self.path.name, what)
        state = msgspec.convert(lasting, RunState)
        for entry in state.quarantine:
            if entry not in self.quarantine:
                self.add_quarantine(entry)
        return state

    def _load_state(self) -> RunState | None:
        try:
            content = self._state_path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            state = msgspec.json.decode(content, type=RunState)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._state_path}: not the state of a run: {error}") from error
        if state.schema != SCHEMA:
            raise ValueError(
                f"{self._state_path}: schema {state.schema}, written by another version; this reads {SCHEMA}"
            )
        return state

    def _load_quarantine(self) -> list[Quarantine]:
        path = self.path / "quarantine.jsonl"
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            try:
                schema = msgspec.json.decode(line, type=_Versioned).schema
                if schema == SCHEMA:
                    entries.append(msgspec.json.decode(line, type=Quarantine))
            except msgspec.MsgspecError:
                _log.warning("%s: a line that cannot be read is left out", path)
                continue
            if schema != SCHEMA:
                raise ValueError(f"{path}: schema {schema}, written by another version; this reads {SCHEMA}")
        return entries


def _append(path: Path, line: bytes) -> None:
    """Add a line, on disk when this returns; a line that a killed job left unfinished does not swallow it."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())

"""What the runs' folders tell of their runs, also of those whose job has ended. Only reads, never through a link."""

import contextlib
import heapq
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exporter.commands import read_plain_file
from exporter.pull import NAME as REPORT_NAME
from exporter.pull import read_report
from exporter.runs import RunFolder, valid_run_name

# Of the `state.json` that this reads; another one is not guessed at.
STATE_SCHEMA = 1
# The newest by their state's time: a folder of old runs must not make series without end.
MOST_RUNS = 200
MOST_STATE_BYTES = 8 * 1024 * 1024
MOST_LOCK_BYTES = 1000
# A job beats its lock every 10 s.
RUNNING_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run. `states` has each of `STATES` that could be read; `waits` is how long each command waits, in seconds."""

    run: str
    states: dict[str, bool]
    waits: list[float]


class _Incident(msgspec.Struct, kw_only=True):
    healed: bool = False


class _Policy(msgspec.Struct, kw_only=True):
    incidents: list[_Incident] = msgspec.field(default_factory=list)
    budget_spent_step: int | None = None
    stopped_step: int | None = None


class _State(msgspec.Struct, kw_only=True):
    """The part of a job's `state.json` that is told here."""

    schema: int
    policy: _Policy


class _Lock(msgspec.Struct, kw_only=True):
    heartbeat: float


def read_runs(runs: Path, now: float) -> list[RunStatus]:
    """The status of the newest runs, by their names; what cannot be read of one is left out.

    Raises:
        OSError: the folder of the runs cannot be read.
    """
    with os.scandir(runs) as entries:
        written = [
            (time, entry.name)
            for entry in entries
            if valid_run_name(entry.name) and (time := _state_time(entry)) is not None
        ]
    names = sorted(name for _, name in heapq.nlargest(MOST_RUNS, written))
    return [_status(RunFolder(runs, name), now) for name in names]


def _state_time(entry: os.DirEntry[str]) -> float | None:
    try:
        if not entry.is_dir(follow_symlinks=False):
            return None
        for name in ("state.json", REPORT_NAME):
            with contextlib.suppress(FileNotFoundError):
                return (Path(entry.path) / name).lstat().st_mtime
    except OSError:
        return None
    return None


def _status(folder: RunFolder, now: float) -> RunStatus:
    try:
        waits = folder.inbox.waits(now)
    except OSError:
        waits = []
    return RunStatus(run=folder.path.name, states=states_of(folder, now), waits=waits)


def states_of(folder: RunFolder, now: float) -> dict[str, bool]:
    """The states of a run; where its job has no folder here, as it has told them."""
    reported = read_report(folder.path)
    if reported is None:
        return read_states(folder.path, now)
    running = reported.states.get("running", False) and abs(now - reported.at) < RUNNING_SECONDS
    return reported.states | {"running": running}


def read_states(path: Path, now: float) -> dict[str, bool]:
    """The states that a job's own folder tells, as far as they can be read."""
    states = {"running": _is_running(path / "lock", now)}
    try:
        state = msgspec.json.decode(read_plain_file(path / "state.json", MOST_STATE_BYTES), type=_State)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return states
    if state.schema != STATE_SCHEMA:
        return states
    policy = state.policy
    return states | {
        "incident_open": bool(policy.incidents) and not policy.incidents[-1].healed,
        "budget_spent": policy.budget_spent_step is not None,
        "stopped_by_guard": policy.stopped_step is not None,
    }


def _is_running(lock: Path, now: float) -> bool:
    """Whether a job beats this lock; one that has ended in order has emptied it. Clocks must agree by some seconds."""
    try:
        content = read_plain_file(lock, MOST_LOCK_BYTES)
        return abs(now - msgspec.json.decode(content, type=_Lock).heartbeat) < RUNNING_SECONDS
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False

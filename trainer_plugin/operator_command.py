"""An operator's own command to a run: put into the run's inbox like an alert's, and waited for."""

import getpass
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from exporter.commands import Action, Command, Record
from exporter.message import plain
from exporter.run_status import states_of
from exporter.runs import RunFolder, valid_run_name

_POLL_SECONDS = 0.2
_REASON_LETTERS = 300


def send_command(
    folder: Path,
    action: str,
    *,
    layers: tuple[str, ...] = (),
    reason: str = "",
    clock: Callable[[], float] = time.time,
    user: Callable[[], str] = getpass.getuser,
) -> Command:
    """Put a command into the inbox of the run in `folder`.

    Raises:
        ValueError: it is no run's folder, no job runs in it, the action takes no layers, or these are too many.
        OSError: the inbox cannot be written.
    """
    where = folder.resolve()
    if not where.is_dir():
        raise ValueError(f"{folder}: no such run folder")
    if not valid_run_name(where.name) or not (run := RunFolder(where.parent, where.name)).exists():
        raise ValueError(f"{folder}: not a run's folder: no job has made an inbox in it")
    if layers and action != "partial_rollback":
        raise ValueError(f"--layers: wanted with partial_rollback alone, found with {action}")
    # What waits for a job that may start next week would surprise whoever starts it.
    if not states_of(run, clock()).get("running", False):
        raise ValueError(f"{folder}: no job runs in it now: nothing is asked of it")
    command = Command(
        id=secrets.token_hex(16),
        run=where.name,
        action=cast("Action", action),
        source="operator",
        received=clock(),
        reason=plain(reason, _REASON_LETTERS),
        by=plain(f"{_name(user)}@{socket.gethostname()}", _REASON_LETTERS),
        layers=layers,
    )
    run.inbox.put(command)
    return command


def _name(user: Callable[[], str]) -> str:
    """Who asks; by number in a container whose user has no name."""
    try:
        return user()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def await_record(folder: Path, command: Command, seconds: float) -> Record | None:
    """What came of a command; None if the job has not decided it in so many seconds."""
    inbox = RunFolder(folder.resolve().parent, command.run).inbox
    deadline = time.monotonic() + seconds
    while (record := inbox.record(command.id)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return record

"""Receivers as processes, and what Alertmanager would send to them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parents[1]


@contextmanager
def running(*arguments: str | Path, log: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `python -m exporter`, and the address that it prints. Its stderr is a pipe, or goes into `log`."""
    command = [sys.executable, "-W", "error", "-m", "exporter", *map(str, arguments)]
    errors: Any = subprocess.PIPE if log is None else log.open("a")
    process = subprocess.Popen(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        line = process.stdout.readline()
        told = log.read_text() if log is not None else "" if line else process.stderr.read()
        assert line.startswith("receiver listening on http"), line + told
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()
        if log is not None:
            errors.close()


def alert(
    number: int, *, run: str = "gpt-0", action: str = "lower_lr", starts_at: str | None = None, **more: Any
) -> Any:
    """A firing alert that is not like any other number's."""
    return {
        "status": "firing",
        "labels": {"alertname": "TeamAlert", "action": action, "run": run, "number": str(number)},
        "annotations": {"summary": f"alert {number}"},
        "startsAt": starts_at or datetime.now(UTC).isoformat(),
        "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": f"{number:016x}",
        **more,
    }


def delivery(*alerts: Any) -> bytes:
    """The body of a delivery."""
    return json.dumps({"version": "4", "status": "firing", "receiver": "job", "alerts": alerts}).encode()

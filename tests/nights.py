"""A night: a tiny job in training, a receiver, Alertmanagers between, and a gate that can break what they say."""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml
from delivery import RULES, Alertmanager
from loopback import Loopback
from receivers import running
from training import Job
from waiting import wait_for

from exporter.commands import Record
from trainer_plugin.demo.process import free_addresses
from trainer_plugin.demo.servers import readdressed

# Alertmanager gives one attempt ten seconds.
HANG_SECONDS = 12.0


class Gate:
    """Stands before the receiver. `plan` is what happens to the next deliveries; one that is not planned passes.

    `refuse`: 503, and nothing is passed on. `lose`: passed on, but the sender is told 503. `hang`: passed on, and no
    answer. `kill`: passed on, then `kill()`, and the connection breaks. `passed` counts what the receiver got.
    """

    def __init__(self, receiver: str, kill: Callable[[], None]) -> None:
        self.plan: list[str] = []
        self.passed = 0
        self._over = threading.Event()
        self._receiver, self._kill = receiver, kill
        self._server = Loopback(self._take, wait_for_answers=True)
        self.address = self._server.address

    def _take(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        what = self.plan.pop(0) if self.plan else "pass"
        status = 503 if what == "refuse" else self._pass_on(self._receiver, body)
        if what == "kill":
            self._kill()
        elif what == "hang":
            self._over.wait(HANG_SECONDS)
        else:
            handler.send_response(503 if what == "lose" else status)
            handler.end_headers()

    def close(self) -> None:
        """Let everybody go, and free the port."""
        self._over.set()
        self._server.close()

    def _pass_on(self, receiver: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(receiver, timeout=5)
        try:
            connection.request("POST", "/alertmanager", body=body)
            self.passed += 1
            return connection.getresponse().status
        except OSError:
            return 503
        finally:
            connection.close()


class Night:
    """Everything, below one folder. `repeat` is Alertmanager's `repeat_interval` for what the job shall act on."""

    def __init__(self, folder: Path, job: Job, *, repeat: str = "1h") -> None:
        self.job = job
        self._folder = folder
        self._repeat = repeat
        self._ends = ExitStack()
        (self.receiver,) = free_addresses(1)
        self._receiver = ExitStack()
        self.start_receiver()
        self.gate = Gate(self.receiver, self.kill_receiver)
        self.alertmanagers: list[Alertmanager] = []

    def close(self) -> None:
        """End every server."""
        for alertmanager in self.alertmanagers:
            alertmanager.close()
        self.gate.close()
        self._receiver.close()

    def start_receiver(self) -> None:
        """Start one, also in the place of one that was killed."""
        arguments = ("--runs", self._folder / "runs", "--listen", self.receiver)
        self._receiver.enter_context(running(*arguments, log=self._folder / "receiver.log"))

    def kill_receiver(self) -> None:
        """As `kill -9` does."""
        self._receiver.close()
        self._receiver = ExitStack()

    def start_alertmanager(self, name: str = "a") -> Alertmanager:
        """One more, or an earlier one with the data that it left, on the shipped routes."""
        folder = self._folder / f"alertmanager-{name}"
        folder.mkdir(exist_ok=True)
        config = readdressed(yaml.safe_load((RULES / "alertmanager.yml").read_text()), {"receiver": self.gate.address})
        config["templates"] = []
        (job,) = [route for route in config["route"]["routes"] if route["receiver"] == "job"]
        job["repeat_interval"] = self._repeat
        alertmanager = Alertmanager(folder, config)
        self.alertmanagers.append(alertmanager)
        return alertmanager

    def stop_alertmanager(self, alertmanager: Alertmanager) -> None:
        """In order, so that it keeps what it has told."""
        self.alertmanagers.remove(alertmanager)
        alertmanager._process._popen.terminate()
        alertmanager._process._popen.wait(20)
        alertmanager.close()

    def fire(self, began: datetime, *, lasts: float = 3600.0, alert: str = "TeamAlert", **more: Any) -> None:
        """Tell every Alertmanager that an alert fires, as a Prometheus (or a pair of them) does."""
        step, total = more.pop("step", self.job.guard.step), more.pop("steps_total", self.steps_total)
        alerts = [
            {
                "labels": {"alertname": alert, "run": "tiny", "action": "lower_lr", **more},
                "annotations": {"summary": "So it is.", "step": str(step), "steps_total": str(total)},
                "startsAt": began.isoformat(),
                "endsAt": (datetime.now(UTC) + timedelta(seconds=lasts)).isoformat(),
            }
        ]
        for alertmanager in self.alertmanagers:
            request = urllib.request.Request(
                f"http://{alertmanager.address}/api/v2/alerts",
                data=json.dumps(alerts).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310
                pass

    @property
    def steps_total(self) -> int:
        """Optimizer steps that the job has run."""
        return self.job.guard._parts.history.steps_total

    def train_until(self, condition: Callable[[], object], seconds: float = 40.0) -> None:
        """Let the job train until something is so.

        Raises:
            TimeoutError: it did not come.
        """
        wait_for(condition, seconds, pause_seconds=0.02, meanwhile=self.job.step)

    def train_for(self, seconds: float) -> None:
        """Let the job train."""
        end = time.monotonic() + seconds
        self.train_until(lambda: time.monotonic() > end, seconds + 40.0)

    def records(self) -> list[Record]:
        """What came of each command."""
        self.job.guard._parts.loop.flush(5.0)
        return self.job.guard._parts.folder.inbox.records()

    def outcomes(self) -> list[str]:
        """The same in one word each, oldest first."""
        return [record.outcome for record in self.records()]

    def answered(self, outcome: str) -> int:
        """How many alerts the receiver has answered so, since it was started."""
        with urllib.request.urlopen(f"http://{self.receiver}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(int(float(line.split()[1])) for line in lines if f'total{{outcome="{outcome}"}}' in line)

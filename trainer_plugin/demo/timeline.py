"""The live timeline: what the run, Prometheus and the receiver show, one line each, as it happens."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from exporter.commands import Inbox
from trainer_plugin.demo.servers import Stack, Watcher

_POLL_SECONDS = 0.2
_PROGRESS_STEPS = 100
_HEARTBEAT = "TrainWatchdog"


class Timeline:
    """Prints lines from its own thread between `start` and `stop`; keeps the alerts it saw and the run's trail.

    `pages` are the words of those that would call a person.
    """

    def __init__(self, run_folder: Path, stack: Stack | Watcher | None, *, began: float) -> None:
        self._trail_path = run_folder / "incidents.jsonl"
        self._inbox = Inbox(run_folder)
        self._stack = stack
        self._began = began
        self._step = 0
        self._trail_read = 0
        self._seen_commands: set[str] = set()
        self._firing: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._rate_began, self._rate_steps = time.monotonic(), 0
        self.alerts: list[str] = []
        self.pages: dict[str, str] = {}
        self.trail: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Print what is left and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look(alerts=False)

    def tell(self, what: str, text: str, *, step: int | None = None) -> None:
        """One line: seconds since the beginning, the step, what it is, and the words."""
        at = "" if step is None else f"step {step}"
        print(f"{time.monotonic() - self._began:7.1f}s  {at:<10} {what:<10} {text}", flush=True)

    def progress(self, step: int, loss: float) -> None:
        """Hear of a step; every so many become a line."""
        self._step = step
        self._rate_steps += 1
        if step % _PROGRESS_STEPS == 0:
            now = time.monotonic()
            rate = self._rate_steps / max(now - self._rate_began, 1e-9)
            self._rate_began, self._rate_steps = now, 0
            self.tell("training", f"loss {loss:.3f}, {rate:.0f} steps/s", step=step)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._look(alerts=True)

    def _look(self, *, alerts: bool) -> None:
        if alerts and self._stack is not None:
            self._look_at_alerts(self._stack)
        self._look_at_inbox()
        self._look_at_trail()

    def _look_at_alerts(self, stack: Stack | Watcher) -> None:
        try:
            firing = {alert["labels"]["alertname"]: alert for alert in stack.alerts() if alert["state"] == "firing"}
        except (OSError, ValueError):
            return  # Prometheus is gone, or going: the training goes on, and so does the timeline.
        for name in sorted(firing.keys() - self._firing):
            if name not in self.alerts:
                self.alerts.append(name)
            if name == _HEARTBEAT:
                self.tell("watchdog", "Prometheus watches the run; its heartbeat goes to the receiver")
            else:
                labels = firing[name]["labels"]
                action = labels.get("action")
                self.tell("alert", f"{name} fires in Prometheus" + (f", asks for {action}" if action else ""))
                if labels.get("severity") == "critical" and name not in self.pages:
                    self.pages[name] = firing[name]["annotations"]["description"]
                    self.tell("page", f"{name}: {self.pages[name]}")
        self._firing = set(firing)

    def _look_at_inbox(self) -> None:
        try:
            commands = self._inbox.waiting() + [record.command for record in self._inbox.records()]
        except OSError:
            return
        for command in commands:
            if command.id not in self._seen_commands:
                self._seen_commands.add(command.id)
                by = "the demo played" if command.by else "Alertmanager delivered"
                text = f"{by} {command.alert}; command {command.id[:8]} ({command.action}) queued"
                self.tell("webhook", text)

    def _look_at_trail(self) -> None:
        try:
            with self._trail_path.open("rb") as file:
                file.seek(self._trail_read)
                lines = file.readlines()
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                break  # Still being written.
            self._trail_read += len(line)
            entry = json.loads(line)
            self.trail.append(entry)
            self._tell_entry(entry)

    def _tell_entry(self, entry: dict[str, Any]) -> None:
        kind, step = entry["kind"], entry.get("step")
        if kind == "incident_opened":
            evidence = "; ".join(entry["evidence"])
            self.tell("detected", f"incident {entry['id']}, {entry['class']}: {evidence}", step=entry["detected_step"])
        elif kind == "incident_class":
            self.tell("class", f"incident {entry['id']} is {entry['class']}: {entry['evidence'][-1]}", step=step)
        elif kind == "incident_healed":
            self.tell("healed", f"incident {entry['id']}: back to normal", step=entry["healed_step"])
        elif kind == "action":
            by = f"command of {entry['alert']}" if entry.get("alert") else f"the {entry['source']} policy"
            if "to_step" in entry:
                self.tell("rollback", f"from step {step} to {entry['to_step']}, by {by}: {entry['detail']}", step=step)
            else:
                self.tell("action", f"{entry['action']} by {by}: {entry['outcome']}, {entry['detail']}", step=step)
        elif kind == "refused":
            asked = entry["alert"] or entry["source"]
            text = f"{entry['action']} asked by {asked}: {entry['outcome']}, {entry['detail']}"
            self.tell("refused", text, step=step)
        elif kind == "nonfinite":
            what, names = ("weights", entry["weights"]) if entry["weights"] else ("gradient", entry["parameters"])
            self.tell("nonfinite", f"{what} of {', '.join(names[:3])}", step=step)

"""What becomes of each alert of a delivery: a command in a run's inbox, a heartbeat, or nothing, and why."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from exporter.catalog import ACTIONS
from exporter.commands import Action, Command, alert_identity
from exporter.message import Alert, plain, step_number
from exporter.runs import RunFolder, find_run

AlertOutcome = Literal["queued", "duplicate", "stale", "unknown_run", "not_actionable", "heartbeat"]
ALERT_OUTCOMES: tuple[str, ...] = get_args(AlertOutcome)

WATCHDOG = "TrainWatchdog"
# A sender's clock may run ahead of ours by this much; a start later than that tells us nothing about its age.
CLOCK_SKEW_SECONDS = 300.0
REASON_LETTERS = 300
NOTE_LETTERS = 800
NAME_LETTERS = 200

logger = logging.getLogger(__name__)


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the sender is told about one alert."""

    fingerprint: str
    alert: str | None
    run: str | None
    outcome: AlertOutcome
    detail: str = ""


class Intake:
    """Takes alerts one by one, each on its own merits.

    Args:
        runs: the folder that holds the runs' folders.
        now: the clock, in Unix seconds.
        stale_after_seconds: an alert that began longer ago than this is not acted on when it is first seen.
        counted: called with the outcome of each alert.
        heard: called with run and time when a run's heartbeat was written.
    """

    def __init__(
        self,
        *,
        runs: Path,
        now: Callable[[], float],
        stale_after_seconds: float,
        counted: Callable[[str], None],
        heard: Callable[[str, float], None],
    ) -> None:
        self._runs = runs
        self._now = now
        self._stale_after_seconds = stale_after_seconds
        self._counted = counted
        self._heard = heard

    def take_all(self, alerts: list[Alert]) -> list[Answer]:
        """Take every alert; one that cannot be written does not hold the others back.

        On return all of it is durable.

        Raises:
            OSError: a command or heartbeat could not be written, and a retry may help. The rest has been taken.
        """
        answers: list[Answer] = []
        failure: OSError | None = None
        folders: dict[str, RunFolder] = {}
        for alert in alerts:
            try:
                answers.append(self._take(alert, folders))
            except OSError as error:
                failure = error
                name, run = alert.labels.get("alertname"), alert.labels.get("run")
                logger.error("alert %.99r of run %.99r could not be written: %.300r", name, run, str(error))  # noqa: TRY400 - the error says it all; a full disk needs no traceback a second
        for folder in folders.values():
            folder.inbox.sync()
        if failure is not None:
            raise failure
        return answers

    def _take(self, alert: Alert, folders: dict[str, RunFolder]) -> Answer:
        """Decide about one alert and write what it leads to; `folders` are those of this delivery so far."""
        outcome, detail = self._judge(alert, folders)
        self._counted(outcome)
        name, run = alert.labels.get("alertname"), alert.labels.get("run")
        usual = outcome in ("heartbeat", "duplicate") or alert.status == "resolved"
        level = logging.DEBUG if usual else logging.INFO
        logger.log(level, "alert %.99r of run %.99r: %s%s", name, run, outcome, detail and f" ({detail})")
        return Answer(fingerprint=alert.fingerprint, alert=name, run=run, outcome=outcome, detail=detail)

    def _judge(self, alert: Alert, folders: dict[str, RunFolder]) -> tuple[AlertOutcome, str]:
        """The outcome of an alert and a word on why."""
        obstacle = _obstacle(alert)
        if obstacle is not None:
            return "not_actionable", obstacle
        run = alert.labels["run"]
        folder = folders.get(run) or find_run(self._runs, run)
        if folder is None:
            return "unknown_run", "no job has made a folder of that name"
        if _is_heartbeat(alert):
            return self._beat(folder)
        folders[run] = folder
        return self._queue(folder, alert)

    def _beat(self, folder: RunFolder) -> tuple[AlertOutcome, str]:
        now = self._now()
        folder.beat(now)
        self._heard(folder.path.name, now)
        return "heartbeat", ""

    def _queue(self, folder: RunFolder, alert: Alert) -> tuple[AlertOutcome, str]:
        now, started = self._now(), alert.started()
        name = alert_identity(alert.fingerprint, alert.starts_at)
        # What is known already is no news however old it is: Alertmanager repeats an alert for as long as it fires.
        if folder.inbox.knows(name):
            return "duplicate", ""
        if now - started > self._stale_after_seconds:
            return "stale", f"began {now - started:.0f} s ago, more than {self._stale_after_seconds:g} s"
        if started - now > CLOCK_SKEW_SECONDS:
            return "stale", f"begins {started - now:.0f} s from now: the clocks disagree"
        command = Command(
            id=name,
            run=folder.path.name,
            action=cast("Action", alert.labels["action"]),
            source="alert",
            received=now,
            # Cut, because a command file has a largest size beyond which the job sets it aside.
            alert=plain(alert.labels.get("alertname", ""), NAME_LETTERS) or None,
            step=step_number(alert.note("step")),
            steps_total=step_number(alert.note("steps_total")),
            starts_at=started,
            reason=_reason(alert),
        )
        return ("queued", "") if folder.inbox.put(command, sync=False) else ("duplicate", "")


def _reason(alert: Alert) -> str:
    """What the job is told: in one line, or, of what it shall only remember, which rank, GPU and host it is about."""
    words = alert.note("description") if alert.labels.get("action") == "note" else ""
    return plain(words or alert.note("summary"), NOTE_LETTERS if words else REASON_LETTERS)


def _is_heartbeat(alert: Alert) -> bool:
    return alert.labels.get("alertname") == WATCHDOG


def _obstacle(alert: Alert) -> str | None:
    """Why nothing can be done about an alert, whichever runs there are."""
    action = alert.labels.get("action", "")
    if alert.status == "resolved":
        return "resolved: nothing is undone"
    if not _is_heartbeat(alert) and not action:
        return "no label `action`"
    if not _is_heartbeat(alert) and action not in ACTIONS:
        return f"label `action` wants one of {', '.join(ACTIONS)}, found {action!r:.60}"
    if not alert.labels.get("run"):
        return "no label `run`: no run is guessed"
    return None

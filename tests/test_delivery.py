"""From a condition to the inbox on the real stack: each incident is one command, and a `resolved` undoes none."""

import random
import threading
import time
from dataclasses import dataclass

import pytest
from test_loop import a_run, wait_for

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

# The series by which each alert is switched on and off: name, labels, value at which it fires, value when all is well.
SWITCHES = {
    "TrainLossNotRecovering": ("train_loss_unrecovered_steps", (), 250.0, 0.0),
    "TrainLossSpikeSustained": ("train_loss_high_steps", ("3",), 250.0, 0.0),
    "TrainNoUpdates": ("train_steps_withheld", (), 12.0, 0.0),
    "TrainAmpScaleCollapse": ("train_amp_loss_scale", (), 0.25, 65536.0),
}
# A condition must be seen by a scrape and an evaluation, a second each here; so must its end.
SEEN_SECONDS = 2.6


@dataclass(frozen=True, kw_only=True)
class Incident:
    """An alert whose condition begins and ends, in seconds from the first."""

    alert: str
    begin: float
    end: float


def incidents(count, *, gaps=(3.0, 20.0), seed=0):
    """So many, each `gaps` seconds after the one before; an alert that is over comes again when its end was seen."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        begin = found[-1].begin + draw.uniform(*gaps) if found else 0.0
        over = {each.alert: each.end for each in found}
        alert = draw.choice([name for name in SWITCHES if begin - over.get(name, -SEEN_SECONDS) >= SEEN_SECONDS])
        found.append(Incident(alert=alert, begin=begin, end=begin + draw.uniform(SEEN_SECONDS, 6.0)))
    return found


def switch(page, alert, *, on):
    """Begin or end the condition of an alert."""
    name, labels, firing, well = SWITCHES[alert]
    page.set(name, firing if on else well, *labels)
    page.add("train_steps_total")


def live_through(page, planned):
    """Begin and end each incident at its time."""
    began, pause = time.monotonic(), threading.Event()
    moments = [(each.begin, True, each.alert) for each in planned] + [(each.end, False, each.alert) for each in planned]
    for when, on, alert in sorted(moments):
        pause.wait(max(0.0, began + when - time.monotonic()))
        switch(page, alert, on=on)


def all_well(page, stack):
    """Every condition is known and none holds; returns when Prometheus has seen it."""
    page.set("train_step", 1)
    for alert in SWITCHES:
        switch(page, alert, on=False)
    wait_for(lambda: stack.query("train_amp_loss_scale == 65536"))


def delivered(stack, outcome):
    """How many alerts the receiver has answered so."""
    return sum(float(s["value"][1]) for s in stack.query(f'receiver_deliveries_total{{outcome="{outcome}"}}'))


def inbox(folder):
    """Every file of the inbox with its content."""
    return {path.name: path.read_bytes() for path in (folder.path / "commands").rglob("*.json")}


def test_each_incident_is_one_command_and_its_end_none(tmp_path):
    """Four incidents of one run, the last the same alert again: four webhooks, four commands, in order, and no more.

    When Alertmanager has told the end of each, the inbox is what it was.
    """
    planned = [
        Incident(alert="TrainLossNotRecovering", begin=0.0, end=3.0),
        Incident(alert="TrainNoUpdates", begin=3.0, end=6.0),
        Incident(alert="TrainAmpScaleCollapse", begin=6.0, end=9.0),
        Incident(alert="TrainNoUpdates", begin=9.0, end=12.0),
    ]
    with a_run(tmp_path) as (folder, page, stack):
        all_well(page, stack)
        live_through(page, planned)
        commands = wait_for(lambda: len(folder.inbox.waiting()) >= len(planned) and folder.inbox.waiting())
        kept = inbox(folder)

        wait_for(lambda: delivered(stack, "not_actionable") == len(planned))
        assert [command.alert for command in commands] == [each.alert for each in planned]
        assert [command.action for command in commands] == ["rollback", "rollback", "lower_lr", "rollback"]
        assert inbox(folder) == kept
        assert (delivered(stack, "queued"), delivered(stack, "duplicate")) == (len(planned), 0)

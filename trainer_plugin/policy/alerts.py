"""Alerts held against what the job knows itself: one that is over by the time its command arrives is not obeyed.

Judged by the steps that an alert speaks of and by what the job reads now; by clocks only where steps are not told.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from exporter.commands import Command
from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.budget import Rollback
from trainer_plugin.policy.decisions import Moment
from trainer_plugin.policy.incidents import Incident

# What was asked longer ago, by a person or by an alert that tells no steps, is not what is wanted now.
ASKED_SECONDS = 3600.0
# The alerts about signals that the job measures itself. Any other is about what only Prometheus sees.
OWN_SIGNALS = frozenset(
    {
        "TrainLossNotRecovering",
        "TrainLossSpikeSustained",
        "TrainNoUpdates",
        "TrainWeightsNonFinite",
        "TrainAmpScaleCollapse",
        "TrainLossDrift",
        "TrainLossOscillating",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the job knows at a boundary.

    `undone_until` is the number of optimizer steps run when the job last started: what was before is undone or over.
    """

    moment: Moment
    rollbacks: Sequence[Rollback]
    undone_until: int
    incident: Incident | None
    readings: Readings | None
    weights_finite: bool


def already_over(command: Command, known: Known) -> tuple[str, str] | None:
    """The outcome and detail with which a command is refused, or None if it is about the present."""
    if "rollback" in command.action and known.rollbacks and command.id in known.rollbacks[-1].answers:
        return "duplicate", f"was asked before the rollback to step {known.rollbacks[-1].to_step} was done"
    waited = known.moment.now - command.received
    if command.steps_total is None and waited > ASKED_SECONDS:
        return "stale", f"was asked {waited:.0f} s ago"
    if command.source == "operator":
        return None
    refused = _by_steps_total(command, known) if command.steps_total is not None else _by_step(command, known)
    return refused or _by_readings(command, known)


def _by_steps_total(command: Command, known: Known) -> tuple[str, str] | None:
    seen, run = command.steps_total or 0, known.moment.steps_total
    if seen > run:
        return "stale", f"speaks of optimizer step {seen}, this job has run {run}"
    if known.rollbacks and seen <= known.rollbacks[-1].at_steps_total:
        return "duplicate", f"already handled by the rollback to step {known.rollbacks[-1].to_step}"
    if seen <= known.undone_until:
        return "duplicate", "about what was before the job was started again"
    return None


def _by_step(command: Command, known: Known) -> tuple[str, str] | None:
    step, last = command.step, known.rollbacks[-1] if known.rollbacks else None
    undone = last is not None and step is not None and known.moment.step < step <= last.at_step
    earlier = last is not None and command.starts_at is not None and command.starts_at <= last.at
    if last is not None and (undone or earlier):
        return "duplicate", f"about what the rollback to step {last.to_step} has undone"
    if step is not None and step > known.moment.step:
        return "stale", f"speaks of step {step}, the run is at {known.moment.step}"
    return None


def _by_readings(command: Command, known: Known) -> tuple[str, str] | None:
    if command.alert not in OWN_SIGNALS or known.readings is None:
        return None
    incident = known.incident
    signs = incident.signs if incident is not None else {}
    if incident is None or not still_so(
        command.alert, known.readings, signs=signs, weights_finite=known.weights_finite
    ):
        return "stale", "no longer so: the job's own reading is back to normal"
    seen, opened = command.steps_total, incident.opened_total
    if seen is None:
        seen, opened = command.step, incident.detected_step
    if seen is not None and seen < opened:
        return "stale", f"evaluated before incident {incident.id}, which is open now, began"
    return None


def still_so(alert: str | None, readings: Readings, *, signs: Collection[str] = (), weights_finite: bool) -> bool:
    """Whether the condition of an alert about the job's own signals holds now; True for any other alert.

    `signs` are those of the incident that is open.
    """
    holds = {
        "TrainLossNotRecovering": readings.loss_unrecovered_steps > 0,
        "TrainLossSpikeSustained": readings.loss_high_steps[3.0] > 0,
        "TrainNoUpdates": readings.withheld_steps > 0,
        "TrainWeightsNonFinite": not weights_finite,
        "TrainAmpScaleCollapse": readings.amp_scale_collapsed,
        "TrainLossDrift": "drift:loss" in signs,
        "TrainLossOscillating": "oscillation:loss" in signs,
    }
    return holds.get(alert or "", True)

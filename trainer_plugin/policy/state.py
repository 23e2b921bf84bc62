"""What the policy remembers: incidents and rollbacks. It never rewinds: it is kept in the run folder."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from exporter.commands import Command
from trainer_plugin.policy.attribution import GPU_FAULT, MACHINE_ALERTS, RateRises
from trainer_plugin.policy.budget import Rollback
from trainer_plugin.policy.incidents import Incident

KEPT_INCIDENTS = 50
NO_REMEDIES = ("note", "checkpoint", "skip_batch")
# What a remedy waits for beside its own kind: a whole rollback lets a partial one have its time.
_GENTLER = {"rollback": "partial_rollback"}
# An alert looks back over 5 minutes, and is as long on its way as a retry takes.
_NOTE_SECONDS = 600.0


class Note(msgspec.Struct, kw_only=True):
    """What an alert said of the run's machines, `at` in Unix seconds. `kept`: a checkpoint was saved because of it."""

    alert: str
    words: str
    at: float
    kept: bool = False


def kind_of(action: str, alert: str | None) -> str:
    """What a remedy waits for: those of its action. Notes are of their alert: one does not hide another."""
    return f"{action} {alert}" if action == "note" and alert is not None else action


class PolicyState(msgspec.Struct, kw_only=True):
    """`undone_until` is the number of optimizer steps run when the job last started.

    `budget_spent_step` is where a remedy was refused for want of budget, until something has helped; `stopped_step`,
    where the guard stopped the run. A new start clears both. The receiver reads them, for people. `asked` is when, in
    optimizer steps run, each action was last done outside of any incident. `notes` are the
    newest of each alert about machines, `rises` the jumps of the learning rate that came to nothing.
    """

    incidents: list[Incident] = msgspec.field(default_factory=list)
    rollbacks: list[Rollback] = msgspec.field(default_factory=list)
    next_id: int = 1
    undone_until: int = 0
    budget_spent_step: int | None = None
    stopped_step: int | None = None
    asked: dict[str, int] = msgspec.field(default_factory=dict)
    notes: list[Note] = msgspec.field(default_factory=list)
    rises: RateRises = msgspec.field(default_factory=RateRises)

    @property
    def open_incident(self) -> Incident | None:
        """The incident that is not healed yet, if any."""
        newest = self.incidents[-1] if self.incidents else None
        return newest if newest is not None and not newest.healed else None

    def restarted(self, steps_total: int, *, anew: bool) -> None:
        """The job has started again, or `anew` from step 0."""
        self.undone_until = steps_total
        self.budget_spent_step = self.stopped_step = None
        if anew:
            self.rollbacks = []
            if self.open_incident is not None:
                self.incidents = self.incidents[:-1]
        if (incident := self.open_incident) is not None:
            # What another mode only told of, or had no target for, is no remedy that has had its time.
            incident.remedies = [one for one in incident.remedies if one.outcome not in ("observed", "no_target")]
            incident.weights_jumped = False  # It goes on from before them.

    def answer(self, waiting: Sequence[Command]) -> None:
        """The rollback just done is the one that these commands ask for, whichever of them was obeyed."""
        asked = tuple(command.id for command in waiting if "rollback" in command.action)
        self.rollbacks = [*self.rollbacks[:-1], msgspec.structs.replace(self.rollbacks[-1], answers=asked)]

    def open(self, first_step: int, step: int, steps_total: int) -> Incident:
        """A new incident, detected at `step`; the oldest are let go."""
        incident = Incident(
            id=self.next_id, first_step=first_step, detected_step=step, last_step=step, opened_total=steps_total
        )
        self.next_id += 1
        self.incidents = [*self.incidents[-KEPT_INCIDENTS:], incident]
        return incident

    def incident_for(self, command: Command, step: int, steps_total: int) -> Incident:
        """The incident that a command belongs to: the open one, else a new one.

        What is no remedy, asked in quiet times, opens none, for that would hold checkpoints back: it gets one that is
        not kept, with id 0.
        """
        incident = self.open_incident
        first_step = min(command.step or step, step)  # One that lies ahead would never be over.
        quiet = command.action in NO_REMEDIES or (command.action == "stop" and command.source == "operator")
        if incident is None and quiet:
            incident = self.quiet(step, first_step)
        elif incident is None:
            incident = self.open(first_step, step, steps_total)
            incident.evidence.append(f"step {step}: {command.alert or command.source} asked for {command.action}")
        return incident

    def quiet(self, step: int, first_step: int | None = None) -> Incident:
        """What stands for an incident where there is none; it is not kept."""
        return Incident(id=0, first_step=step if first_step is None else first_step, detected_step=step, last_step=step)

    def hear(self, commands: Sequence[Command], step: int, now: float) -> None:
        """Keep what alerts say of the run's machines, whatever becomes of the commands, and tell the open incident."""
        for command in commands:
            alert = command.alert
            if command.source == "alert" and command.action == "note" and alert in MACHINE_ALERTS:
                if any(note.alert == alert and note.at == command.received for note in self.notes):
                    continue
                words = f"step {step}: {alert}: {command.reason}"
                note = Note(alert=alert, words=words, at=command.received)
                self.notes = [*(one for one in self.notes if one.alert != alert), note]
        if self.notes and (incident := self.open_incident) is not None:
            for note in self.notes:
                if abs(now - note.at) <= _NOTE_SECONDS:
                    incident.hear(note.alert, note.words)

    def new_gpu_fault(self, now: float) -> str:
        """What was said of a GPU and has not been acted upon; from now on it has."""
        for note in self.notes:
            if note.alert == GPU_FAULT and not note.kept:
                note.kept = True
                return note.words if abs(now - note.at) <= _NOTE_SECONDS else ""
        return ""

    @property
    def may_act(self) -> bool:
        """Whether there may be something to do without a command: an incident is open, or a GPU's fault is new."""
        return self.open_incident is not None or any(one.alert == GPU_FAULT and not one.kept for one in self.notes)

    def cooling(self, action: str, steps_total: int, cooldown_steps: int, *, alert: str | None = None) -> bool:
        """Whether the last remedy of this kind, or a gentler one in its place, has not had its time yet.

        That time is `cooldown_steps`. For a lower rate it is twice as long after each one that did not keep for twice
        its time: what has to be repeated on and on is no remedy.
        """
        kinds = {kind_of(action, alert), _GENTLER.get(action, kind_of(action, alert))}
        done = sorted(
            remedy.steps_total
            for incident in self.incidents
            for remedy in incident.remedies
            if kind_of(remedy.action, remedy.alert) in kinds and remedy.outcome == "done"
        )
        done = sorted([*done, *(self.asked[kind] for kind in kinds if kind in self.asked)])
        wait = cooldown_steps
        for before, after in pairwise(done):
            wait = 2 * wait if action == "lower_lr" and after - before < 2 * wait else cooldown_steps
        return bool(done) and steps_total - done[-1] < wait

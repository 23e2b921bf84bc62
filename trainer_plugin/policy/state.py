"""What the policy remembers: incidents and rollbacks. It never rewinds: it is kept in the run folder."""

from itertools import pairwise

import msgspec

from exporter.commands import Command
from trainer_plugin.policy.budget import Rollback
from trainer_plugin.policy.incidents import Incident

KEPT_INCIDENTS = 50
NO_REMEDIES = ("note", "checkpoint", "skip_batch")
# What a remedy waits for beside its own kind: a whole rollback lets a partial one have its time.
_GENTLER = {"rollback": "partial_rollback"}


class PolicyState(msgspec.Struct, kw_only=True):
    """`undone_until` is the number of optimizer steps run when the job last started.

    `budget_spent_step` is where a remedy was refused for want of budget, until something has helped; `stopped_step`,
    where the guard stopped the run. A new start clears both. The receiver reads them, for people. `asked` is when, in
    optimizer steps run, each action was last done outside of any incident.
    """

    incidents: list[Incident] = msgspec.field(default_factory=list)
    rollbacks: list[Rollback] = msgspec.field(default_factory=list)
    next_id: int = 1
    undone_until: int = 0
    budget_spent_step: int | None = None
    stopped_step: int | None = None
    asked: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def open_incident(self) -> Incident | None:
        """The incident that is not healed yet, if any."""
        newest = self.incidents[-1] if self.incidents else None
        return newest if newest is not None and not newest.healed else None

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
        quiet = command.action in NO_REMEDIES or (command.action == "stop" and command.source == "operator")
        if incident is None and quiet:
            first_step = min(command.step or step, step)
            incident = Incident(id=0, first_step=first_step, detected_step=step, last_step=step)
        elif incident is None:
            incident = self.open(command.step or step, step, steps_total)
            incident.evidence.append(f"step {step}: {command.alert or command.source} asked for {command.action}")
        return incident

    def cooling(self, action: str, steps_total: int, cooldown_steps: int) -> bool:
        """Whether the last remedy of this kind, or a gentler one in its place, has not had its time yet.

        That time is `cooldown_steps`. For a lower rate it is twice as long after each one that did not keep for twice
        its time: what has to be repeated on and on is no remedy.
        """
        kinds = {action, _GENTLER.get(action, action)}
        done = sorted(
            remedy.steps_total
            for incident in self.incidents
            for remedy in incident.remedies
            if remedy.action in kinds and remedy.outcome == "done"
        )
        done = sorted([*done, *(self.asked[kind] for kind in kinds if kind in self.asked)])
        wait = cooldown_steps
        for before, after in pairwise(done):
            wait = 2 * wait if action == "lower_lr" and after - before < 2 * wait else cooldown_steps
        return bool(done) and steps_total - done[-1] < wait

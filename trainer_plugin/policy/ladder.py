"""The policy: verdicts and commands meet here, and at most one action a boundary comes out, by the table. Pure."""

from exporter.commands import Command
from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.alerts import OWN_SIGNALS, Known, already_over
from trainer_plugin.policy.attribution import StepTimes
from trainer_plugin.policy.budget import BudgetConfig, Rollback, in_vain, overspent
from trainer_plugin.policy.decisions import ActionsConfig, Decision, Mode, Moment, Refusal, spike_withheld
from trainer_plugin.policy.escalation import (
    NO_UPDATES_STEPS,
    answered,
    gentle_remedy,
    is_brief,
    quick_remedy,
    refused_rollback,
    settling,
    slow_remedy,
)
from trainer_plugin.policy.incidents import Incident, Remedy
from trainer_plugin.policy.partial import partial_layers, rollback_kind
from trainer_plugin.policy.state import PolicyState, kind_of
from trainer_plugin.signals import Signals

# Steps without a bad sign, beyond the first bad one, after which an incident counts as healed.
HEALED_STEPS = 20
TAIL_STEPS = 10  # Two outliers of the gradient norm within so many steps are no chance.


class Policy:
    """The ladder of R9 with its budgets; `sustained_steps` is the detectors' own."""

    def __init__(
        self,
        *,
        mode: Mode,
        actions: ActionsConfig,
        budget: BudgetConfig,
        sustained_steps: int,
        state: PolicyState | None = None,
    ) -> None:
        self.mode = mode
        self.state = state or PolicyState()
        self._actions = actions
        self._budget = budget
        self._sustained_steps = sustained_steps
        self._slow_since: float | None = None
        self._surged = False
        self._out_of_band = False
        self._tail_step: int | None = None
        self._weights_finite = True
        self._readings: Readings | None = None
        self._step_times = StepTimes()

    @property
    def open_incident(self) -> Incident | None:
        """The incident that is not healed yet, if any."""
        return self.state.open_incident

    def restarted(self, steps_total: int, *, anew: bool) -> None:
        """The job has started again, or `anew` from step 0: earlier alerts are over, other weights had other faults."""
        self.state.restarted(steps_total, anew=anew)

    def observe(
        self, signals: Signals, readings: Readings, verdicts: list[Verdict], *, weights_finite: bool, steps_total: int
    ) -> list[Incident]:
        """Take in one step; return the incidents that opened or healed by it."""
        self._readings, self._weights_finite, self._surged = readings, weights_finite, signals.surge
        self._step_times.add(signals.step_seconds, signals.data_wait_seconds)
        acting = [verdict for verdict in verdicts if (verdict.detector, verdict.signal) in Monitor.ACTING]
        if readings.hard_batches:
            acting = [verdict for verdict in acting if verdict.detector != "robust"]
        changed = []
        incident = self.open_incident
        readings = self.state.rises.judge(signals, readings, quiet=incident is None and not acting)
        # What was withheld has its remedy already.
        banded = any(verdict.detector in ("robust", "ema_ratio") for verdict in acting)
        self._out_of_band = (self._out_of_band and incident is not None) or (banded and signals.withheld != "spike")
        if acting and incident is None and not self._lone_tail(acting, signals.step):
            incident = self.state.open(min(verdict.first_step for verdict in acting), signals.step, steps_total)
            changed.append(incident)
            incident.hear_of_slow_steps(signals.step, self._step_times.slow())
        if incident is None:
            return changed
        incident.take_in(signals, readings, acting)
        withheld = spike_withheld(signals, readings, mode=self.mode, actions=self._actions)
        if signals.surge or withheld:
            incident.done_in_step(signals, steps_total, withheld=withheld, acts=self.mode == "auto")
        # A step that was withheld is no good one, but neither does it undo those before it: it reached nothing.
        bad = any(verdict.detector != "nonfinite" for verdict in acting)
        if bad or readings.loss_unrecovered_steps > (HEALED_STEPS if readings.hard_batches else 0):
            incident.good_steps = 0
        elif not acting and signals.withheld in (None, "amp_overflow") and signals.step > incident.first_step:
            incident.good_steps += 1
        if incident.good_steps >= HEALED_STEPS:
            incident.healed, incident.healed_step = True, signals.step
            self._slow_since = self.state.budget_spent_step = None
            changed.append(incident)
        return changed

    def _lone_tail(self, acting: list[Verdict], step: int) -> bool:
        """Whether all there is is one gradient norm in the far tail, as every healthy run has some."""
        alone = all((verdict.detector, verdict.signal) == ("robust", "grad_norm") for verdict in acting)
        before, self._tail_step = self._tail_step, step
        return alone and not (before is not None and 0 < step - before <= TAIL_STEPS)

    def decide(self, moment: Moment, commands: list[Command]) -> tuple[Decision | None, list[Refusal]]:
        """What to do at this boundary: the oldest command that may be obeyed, else what the job itself would do."""
        refusals: list[Refusal] = []
        decision: Decision | None = None
        self.state.hear(commands, moment.step, moment.now)
        for command in commands:
            # Before the first reading after a start or a rollback such an alert cannot be held against one: it waits.
            ready = command.alert not in OWN_SIGNALS or self._readings is not None
            answer = self._answer(command, moment) if decision is None and ready else None
            if isinstance(answer, Refusal):
                refusals.append(answer)
            elif answer is not None:
                decision = answer
        if decision is None:
            wish = self._wish(moment)
            if isinstance(wish, Refusal):
                refusals.append(wish)
            else:
                decision = wish
        if self.open_incident is not None and any(refusal.outcome == "refused_budget" for refusal in refusals):
            self.state.budget_spent_step = moment.step
        return decision, refusals

    def record(self, decision: Decision, moment: Moment, outcome: str, *, detail: str, to_step: int | None) -> Remedy:
        """Keep what came of a decision; `to_step` where a rollback went."""
        remedy = Remedy(
            action=decision.action, step=moment.step, steps_total=moment.steps_total, source=decision.source,
            outcome=outcome, alert=decision.command.alert if decision.command else None,
            command=decision.command.id if decision.command else None, detail=detail,
        )  # fmt: skip
        decision.incident.remedies.append(remedy)
        if not decision.incident.id and outcome == "done":
            self.state.asked[kind_of(decision.action, remedy.alert)] = moment.steps_total
        if to_step is not None:
            self.state.rollbacks.append(
                Rollback(
                    at=moment.now, at_step=moment.step, at_steps_total=moment.steps_total, to_step=to_step,
                    nearest_step=moment.target_step, incident=decision.incident.id,
                )
            )  # fmt: skip
            decision.incident.good_steps, decision.incident.weights_jumped = 0, False
            self.state.budget_spent_step = None
            # What was read of the steps now undone must not ask for a second rollback before new values arrive.
            self._slow_since, self._readings = None, None
        return remedy

    def _answer(self, command: Command, moment: Moment) -> Decision | Refusal:
        """Obey a command, or say why not."""

        def refuse(outcome: str, detail: str) -> Refusal:
            return Refusal(
                action=command.action, source=command.source, outcome=outcome, detail=detail, command=command
            )

        if self.mode == "observe":
            return refuse("observed", "mode is observe")
        incident, action = self.open_incident, str(command.action)
        known = Known(
            moment=moment,
            rollbacks=self.state.rollbacks,
            undone_until=self.state.undone_until,
            incident=incident,
            readings=self._readings,
            weights_finite=self._weights_finite,
        )
        handled = already_over(command, known)
        if handled is not None:
            return refuse(*handled)
        if command.source == "alert":
            if self._cooling(command.action, moment, command.alert):
                return refuse("refused_cooldown", f"the last {command.action}, or what is gentler, needs its time")
            action = rollback_kind(incident, self._readings, self._actions) if action == "rollback" else action
        if "rollback" in action:
            refused = overspent(self._budget, self.state.rollbacks, self._in_vain(incident, moment), moment.now)
            if refused:
                return refuse("refused_budget", refused)
        incident = self.state.incident_for(command, moment.step, moment.steps_total)
        return self._decision(action, command.source, command.reason, incident=incident, moment=moment, command=command)

    def _wish(self, moment: Moment) -> Decision | Refusal | None:
        """What the job would do by itself, in the order of the table."""
        incident, readings = self.open_incident, self._readings
        if incident is None or readings is None:
            return self._quiet_wish(moment) if incident is None else None
        if not self._weights_finite:
            wish = self._local("rollback", "weights are not finite", incident, moment)
            if wish is None and self.mode != "auto" and moment.target_step >= 0:
                return None  # Said already; and the way back that was not taken is there.
            # R9: nothing is left to train on, and no way back.
            return wish or self._local("stop", "weights are not finite, and there is no way back", incident, moment)
        slow = None
        surged, saved = self._surged and not self._cooling("lower_lr", moment), self._cooling("checkpoint", moment)
        remedy = quick_remedy(incident, surged=surged, saved=saved)
        if remedy is None:
            slow = remedy = self._slow(incident, readings, moment)
        if remedy is None:
            remedy = gentle_remedy(incident, clips=self._out_of_band and self._actions.clip_max_norm is not None)
        if remedy is None:
            return None
        wish = self._local(*remedy, incident, moment)
        return wish or (self._last_resort(remedy[1], incident, readings, moment) if slow is not None else None)

    def _quiet_wish(self, moment: Moment) -> Decision | None:
        """Outside of any incident: what a GPU has made so far may be all that is left of it."""
        fault = self.state.new_gpu_fault(moment.now)
        if not fault or self.mode != "auto":
            return None
        return self._decision("checkpoint", "local", fault, incident=self.state.quiet(moment.step), moment=moment)

    def _slow(self, incident: Incident, readings: Readings, moment: Moment) -> tuple[str, str] | None:
        """What to do and why, where the alert comes first and has had its time."""
        refused = overspent(self._budget, self.state.rollbacks, self._in_vain(incident, moment), moment.now)
        known = (incident, readings, self._actions, moment, self._sustained_steps)
        remedy = slow_remedy(*known, budget_left=not refused)
        if remedy is None:
            self._slow_since = None
            return None
        action, reason = remedy
        if self._cooling(action, moment):
            return None
        if self._slow_since is None or moment.now < self._slow_since:  # A clock set back begins anew.
            self._slow_since = moment.now
        waited = moment.now - self._slow_since >= self._actions.alert_grace_seconds
        return (action, reason) if waited or not moment.loop_up or self.mode != "auto" else None

    def _last_resort(
        self, reason: str, incident: Incident, readings: Readings, moment: Moment
    ) -> Decision | Refusal | None:
        """The last rung: to stop, when going back is at an end and the run has had its time without."""
        updating = readings.withheld_steps < NO_UPDATES_STEPS
        until = moment.steps_total - self._budget.cooldown_steps
        refused = refused_rollback(incident, after=self.state.undone_until, until=until, updating=updating)
        if refused is None or self._actions.last_resort != "stop":
            return None
        return self._local("stop", f"{reason}; going back: {refused.outcome}, {refused.detail}", incident, moment)

    def _cooling(self, action: str, moment: Moment, alert: str | None = None) -> bool:
        if action == "rollback" and not self._weights_finite:  # Nothing is trained that could be given time.
            return False
        if "rollback" in action and settling(self.open_incident, moment.steps_total, self._sustained_steps):
            return True
        return self.state.cooling(action, moment.steps_total, self._budget.cooldown_steps, alert=alert)

    def _local(self, action: str, reason: str, incident: Incident, moment: Moment) -> Decision | Refusal | None:
        """The job's own wish, unless this incident has had its answer already."""
        tried = incident.tried(action)
        if answered(action, tried, moment.steps_total, self.state.undone_until, self._budget.cooldown_steps):
            return None
        outcome = detail = ""
        if self.mode != "auto":
            outcome, detail = "observed", f"{reason}; mode is {self.mode}"
        elif "rollback" in action:
            detail = overspent(self._budget, self.state.rollbacks, self._in_vain(incident, moment), moment.now)
            outcome = "refused_budget" if detail else ""
            said = [r for r in tried if r.outcome == outcome and r.steps_total > self.state.undone_until]
            if detail and said:  # A budget that is there again, a day later, is used.
                return None
        if outcome:
            remedy = Remedy(
                action=action, step=moment.step, steps_total=moment.steps_total, source="local",
                outcome=outcome, detail=detail,
            )  # fmt: skip
            incident.remedies.append(remedy)
            return Refusal(action=action, source="local", outcome=outcome, detail=detail)
        return self._decision(action, "local", reason, incident=incident, moment=moment)

    def _decision(
        self,
        action: str,
        source: str,
        reason: str,
        *,
        incident: Incident,
        moment: Moment,
        command: Command | None = None,
    ) -> Decision:
        again = self._in_vain(incident, moment) if action == "rollback" else []
        partial, most = action == "partial_rollback", self._actions.partial_layers
        return Decision(
            action=action,
            source=source,
            reason=reason,
            incident=incident,
            command=command,
            # R11: back to the same place means that the last target was not good enough, nor the window.
            before_step=min([incident.before_step, *(rollback.to_step for rollback in again)]),
            widen=2 ** len(again),
            layers=partial_layers(incident, self._readings, most, command) if partial else (),
            brief=is_brief(action, source, incident, again=bool(again), surged=self._surged),
        )

    def _in_vain(self, incident: Incident | None, moment: Moment) -> list[Rollback]:
        return in_vain(self.state.rollbacks, incident.id if incident else 0, moment.target_step, moment.now)

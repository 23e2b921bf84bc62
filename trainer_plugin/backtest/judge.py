"""The judge: the job's own detectors and policy over the rows of an old log, one after the other."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from trainer_plugin.backtest.judged import Event, FoundIncident, Judged, WouldDo
from trainer_plugin.backtest.logs import Log
from trainer_plugin.backtest.notes import printable
from trainer_plugin.backtest.rows import LogRow
from trainer_plugin.detection.detectors import DetectionConfig, Verdict
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.decisions import ActionsConfig, Decision, Moment
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.policy.ladder import Policy
from trainer_plugin.signals import Signals

PROGRESS_STEPS = 200_000
MOST_EVENTS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of guard.yaml that a backtest uses. `checkpoint_every_steps` tells where a rollback could go."""

    detection: DetectionConfig
    actions: ActionsConfig
    budget: BudgetConfig
    checkpoint_every_steps: int


def judge(
    log: Log,
    options: Options,
    *,
    most_events: int = MOST_EVENTS,
    watch: Callable[[LogRow], None] | None = None,
    tell: Callable[[int], None] | None = None,
) -> Judged:
    """Every verdict about a log, and what the policy would have done in mode `auto`, with the outer loop down.

    Nothing is healed by it: the log goes on as it was. So an incident in which the policy would have gone back is
    asked no further, and a step is taken to last a second where the budget counts days. After `most_events` verdicts
    they are only counted. `watch` sees each row, `tell` hears every so often how many there have been.

    Raises:
        ValueError: the log cannot be read, in one line.
    """
    judged = Judged(path=printable(str(log.path)), format=log.format)
    steps = 0
    run_judge: _RunJudge | None = None
    cases: list[_LoggedIncident] = []
    for row in log:
        if run_judge is None or row.run != run_judge.run:
            run_judge = _RunJudge(options, judged, cases, row.run, most_events)
        run_judge.hear(row)
        if watch is not None:
            watch(row)
        steps += 1
        if steps % PROGRESS_STEPS == 0 and tell is not None:
            tell(steps)
    judged.steps = steps
    judged.runs = run_judge.run if run_judge is not None else 0
    judged.notes = [printable(note) for note in log.notes]
    if judged.events_left_out:
        judged.notes.append(
            f"the first {most_events} verdicts are kept and listed, {judged.events_left_out} more are only counted"
        )
    judged.incidents = [_told(case) for case in cases]
    return judged


@dataclass(kw_only=True, slots=True)
class _LoggedIncident:
    """An incident, the run it is in, and the last step after which something would have been done about it."""

    incident: Incident
    run: int
    last_action_step: int = 0


class _RunJudge:
    """Detectors and policy of one run of a log; what they find goes into `judged` and `cases`."""

    def __init__(
        self, options: Options, judged: Judged, cases: list[_LoggedIncident], run: int, most_events: int
    ) -> None:
        self.run = run
        self._cases = cases
        self._most_events = most_events
        self._kept: set[tuple[int, str]] = set()
        self._options = options
        self._judged = judged
        self._monitor = Monitor(options.detection)
        self._policy = Policy(
            mode="auto",
            actions=options.actions,
            budget=options.budget,
            sustained_steps=options.detection.sustained_steps,
        )
        self._first_step: int | None = None
        self._last_step = 0
        self._steps_total = 0

    def hear(self, row: LogRow) -> None:
        """Judge one row, and let the policy see it if there is anything to see."""
        if self._first_step is None:
            self._first_step = self._last_step = row.step
        ahead_steps, self._last_step = row.step - self._last_step, row.step
        self._steps_total += ahead_steps if ahead_steps > 1 else 1  # Steps that come again were run again.
        signals = _signals(row)
        verdicts = self._monitor.judge(signals)
        self._judged.steps_judged += self._monitor.warm
        if verdicts or self._policy.open_incident is not None:
            self._decide(signals, verdicts)

    def _decide(self, signals: Signals, verdicts: list[Verdict]) -> None:
        policy, step = self._policy, signals.step
        self._keep_events(step, verdicts)
        surge = any((verdict.detector, verdict.signal) == ("ema_ratio", "grad_norm") for verdict in verdicts)
        readings = self._monitor.readings()
        if readings.repeated_spike and self._options.actions.withhold_spikes != "never" and signals.withheld is None:
            signals = msgspec.structs.replace(signals, withheld="spike")
        elif surge and signals.grad_norm:
            coefficient = min(1.0, self._monitor.grad_norm_baseline / signals.grad_norm)
            signals = msgspec.structs.replace(signals, surge=True, clip_coefficient=coefficient)
        before = policy.open_incident
        policy.observe(signals, readings, verdicts, weights_finite=True, steps_total=self._steps_total)
        incident = policy.open_incident
        if incident is not None and incident is not before:
            self._cases.append(_LoggedIncident(incident=incident, run=self.run))
        if incident is None or incident.tried("rollback"):
            return
        if signals.surge:
            self._keep_once(incident, "clip", step, "gradient surge, in the same step")
        if signals.withheld == "nonfinite":
            self._keep_once(incident, "skip_batch", step, "not finite: the update is withheld")
        if signals.withheld == "spike":
            self._keep_once(incident, "skip_batch", step, "a spike behind a spike: the update is withheld")
        self._ask(step, incident)

    def _keep_events(self, step: int, verdicts: list[Verdict]) -> None:
        room = max(self._most_events - len(self._judged.events), 0)
        self._judged.events_left_out += max(len(verdicts) - room, 0)
        for verdict in verdicts[:room]:
            self._judged.events.append(
                Event(
                    step=step,
                    detector=verdict.detector,
                    signal=verdict.signal,
                    value=verdict.value,
                    baseline=verdict.baseline,
                    run=self.run,
                )
            )

    def _ask(self, step: int, incident: Incident) -> None:
        every = self._options.checkpoint_every_steps
        target = (incident.before_step - 1) // every * every
        first = self._first_step or 0
        moment = Moment(
            step=step,
            steps_total=self._steps_total,
            now=float(self._steps_total),
            loop_up=False,
            target_step=target if target >= first and target > 0 else -1,
        )
        decision, _ = self._policy.decide(moment, [])
        if decision is not None:
            self._carry_out(decision, moment)

    def _carry_out(self, decision: Decision, moment: Moment) -> None:
        """Keep what the policy would do; a rollback counts for its budget as it would have."""
        action, reason, target = decision.action, decision.reason, moment.target_step
        if action != "rollback":
            self._policy.record(decision, moment, "done", detail="", to_step=None)
        elif target < 0:
            self._policy.record(decision, moment, "no_target", detail="", to_step=None)
            action, reason = "note", f"{reason}: a rollback, but no checkpoint lies before it"
        else:
            self._policy.record(decision, moment, "done", detail="", to_step=target)
            reason = f"{reason}: to step {target}"
        self._keep(action, moment.step, reason)

    def _keep_once(self, incident: Incident, action: str, step: int, reason: str) -> None:
        """What is done within a step is told once an incident."""
        if (incident.id, action) not in self._kept:
            self._kept.add((incident.id, action))
            self._keep(action, step, reason)

    def _keep(self, action: str, step: int, reason: str) -> None:
        # The policy has one open incident at a time: the newest.
        self._cases[-1].last_action_step = step
        self._judged.would_do.append(WouldDo(step=step, action=action, reason=reason, run=self.run))


def _signals(row: LogRow) -> Signals:
    """What a log tells of a step, and what the shield would have done with it."""
    norm, scale = row.grad_norm, row.amp_loss_scale
    withheld = None
    if not math.isfinite(row.loss) or (norm is not None and not math.isfinite(norm)):
        # A scale of 1 does not move: it is what some print where nothing is scaled.
        scaled = scale is not None and scale != 1.0 and math.isfinite(row.loss)
        withheld = "amp_overflow" if scaled else "nonfinite"
    return Signals(
        step=row.step,
        loss=row.loss,
        grad_norm=norm,
        withheld=withheld,
        amp_loss_scale=scale,
        learning_rates=() if row.learning_rate is None else (row.learning_rate,),
    )


def _told(case: _LoggedIncident) -> FoundIncident:
    incident = case.incident
    return FoundIncident(
        first_step=incident.first_step,
        detected_step=incident.detected_step,
        last_step=max(incident.last_step, case.last_action_step),
        class_=incident.class_,
        evidence=incident.evidence,
        run=case.run,
    )

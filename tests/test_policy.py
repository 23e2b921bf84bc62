"""The policy: what is done at which boundary, by whom, how often, and what is refused."""

import json
import math
from itertools import pairwise

import msgspec
import pytest
from curves import signals

from exporter.commands import Command
from trainer_plugin.detection.detectors import DetectionConfig, Verdict
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.budget import BudgetConfig, Rollback, in_vain
from trainer_plugin.policy.decisions import ActionsConfig, Moment
from trainer_plugin.policy.escalation import NO_UPDATES_STEPS
from trainer_plugin.policy.ladder import HEALED_STEPS, Policy
from trainer_plugin.policy.state import PolicyState

GRACE_SECONDS = 30.0
COOLDOWN_STEPS = 200
SUSTAINED_STEPS = 200
DAY_SECONDS = 86_400.0
ALERT = "TrainLossNotRecovering"
QUIET = Readings(
    loss_ema=2.0, grad_norm_ema=1.0, loss_ema_ratio=1.0, grad_norm_ema_ratio=1.0, loss_mean=2.0, loss_stddev=0.05,
    loss_zscore=0.0, loss_robust_center=2.0, loss_robust_scale=0.05, loss_robust_score=0.0, grad_norm_robust_center=1.0,
    grad_norm_robust_scale=0.1, grad_norm_robust_score=0.0, loss_high_steps=dict.fromkeys((1.2, 1.5, 2.0, 3.0), 0),
    grad_norm_high_steps=dict.fromkeys((3.0, 10.0), 0), loss_unrecovered_steps=0, withheld_steps=0,
    amp_scale_collapsed=False, hard_batches=False, repeated_spike=False,
)  # fmt: skip


class Job:
    """A policy with a step counter and a clock turned by hand; `went` holds what was done."""

    def __init__(self, mode="auto", *, budget=None, actions=None, loop_up=True, state=None):
        self.policy = Policy(
            mode=mode,
            actions=actions or ActionsConfig(),
            budget=budget or BudgetConfig(),
            sustained_steps=SUSTAINED_STEPS,
            state=state,
        )
        self.step = self.steps_total = 1000
        self.now = 1e9
        self.loop_up = loop_up
        self.unrecovered = self.withheld = 0
        self.ratios = {}
        self.risen = self.jumped = None
        self.back_in_steps = math.inf
        self.has_target = True
        self.went = []

    @property
    def moment(self):
        """This boundary."""
        before = self.step + 1 if self.incident is None else self.incident.before_step
        nearest = (before - 1) // 100 * 100  # A checkpoint every 100 steps, all of them proven.
        nearest = nearest if self.has_target else -1
        return Moment(
            step=self.step, steps_total=self.steps_total, now=self.now, loop_up=self.loop_up, target_step=nearest
        )

    @property
    def incident(self):
        """The open incident."""
        return self.policy.open_incident

    def see(
        self,
        *found,
        surge=False,
        withheld=None,
        weights_finite=True,
        ratio=1.0,
        seconds=0.5,
        collapsed=False,
        hard=False,
    ):
        """Run one step in which these detectors (`detector:signal`) speak; return incidents opened or healed."""
        self.step += 1
        self.steps_total += 1
        self.now += seconds
        self.unrecovered = self.unrecovered + 1 if self.unrecovered or "robust:loss" in found else 0
        self.withheld = self.withheld + 1 if withheld == "nonfinite" else 0
        verdicts = []
        for sign in found:
            detector, signal = sign.split(":")
            value = math.nan if detector == "nonfinite" else 9.0
            first_step = self.step - 5 * (sign == "drift:loss")  # A climb takes its time.
            verdicts.append(
                Verdict(
                    detector=detector, signal=signal, step=self.step, value=value, baseline=2.0, first_step=first_step
                )
            )  # fmt: skip
        return self.policy.observe(
            signals(self.step, 2.0, surge=surge, withheld=withheld),
            _readings(
                unrecovered=self.unrecovered,
                withheld=self.withheld,
                ratio=ratio,
                collapsed=collapsed,
                hard=hard,
                layer_ratios=self.ratios,
                risen=self.risen,
                jumped=self.jumped,
                back_in_steps=self.back_in_steps,
            ),
            verdicts,
            weights_finite=weights_finite,
            steps_total=self.steps_total,
        )

    def decide(self, *commands):
        """What the policy decides at this boundary; nothing is carried out."""
        return self.policy.decide(self.moment, list(commands))

    def obey(self, *commands, outcome="done", to_step=None):
        """Decide and record; a rollback that is done moves the job. Returns the refusals' outcomes."""
        decision, refusals = self.decide(*commands)
        if decision is not None:
            goes_back = decision.action == "rollback" and outcome == "done"
            to_step = (
                (to_step if to_step is not None else (decision.before_step - 1) // 100 * 100) if goes_back else None
            )
            self.policy.record(decision, self.moment, outcome, detail="", to_step=to_step)
            self.went.append((decision.action, decision.source, outcome))
            if to_step is not None:
                self.step, self.unrecovered, self.withheld = to_step, 0, 0
        return [refusal.outcome for refusal in refusals]

    def calm(self, steps):
        """Run quiet steps, deciding after each; return what was done meanwhile."""
        before = len(self.went)
        self.unrecovered = 0
        for _ in range(steps):
            self.see()
            self.obey()
        return self.went[before:]

    def alert(self, action="rollback", alert=ALERT, **changes):
        """A command by an alert that was evaluated just now."""
        fields = {
            "id": f"a{self.steps_total}{action}", "run": "gpt-0", "action": action, "source": "alert", "alert": alert,
            "received": self.now, "starts_at": self.now - 1.0, "step": self.step, "steps_total": self.steps_total,
        }  # fmt: skip
        return Command(**{**fields, **changes})

    def operator(self, action):
        """A person's command."""
        return Command(id=f"o{action}", run="gpt-0", action=action, source="operator", received=self.now)

    def spoil(self, steps=SUSTAINED_STEPS):
        """Let the loss jump and stay up for these many steps, without asking the policy."""
        self.see("robust:loss")
        for _ in range(steps - 1):
            self.see()
        return self


def _readings(
    *,
    unrecovered,
    withheld,
    ratio,
    collapsed=False,
    hard=False,
    layer_ratios=None,
    risen=None,
    jumped=None,
    back_in_steps=math.inf,
):
    changed = {name: getattr(QUIET, name) for name in Readings.__struct_fields__}
    changed |= {"layer_ratios": layer_ratios or {}, "rate_rise": risen, "weight_jump": jumped}
    changed |= {"loss_unrecovered_steps": unrecovered, "withheld_steps": withheld, "grad_norm_ema_ratio": ratio}
    changed |= {"amp_scale_collapsed": collapsed, "hard_batches": hard}
    changed["loss_back_in_steps"] = back_in_steps if unrecovered else 0.0
    changed["loss_high_steps"] = dict.fromkeys((1.2, 1.5, 2.0, 3.0), unrecovered)
    return Readings(**changed)


@pytest.fixture
def job():
    """A job in mode auto whose outer loop is up."""
    return Job()


# --- The table ------------------------------------------------------------------------------------------------------


def test_a_quiet_run_is_left_alone(job):
    """Without a sign there is no incident and no action."""
    assert job.calm(100) == []
    assert job.policy.state == PolicyState()


@pytest.mark.parametrize("sign", ["nonfinite:loss", "nonfinite:grad_norm"])
def test_a_step_that_is_not_finite_is_an_incident_and_needs_no_action(job, sign):
    """The shield has withheld the step: the policy records it and does nothing."""
    (incident,) = job.see(sign, withheld="nonfinite")
    assert (incident.class_, incident.first_step) == ("numerical", 1001)
    assert job.decide() == (None, [])
    assert job.calm(HEALED_STEPS) == []
    assert incident.healed


def test_a_surge_was_clipped_and_lowers_the_learning_rate_once(job):
    """A surge is recorded as clipped in its own step; at the boundary the learning rate is lowered, once."""
    job.see("ema_ratio:grad_norm", surge=True, ratio=20.0)
    assert [(r.action, r.outcome, r.source) for r in job.incident.remedies] == [("clip", "done", "local")]
    job.obey()
    job.see("ema_ratio:grad_norm", surge=True, ratio=20.0)
    job.obey()
    job.calm(5)
    assert job.went == [("lower_lr", "local", "done")]
    assert job.incident.class_ == "gradient_explosion"


@pytest.mark.parametrize("sign", ["robust:loss", "robust:grad_norm"])
def test_out_of_the_robust_band_tightens_the_clip_once(job, sign):
    """The first outlier of an incident is answered with the gentlest remedy, the others with none."""
    for _ in range(5):
        job.see(sign)
        job.obey()
    assert job.went == [("clip", "local", "done")]


def test_a_withheld_spike_is_its_own_remedy(job):
    """A batch that was left out is recorded as skipped, once, and needs no clip if the loss comes back."""
    job.see("robust:loss", "robust:grad_norm", withheld="spike")
    job.obey()
    job.see("robust:loss", "robust:grad_norm", withheld="spike")
    job.obey()
    assert [(r.action, r.outcome) for r in job.incident.remedies] == [("skip_batch", "done")]
    assert job.calm(HEALED_STEPS) == [("skip_batch", "local", "done")]  # For good: it comes again in the next epoch.
    assert job.policy.state.incidents[-1].healed


def test_a_spike_that_was_withheld_in_vain_tightens_the_clip(job):
    """When a later step is out of its band too, and was applied, the next remedy has its turn."""
    job.see("robust:loss", "robust:grad_norm", withheld="spike")
    job.obey()
    job.see()
    job.obey()
    assert job.went == []
    job.see("robust:loss")
    job.obey()
    assert job.went == [("clip", "local", "done")]


def test_a_collapsed_loss_scale_lowers_the_rate_by_the_alert_or_else_by_the_job(job):
    """The alert comes first; after its grace the job lowers the rate itself; either way once, and never by a clip."""
    for _ in range(5):
        job.see("drift:amp_loss_scale", collapsed=True)
        job.obey()
    assert job.went == []
    job.obey(job.alert("lower_lr", alert="TrainAmpScaleCollapse"))
    assert job.went == [("lower_lr", "alert", "done")]

    alone = Job(loop_up=False)
    for _ in range(5):
        alone.see("drift:amp_loss_scale", collapsed=True)
        alone.obey()
    assert alone.went == [("lower_lr", "local", "done")]
    assert alone.incident.class_ == "numerical"


@pytest.mark.parametrize(
    ("sign", "alert"), [("drift:loss", "TrainLossDrift"), ("oscillation:loss", "TrainLossOscillating")]
)
def test_a_loss_that_drifts_or_oscillates_lowers_the_rate(job, sign, alert):
    """The alert comes first and is believed while the incident has the sign; a loop that is down waits for nobody."""
    job.see(sign)
    job.obey()
    assert job.went == []
    job.see()
    assert job.obey(job.alert("lower_lr", alert=alert)) == []
    assert job.went == [("lower_lr", "alert", "done")]
    assert job.incident.class_ == "lr_too_high"

    alone = Job(loop_up=False)
    alone.see(sign)
    alone.obey()
    alone.see(sign)
    alone.obey()
    assert alone.went == [("lower_lr", "local", "done")]


def test_a_runaway_loss_scale_has_no_remedy():
    """A scale that only grows is an incident for people: the job does nothing to the weights."""
    alone = Job(loop_up=False)
    for _ in range(50):
        alone.see("drift:amp_loss_scale")
        alone.obey()
    assert alone.went == []
    assert alone.incident.class_ == "numerical"


def test_a_run_that_does_not_clip_is_not_told_to():
    """With `clip_max_norm: null` the clip is no remedy."""
    job = Job(actions=ActionsConfig(clip_max_norm=None))
    job.see("robust:loss")
    assert job.decide() == (None, [])


def test_weights_that_are_not_finite_go_back_at_once(job):
    """Non-finite weights are rolled back at the same boundary, whether the loop is up or not."""
    job.see("nonfinite:loss", withheld="nonfinite", weights_finite=False)
    decision, _ = job.decide()
    assert (decision.action, decision.source, decision.before_step) == ("rollback", "local", 1000)


def test_updates_withheld_in_a_row_lead_back():
    """A run that cannot make an update any more goes back, after exactly as many steps as that undoes."""
    job = Job(loop_up=False)
    for _ in range(99):
        job.see("nonfinite:grad_norm", withheld="nonfinite")
        assert job.decide() == (None, [])
    job.see("nonfinite:grad_norm", withheld="nonfinite")
    decision, _ = job.decide()
    assert (decision.action, decision.before_step, job.moment.target_step) == ("rollback", 1000, 900)


def test_comparison_detectors_open_no_incident(job):
    """A verdict of a detector that does not act changes nothing."""
    assert job.see("rolling_sigma:loss", "ema_ratio:loss") == []
    assert job.incident is None


# --- Who acts (decision 1) ------------------------------------------------------------------------------------------


def test_the_alert_acts_while_the_loop_is_up(job):
    """The command of an alert is obeyed at the next boundary, before the job's own grace is over."""
    job.spoil()
    job.obey(outcome="done")
    assert job.went == [("clip", "local", "done")]
    assert job.obey(job.alert()) == []
    assert job.went[1:] == [("rollback", "alert", "done")]
    remedy = job.policy.state.incidents[0].remedies[-1]
    assert (remedy.alert, remedy.step) == (ALERT, 1200)


def test_the_job_waits_for_the_alert_and_then_acts(job):
    """With the loop up the job's own rollback waits `alert_grace_seconds` from the moment it would have acted."""
    job.spoil()
    job.obey()
    began = job.now
    while job.now - began < GRACE_SECONDS:
        assert ("rollback", "local", "done") not in job.went
        job.see()
        job.obey()
    assert job.went[-1] == ("rollback", "local", "done")
    assert job.policy.state.rollbacks[0].at - began == pytest.approx(GRACE_SECONDS)


def test_the_job_acts_at_once_when_the_loop_is_down(job):
    """With the loop down at 200 unrecovered steps, and not one before, the job goes back without waiting (R23)."""
    job.loop_up = False
    job.spoil(SUSTAINED_STEPS - 1)
    job.obey()
    assert job.went == [("clip", "local", "done")]
    job.see()
    job.obey()
    assert job.went[-1] == ("rollback", "local", "done")


def test_a_loop_that_dies_in_the_grace_ends_the_waiting(job):
    """When the heartbeat stops while the job waits, it acts at the next boundary."""
    job.spoil()
    job.obey()
    job.see()
    job.obey()
    assert len(job.went) == 1
    job.loop_up = False
    job.see()
    job.obey()
    assert job.went[-1] == ("rollback", "local", "done")


def test_a_recovery_in_the_grace_calls_the_rollback_off(job):
    """A loss that comes back while the job waits is not rolled back, and a later wait begins anew."""
    job.spoil()
    job.obey()
    assert job.calm(HEALED_STEPS + 200) == []
    job.spoil()
    assert job.decide()[0].action == "clip"
    began = job.now
    job.see(seconds=GRACE_SECONDS - 1.0)
    assert job.decide()[0].action == "clip"
    job.see(seconds=1.0)
    assert job.now - began == GRACE_SECONDS
    assert job.decide()[0].action == "rollback"


def test_each_wait_is_its_own(job):
    """A reason that goes away and comes back within one incident is waited for anew."""
    for _ in range(2):
        for _ in range(NO_UPDATES_STEPS):
            job.see("nonfinite:loss", withheld="nonfinite", seconds=GRACE_SECONDS / 2)
            assert job.decide() == (None, [])
        job.see(seconds=GRACE_SECONDS)
        assert job.decide() == (None, [])
    assert len(job.policy.state.incidents) == 1


def test_observe_does_nothing_and_says_what_it_would_do():
    """In mode observe commands are answered `observed`, and the job's own wishes too, each once."""
    job = Job("observe")
    job.spoil()
    assert job.obey(job.alert()) == ["observed", "observed"]
    for _ in range(100):
        job.see()
        assert job.obey() == []
    assert job.went == []
    assert [(r.action, r.outcome) for r in job.incident.remedies] == [("rollback", "observed")]


def test_assist_obeys_commands_only():
    """In mode assist the job's own wishes are only said; an alert or a person is obeyed."""
    job = Job("assist", loop_up=False)
    job.spoil()
    assert job.obey() == ["observed"]
    assert job.went == []
    job.obey(job.alert())
    assert job.went == [("rollback", "alert", "done")]


# --- Old news -------------------------------------------------------------------------------------------------------


@pytest.fixture
def healed():
    """A job that went back from step 1200 to 900 and is at step 910; `at` is its clock at the rollback."""
    job = Job(loop_up=False)
    job.spoil()
    job.obey()
    job.went.clear()
    assert job.step == 900
    job.at = job.now
    job.calm(10)
    job.loop_up = True
    return job


def test_an_alert_of_before_the_rollback_is_a_duplicate_by_its_steps(healed):
    """An alert evaluated up to the rollback's own step is about what it has handled (case W14), whenever it fires."""
    for steps_total in (1100, 1200):
        command = healed.alert(alert="Other", steps_total=steps_total, step=steps_total, starts_at=healed.now)
        assert healed.obey(command) == ["duplicate"]
    assert healed.went == []
    healed.obey(healed.alert("lower_lr", alert="Other", steps_total=1201, step=901))
    assert healed.went == [("lower_lr", "alert", "done")]


def test_an_alert_about_undone_steps_is_a_duplicate_by_its_step(healed):
    """Without `steps_total`, a step that the run has gone back from is of the branch that was left."""
    for step in (healed.step + 1, 1200):
        assert healed.obey(healed.alert(alert="Other", steps_total=None, step=step)) == ["duplicate"]
    assert healed.went == []


def test_an_alert_without_steps_is_a_duplicate_by_its_beginning(healed):
    """Without any step, an alert that began to fire before the rollback is about what it has handled."""
    for starts_at in (healed.at, healed.at - 500.0):
        command = healed.alert(alert="Other", steps_total=None, step=None, starts_at=starts_at)
        assert healed.obey(command) == ["duplicate"]
    assert healed.went == []


@pytest.mark.parametrize("changes", [{"steps_total": 99_999}, {"steps_total": None, "step": 99_999}])
def test_an_alert_of_another_future_is_stale(healed, job, changes):
    """An alert that speaks of steps which this job has not run is not obeyed."""
    for one in (healed, job):
        assert one.obey(one.alert(alert="Other", **changes)) == ["stale"]
        assert one.went == []


@pytest.mark.parametrize(
    "alert",
    [
        "TrainLossNotRecovering",
        "TrainLossSpikeSustained",
        "TrainNoUpdates",
        "TrainWeightsNonFinite",
        "TrainAmpScaleCollapse",
        "TrainLossDrift",
        "TrainLossOscillating",
    ],
)
def test_an_alert_that_is_no_longer_so_is_stale(job, alert):
    """What the job itself measures is held against its present reading."""
    job.calm(1)
    assert job.obey(job.alert(alert=alert)) == ["stale"]
    assert job.went == []


def test_an_alert_is_believed_while_it_is_still_so(job):
    """Each alert about the job's own readings is obeyed while they say the same."""
    job.spoil(5)
    for alert in ("TrainLossNotRecovering", "TrainLossSpikeSustained"):
        assert job.decide(job.alert(alert=alert))[0].source == "alert"
    job.see("nonfinite:loss", withheld="nonfinite", weights_finite=False)
    for alert in ("TrainNoUpdates", "TrainWeightsNonFinite"):
        assert job.decide(job.alert(alert=alert))[0].source == "alert"


def test_an_alert_of_the_users_own_opens_an_incident(job):
    """A rule about what only Prometheus sees is obeyed as it is; its incident begins where the alert was evaluated."""
    job.calm(5)
    job.obey(job.alert("lower_lr", alert="TokensFall", step=1003))
    assert job.went == [("lower_lr", "alert", "done")]
    assert job.incident.first_step == 1003
    assert job.incident.evidence == ["step 1005: TokensFall asked for lower_lr"]


def test_the_job_and_the_alert_heal_one_incident_once(job):
    """A rollback by the job and the alert for the same spike 30 s later are one action (case W14)."""
    job.loop_up = False
    job.spoil()
    command = job.alert()
    job.obey()
    job.loop_up = True
    for _ in range(60):
        job.see()
        job.obey()
    assert job.obey(command) == ["duplicate"]
    assert [went[0] for went in job.went] == ["rollback"]
    assert len(job.policy.state.incidents) == 1


# --- How often ------------------------------------------------------------------------------------------------------


def test_an_alert_within_the_cooldown_is_refused(job):
    """The same remedy is not repeated before the last one has had its steps, and is afterwards (case W09)."""
    job.obey(job.alert("lower_lr", alert="Mine"))
    job.calm(COOLDOWN_STEPS - 1)
    assert job.obey(job.alert("lower_lr", alert="Mine")) == ["refused_cooldown"]
    job.calm(1)
    assert job.obey(job.alert("lower_lr", alert="Mine")) == []
    assert job.went == [("lower_lr", "alert", "done")] * 2


def test_a_remedy_that_failed_uses_up_no_cooldown(job):
    """Only what was done cools down: after a failure the next alert is obeyed (case W11)."""
    job.obey(job.alert("lower_lr", alert="Mine"), outcome="failed")
    job.see()
    assert job.obey(job.alert("lower_lr", alert="Mine")) == []
    assert job.went == [("lower_lr", "alert", "failed"), ("lower_lr", "alert", "done")]


def test_a_person_does_not_cool_down(job):
    """An operator is obeyed within the cooldown and without an incident, but not in mode observe."""
    job.obey(job.operator("lower_lr"))
    job.see()
    job.obey(job.operator("lower_lr"))
    assert job.went == [("lower_lr", "operator", "done")] * 2
    assert Job("observe").obey(job.operator("rollback")) == ["observed"]


def test_a_rollback_has_its_time_before_the_next(job):
    """A loss that is up again right after a rollback leads to the next one only when that had its cooldown."""
    job.loop_up = False
    job.spoil()
    job.obey()
    first = job.steps_total
    job.see("robust:loss")
    while len(job.went) < 2:
        assert job.steps_total - first <= COOLDOWN_STEPS
        job.see("robust:loss")
        job.obey()
    assert [went[0] for went in job.went] == ["rollback", "rollback"]
    assert job.steps_total - first == COOLDOWN_STEPS


def test_the_same_place_again_goes_further_back_with_a_wider_window(job):
    """A second rollback from the same place takes an older target and doubles the suspect window (R11)."""
    job.loop_up = False
    job.spoil()
    first, _ = job.decide()
    assert (first.before_step, first.widen) == (1000, 1)
    job.obey(to_step=900)
    for _ in range(COOLDOWN_STEPS):
        job.see("robust:loss")
    second, _ = job.decide()
    assert (second.action, second.before_step, second.widen) == ("rollback", 900, 2)


def test_another_place_begins_anew():
    """A rollback beyond the step where the last one began takes the nearest target and the plain window."""
    job = Job(loop_up=False)
    job.spoil()
    job.obey()
    job.calm(2000)
    job.spoil()
    decision, _ = job.decide()
    assert decision.incident.id == 2
    assert (decision.before_step, decision.widen) == (decision.incident.first_step - 1, 1)


def test_the_budget_of_a_day_is_kept(job):
    """More rollbacks than `rollbacks_per_day` are refused, whoever asks; a day later they are not."""
    job.loop_up = False
    for _ in range(3):
        job.calm(2000)
        job.spoil()
        job.obey()
    assert [went[0] for went in job.went] == ["rollback"] * 3
    job.calm(2000)
    job.spoil()
    assert job.obey(job.alert()) == ["refused_budget", "refused_budget"]
    assert job.obey(job.operator("rollback")) == ["refused_budget"]  # The job's own wish is not said twice.
    assert len(job.went) == 3
    job.now += DAY_SECONDS
    assert job.decide(job.operator("rollback"))[0].action == "rollback"


def test_a_spent_budget_is_kept_until_something_has_helped(job):
    """Where a remedy was refused for want of budget is remembered; healing, a rollback or a new start ends it."""

    def spend():
        job.see("robust:loss")
        job.obey(job.operator("rollback"))
        return job.policy.state.budget_spent_step

    job.policy.state.rollbacks = [rollback(job, to_step=to_step) for to_step in (100, 200, 300)]
    assert spend() == job.step
    job.calm(HEALED_STEPS + 1)
    assert (job.incident, job.policy.state.budget_spent_step) == (None, None)
    assert spend() == job.step
    job.now += DAY_SECONDS
    assert spend() is None
    assert job.went[-1] == ("rollback", "operator", "done")
    job.policy.state.rollbacks = [rollback(job, to_step=to_step) for to_step in (100, 200, 300)]
    assert spend() == job.step
    kept = msgspec.json.decode(msgspec.json.encode(job.policy.state), type=PolicyState)
    assert kept.budget_spent_step == job.step
    job.policy.restarted(job.steps_total, anew=False)
    assert job.policy.state.budget_spent_step is None


def test_a_refusal_in_quiet_times_is_no_spent_budget(job):
    """Whoever asks for a rollback that nothing calls for, and is refused, has only that answer."""
    job.policy.state.rollbacks = [rollback(job, to_step=to_step) for to_step in (100, 200, 300)]
    assert job.obey(job.operator("rollback")) == ["refused_budget"]
    assert job.policy.state.budget_spent_step is None


def rollback(job, *, to_step):
    """A rollback done an hour ago."""
    return Rollback(
        at=job.now - 3600.0, at_step=to_step + 50, at_steps_total=to_step + 50, to_step=to_step, nearest_step=to_step,
        incident=0,
    )  # fmt: skip


def test_the_budget_of_a_place_is_kept(job):
    """More rollbacks than `same_target` to one place are refused, once in words and never again by itself."""
    job.loop_up = False
    said = []
    for _ in range(3 * SUSTAINED_STEPS + COOLDOWN_STEPS - 1):  # One step later the run is stopped.
        job.see("robust:loss")
        said += job.obey(to_step=900)
    assert [went[0] for went in job.went] == ["clip", "rollback", "rollback"]
    assert said == ["refused_budget"]
    assert "same_target (2)" in job.incident.remedies[-1].detail


def test_places_that_are_not_known_are_not_one_place():
    """While no target is whole in both tiers (-1), an earlier incident's rollback is none in vain for a new one."""
    unknown = [Rollback(at=0.0, at_step=50, at_steps_total=50, to_step=40, nearest_step=-1, incident=1)]
    assert in_vain(unknown, 2, -1, 10.0) == []
    assert in_vain(unknown, 1, -1, 10.0) == unknown


def test_no_budget_at_all():
    """With `rollbacks_per_day: 0` nothing goes back, not even weights that are not finite."""
    job = Job(budget=BudgetConfig(rollbacks_per_day=0))
    job.see("nonfinite:loss", weights_finite=False)
    assert job.obey() == ["refused_budget"]
    assert job.obey() == []


@pytest.mark.parametrize(("outcome", "tries"), [("failed", 1), ("no_target", 1)])
def test_what_cannot_be_done_is_not_tried_for_ever(job, outcome, tries):
    """A rollback without a target is tried once an incident, one that fails not in every step."""
    job.loop_up = False
    job.spoil()
    for _ in range(50):
        job.obey(outcome=outcome)
        job.see()
    assert [went for went in job.went if went[0] == "rollback"] == [("rollback", "local", outcome)] * tries
    assert job.policy.state.rollbacks == []


def test_a_rollback_that_failed_is_tried_again_after_its_time(job):
    """A disk that was out of order may be back: the wish is not given up, but neither does it come in every step."""
    job.loop_up = False
    job.spoil()
    for _ in range(2 * COOLDOWN_STEPS + 1):
        job.obey(outcome="failed")
        job.see("robust:loss")
    assert [went for went in job.went if went[0] == "rollback"] == [("rollback", "local", "failed")] * 3


def test_an_alert_of_an_earlier_incident_is_stale(job):
    """A late command whose alert was evaluated before the open incident began takes nothing back."""
    late = job.alert()
    job.spoil(1)
    assert job.obey(late) == ["stale"]
    assert job.went == [("clip", "local", "done")]
    only_step = job.alert(steps_total=None, step=late.step)
    assert job.obey(only_step) == ["stale"]


def test_an_alert_waits_for_the_first_reading(job):
    """Before the job has read anything a command of an alert can't be judged: it is neither obeyed nor refused."""
    job.policy.restarted(job.steps_total - 1, anew=False)
    command = job.alert()
    assert job.decide(command) == (None, [])
    job.see()
    assert job.obey(command) == ["stale"]


def test_what_was_before_a_restart_is_over(job):
    """An alert about steps that a restart has undone is a duplicate; anew, old rollbacks do not count."""
    job.see()
    command = job.alert(alert="MyOwnRule")
    job.policy.restarted(job.steps_total, anew=False)
    job.see()
    assert job.obey(command) == ["duplicate"]
    job.loop_up = False
    job.spoil()
    job.obey()
    assert job.policy.state.rollbacks
    job.policy.restarted(job.steps_total, anew=True)
    assert (job.policy.state.rollbacks, job.incident) == ([], None)


def test_withheld_batches_do_not_keep_an_incident_open(job):
    """One NaN batch in fifteen, each withheld, over a calm loss: the incident heals, and the run can be proven."""
    for _ in range(3):
        job.see("nonfinite:loss", withheld="nonfinite")
        for _ in range(14):
            job.see()
    assert job.policy.state.incidents[0].healed


def test_one_norm_in_the_tail_is_no_incident(job):
    """A single outlier of the gradient norm opens nothing; a second one within ten steps does."""
    job.see("robust:grad_norm")
    assert job.incident is None
    for _ in range(20):
        job.see()
    job.see("robust:grad_norm")
    assert job.incident is None
    job.see("robust:grad_norm")
    assert job.incident.evidence


def test_a_rollback_is_not_repeated_on_what_was_read_before_it(job):
    """Where values arrive a step late, a boundary right after a rollback has none, and asks for nothing."""
    job.see("nonfinite:loss", withheld="nonfinite", weights_finite=False)
    job.obey()
    job.step += 1
    job.steps_total += 1
    assert job.decide() == (None, [])
    job.see()
    assert job.decide() == (None, [])
    assert job.went == [("rollback", "local", "done")]


def test_one_command_is_obeyed_at_a_boundary_and_the_others_wait(job):
    """Of several commands the oldest that may be obeyed is; those behind it are neither obeyed nor refused."""
    job.spoil(5)
    old = job.alert("lower_lr", alert="Old", steps_total=99_999)
    first, second, third = (job.alert(action, alert="Mine") for action in ("clip", "lower_lr", "rollback"))
    decision, refusals = job.decide(old, first, second, third)
    assert decision.command == first
    assert [refusal.command for refusal in refusals] == [old]
    job.obey(first)
    decision, refusals = job.decide(second, third)
    assert (decision.command, refusals) == (second, [])


def test_a_note_is_no_remedy(job):
    """A note from an alert about the machine is written down, and takes the place of no remedy."""
    job.obey(job.alert("note", alert="TrainStepTimeJitter"))
    job.see("robust:loss")
    job.obey()
    assert job.went == [("note", "alert", "done"), ("clip", "local", "done")]
    assert len(job.policy.state.incidents) == 1


# --- Incidents ------------------------------------------------------------------------------------------------------


def test_healing_is_measured(job):
    """An incident is healed after enough good steps in a row, and not because something was done."""
    (incident,) = job.see("robust:loss")
    job.calm(HEALED_STEPS - 1)
    job.see("robust:loss")
    job.calm(HEALED_STEPS - 1)
    assert not incident.healed
    assert job.see() == [incident]
    assert (incident.healed, incident.healed_step) == (True, job.step)
    assert job.incident is None


def test_an_unrecovered_loss_and_a_withheld_step_are_not_good(job):
    """Steps without a verdict do not heal while the loss is up; a withheld one does not count, an overflow does."""
    (incident,) = job.see("robust:loss")
    for _ in range(2 * HEALED_STEPS):
        job.see()
    assert incident.good_steps == 0
    job.unrecovered = 0
    for _ in range(HEALED_STEPS - 1):
        job.see()
    job.see(withheld="spike")
    assert incident.good_steps == HEALED_STEPS - 1
    job.see(withheld="amp_overflow")
    assert incident.healed


def test_steps_repeated_up_to_the_first_bad_one_heal_nothing(job):
    """After a rollback only steps beyond the first bad one show whether it helped."""
    job.loop_up = False
    job.spoil()
    incident = job.incident
    job.obey(to_step=900)
    job.calm(101)
    assert (job.step, incident.first_step, incident.good_steps) == (1001, 1001, 0)
    job.calm(HEALED_STEPS)
    assert incident.healed
    assert incident.healed_step == 1001 + HEALED_STEPS


def test_a10_what_comes_back_before_healing_is_the_same_incident(job):
    """Bad steps in a row, with good ones between them, are one incident and one remedy (case A10)."""
    for _ in range(3):
        job.see("robust:loss")
        job.obey()
        job.calm(5)
    assert len(job.policy.state.incidents) == 1
    assert job.went == [("clip", "local", "done")]
    job.calm(HEALED_STEPS)
    (second,) = job.see("robust:loss")
    assert second.id == 2


def test_an_incident_opens_at_the_earliest_onset(job):
    """An incident begins where the earliest of its verdicts says that its deviation began."""
    job.see()
    verdicts = [
        Verdict(detector="robust", signal=signal, step=1002, value=9.0, baseline=2.0, first_step=first)
        for signal, first in (("loss", 1000), ("grad_norm", 998))
    ]
    readings = _readings(unrecovered=3, withheld=0, ratio=1.0)
    (incident,) = job.policy.observe(
        signals(1002, 9.0), readings, verdicts, weights_finite=True, steps_total=1002
    )  # fmt: skip
    assert (incident.first_step, incident.detected_step, incident.before_step) == (998, 1002, 997)


def test_hard_batches_keep_no_incident_open_and_open_none(job):
    """Every tenth batch of a kind that is known to be hard is no sign; a loss that stays away still is."""
    job.see("robust:loss")
    assert job.incident is not None
    for step in range(HEALED_STEPS + 1):
        if step % 10 == 0:
            job.unrecovered = 0
        job.see(*(["robust:loss"] if step % 10 == 0 else []), hard=True)
    assert job.incident is None
    job.unrecovered = 0
    job.see("robust:loss", hard=True)
    assert job.incident is None
    job.see("robust:loss", hard=False)
    assert job.incident is not None


def test_a_lower_rate_that_has_to_be_repeated_comes_ever_more_rarely(job):
    """Each cut of the rate that did not keep for twice its time doubles the time until the next."""
    job.loop_up = False
    cuts = []
    for _ in range(4000):
        job.see("oscillation:loss")
        job.unrecovered = 0
        if job.incident.tried("lower_lr"):
            job.incident.healed = True
            continue
        before = len(job.went)
        job.obey()
        cuts += [job.steps_total] * (len(job.went) - before)
    waits = [after - before for before, after in pairwise(cuts)]
    assert [round(wait / COOLDOWN_STEPS) for wait in waits] == [1, 2, 4, 8]


def test_old_incidents_are_let_go(job):
    """Only the newest incidents are kept, with numbers that never come twice."""
    for _ in range(120):
        job.see("ema_ratio:grad_norm")
        job.calm(HEALED_STEPS)
    ids = [incident.id for incident in job.policy.state.incidents]
    assert ids == list(range(ids[0], 121))
    assert len(ids) <= 51


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_the_state_goes_on_the_same_after_json():
    """A policy that takes over the state of another, through JSON, decides what the first one decides."""
    first = Job(loop_up=False)
    first.spoil()
    first.obey(to_step=900)
    first.calm(50)
    second = Job(loop_up=False, state=msgspec.json.decode(msgspec.json.encode(first.policy.state), type=PolicyState))
    assert second.policy.state == first.policy.state
    second.step, second.steps_total, second.now = first.step, first.steps_total, first.now
    for job in (first, second):
        assert job.obey(job.alert(alert="Mine", steps_total=1100)) == ["duplicate"]
        assert job.obey(job.alert(alert="Mine")) == ["refused_cooldown"]
        job.spoil(SUSTAINED_STEPS)
    ours, theirs = (job.decide()[0] for job in (first, second))
    assert ours == theirs
    assert (ours.action, ours.before_step, ours.widen) == ("rollback", 900, 2)


def test_nan_never_breaks_the_record(job):
    """Verdicts and ratios that are not finite leave a state that is valid JSON and is read back the same."""
    job.see("nonfinite:loss", "nonfinite:grad_norm", "robust:loss", surge=True, ratio=math.nan)
    job.obey()
    job.see("nonfinite:loss", ratio=math.inf)
    text = msgspec.json.encode(job.policy.state)
    json.loads(text, parse_constant=pytest.fail)
    assert msgspec.json.decode(text, type=PolicyState) == job.policy.state


# --- Partial rollback ------------------------------------------------------------------------------------------------


@pytest.fixture
def surging():
    """A function that makes a job whose loss jumped in an explosion of one layer in ten, and stays up."""

    def surging(**options) -> Job:
        job = Job(actions=ActionsConfig(partial_rollback=options.pop("on", True)), **options)
        job.ratios = dict.fromkeys("abcdefghij", 1.0) | {"c": 15.0}
        job.see("robust:grad_norm", "ema_ratio:grad_norm", "robust:loss", surge=True)
        job.obey()
        for _ in range(SUSTAINED_STEPS - 1):
            job.see()
        return job

    return surging


def test_an_explosion_in_few_layers_first_takes_these_back(surging):
    """The job takes back the layers that surged; what they don't heal goes back whole, after the cooldown."""
    job = surging(loop_up=False)
    decision, _ = job.decide()
    assert (decision.action, decision.layers, decision.before_step) == ("partial_rollback", ("c",), 1000)
    job.obey()
    step = job.step
    for _ in range(COOLDOWN_STEPS):
        job.see()
        job.obey()
    assert [went[0] for went in job.went] == ["lower_lr", "partial_rollback", "rollback"]
    assert job.policy.state.rollbacks[0].at_step == step + COOLDOWN_STEPS
    assert job.policy.state.rollbacks[0].to_step == 900


def test_what_heals_after_a_partial_rollback_goes_back_no_further(surging):
    """A loss that comes back ends the incident; no step has been lost."""
    job = surging(loop_up=False)
    job.obey()
    assert job.calm(HEALED_STEPS) == []
    assert job.policy.state.incidents[-1].healed
    assert job.policy.state.rollbacks == []


def test_the_alerts_rollback_is_a_partial_one_first(surging):
    """With the loop up the alert asks; its command is obeyed by the gentler remedy, and the next one is too early."""
    job = surging()
    command = job.alert()
    decision, _ = job.decide(command)
    assert (decision.action, decision.command) == ("partial_rollback", command)
    job.obey(command)
    job.see()
    assert job.obey(job.alert()) == ["refused_cooldown"]
    for _ in range(COOLDOWN_STEPS):
        job.see()
    assert job.decide(job.alert())[0].action == "rollback"


def test_without_the_option_all_goes_back(surging):
    """`partial_rollback` is off by default: the same explosion leads to a whole rollback."""
    assert not ActionsConfig().partial_rollback
    assert surging(loop_up=False, on=False).decide()[0].action == "rollback"


def test_a_person_may_always_ask_for_it(surging):
    """By command it is done in any incident, and in none: with the layers that stand out most, or those named."""
    job = surging(on=False)
    decision, _ = job.decide(job.operator("partial_rollback"))
    assert (decision.action, decision.layers) == ("partial_rollback", ("c",))
    calm = Job()
    calm.ratios = {"a": 1.1, "b": 1.4, "c": 1.2, "d": 1.0}
    calm.see()
    assert calm.decide(calm.operator("partial_rollback"))[0].layers == ("b", "c", "a")
    named = msgspec.structs.replace(calm.operator("partial_rollback"), layers=("d", "h"))
    assert calm.decide(named)[0].layers == ("d", "h")


def test_a_partial_rollback_needs_what_a_rollback_would_need_of_the_budget(surging):
    """Where no rollback is left, nothing goes back in part either; one that is done spends none."""
    job = surging(loop_up=False, budget=BudgetConfig(rollbacks_per_day=0))
    assert job.obey() == ["refused_budget"]
    job = surging(loop_up=False)
    job.obey()
    assert job.policy.state.rollbacks == []


def test_observe_says_that_it_would_be_a_partial_one(surging):
    """In mode observe the wish is told once, and not followed by one for the whole."""
    job = surging(mode="observe")
    assert job.obey() == ["observed"]
    job.see()
    assert job.obey() == []
    assert [remedy.action for remedy in job.incident.remedies if remedy.outcome == "observed"][-1] == "partial_rollback"


def test_with_the_real_monitor_a_sustained_jump_is_one_incident_and_one_rollback():
    """From losses to the decision: a jump that stays leads back once, before its first step, and then heals."""
    job = Job(loop_up=False)
    monitor = Monitor(DetectionConfig(warmup_steps=50))
    job.step = job.steps_total = 0
    stored, bad = None, range(101, 400)
    while job.step < 450:
        job.step += 1
        job.steps_total += 1
        loss = 3.0 if job.step in bad else 2.0 + 0.02 * (job.step % 3)
        seen = signals(job.step, loss, grad_norm=1.0 + 0.02 * (job.step % 5))
        readings, verdicts = monitor.update(seen)
        job.policy.observe(seen, readings, verdicts, weights_finite=True, steps_total=job.steps_total)
        before = len(job.went)
        job.obey(to_step=90)
        if job.step == 90 and stored is None:
            stored = monitor.state_dict()
        if job.went[before:] == [("rollback", "local", "done")]:
            monitor.load_state_dict(stored)
            assert job.steps_total == 300
            bad = range(0)
    assert job.went == [("clip", "local", "done"), ("rollback", "local", "done")]
    (incident,) = job.policy.state.incidents
    assert (incident.first_step, incident.healed, incident.healed_step) == (101, True, 101 + HEALED_STEPS)

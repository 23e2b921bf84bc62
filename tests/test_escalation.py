"""Up the ladder: each rung has its time, a spent budget ends in a stop, and a table says it all."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from test_policy import COOLDOWN_STEPS, DAY_SECONDS, SUSTAINED_STEPS, Job

from trainer_plugin.detection.weight_jumps import WeightJump
from trainer_plugin.policy.alerts import ASKED_SECONDS
from trainer_plugin.policy.attribution import LASTING_STEPS
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.decisions import ActionsConfig
from trainer_plugin.policy.escalation import NO_UPDATES_STEPS, SETTLE_PART, withheld_too_long
from trainer_plugin.policy.state import PolicyState
from trainer_plugin.policy.table import TABLE, markdown

SETTLE_STEPS = int(SETTLE_PART * SUSTAINED_STEPS)
README = (Path(__file__).parents[1] / "README.md").read_text()


def suffer(job, steps, *, to_step=900, outcome="done", **sign):
    """Run steps that all show the same sign and obey at each; return every refusal with its step."""
    said = []
    for _ in range(steps):
        job.see(*sign.get("found", ("robust:loss",)), withheld=sign.get("withheld"))
        at = job.steps_total
        said += [(refusal, at) for refusal in job.obey(to_step=to_step, outcome=outcome)]
    return said


def test_the_readme_shows_the_table():
    """What is decided, line for line as it is kept beside the policy; and no line is there twice."""
    assert markdown() in README
    assert len({row.sign for row in TABLE}) == len(TABLE)


def test_a_lower_rate_has_its_time_before_the_run_goes_back():
    """A rate lowered late in an incident has so many steps to help: the alert is told so, the job goes back then."""
    job = Job()
    job.spoil(SUSTAINED_STEPS - 10)
    job.policy.state.incidents[-1].remedies.clear()
    job.see("drift:loss")
    assert job.obey(job.alert("lower_lr", "TrainLossDrift")) == []
    lowered = job.steps_total
    said = []
    for _ in range(SETTLE_STEPS - 1):
        job.see()
        said += job.obey(job.alert()) if job.unrecovered == SUSTAINED_STEPS else job.obey()
    assert (job.went, said) == ([("lower_lr", "alert", "done")], ["refused_cooldown"])
    job.loop_up = False
    job.see()
    job.obey()
    assert job.went[1:] == [("rollback", "local", "done")]
    assert job.policy.state.rollbacks[-1].at_steps_total == lowered + SETTLE_STEPS


def test_r23_the_job_takes_over_and_hands_back_and_never_both_act():
    """While the loop is silent the job goes back by itself; its alert, late, is a duplicate; then alerts are first."""
    job = Job(loop_up=False)
    job.spoil()
    late = job.alert()
    job.obey()
    job.loop_up = True
    job.see()
    assert job.obey(late) == ["duplicate"]
    job.calm(1000)
    assert [went[:2] for went in job.went] == [("rollback", "local")]
    job.spoil()
    assert job.obey() == []
    assert job.obey(job.alert()) == []
    job.see()
    assert job.obey() == []
    assert [went[:2] for went in job.went] == [("rollback", "local"), ("clip", "local"), ("rollback", "alert")]


def test_a_lower_rate_that_helps_costs_no_rollback():
    """A loss that comes back meanwhile is not rolled back."""
    job = Job(loop_up=False)
    job.spoil(SUSTAINED_STEPS - 10)
    job.see("drift:loss")
    job.obey()
    for _ in range(20):
        job.see()
        job.obey()
    job.calm(500)
    assert [went[0] for went in job.went] == ["lower_lr"]
    assert job.incident is None


def test_a_loop_of_nan_ends_in_a_stop():
    """NaN, rollback, NaN: after two rollbacks to one place a third is refused, and 200 steps later it stops."""
    job = Job(loop_up=False)
    said = suffer(job, 1500, found=("nonfinite:loss",), withheld="nonfinite")
    assert [went[0] for went in job.went] == ["rollback", "rollback", "stop"]
    ((outcome, at),) = said
    assert outcome == "refused_budget"
    stop = job.incident.tried("stop")[0]
    assert stop.steps_total == at + COOLDOWN_STEPS
    assert job.incident.healed is False


def test_a_rollback_is_never_repeated_as_it_was():
    """The second one to a place goes further back, and leaves out twice the data."""
    job = Job(loop_up=False)
    decisions = []
    for _ in range(1500):
        job.see("nonfinite:loss", withheld="nonfinite")
        decision, _ = job.decide()
        if decision is not None and decision.action == "rollback":
            decisions.append((decision.before_step, decision.widen))
        job.obey()
    assert len(decisions) == len(set(decisions)) == 2


def test_a_loss_that_stays_up_after_the_budget_ends_in_a_stop():
    """The run has its time without a rollback; only if the loss is no better then is it stopped."""
    job = Job(loop_up=False)
    suffer(job, 2000)
    assert [went[0] for went in job.went] == ["clip", "rollback", "rollback", "stop"]
    better = Job(loop_up=False)
    while not suffer(better, 1):
        pass
    better.calm(1000)
    assert [went[0] for went in better.went] == ["clip", "rollback", "rollback"]


@pytest.mark.parametrize(("withheld", "last"), [("nonfinite", "stop"), (None, "rollback")])
def test_a09_without_a_target_it_stops_only_if_nothing_is_trained(withheld, last):
    """Before the first checkpoint NaN in every step is skipped for a while and then stopped; a high loss goes on."""
    job = Job(loop_up=False)
    suffer(job, 1000, found=("nonfinite:loss" if withheld else "robust:loss",), withheld=withheld, outcome="no_target")
    assert job.went[-1][0] == last
    assert [went for went in job.went if went[0] == "rollback"] == [("rollback", "local", "no_target")]


def test_w11_what_fails_three_times_ends_in_a_stop():
    """A rollback that fails is tried again after each cool-down; after the third time the run is stopped.

    Three failures of alerts' commands, in a row, are only three failures.
    """
    job = Job(loop_up=False)
    suffer(job, SUSTAINED_STEPS + 2 * COOLDOWN_STEPS + 1, outcome="failed")
    tries = [remedy.steps_total for remedy in job.incident.tried("rollback")]
    assert [after - before for before, after in pairwise(tries)] == [COOLDOWN_STEPS] * 2
    assert [went[0] for went in job.went] == ["clip", *["rollback"] * 3, "stop"]
    asked = Job(mode="auto")
    asked.spoil()
    for number in range(3):
        asked.see()
        asked.obey(asked.alert(id=f"a{number}"), outcome="failed")
    assert [went[:2] for went in asked.went] == [("rollback", "alert")] * 3


@pytest.mark.parametrize("mode", ["observe", "assist"])
def test_only_in_auto_is_a_run_stopped(mode):
    """In the other modes the wish is said as any other, and the run goes on."""
    job = Job(mode)
    suffer(job, 2000, found=("nonfinite:loss",), withheld="nonfinite")
    assert job.went == []


def test_last_resort_go_on_leaves_it_to_people():
    """The refusal is said, the run goes on; weights that are not finite are stopped all the same."""
    job = Job(loop_up=False, actions=ActionsConfig(last_resort="go_on"))
    said = suffer(job, 2000)
    assert [went[0] for went in job.went] == ["clip", "rollback", "rollback"]
    assert [outcome for outcome, _ in said] == ["refused_budget"]
    job.see("nonfinite:loss", weights_finite=False)
    job.obey()
    assert job.went[-1][0] == "stop"


def test_a_budget_that_is_there_again_is_used():
    """A day later the same incident may go back again."""
    job = Job(loop_up=False, actions=ActionsConfig(last_resort="go_on"))
    suffer(job, 1000)
    assert [went[0] for went in job.went] == ["clip", "rollback", "rollback"]
    job.now += DAY_SECONDS
    job.see()
    job.obey()
    assert job.went[-1] == ("rollback", "local", "done")


def test_a_stop_is_said_once_and_its_time_begins_anew_after_a_start():
    """A loop that goes on all the same is told once; after a start the refusal is said anew, then it stops.

    State goes through JSON, as it does at a restart.
    """
    job = Job(loop_up=False)
    suffer(job, 2000)
    assert [went[0] for went in job.went].count("stop") == 1
    state = msgspec.json.decode(msgspec.json.encode(job.policy.state), type=PolicyState)
    again = Job(loop_up=False, state=state)
    again.step, again.steps_total, again.now = 950, job.steps_total, job.now
    again.policy.restarted(again.steps_total, anew=False)
    said = suffer(again, SUSTAINED_STEPS)
    assert ([went[0] for went in again.went], [outcome for outcome, _ in said]) == ([], ["refused_budget"])
    suffer(again, COOLDOWN_STEPS - 1)
    assert again.went == []
    suffer(again, 1)
    assert [went[0] for went in again.went] == ["stop"]


def test_a_surge_lowers_the_rate_briefly():
    """It was clipped in its own step; where the rate had jumped before it, a lower one lasts, and where asked for."""
    job = Job()
    job.see("ema_ratio:grad_norm", surge=True)
    decision = job.decide()[0]
    assert (decision.action, decision.brief) == ("lower_lr", True)
    asked = job.decide(job.operator("lower_lr"))[0]
    assert (asked.source, asked.brief) == ("operator", False)
    job = Job()
    job.risen = (999, 4.0)
    job.see("robust:loss", "ema_ratio:grad_norm", surge=True)
    decision = job.decide()[0]
    assert (decision.action, decision.brief) == ("lower_lr", False)


def test_a_first_rollback_lowers_the_rate_briefly_and_a_second_to_the_same_place_does_not():
    """Nor does one of a loss that had climbed: there the rate is suspect."""
    job = Job()
    job.spoil(5)
    for brief in (True, False):
        decision = job.decide(job.operator("rollback"))[0]
        assert (decision.action, decision.brief) == ("rollback", brief)
        job.obey(job.operator("rollback"), to_step=900)
        job.spoil(5)
    job = Job()
    job.see("drift:loss")
    climbed = job.decide(job.operator("rollback"))[0]
    assert (climbed.incident.class_, climbed.brief) == ("lr_too_high", False)


@pytest.mark.parametrize(
    ("step", "target_step", "due"), [(960, 900, 60), (1400, 900, 200), (903, 900, 10), (960, -1, 10)]
)
def test_waiting_for_an_update_costs_no_more_than_going_back(step, target_step, due):
    """After this step updates are withheld: it goes back at as many as it undoes, 10 at least and 200 at most."""
    assert [withheld_too_long(n, 200, step=step + n, target_step=target_step) for n in (due - 1, due)] == [False, True]


def damaged(step=1030, *, before=None, **changes):
    """A job whose weights jumped in step `step` and whose loss is away from the next one on; it obeys for 220 steps.

    `before` may change it before each of them.
    """
    job = Job(**{"loop_up": False, **changes})
    job.step = job.steps_total = step
    job.jumped = WeightJump(step - 20, step + 5, "blocks.1", 1.4)
    for _ in range(220):
        if before is not None:
            before(job)
        job.see(*["robust:loss"] * (job.unrecovered == 0))
        job.obey()
        if job.went and job.went[-1][0] == "rollback":
            break
    return job


@pytest.mark.parametrize(("step", "waited"), [(1030, 30), (1099, 99), (1005, LASTING_STEPS)])
def test_damage_is_undone_once_that_costs_no_more_than_it_has_cost(step, waited):
    """Weights jumped and the loss stays away: as long as going back would undo, 20 steps at least."""
    job = damaged(step)
    assert job.went == [("clip", "local", "done"), ("rollback", "local", "done")]
    assert job.policy.state.rollbacks[0].at_steps_total == step + waited
    assert "blocks.1 is 1.4 times what it was after step" in " ".join(job.policy.state.incidents[-1].evidence)


def test_a_rate_that_threw_the_weights_is_lowered_first():
    """A remedy has its time before the next: the run goes back when the lower rate has had so many steps."""
    job = Job(loop_up=False)
    job.step = job.steps_total = 1030
    job.risen, job.jumped = (1030, 30.0), WeightJump(1000, 1035, "wte", 30.0)
    for _ in range(2 * SETTLE_STEPS):
        job.see(*["robust:loss"] * (job.unrecovered == 0))
        job.obey()
    assert job.went == [("lower_lr", "local", "done"), ("rollback", "local", "done")]
    assert job.policy.state.rollbacks[0].at_steps_total == 1031 + SETTLE_STEPS


def test_a_loss_on_its_way_back_is_not_cut_short():
    """Weights jumped, as where a layer was begun anew on purpose: what will be back within its time has it."""
    job = damaged(before=lambda job: setattr(job, "back_in_steps", SUSTAINED_STEPS - 40.0))
    assert job.policy.state.rollbacks[0].at_steps_total == 1030 + 40


def test_without_a_target_damage_asks_for_nothing_early():
    """The only answer would be no, for the whole incident: the checkpoint that is proven meanwhile is taken."""
    job = damaged(before=lambda job: setattr(job, "has_target", job.steps_total > 1090))
    assert [one for one in job.went if "rollback" in one[0]] == [("rollback", "local", "done")]
    assert job.policy.state.rollbacks[0].at_steps_total == 1092


def test_with_its_budget_spent_damage_asks_for_nothing_early():
    """The refusal begins the time until the run is stopped: it comes no sooner than it did."""
    job = damaged(budget=BudgetConfig(rollbacks_per_day=0))
    (refused,) = job.incident.tried("rollback")
    assert (refused.outcome, refused.steps_total) == ("refused_budget", 1030 + SUSTAINED_STEPS)


def test_a_partial_rollback_too_waits_for_the_lower_rate():
    """It is no gentler than the whole one to a remedy that has not had its time."""
    job = Job(loop_up=False, actions=ActionsConfig(partial_rollback=True))
    job.step = job.steps_total = 1030
    job.jumped, job.ratios = WeightJump(1000, 1035, "wte", 30.0), {"wte": 30.0, "wpe": 1.0}
    job.see("robust:loss", "ema_ratio:grad_norm", surge=True)
    while job.steps_total < 1200 and "partial_rollback" not in [went[0] for went in job.went]:
        job.obey()
        job.see()
    assert [went[0] for went in job.went] == ["lower_lr", "partial_rollback"]
    assert job.incident.tried("partial_rollback")[0].steps_total == 1031 + SETTLE_STEPS


def test_a_jump_is_over_once_the_run_has_gone_back():
    """By a rollback, or by a start, which goes on from before it: what is wrong then has its full time."""
    job = damaged()
    assert not job.incident.weights_jumped
    job = damaged(mode="observe")
    assert job.incident.weights_jumped
    job.policy.restarted(job.steps_total, anew=False)
    assert not job.incident.weights_jumped


def test_of_damage_too_the_alerts_hear_first():
    """While the outer loop is up the job waits its half a minute, here 60 steps, for a command."""
    job = damaged(loop_up=True)
    assert job.went[1:] == [("rollback", "local", "done")]
    assert job.policy.state.rollbacks[0].at_steps_total == 1030 + 30 + 60


@pytest.mark.parametrize("mode", ["observe", "assist"])
def test_damage_is_only_told_where_the_job_may_not_act(mode):
    """It says once that it would go back."""
    job = damaged(mode=mode)
    told = [remedy for remedy in job.incident.remedies if remedy.action == "rollback"]
    assert (job.went, [remedy.outcome for remedy in told]) == ([], ["observed"])
    assert told[0].steps_total == 1030 + 30


@pytest.mark.parametrize("jump", [None, WeightJump(800, 850, "wte", 30.0), WeightJump(1031, 1040, "wte", 30.0)])
def test_a_loss_that_stays_away_from_weights_that_did_not_jump_has_its_time(jump):
    """No jump, or one long before the loss left, or one only after it: it is given the steps of R11."""
    job = Job(loop_up=False)
    job.step = job.steps_total = 1030
    job.jumped = jump
    job.spoil(SUSTAINED_STEPS - 1)
    job.obey()
    job.obey()
    assert job.went == [("clip", "local", "done")]
    job.see()
    job.obey()
    assert job.went[1:] == [("rollback", "local", "done")]


def test_a_step_withheld_now_and_then_is_no_reason_to_stop():
    """With the budget spent, updates that are made again for a while call nothing to a stop."""
    job = Job(loop_up=False, budget=BudgetConfig(rollbacks_per_day=0))
    for number in range(3000):
        bad = number % (NO_UPDATES_STEPS + 5) < NO_UPDATES_STEPS - 1
        job.see(*["nonfinite:loss"] * bad, withheld="nonfinite" if bad else None)
        job.obey()
    assert job.went == []


@pytest.mark.parametrize("action", ["note", "checkpoint", "skip_batch"])
@pytest.mark.parametrize("source", ["alert", "operator"])
def test_what_is_no_remedy_opens_no_incident(action, source):
    """In quiet times these are done and hold no checkpoint back; an alert's next one must wait, also after a start."""
    job = Job()
    job.calm(10)
    command = job.alert(action, "TeamAlert") if source == "alert" else job.operator(action)
    assert job.obey(command) == []
    assert job.went == [(action, source, "done")]
    assert (job.incident, job.policy.state.incidents) == (None, [])
    state = msgspec.json.decode(msgspec.json.encode(job.policy.state), type=PolicyState)
    again = Job(state=state)
    again.step, again.steps_total = job.step, job.steps_total
    again.see()
    # One note does not hide another: a person's is none of the alert's.
    waits = (action, source) != ("note", "operator")
    assert again.obey(again.alert(action, "TeamAlert")) == ["refused_cooldown"] * waits
    again.calm(COOLDOWN_STEPS)
    assert again.obey(again.alert(action, "TeamAlert")) == []


@pytest.mark.parametrize(("source", "incidents"), [("operator", 0), ("alert", 1)])
def test_who_stops_a_quiet_run_by_hand_leaves_it_well(source, incidents):
    """A person's stop is no incident, so the restart goes on where it ended; an alert's is one."""
    job = Job()
    job.calm(10)
    job.obey(job.alert("stop", "TeamAlert") if source == "alert" else job.operator("stop"))
    assert job.went == [("stop", source, "done")]
    assert len(job.policy.state.incidents) == incidents


def test_what_a_person_asked_for_an_hour_ago_is_stale():
    """A command that lay in the inbox while no job ran does not surprise whoever starts it."""
    job = Job()
    job.calm(2)
    old = msgspec.structs.replace(job.operator("rollback"), received=job.now - ASKED_SECONDS - 1.0)
    assert job.obey(old) == ["stale"]
    fresh = msgspec.structs.replace(job.operator("lower_lr"), received=job.now - ASKED_SECONDS)
    assert job.obey(fresh) == []

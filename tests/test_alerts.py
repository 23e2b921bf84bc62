"""Commands held against what the job knows: asked twice, asked long ago, asked of another start or another clock."""

import msgspec
import pytest
from test_policy import DAY_SECONDS, Job

from trainer_plugin.policy.alerts import ASKED_SECONDS
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.state import PolicyState

OWN_RULE = "MyEvalLoss"


@pytest.fixture
def job():
    """A job in mode auto whose outer loop is up."""
    return Job()


def obey(job, *waiting):
    """One boundary as the guard crosses it: after a rollback it tells the policy of the commands that still wait."""
    before = len(job.policy.state.rollbacks)
    refused = job.obey(*waiting)
    if len(job.policy.state.rollbacks) > before:
        job.policy.state.answer(waiting)
    return refused


def start_again(job, mode="auto"):
    """The same run in a new process, with its state as it was last written."""
    again = Job(mode, state=msgspec.json.decode(msgspec.json.encode(job.policy.state), type=PolicyState))
    again.step, again.steps_total, again.now = job.step, job.steps_total, job.now
    again.policy.restarted(again.steps_total, anew=False)
    return again


def person(job, number, action="rollback"):
    """A person's command."""
    return msgspec.structs.replace(job.operator(action), id=f"o{number}")


def test_a_rollback_asked_for_by_alert_and_person_at_once_is_one(job):
    """What waits while a run goes back has what it asked for; what is asked later is another rollback."""
    job.spoil()
    early = person(job, 1)
    assert obey(job, job.alert(), early) == []
    job.see()
    assert obey(job, early) == ["duplicate"]
    assert obey(job, person(job, 2)) == []
    assert job.went == [("rollback", "alert", "done"), ("rollback", "operator", "done")]


def test_a_person_who_asks_twice_before_anything_is_seen_goes_back_once(job):
    """An impatient second rollback takes no older target; a command of another kind is obeyed all the same."""
    job.see()
    first, second, other = person(job, 1), person(job, 2), person(job, 3, "lower_lr")
    assert obey(job, first, second, other) == []
    job.see()
    assert obey(job, second, other) == ["duplicate"]
    assert [action for action, _, _ in job.went] == ["rollback", "lower_lr"]


def test_a_rollback_whose_record_was_lost_with_the_job_is_not_done_again(job):
    """Killed after the state was written and before the command's record: the next start finds the command waiting."""
    job.see()
    command = person(job, 1)
    assert obey(job, command) == []
    again = start_again(job)
    again.see()
    assert obey(again, command) == ["duplicate"]
    assert again.went == []


def test_an_alert_without_steps_that_waited_for_a_job_is_stale(job):
    """What was put into the inbox of a run without a job, and tells no step, surprises nobody who starts it later."""
    job.see()
    command = job.alert(alert=OWN_RULE, step=None, steps_total=None)
    job.now += ASKED_SECONDS + 1.0
    again = start_again(job)
    again.see()
    assert obey(again, command) == ["stale"]
    assert obey(again, again.alert(alert=OWN_RULE, step=None, steps_total=None)) == []


def test_a_step_that_lies_ahead_holds_no_incident_open(job):
    """An alert whose annotation tells a step that the run has not reached opens an incident of now, which heals."""
    job.see()
    assert obey(job, job.alert(alert=OWN_RULE, step=10**9)) == []
    assert job.policy.state.rollbacks[-1].to_step == 900
    job.calm(400)
    assert job.incident is None


def test_weights_gone_bad_again_are_not_left_to_a_cooldown():
    """In assist only the alert can bring them back: within the cool-down too, until the budget is spent."""
    job = Job("assist")
    answers = []
    for number in range(3):
        job.see("nonfinite:loss", weights_finite=False)
        answers += obey(job, job.alert(id=f"a{number}", alert="TrainWeightsNonFinite"))
        job.calm(5)
    assert [action for action, _, outcome in job.went if outcome == "done"] == ["rollback", "rollback"]
    assert "refused_budget" in answers
    assert "refused_cooldown" not in answers


def test_what_was_only_observed_is_done_once_the_mode_is_auto():
    """Started again in auto in the middle of an incident, the job does what it had only said it would do."""
    watching = Job("observe")
    watching.spoil().obey()
    watching.see("robust:loss", surge=True)
    watching.obey()
    assert {remedy.outcome for remedy in watching.incident.remedies} == {"observed"}
    again = start_again(watching, "auto")
    again.loop_up = False
    again.spoil().obey()
    assert again.went == [("rollback", "local", "done")]


def test_a_clock_that_was_a_year_ahead_spends_no_budget():
    """Rollbacks that a wrong clock dated into the future do not hold the next ones back until that day."""
    job = Job(budget=BudgetConfig(rollbacks_per_day=1))
    job.now += 365 * DAY_SECONDS
    job.see()
    assert obey(job, person(job, 1)) == []
    job.now -= 365 * DAY_SECONDS
    job.calm(30)
    assert obey(job, person(job, 2)) == []
    job.now -= 3600.0  # A clock set back by an hour frees nothing.
    assert obey(job, person(job, 3)) == ["refused_budget"]

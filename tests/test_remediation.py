"""What goes wrong at night between a real Alertmanager, receiver and job: each incident is one action, or none."""

from datetime import UTC, datetime, timedelta

import pytest
from nights import Night
from test_guard import actions
from training import kick

# A job that finds nothing by itself.
CALM = {"detection": {"warmup_steps": 1_000_000}}
pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


@pytest.fixture
def night(tmp_path, make_guard):
    """A function that begins a night with a job in training."""
    nights = []

    def begin(*, repeat="1h", **options):
        job = make_guard(local_only=False, **(options or CALM))
        job.run(25)
        nights.append(Night(tmp_path, job, repeat=repeat))
        return nights[-1]

    yield begin
    for each in nights:
        each.close()


def done(night, action="lower_lr", outcome="done"):
    """How often the job has done what an alert asked."""
    return actions(night.job, action, outcome, "alert")


def test_a_pair_of_alertmanagers_is_one_action(night):
    """Two of them that know nothing of each other deliver the same alert: one action, one duplicate."""
    tonight = night()
    tonight.start_alertmanager("a")
    tonight.start_alertmanager("b")
    tonight.fire(datetime.now(UTC))
    tonight.train_until(lambda: tonight.answered("duplicate") == 1 and tonight.outcomes())
    tonight.train_for(1.0)
    assert (tonight.outcomes(), done(tonight)) == (["done"], 1)
    assert (tonight.answered("queued"), tonight.answered("duplicate")) == (1, 1)


def test_retries_after_errors_and_time_outs_are_one_action(night):
    """Refused, taken but answered 503, taken but never answered: Alertmanager tries again each time; one action."""
    tonight = night()
    tonight.start_alertmanager()
    tonight.gate.plan = ["refuse", "lose", "hang"]
    tonight.fire(datetime.now(UTC))
    tonight.train_until(lambda: tonight.gate.passed == 3, 60.0)
    tonight.train_for(1.0)
    assert (tonight.outcomes(), done(tonight)) == (["done"], 1)
    assert (tonight.answered("queued"), tonight.answered("duplicate")) == (1, 2)


def test_w12_a_receiver_killed_between_accept_and_action_is_one_action(night):
    """It dies before it could answer, the job acts all the same, and the retry finds the next one knowing of it."""
    tonight = night()
    tonight.start_alertmanager()
    tonight.gate.plan = ["kill"]
    tonight.fire(datetime.now(UTC))
    tonight.train_until(tonight.outcomes)
    tonight.start_receiver()
    tonight.train_until(lambda: tonight.answered("duplicate"))
    tonight.train_for(1.0)
    assert (tonight.outcomes(), done(tonight)) == (["done"], 1)
    assert tonight.answered("queued") == 0


@pytest.mark.parametrize("kept", [True, False], ids=["with its data", "without"])
def test_an_alertmanager_that_is_started_again_repeats_nothing(night, kept):
    """With its data it remembers what it told; without, it tells it again, and that is a duplicate. One action."""
    tonight = night()
    first, began = tonight.start_alertmanager("a"), datetime.now(UTC)
    tonight.fire(began)
    tonight.train_until(tonight.outcomes)
    tonight.stop_alertmanager(first)
    tonight.start_alertmanager("a" if kept else "b")
    tonight.fire(began)
    if not kept:
        tonight.train_until(lambda: tonight.answered("duplicate"))
    tonight.train_for(4.0)
    assert (tonight.outcomes(), done(tonight)) == (["done"], 1)
    assert tonight.answered("duplicate") == (0 if kept else 1)


def test_w09_repeats_and_a_new_firing_too_soon_are_no_second_action(night):
    """Alertmanager repeats the alert again and again: one action. A new firing too soon is refused, later not."""
    tonight = night(repeat="1s", **CALM, budget={"cooldown_steps": 1000})
    tonight.start_alertmanager()
    tonight.fire(datetime.now(UTC))
    tonight.train_until(lambda: tonight.answered("duplicate") >= 4)
    tonight.fire(datetime.now(UTC) + timedelta(milliseconds=1), number="2")
    tonight.train_until(lambda: len(tonight.outcomes()) == 2)
    assert tonight.outcomes() == ["done", "refused_cooldown"]
    acted = tonight.records()[0].at_step
    tonight.job.run(acted + 1000)
    tonight.fire(datetime.now(UTC), number="3")
    tonight.train_until(lambda: len(tonight.outcomes()) == 3)
    assert (tonight.outcomes()[2], done(tonight)) == ("done", 2)


def test_a_prometheus_that_dies_undoes_nothing_and_its_return_repeats_nothing(night):
    """Alertmanager calls the alert resolved when nobody renews it: nothing is undone.

    When it fires again, evaluated at the step that the rollback has handled, it is a new firing and a duplicate.
    """
    tonight = night(mode="assist", budget={"cooldown_steps": 1})
    tonight.start_alertmanager()
    kick(tonight.job)
    tonight.job.step()
    seen = {"alert": "TrainLossNotRecovering", "action": "rollback", "step": tonight.job.guard.step}
    seen["steps_total"] = tonight.steps_total
    tonight.fire(datetime.now(UTC), lasts=4.0, **seen)
    tonight.train_until(tonight.outcomes)
    assert tonight.outcomes() == ["done"]
    step = tonight.job.guard.step
    tonight.train_until(lambda: tonight.answered("not_actionable"))
    assert tonight.job.guard.step >= step
    assert tonight.answered("queued") == 1
    tonight.fire(datetime.now(UTC), lasts=4.0, **seen)
    tonight.train_until(lambda: len(tonight.outcomes()) == 2)
    assert (tonight.outcomes(), done(tonight, "rollback")) == (["done", "duplicate"], 1)
    assert tonight.records()[0].detail.startswith("to step ")


def test_w10_a_week_old_alert_is_no_action(night):
    """An Alertmanager that comes back after a week delivers what it was keeping: 200, `stale`, and no command."""
    tonight = night()
    tonight.start_alertmanager()
    tonight.fire(datetime.now(UTC) - timedelta(days=7))
    tonight.train_until(lambda: tonight.answered("stale") == 1)
    tonight.train_for(1.0)
    assert (tonight.outcomes(), done(tonight)) == ([], 0)


def test_w08_a_firing_without_an_end_leaves_no_rate_low_for_ever(night):
    """Firing, then silence: the rate comes back by the count of steps, and the incident ends by what is measured."""
    tonight = night()
    alertmanager = tonight.start_alertmanager()
    tonight.fire(datetime.now(UTC))
    tonight.train_until(tonight.outcomes)
    alertmanager.close()
    tonight.job.run(tonight.job.guard.step + 60)
    assert tonight.job.guard._parts.learning_rate.factor == 1.0
    assert tonight.job.guard._parts.policy.open_incident is None

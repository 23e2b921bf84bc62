"""A run that cannot be healed: it goes back as often as it may, stops, and no restart trains on what it left."""

import math
import time

import pytest
from test_guard import actions, trail
from training import adamw_job, spoil_gradient, spoil_weights
from waiting import wait_for

from exporter.commands import Command
from exporter.run_status import read_states
from trainer_plugin.checkpoints import manifest

SHORT = {"budget": {"rollbacks_per_day": 3, "same_target": 2, "cooldown_steps": 10}, "checkpoints": {"every": 10}}


def live(job, damage, steps=400):
    """Train on with a damage in every step after the 25th, until the guard stops it; the steps it was at."""
    at = []
    for _ in range(steps):
        if job.guard.stopping:
            return at
        before = job.guard.step
        job.step(damage if before >= 25 else None)
        at.append((before, job.guard.step))
    raise AssertionError(f"not stopped in {steps} steps")


@pytest.mark.parametrize("damage", [spoil_gradient, spoil_weights])
def test_a_loop_of_nan_ends_with_a_stop_and_no_third_rollback(make_guard, damage):
    """NaN, rollback, NaN: two different rollbacks, a refusal, a stop; only what was saved before can be loaded.

    The page follows from `stopped_by_guard` and `budget_spent` in the run's folder.
    """
    job = make_guard(**SHORT)
    at = live(job, damage)
    targets = [after for before, after in at if after < before]
    assert len(targets) == len(set(targets)) == 2
    assert (actions(job, "rollback", "refused_budget"), actions(job, "stop")) == (1, 1)
    (stop,) = [line for line in trail(job, "action") if line["action"] == "stop"]
    states = read_states(job.guard._parts.folder.path, 0.0)
    assert (states["budget_spent"], states["stopped_by_guard"]) == (True, True)
    (kept,) = (job.guard._parts.folder.path / "stopped").iterdir()
    assert str(kept) in stop["detail"]
    assert manifest.read(kept).step == job.guard.step
    job.guard.close()
    again = make_guard(adamw_job(), **SHORT)
    assert again.guard.step in (10, 20)  # Of before the first bad step, 26.
    assert all(math.isfinite(float(weight.sum())) for weight in again.weights())


def test_no_restart_takes_what_was_set_aside_even_if_nothing_else_is_left(make_guard):
    """With both tiers empty the run begins anew, though the state that was set aside is whole."""
    job = make_guard(**SHORT | {"checkpoints": {"every": 10_000}})
    live(job, spoil_weights)
    assert len(list((job.guard._parts.folder.path / "stopped").iterdir())) == 1
    job.guard.close()
    again = make_guard(adamw_job(), **SHORT)
    assert again.guard.step == 0


def test_the_boundary_of_a_stop_saves_no_checkpoint(make_guard, tmp_path):
    """Where one is due in the step in which an alert stops the run, the tiers hold those of earlier steps alone."""
    job = make_guard(checkpoints={"every": 1})
    job.run(25)
    job.guard._parts.folder.inbox.put(
        Command(id="a1", run="tiny", action="stop", source="alert", received=time.time(), alert="TheirOwn", step=25)
    )
    wait_for(job.guard._parts.loop.commands)
    job.run(40)
    assert job.guard.stopping
    job.guard.close()
    steps = [int(path.name.split("-")[1]) for path in (tmp_path / "local/tiny").iterdir()]
    assert max(steps) == job.guard.step - 1


def test_a09_nan_before_the_first_checkpoint(make_guard):
    """NaN in step 7 alone is withheld and trained past; in every step it ends in a stop. Weights stay as they were."""
    job = make_guard(checkpoints={"every": 100})
    job.run(6)
    before = job.weights()
    job.step(spoil_gradient)
    assert all((a == b).all() for a, b in zip(before, job.weights(), strict=True))
    job.run(60)
    assert not job.guard.stopping
    other = make_guard(adamw_job(seed=1), run="other", **SHORT | {"checkpoints": {"every": 10_000}})
    other.run(6)
    before = other.weights()
    for _ in range(200):
        if other.guard.stopping:
            break
        other.step(spoil_gradient)
    assert other.guard.stopping
    assert all((a == b).all() for a, b in zip(before, other.weights(), strict=True))
    assert (actions(other, "rollback", "no_target"), actions(other, "stop")) == (1, 1)

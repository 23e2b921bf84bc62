"""Damage: weights that were thrown somewhere else, finite as they are, and a job that sees it and goes back."""

import pytest
import torch
from training import adamw_job

DAMAGED, SUSTAINED_STEPS = 303, 100


@pytest.fixture
def hurt(make_guard):
    """A function that trains, multiplies all weights by ten, trains on, and gives the job."""

    def hurt(*, layers_every):
        job = make_guard(
            adamw_job(seed=3, lr=3e-3),
            metrics={"layers_every": layers_every},
            detection={"sustained_steps": SUSTAINED_STEPS, "robust_window": 50},
        )
        job.run(DAMAGED)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(10.0)
        for _ in range(SUSTAINED_STEPS // 2):
            job.step()
        return job

    return hurt


def test_damage_is_seen_in_the_weights_and_undone(hurt):
    """As soon as the lower rate, tried for the surge that came with it, has had its time; and it says why."""
    job = hurt(layers_every=5)
    state = job.guard._parts.policy.state
    [rollback] = state.rollbacks
    assert (rollback.at_step, rollback.to_step) == (DAMAGED + 1 + SUSTAINED_STEPS // 4, 300)
    [incident] = state.incidents
    assert "the weight norm of 0 is 9." in " ".join(incident.evidence)
    assert max(job.step() for _ in range(5)) < 1.0


def test_where_no_weights_are_read_it_has_its_time(hurt):
    """Without readings of the layers it is a loss that stays away, as after any fault."""
    state = hurt(layers_every=0).guard._parts.policy.state
    assert state.rollbacks == []
    assert state.open_incident.first_step == DAMAGED + 1

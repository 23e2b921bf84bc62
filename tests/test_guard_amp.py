"""The Guard beside AMP's scaler: a search for the scale is no incident; a collapse and a runaway are."""

import math

import pytest
import torch
from torch import nn
from training import adamw_job, equal

from trainer_plugin.policy.alerts import OWN_SIGNALS


class Scaled:
    """A job under a GradScaler, one call one step; `overflow` makes a gradient Inf before anybody has unscaled it."""

    def __init__(self, make_guard, *, scale=65536.0, growth_interval=10**6, **options):
        self.job = adamw_job()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
        make_guard(self.job, scaler=self.scaler, **options)
        self.guard = self.job.guard
        self.page = self.guard.page

    def step(self, *, overflow=False, shrink=1.0):
        """Run one step; its loss is multiplied by `shrink`."""
        batch = self.guard.next_batch()
        loss = nn.functional.mse_loss(self.job.model(batch), batch.sum(1, keepdim=True)) * shrink
        self.scaler.scale(loss).backward()
        if overflow:
            self.job.model[3].weight.grad[0, 0] = math.inf
        self.guard.before_optimizer(loss)
        self.scaler.step(self.job.optimizer)
        self.scaler.update()
        self.job.optimizer.zero_grad()
        self.guard.end_step()
        self.guard._parts.checkpoints.wait()

    def incidents(self):
        """All of them."""
        return self.guard._parts.policy.state.incidents

    def actions(self, action, outcome="done"):
        """How often the job itself has done so."""
        return self.page.value("train_actions_total", action, "local", outcome)


def test_a13_overflows_of_a_scale_search_are_no_incident(make_guard):
    """Overflow in steps 1 to 5, 65536 to 2048, then normal: five skips of the scaler's, no incident, no NaN after."""
    scaled = Scaled(make_guard)
    shown = []
    for number in range(1, 61):
        scaled.step(overflow=number <= 5)
        shown.append(scaled.page.value("train_amp_loss_scale"))
    page = scaled.page
    assert shown[:7] == [65536.0, 32768.0, 16384.0, 8192.0, 4096.0, 2048.0, 2048.0]
    assert page.value("train_amp_overflows_total") == page.value("train_steps_skipped_total", "amp_overflow") == 5
    assert page.value("train_steps_applied_total") == 55
    assert page.value("train_nonfinite_total", "grad") == 0
    assert scaled.incidents() == []
    for name in ("train_grad_norm", "train_grad_norm_ema", "train_loss_ema", "train_loss_mean"):
        assert math.isfinite(page.value(name))


def test_a12_a_scale_that_runs_away_is_an_incident_without_a_remedy(make_guard):
    """Tiny gradients and growth at every step: told as numerical, shown as it is, and nothing is done to the run."""
    scaled = Scaled(make_guard, growth_interval=1, detection={"robust_window": 128})
    for _ in range(200):
        scaled.step(shrink=1e-30)
    (incident,) = scaled.incidents()
    assert (incident.class_, incident.first_step) == ("numerical", 10)  # 65536 x 2^9 is the first above 2^24.
    assert incident.remedies == []
    assert scaled.page.value("train_amp_loss_scale") > 2.0**24
    assert scaled.page.value("train_detections_total", "drift", "amp_loss_scale") == 8  # As long as sustained_steps.
    assert incident.healed
    assert scaled.guard.step == 200


def test_a_scale_of_infinity_is_shown_as_such(make_guard):
    """Where a scaler has no cap, +Inf is on the page, and not dropped."""
    scaled = Scaled(make_guard)
    scaled.step()
    scaled.scaler.update(new_scale=math.inf)
    scaled.step()
    assert scaled.page.value("train_amp_loss_scale") == math.inf
    assert b'train_amp_loss_scale{run="tiny",rank="0"} +Inf\n' in scaled.page.render()


def test_a_scale_that_collapses_lowers_the_rate_and_then_goes_back(make_guard):
    """Overflow upon overflow: below 1 the rate is lowered, once; updates that still do not come lead back."""
    scaled = Scaled(make_guard)
    for _ in range(20):
        scaled.step()
    good = scaled.job.weights()
    while not scaled.incidents():
        scaled.step(overflow=True)
        assert scaled.guard.step < 60
    (incident,) = scaled.incidents()
    assert scaled.page.value("train_amp_loss_scale") == 0.5
    assert incident.class_ == "numerical"
    assert scaled.actions("lower_lr") == 1
    assert equal(good, scaled.job.weights())
    while not scaled.actions("rollback"):
        scaled.step(overflow=True)
        assert scaled.guard.step < 80
    assert [remedy.action for remedy in incident.remedies] == ["lower_lr", "rollback"]
    assert scaled.guard.step == 30  # Nothing was applied since 20: the nearest target has the same weights.
    assert equal(good, scaled.job.weights())
    assert scaled.scaler.get_scale() == 64.0  # The scale goes back with the weights.


def test_a_scale_that_recovers_is_healed(make_guard):
    """A collapse that is over heals, and the checkpoints after it count again."""
    scaled = Scaled(make_guard)
    for _ in range(20):
        scaled.step()
    for _ in range(18):
        scaled.step(overflow=True)
    scaled.scaler.update(new_scale=1024.0)
    for _ in range(30):
        scaled.step()
    (incident,) = scaled.incidents()
    assert incident.healed
    assert scaled.page.value("train_incident_open") == 0.0
    assert scaled.actions("rollback") == 0


@pytest.mark.parametrize("mode", ["observe", "assist"])
def test_who_may_not_act_says_what_it_would_do(make_guard, mode):
    """Outside `auto` a collapse is told and the remedy only observed."""
    scaled = Scaled(make_guard, mode=mode)
    for _ in range(20):
        scaled.step(overflow=True)
    assert scaled.actions("lower_lr", "observed") == 1
    assert scaled.actions("lower_lr") == 0
    assert scaled.guard._parts.learning_rate.factor == 1.0


def test_a_collapse_is_the_jobs_own_reading():
    """The alert about it is held against what the job reads, as every alert about its own signals."""
    assert "TrainAmpScaleCollapse" in OWN_SIGNALS


def test_without_a_scaler_there_is_no_scale(make_guard):
    """A run in bfloat16 or float32 has no scale on its page, not even 1."""
    job = make_guard()
    job.step()
    assert b"train_amp" not in job.guard.page.render()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    job = make_guard(run="other", scaler=disabled)
    job.step()
    assert b"train_amp" not in job.guard.page.render()

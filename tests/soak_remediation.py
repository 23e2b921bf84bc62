"""The nights of test_remediation.py on every version of Alertmanager (`make soak`)."""

import shutil
import time

import pytest
from soak_versions import release  # noqa: F401 - each release in turn
from test_alertmanager import PATIENCE_SECONDS, RULES, start_prometheus
from test_remediation import (  # noqa: F401 - the tests are run here again
    CALM,
    done,
    night,
    test_a_pair_of_alertmanagers_is_one_action,
    test_a_prometheus_that_dies_undoes_nothing_and_its_return_repeats_nothing,
    test_an_alertmanager_that_is_started_again_repeats_nothing,
    test_retries_after_errors_and_time_outs_are_one_action,
    test_w09_repeats_and_a_new_firing_too_soon_are_no_second_action,
    test_w10_a_week_old_alert_is_no_action,
    test_w12_a_receiver_killed_between_accept_and_action_is_one_action,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


# A team's own rule, true from a step on for as long as anybody asks.
TEAM_RULE = """
  - name: team
    rules:
      - alert: TeamAlert
        expr: max by (run) (train_step) > 100
        labels: {severity: warning, action: lower_lr}
        annotations: {summary: "So it is.", step: "{{ $value }}"}
"""


def test_a_prometheus_that_is_killed_for_minutes_costs_nothing_twice(night, tmp_path):  # noqa: F811
    """A real one, killed as its alert fires: after four minutes Alertmanager calls that over, and nothing is undone.

    With its data it comes back, and the alert begins anew: too soon after what was done. It is told with the resend of
    a minute: a Prometheus that has just started does not know yet whom to tell.
    """
    rules = tmp_path / "rules"
    shutil.copytree(RULES, rules)
    with (rules / "training.yml").open("a") as file:
        file.write(TEAM_RULE)
    tonight = night(**CALM, budget={"cooldown_steps": 1_000_000})
    alertmanager = tonight.start_alertmanager()
    prometheus = start_prometheus(tmp_path / "prometheus", tmp_path / "runs", alertmanager.address, rules=rules)
    prometheus.wait_ready(time.monotonic() + PATIENCE_SECONDS)
    tonight.train_until(lambda: tonight.answered("queued"), 60.0)
    prometheus.kill()
    tonight.train_until(tonight.outcomes)
    assert (tonight.outcomes(), done(tonight)) == (["done"], 1)
    factor = tonight.job.guard.page.value("train_lr_factor")
    tonight.train_until(lambda: tonight.answered("not_actionable"), 400.0)
    assert (tonight.answered("queued"), tonight.outcomes()) == (1, ["done"])
    again = start_prometheus(tmp_path / "prometheus", tmp_path / "runs", alertmanager.address, rules=rules)
    again.wait_ready(time.monotonic() + PATIENCE_SECONDS)
    tonight.train_until(lambda: len(tonight.outcomes()) == 2, 120.0)
    again.kill()
    assert factor == 0.5
    assert (tonight.outcomes(), done(tonight)) == (["done", "refused_cooldown"], 1)

"""Rules, configurations, page and loop on the newest servers: the tests that hold on the oldest, and one live loop."""

import os
import subprocess

import pytest
from test_loop import a_run, wait_for
from test_page import page, test_promtool_finds_nothing_wrong  # noqa: F401 - found here by pytest
from test_rules import (  # noqa: F401 - found here by pytest
    taken_up,
    test_alert_reaches_its_receivers,
    test_alertmanager_configuration_is_valid_with_and_without_its_examples,
    test_m06_the_nan_of_512_ranks_is_a_handful_of_alerts,
    test_prometheus_configuration_is_valid_and_loads_every_rule_file,
    test_rule_file_is_valid,
    test_story_comes_true,
)
from tools import NEWEST, OLDEST, RELEASES, ROOT, find_tool, programs_of

from trainer_plugin.demo.servers import Servers


@pytest.fixture(autouse=True, params=[NEWEST])
def release(request, monkeypatch):
    """One Debian release, whose programs stand first on the PATH."""
    monkeypatch.setenv("PATH", f"{programs_of(request.param)}{os.pathsep}{os.environ['PATH']}")
    return request.param


def servers_of(prometheus: str, alertmanager: str) -> Servers:
    """The servers of two releases."""
    return Servers(
        prometheus=str(programs_of(prometheus) / "prometheus"),
        alertmanager=str(programs_of(alertmanager) / "prometheus-alertmanager"),
    )


def close_the_loop(tmp_path, servers):
    """From page to inbox: a heartbeat, a spike that only a histogram has seen, and two commands of one alert."""
    with a_run(tmp_path, servers) as (folder, job_page, stack):

        def firing():
            return {alert["labels"]["alertname"] for alert in stack.alerts() if alert["state"] == "firing"}

        with job_page.update():
            job_page.set("train_step", 900)
            job_page.add("train_steps_total", 900)
            job_page.observe("train_loss_robust_score", 1.0)
        wait_for(folder.outer.heartbeat)
        for name, program in (("prometheus", servers.prometheus), ("alertmanager", servers.alertmanager)):
            told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
            (built,) = wait_for(lambda name=name: stack.query(f"{name}_build_info"))
            assert f"version {built['metric']['version']} " in told.stdout + told.stderr

        job_page.observe("train_loss_robust_score", 30.0)
        wait_for(lambda: "TrainLossSpike" in firing())
        for commands in (1, 2):
            job_page.set("train_loss_unrecovered_steps", 200)
            waiting = wait_for(lambda n=commands: len(found := folder.inbox.waiting()) == n and found)
            job_page.set("train_loss_unrecovered_steps", 0)
            # Its end must have come through: Alertmanager swallows an alert that begins again before it has told that.
            ended = f'receiver_deliveries_total{{outcome="not_actionable"}} >= {commands}'
            wait_for(lambda ended=ended: stack.query(ended))
        for command in waiting:
            assert (command.alert, command.action) == ("TrainLossNotRecovering", "rollback")
            assert command.step == command.steps_total == 900


@pytest.mark.live
@pytest.mark.timeout(120)
def test_the_loop_closes(tmp_path, release):
    """A run's page becomes alerts, and an alert that comes twice two commands in the run's inbox."""
    close_the_loop(tmp_path, servers_of(release, release))


def test_the_programs_of_the_release_are_the_ones_that_run(release):
    """What a test finds by name is the release's own."""
    assert find_tool("promtool").parent == programs_of(release)


def test_a_release_that_cannot_be_had_is_skipped_with_its_reason(tmp_path):
    """Only what the fetch has given up is skipped; what nobody has fetched is an error that says what to run."""
    (tmp_path / "sid.missing").write_text("no network\n")
    with pytest.raises(pytest.skip.Exception, match="sid cannot be had: no network"):
        programs_of("sid", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"trixie is not in .*: run `make tools-all` first"):
        programs_of("trixie", tmp_path)


def test_make_fetches_what_is_tested():
    """`make tools` fetches the oldest and the newest release, `make tools-all` every one."""
    for target, releases in (("tools", (OLDEST, NEWEST)), ("tools-all", RELEASES)):
        told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert f"fetch_tools.sh {' '.join(releases)}" in told

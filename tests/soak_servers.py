"""The loop on each pair of Prometheus and Alertmanager and on VictoriaMetrics; the demo on the newest (`make soak`)."""

import os
import re
import subprocess
import time
from contextlib import contextmanager

import pytest
import test_any_trainer
import test_loop
import yaml
from test_rules import RULE_FILES, RULES, STORIES, run
from test_versions import close_the_loop, servers_of
from tools import NEWEST, RELEASES, programs_of

from trainer_plugin.demo.process import Process, free_addresses

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
# Those whose vmalert knows `keep_firing_for`; bookworm's 1.79 does not, and refuses the rules.
VICTORIA_METRICS = ("victoria-trixie", "victoria-sid")
# any_trainer.yml reads what it has recorded itself, which vmalert cannot; its variant has a story of its own.
TOLD_THE_SAME = [path for path in STORIES if not path.name.startswith("any_trainer")]
# Alerts of which VictoriaMetrics tells another story than Prometheus, and why.
SERIES_FROM_ZERO = (
    "`increase` takes a series that appears with a value below 10 for one that began at 0; so do the job's counters, "
    "but for the steps: what it counts is what happened before the first scrape"
)
DIFFERENT = {
    "TrainWeightsNonFinite": SERIES_FROM_ZERO,
    "TrainActionTaken": SERIES_FROM_ZERO,
    "TrainBudgetSpent": SERIES_FROM_ZERO,
    "TrainLossFrozen": "it stores twelve digits and misses a change in the last bit",
    "TrainAmpScaleRunaway": "it stores no NaN, and takes the value before for one scrape more",
    "TrainGpuFault": "what one rule records, the next one reads an evaluation later; here three stand in a row",
}


@pytest.mark.parametrize("alertmanager", RELEASES)
@pytest.mark.parametrize("prometheus", RELEASES)
def test_the_loop_closes_on_every_pair(tmp_path, prometheus, alertmanager):
    """From the page to the inbox, whichever Prometheus sends to whichever Alertmanager."""
    close_the_loop(tmp_path, servers_of(prometheus, alertmanager))


@pytest.mark.timeout(1800)
def test_the_demo_is_healed_on_the_newest_servers(tmp_path, monkeypatch):
    """The demo's damaged run is taken back by an alert of the newest Prometheus and Alertmanager."""
    monkeypatch.setenv("PATH", f"{programs_of(NEWEST)}{os.pathsep}{os.environ['PATH']}")
    test_loop.test_the_sustained_demo_is_healed_by_an_alert(tmp_path)


@contextmanager
def a_run_on_victoria_metrics(tmp_path, programs):
    """A run whose Prometheus is dead; VictoriaMetrics scrapes in its place, and vmalert evaluates the same rules."""
    with test_loop.a_run(tmp_path) as (folder, page, stack):
        stack.kill("prometheus")
        configs = tmp_path / "servers"
        database, alerts = free_addresses(2)
        commands = {
            database: [
                "victoria-metrics",
                f"-promscrape.config={configs / 'prometheus.yml'}",
                "-promscrape.config.strictParse=false",
                "-promscrape.fileSDCheckInterval=1s",
                "-search.latencyOffset=0s",
                f"-storageDataPath={configs / 'victoria-data'}",
            ],
            alerts: [
                "vmalert",
                *(f"-rule={configs / 'alert_rules' / path.name}" for path in RULE_FILES),
                f"-datasource.url=http://{database}",
                f"-remoteWrite.url=http://{database}",
                f"-notifier.url={stack.urls['alertmanager']}",
                "-evaluationInterval=1s",
                "-rule.evalDelay=0s",
            ],
        }
        started = []
        try:
            for address, (name, *options) in commands.items():
                command = [str(programs / name), f"-httpListenAddr={address}", *options]
                started.append(Process(name, command, address, configs / f"{name}.log"))
                started[-1].wait_ready(time.monotonic() + 30)
            yield folder, page
        finally:
            for process in reversed(started):
                process.terminate()
                process.end(time.monotonic() + 10)


@pytest.mark.parametrize("release", VICTORIA_METRICS)
def test_the_loop_closes_on_victoria_metrics(tmp_path, release):
    """Heartbeat and command reach the run when VictoriaMetrics scrapes it and vmalert evaluates the rules."""
    with a_run_on_victoria_metrics(tmp_path, programs_of(release)) as (folder, page):
        with page.update():
            page.set("train_step", 900)
            page.add("train_steps_total", 900)
            page.set("train_loss_unrecovered_steps", 0)
        test_loop.wait_for(folder.outer.heartbeat)
        assert folder.inbox.waiting() == []

        page.set("train_loss_unrecovered_steps", 200)

        command = test_loop.wait_for(lambda: next(iter(folder.inbox.waiting()), None))
        assert (command.alert, command.action) == ("TrainLossNotRecovering", "rollback")
        assert command.step == command.steps_total == 900


@pytest.mark.parametrize("release", VICTORIA_METRICS)
def test_victoria_metrics_accepts_rules_and_scrape_jobs(release):
    """Every rule file is valid for vmalert, and the scrape jobs for VictoriaMetrics."""
    programs = programs_of(release)
    run(programs / "vmalert", "-dryRun", *(f"-rule={path}" for path in RULE_FILES))
    config = f"-promscrape.config={RULES / 'prometheus.yml'}"
    run(programs / "victoria-metrics", config, "-promscrape.config.strictParse=false", "-dryRun")


@pytest.mark.parametrize("release", VICTORIA_METRICS)
def test_victoria_metrics_tells_the_story_of_its_own_variant(tmp_path, monkeypatch, release):
    """The variant of any_trainer.yml is valid for vmalert, and its story comes true there."""
    monkeypatch.setenv("PATH", f"{programs_of(release)}{os.pathsep}{os.environ['PATH']}")
    test_any_trainer.test_vmalert_loads_its_variant()
    test_any_trainer.test_vmalert_tells_the_same_story(tmp_path)


def test_victoria_metrics_tells_the_same_stories(tmp_path):
    """On VictoriaMetrics every alert fires and is silent as on Prometheus, but for those that are known to differ."""
    told = ""
    for path in TOLD_THE_SAME:
        story = yaml.safe_load(path.read_text())
        story["rule_files"] = [str((path.parent / file).resolve()) for file in story["rule_files"]]
        for test in story["tests"]:
            # Questions to the series ALERTS, which vmalert writes with other labels, and later.
            test.pop("promql_expr_test", None)
        (tmp_path / path.name).write_text(yaml.safe_dump(story, width=10_000))
        command = [programs_of("victoria-sid") / "vmalert-tool", "unittest", "--disableAlertgroupLabel"]
        done = subprocess.run(
            [*command, f"--files={tmp_path / path.name}"], capture_output=True, text=True, check=False
        )
        assert "Unit Testing" in done.stdout + done.stderr
        failed = re.findall(r"alertname: (\w+), time", done.stdout + done.stderr)
        assert bool(failed) == bool(done.returncode), done.stdout + done.stderr
        told += " ".join(failed) + " "
    assert set(told.split()) == set(DIFFERENT)

"""Delivery on a real Alertmanager with the shipped configuration: what reaches the job, what pages, and how often."""

import itertools
import os
import re
import shutil
import signal
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from delivery import RULE_LABELS, RULES, Alertmanager, Sink, configuration, until
from test_rules import asked, kinds_told, selectors, selects

from exporter.page import Page
from exporter.runs import RunFolder
from exporter.serving import MetricsServer, Target
from trainer_plugin.demo.process import Process, free_addresses
from trainer_plugin.demo.servers import Stack, find_servers, prometheus_config, readdressed

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
PATIENCE_SECONDS = 40.0


@pytest.fixture(scope="module")
def sink():
    """Where everything goes."""
    sink = Sink()
    yield sink
    sink.close()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory, sink):
    """One Alertmanager for all tests that have runs of their own."""
    folder = tmp_path_factory.mktemp("alertmanager")
    alertmanager = Alertmanager(folder, configuration(folder, sink))
    yield alertmanager
    alertmanager.close()


def test_one_incident_is_one_page(alertmanager, sink):
    """Two rollback alerts are one page, and the failure of what they asked for is written on it.

    The job gets its commands at once, the chat the warnings, the log the rest.
    """
    run = "one-page"
    alertmanager.fire("TrainLossSpike", run=run)
    until(lambda: sink.chats(run))
    alertmanager.fire("TrainLossNotRecovering", "TrainLossSpikeSustained", run=run)
    until(lambda: len(sink.commands(run)) == 2)
    assert sink.pages(run) == []
    until(lambda: sink.pages(run))
    ((page, what, title),) = sink.pages(run)
    assert what == "trigger"
    assert re.fullmatch(
        rf"\[FIRING 2\] run {run}: (TrainLossNotRecovering, TrainLossSpikeSustained|"
        r"TrainLossSpikeSustained, TrainLossNotRecovering)",
        title,
    )
    alertmanager.fire("TrainActionTaken", run=run, job_action="lower_lr", source="local")
    alertmanager.fire("TrainActionFailed", run=run, job_action="rollback", source="alert", outcome="failed")
    until(lambda: "TrainActionFailed" in str(sink.pages(run)))
    until(lambda: sink.logs(run) == ["TrainActionTaken"])
    alertmanager.fire("TrainLossNotRecovering", "TrainLossSpikeSustained", run=run, status="resolved")
    alertmanager.fire(
        "TrainActionFailed", run=run, job_action="rollback", source="alert", outcome="failed", status="resolved"
    )
    until(lambda: sink.pages(run)[-1][1] == "resolve")
    assert {key for key, _, _ in sink.pages(run)} == {page}
    assert sink.chats(run) == [f"[FIRING 1] run {run}: TrainLossSpike"]


def test_people_read_what_is_the_case_and_what_to_do(alertmanager, sink):
    """A message says which run, where it is, what is the case and which heading of the runbook helps."""
    run = "message"
    alertmanager.fire("TrainLayerNormOutlier", run=run)
    until(lambda: sink.chats(run))
    (message,) = [a for body in sink.bodies("/chat") for a in body["attachments"] if f"run {run}:" in a["title"]]
    assert message["title"] == f"[FIRING 1] run {run}: TrainLayerNormOutlier"
    assert message["text"].split("\n")[:3] == [
        "warning: TrainLayerNormOutlier, at step 1240",
        "Summary of TrainLayerNormOutlier. What is the case with TrainLayerNormOutlier.",
        "What to do: runbook.md#trainlayernormoutlier",
    ]
    alertmanager.fire("TrainLayerNormOutlier", run=run, status="resolved")
    until(lambda: sink.chats(run)[-1].startswith("[RESOLVED]"))


def test_what_the_job_heals_in_time_pages_nobody(tmp_path, sink):
    """An alert that is over before the pager's wait is: the job has its command, and no page is opened."""
    config = configuration(tmp_path, sink)
    (pager,) = [route for route in config["route"]["routes"] if route["receiver"] == "pager"]
    pager["group_wait"] = "6s"
    alertmanager = Alertmanager(tmp_path, config)
    try:
        alertmanager.fire("TrainLossNotRecovering", run="healed")
        until(lambda: sink.commands("healed") == [("TrainLossNotRecovering", "firing")])
        alertmanager.fire("TrainLossNotRecovering", run="healed", status="resolved")
        until(lambda: sink.commands("healed")[1:] == [("TrainLossNotRecovering", "resolved")])
        alertmanager.fire("TrainStoppedByGuard", run="ill")
        until(lambda: sink.pages("ill"))
        assert sink.pages("healed") == []
    finally:
        alertmanager.close()


def test_m02_the_end_of_one_alert_is_told_and_the_others_go_on(alertmanager, sink):
    """Of two runs with two alerts each one ends: job and chat hear of just that one."""
    runs = ("m02-a", "m02-b")
    commands, warnings = ("TrainLossNotRecovering", "TrainNoUpdates"), ("TrainCheckpointStale", "TrainLossFrozen")
    for run in runs:
        alertmanager.fire(*commands, *warnings, run=run)
    for run in runs:
        until(lambda run=run: len(sink.commands(run)) == len(sink.chats(run)) == 2)
    alertmanager.fire("TrainNoUpdates", "TrainLossFrozen", run="m02-a", status="resolved")
    until(lambda: len(sink.commands("m02-a")) == len(sink.chats("m02-a")) == 3)
    assert sink.commands("m02-a")[-1] == ("TrainNoUpdates", "resolved")
    assert sink.chats("m02-a")[-1] == "[RESOLVED] run m02-a: TrainLossFrozen"
    assert sorted(sink.commands("m02-b")) == [(name, "firing") for name in commands]
    assert sorted(sink.chats("m02-b")) == [f"[FIRING 1] run m02-b: {name}" for name in warnings]


def test_m07_one_runs_death_mutes_its_own_spike_and_no_other(alertmanager, sink):
    """With a page of run a gone, its spike is muted, not that of run b; its call for a rollback reaches the job.

    That it stands still is told: the page that is gone may be that of another rank.
    """
    alertmanager.fire("TrainMetricsDown", run="m07-a")
    until(lambda: sink.pages("m07-a"))
    for run in ("m07-a", "m07-b"):
        alertmanager.fire("TrainLossSpike", "TrainStalled", run=run)
    alertmanager.fire("TrainNonFinite", run="m07-a", where="loss")
    alertmanager.fire("TrainLossNotRecovering", run="m07-a")
    until(lambda: len(sink.chats("m07-b")) == 2 and len(sink.chats("m07-a")) == 2)
    until(lambda: sink.commands("m07-a"))
    assert sorted(sink.chats("m07-a")) == [
        f"[FIRING 1] run m07-a: {name}" for name in ("TrainNonFinite", "TrainStalled")
    ]
    assert alertmanager.muted(run="m07-a") == {
        "TrainMetricsDown": False, "TrainLossNotRecovering": False, "TrainNonFinite": False,
        "TrainLossSpike": True, "TrainStalled": False,
    }  # fmt: skip
    assert not any(alertmanager.muted(run="m07-b").values())


def test_no_alert_ever_mutes_a_command(alertmanager, sink):
    """With every alert of a run and of the stack firing at once, each one with an action reaches the job."""
    run = "all"
    stack = ["TrainReceiverDown", "TrainAlertmanagerDown", "TrainRulesFailing", "TrainRulesLate", "TrainAlertsDropped"]
    alertmanager.fire(*stack, job="some")
    for integration in ("webhook", "slack"):
        alertmanager.fire("TrainNotificationsFailing", integration=integration)
    alertmanager.fire(*(name for name in RULE_LABELS if name not in {*stack, "TrainNotificationsFailing"}), run=run)
    commands = {name for name, labels in RULE_LABELS.items() if "action" in labels}
    until(lambda: {name for name, _ in sink.commands(run)} >= commands)
    muted = alertmanager.muted(run=run)
    first_signs = {"TrainLossSpike", "TrainGradNormSurge", "TrainLayerNormOutlier", "TrainUpdatesWithheld"}
    assert {name for name, is_muted in muted.items() if is_muted} == {*first_signs, "TrainControlLoopDown"}
    assert alertmanager.muted(integration="webhook") == {"TrainNotificationsFailing": True}
    assert alertmanager.muted(integration="slack") == {"TrainNotificationsFailing": False}
    alertmanager.fire(*stack, job="some", status="resolved")


@contextmanager
def receiver(folder, runs):
    """A real receiver without a token; its address."""
    (address,) = free_addresses(1)
    command = [sys.executable, "-m", "exporter", "--runs", str(runs), "--listen", address]
    process = Process("receiver", command, address, folder / "receiver.log")
    try:
        process.wait_ready(time.monotonic() + PATIENCE_SECONDS)
        yield address
    finally:
        process.kill()


def scrape(address):
    """A page."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def count(page, series):
    """The value of a series on a page."""
    return float(re.search(rf"^{re.escape(series)} (\S+)", page, re.MULTILINE)[1])


def repeats(folder, sink, *, group_interval, repeat_interval, times):
    """Let an alert be repeated to a real receiver and to the sink; seconds in between, commands, receiver's page."""
    runs = folder / "runs"
    inbox = RunFolder(runs, "repeats").inbox
    inbox.create()
    config = configuration(folder, sink)
    (job,) = [route for route in config["route"]["routes"] if route["receiver"] == "job"]
    job |= {"group_interval": group_interval, "repeat_interval": repeat_interval}
    before = len(sink.got)
    with receiver(folder, runs) as address:
        (hooks,) = [each["webhook_configs"] for each in config["receivers"] if each["name"] == "job"]
        hooks.append({"url": f"http://{address}/alertmanager"})
        alertmanager = Alertmanager(folder, config)
        try:
            alertmanager.fire("TrainLossNotRecovering", run="repeats")
            until(lambda: len(sink.commands("repeats")) > times, 900.0)
            # Each way is timed by itself: here a repeat may come one interval later.
            until(lambda: count(scrape(address), 'receiver_deliveries_total{outcome="duplicate"}') >= times, 900.0)
        finally:
            alertmanager.close()
        page = scrape(address)
    at = [when for path, body, when in sink.got[before:] if path == "/alertmanager" and "repeats" in str(body)]
    return [later - earlier for earlier, later in itertools.pairwise(at)], inbox.waiting(), page


def test_m03_a_repeat_comes_when_it_is_due_and_is_no_second_command(tmp_path, sink):
    """At 1 s and 3 s the alert comes again after 3 s, not earlier and not a round later; the inbox holds one command.

    `make soak` does the same at 1 and 3 minutes.
    """
    gaps, waiting, page = repeats(tmp_path, sink, group_interval="1s", repeat_interval="3s", times=2)
    assert len(gaps) >= 2
    assert all(2.5 < gap < 6.0 for gap in gaps)
    assert [command.alert for command in waiting] == ["TrainLossNotRecovering"]
    assert count(page, 'receiver_deliveries_total{outcome="queued"}') == 1


def test_m06_what_a_widened_route_cuts_off_is_counted(tmp_path, sink):
    """300 alerts in one message, which the shipped routes never make: 200 come, 100 are counted by the receiver."""
    config = configuration(tmp_path, sink)
    (job,) = [route for route in config["route"]["routes"] if route["receiver"] == "job"]
    job |= {"group_by": ["alertname"], "group_wait": "3s"}
    with receiver(tmp_path, tmp_path) as address, ExitStack() as ends:
        alertmanager = Alertmanager(tmp_path, readdressed_to(config, address))
        ends.callback(alertmanager.close)
        alertmanager.fire("TrainNoUpdates", runs=[f"m06-{number}" for number in range(300)])
        until(lambda: count(scrape(address), "receiver_alerts_truncated_total"))
        page = scrape(address)
    assert count(page, 'receiver_deliveries_total{outcome="unknown_run"}') == 200
    assert count(page, "receiver_alerts_truncated_total") == 100


def readdressed_to(config, address):
    """The configuration with its job's webhook at another address."""
    (hooks,) = [each["webhook_configs"] for each in config["receivers"] if each["name"] == "job"]
    hooks[0] = {"url": f"http://{address}/alertmanager", "max_alerts": hooks[0]["max_alerts"]}
    return config


@contextmanager
def a_page(runs):
    """A job's page on a real port, with an alert's condition on it, announced in the runs' folder."""
    (runs / "targets").mkdir(parents=True)
    page = Page(run="gpt-0")
    page.set("train_loss_unrecovered_steps", 250)
    page.set("train_step", 900)
    server = MetricsServer(page, host="127.0.0.1", port=0)
    target = Target(runs, run="gpt-0", rank="0", address=f"127.0.0.1:{server.port}")
    try:
        yield page
    finally:
        target.remove()
        server.close()


def start_prometheus(folder, runs, alertmanager, *, rules=RULES, labels=None):
    """A Prometheus on the shipped configuration, at intervals of a second."""
    folder.mkdir(exist_ok=True)
    (address,) = free_addresses(1)
    shipped = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config = prometheus_config(shipped, rules, runs, "1s", "1s")
    config["global"]["external_labels"] = labels or {}
    addresses = {"prometheus": address, "alertmanager": alertmanager, "receiver": "127.0.0.1:1"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(readdressed(config, addresses)))
    program = find_servers().prometheus
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    return Process("prometheus", command, address, folder / "prometheus.log", Path(program).parent)


def test_m04_two_prometheus_servers_are_one_alert(tmp_path):
    """Two Prometheus servers with a `replica` each see the same condition: one alert, one delivery."""
    runs, sink = tmp_path / "runs", Sink()
    with ExitStack() as ends:
        ends.callback(sink.close)
        ends.enter_context(a_page(runs))
        alertmanager = Alertmanager(tmp_path, configuration(tmp_path, sink))
        ends.callback(alertmanager.close)
        servers = [
            start_prometheus(tmp_path / name, runs, alertmanager.address, labels={"replica": name}) for name in "ab"
        ]
        for server in servers:
            ends.callback(server.kill)
        for server in servers:
            server.wait_ready(time.monotonic() + PATIENCE_SECONDS)
        for server in servers:
            sent = r"^prometheus_notifications_sent_total\S* [1-9]"
            until(lambda at=server.address, sent=sent: re.search(sent, scrape(at), re.MULTILINE))
            until(lambda at=server.address: '"TrainLossNotRecovering"' in alerts_of(at))
        until(lambda: sink.commands("gpt-0"))
        found = [a["labels"] for a in alertmanager.alerts() if a["labels"]["alertname"] == "TrainLossNotRecovering"]
    assert found == [
        {"alertname": "TrainLossNotRecovering", "run": "gpt-0", "severity": "critical", "action": "rollback"}
    ]
    assert [name for name, _ in sink.commands("gpt-0") if name != "TrainWatchdog"] == ["TrainLossNotRecovering"]


def alerts_of(address):
    """The alerts of a Prometheus, as text."""
    with urllib.request.urlopen(f"http://{address}/api/v1/alerts", timeout=10) as answer:
        return answer.read().decode()


def test_r20_a_reload_does_not_begin_the_waiting_anew(tmp_path):
    """A reload while an alert is pending: it goes on to wait from where it began, and fires."""
    rules, runs = tmp_path / "rules", tmp_path / "runs"
    shutil.copytree(RULES, rules)
    text = (rules / "stack.yml").read_text()
    assert text.count("for: 30s") == 1
    (rules / "stack.yml").write_text(text.replace("for: 30s", "for: 8s"))
    (runs / "targets").mkdir(parents=True)
    Target(runs, run="gpt-0", rank="0", address="127.0.0.1:1")
    server = start_prometheus(tmp_path / "prometheus", runs, "127.0.0.1:1", rules=rules)

    def alert():
        found = re.search(
            r'\{"labels":\{"alertname":"TrainMetricsDown".*?"activeAt":"[^"]*"', alerts_of(server.address)
        )
        return found and tuple(re.findall(r'"(?:state|activeAt)":"(.*?)"', found[0]))

    try:
        server.wait_ready(time.monotonic() + PATIENCE_SECONDS)
        until(alert)
        state, active_at = alert()
        assert state == "pending"
        os.kill(server._popen.pid, signal.SIGHUP)
        until(
            lambda: "Completed loading of configuration file" in server.log.read_text().partition("Server is ready")[2]
        )
        until(lambda: alert()[0] == "firing")
        assert alert()[1] == active_at
    finally:
        server.kill()


def test_r12_series_of_the_servers_are_on_their_pages(tmp_path):
    """Every series of Prometheus's and Alertmanager's own that a rule asks for is on a real page, and a counter."""
    runs = tmp_path / "runs"
    with a_page(runs), Stack(tmp_path / "servers", runs, files("alert_rules"), scrape_seconds=0.5) as stack:
        wanted = {(name, m) for name, m in selectors(asked()) if name.startswith(("prometheus_", "alertmanager_"))}
        assert len(wanted) == 5
        pages = ""
        until(lambda: stack.query("prometheus_rule_group_iterations_total > 2"))
        for server in ("prometheus", "alertmanager"):
            pages += scrape(stack.urls[server].removeprefix("http://"))
        kinds = kinds_told(pages)
        for name, matchers in wanted:
            lines = re.findall(rf"^{name}(?:{{(.*)}})? ", pages, re.MULTILINE)
            labels = [dict(re.findall(r'(\w+)="(.*?)"', line)) for line in lines]
            assert any(selects(matchers, each) for each in labels), name
            assert kinds[name] == "counter", name

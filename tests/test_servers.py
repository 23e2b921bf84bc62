"""The demo's servers: found, configured from what is shipped, awaited, and never left behind."""

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import waiting
import yaml

from trainer_plugin.demo.process import LostPortError, Process, free_addresses
from trainer_plugin.demo.servers import Stack, find_servers, prometheus_config, readdressed

ALERT_RULES = Path(__file__).resolve().parents[1] / "alert_rules"
ADDRESSES = {"receiver": "127.0.0.1:1111", "alertmanager": "127.0.0.1:2222", "prometheus": "127.0.0.1:3333"}
READY = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


@pytest.fixture
def start(tmp_path):
    """Start a Python process as a server; every one is killed after the test."""
    started = []

    def start(code, address=None, environment=None):
        address = address or free_addresses(1)[0]
        command = [sys.executable, "-c", code, address.rpartition(":")[2]]
        started.append(Process("thing", command, address, tmp_path / "thing.log", environment=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def shipped(name):
    """A shipped configuration, parsed."""
    return yaml.safe_load((ALERT_RULES / name).read_text())


def ended(pid, seconds):
    """Whether a process that may not be our child ends within so many seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_shipped_configuration_keeps_all_but_addresses_paths_and_intervals(tmp_path):
    """What Prometheus and Alertmanager run is what is shipped, with other addresses, paths and intervals."""
    original = shipped("prometheus.yml")
    for name in original["rule_files"]:
        (tmp_path / name).touch()
    config = readdressed(prometheus_config(original, tmp_path, tmp_path / "runs", "500ms", "250ms"), ADDRESSES)
    assert config["global"]["scrape_interval"] == "500ms"
    assert config["global"]["evaluation_interval"] == "250ms"
    assert config["rule_files"] == [str(tmp_path / name) for name in original["rule_files"]]
    assert config["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["127.0.0.1:2222"]}]}]
    assert config["alerting"]["alert_relabel_configs"] == original["alerting"]["alert_relabel_configs"]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["train"]["honor_labels"] is True
    assert jobs["train"]["file_sd_configs"] == [
        {"files": [f"{tmp_path}/runs/targets/*.json"], "refresh_interval": "500ms"}
    ]
    assert jobs["receiver"]["static_configs"] == [{"targets": ["127.0.0.1:1111"]}]
    assert {job["scrape_interval"] for job in jobs.values()} == {"500ms"}

    original = shipped("alertmanager.yml")
    config = readdressed(original, ADDRESSES)
    assert "9402" in str(original)
    assert str(config) == str(original).replace("127.0.0.1:9402", "127.0.0.1:1111")


def test_job_with_foreign_targets_is_left_out(tmp_path):
    """A job whose fixed addresses are not ours is left out, since a stranger may listen there."""
    foreign = {"job_name": "gpu", "static_configs": [{"targets": ["127.0.0.1:9400"]}]}
    config = {"global": {}, "rule_files": [], "scrape_configs": [foreign]}
    assert prometheus_config(config, tmp_path, tmp_path, "1s", "1s")["scrape_configs"] == []


def test_a_job_for_gpus_is_there_where_they_are_served(tmp_path):
    """The shipped job for GPUs is taken over where the receiver shows a fake driver's, at its address, and else not."""
    original = shipped("prometheus.yml")
    for name in original["rule_files"]:
        (tmp_path / name).touch()
    addresses = ADDRESSES | {"gpu": "127.0.0.1:4444"}
    with_gpus, without = (
        readdressed(prometheus_config(original, tmp_path, tmp_path, "1s", "1s", served=served), addresses)
        for served in (addresses, ADDRESSES)
    )
    targets = {job["job_name"]: job.get("static_configs") for job in with_gpus["scrape_configs"]}
    assert targets.pop("gpu") == [{"targets": ["127.0.0.1:4444"]}]
    assert targets.keys() == {job["job_name"] for job in without["scrape_configs"]}


def test_missing_rule_file_is_named(tmp_path):
    """A rule file that is not there is an error, since Prometheus would run without it in silence."""
    config = {"global": {}, "rule_files": ["nowhere.yml"], "scrape_configs": []}
    with pytest.raises(FileNotFoundError, match=r"rule file nowhere\.yml wanted"):
        prometheus_config(config, tmp_path, tmp_path, "1s", "1s")


def test_ready_server_is_awaited_and_ended(start):
    """A server that answers is ready, and does not answer once it was asked to end."""
    process = start(READY)
    process.wait_ready(time.monotonic() + 5)
    process.terminate()
    process.end(time.monotonic() + 5)
    with pytest.raises(RuntimeError, match="thing ended with exit code -15"):
        process.wait_ready(time.monotonic() + 5)


def test_server_that_ends_is_reported_with_its_last_words(start):
    """A server that ends before it is ready is named, with its exit code and the last line of its log."""
    process = start("print('first'); print('no such file: x.yml'); print(); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"thing ended with exit code 3: no such file: x\.yml$"):
        process.wait_ready(time.monotonic() + 5)


def test_a_server_has_the_environment_that_it_is_given(start):
    """What a fake driver is found by is told to that process alone."""
    code = "import os; raise SystemExit(os.environ['FAKE_NVML'])"
    with pytest.raises(RuntimeError, match=r"ended with exit code 1: a scenario$"):
        start(code, environment=os.environ | {"FAKE_NVML": "a scenario"}).wait_ready(time.monotonic() + 5)
    assert "FAKE_NVML" not in os.environ


def test_server_that_never_answers_is_reported_with_its_last_words(start):
    """A server that is not ready in time is named, with the last line of its log."""
    process = start("import time; time.sleep(60)")
    with pytest.raises(TimeoutError, match=r"thing does not answer on 127.0.0.1:\d+: \(nothing in its log\)"):
        process.wait_ready(time.monotonic())


def test_lost_race_for_a_port_is_told_apart(start):
    """A server that ends because another one took its port is told apart, so that it can be tried again."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        with pytest.raises(LostPortError, match="Address already in use"):
            start(READY, address).wait_ready(time.monotonic() + 5)


def test_stubborn_server_is_killed(start):
    """A server that ignores the request to end is killed when the time is over."""
    ready = READY.replace("import", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport", 1)
    process = start(ready)
    process.wait_ready(time.monotonic() + 5)
    process.terminate()
    process.end(time.monotonic() + 0.1)
    with pytest.raises(RuntimeError, match="exit code -9"):
        process.wait_ready(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it on Linux only")
def test_server_dies_with_a_parent_that_is_killed(tmp_path):
    """A server does not outlive a parent that gets kill -9."""
    parent_code = (
        "import pathlib, sys, time; from trainer_plugin.demo.process import Process\n"
        "code, address, log = sys.argv[1:]\n"
        "command = [sys.executable, '-c', code, address.rpartition(':')[2]]\n"
        "process = Process('thing', command, address, pathlib.Path(log))\n"
        "process.wait_ready(time.monotonic() + 5)\n"
        "print(process._popen.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", parent_code, READY, free_addresses(1)[0], str(tmp_path / "thing.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert ended(pid, 5)


@pytest.mark.live
@pytest.mark.timeout(60)
def test_stack_runs_the_shipped_rules_and_ends(tmp_path):
    """The three servers come up on the shipped configuration, see one another, lose one, and are gone afterwards."""
    assert find_servers() is not None, "no prometheus and prometheus-alertmanager here: run `make tools`"
    with Stack(tmp_path / "stack", tmp_path / "runs", ALERT_RULES, scrape_seconds=0.2) as stack:
        pids = [process._popen.pid for process in stack._processes.values()]
        assert set(stack.urls) == {"receiver", "alertmanager", "prometheus"}
        wait_for(
            lambda: {s["metric"]["job"] for s in stack.query("up == 1")} == {"receiver", "alertmanager", "prometheus"}
        )
        assert stack.query("prometheus_rule_group_rules > 0")
        assert stack.query("prometheus_notifications_alertmanagers_discovered")[0]["value"][1] == "1"
        with pytest.raises(ValueError, match="parse error"):
            stack.query("sum(")
        stack.kill("alertmanager")
        wait_for(lambda: stack.query('up{job="alertmanager"} == 0'))
        assert isinstance(stack.alerts(), list)
    assert all(ended(pid, 0) for pid in pids)


@pytest.mark.live
@pytest.mark.timeout(60)
def test_stack_that_cannot_start_leaves_nothing(tmp_path):
    """When one server cannot start, the error names it and says why, and none is left running."""
    rules = tmp_path / "rules"
    rules.mkdir()
    for file in ALERT_RULES.glob("*.yml"):
        (rules / file.name).write_bytes(file.read_bytes())
    (rules / "stack.yml").write_text("groups: nonsense")
    stack = Stack(tmp_path / "stack", tmp_path / "runs", rules)
    with pytest.raises(RuntimeError, match="prometheus ended with exit code"):
        stack.__enter__()
    assert all(ended(process._popen.pid, 0) for process in stack._processes.values())


def wait_for(condition, seconds=20):
    """Ask until it is so, without an interval: each question is a request to a server, or fails the test in time."""
    waiting.wait_for(condition, seconds, pause_seconds=0.0)

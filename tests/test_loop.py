"""The loop on real software: training, Prometheus, Alertmanager, receiver and back; and what happens when parts die."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import waiting
from fake_nvml import skip_without_compiler

from exporter.commands import Inbox
from exporter.page import Page
from exporter.serving import MetricsServer, Target
from trainer_plugin.config import read_config
from trainer_plugin.demo.job import Workbench, train_guarded
from trainer_plugin.demo.servers import Stack, find_servers
from trainer_plugin.demo.text import Corpus
from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.faults import Faults
from trainer_plugin.faults.driver import uuid
from trainer_plugin.metrics import Metrics
from trainer_plugin.run_folder import JobFolder
from trainer_plugin.signals import Signals

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _servers():
    """Without the servers these tests fail, and say how to get them."""
    assert find_servers() is not None, "prometheus and prometheus-alertmanager wanted: run `make tools`"


def wait_for(condition, seconds=30.0):
    """The first true value of `condition`, asked again and again for so long."""
    return waiting.wait_for(condition, seconds, pause_seconds=0.05)


def run_demo(*arguments: str, out: Path) -> dict:
    """The JSON of a demo that must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugin", "demo", "--out", str(out), "--json", str(out) + ".json", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return json.loads(Path(str(out) + ".json").read_text())


def test_the_sustained_demo_is_healed_by_an_alert(tmp_path):
    """A damaged run is taken back by an alert to a step before the fault, whole in both tiers, and ends as its twin."""
    result = run_demo("--scenario", "sustained", out=tmp_path / "out")

    assert result["mode"] == "prometheus"
    remedies = [r for incident in result["incidents"] for r in incident["remedies"] if r["action"] == "rollback"]
    assert [(r["source"], r["alert"], r["outcome"]) for r in remedies] == [("alert", "TrainLossNotRecovering", "done")]
    (rollback,) = result["rollbacks"]
    assert rollback["to_step"] < result["fault"]["first_step"]
    assert rollback["tiers"] == {"local": "whole", "shared": "whole"}
    for tier in ("local", "shared"):
        folder = tmp_path / "out/checkpoints" / tier / "demo"
        assert list(folder.glob(f"step-{rollback['to_step']:09d}-*/manifest.json"))
    assert result["final"]["loss"] == pytest.approx(result["final"]["baseline_loss"], rel=0.02)
    assert all(incident["healed"] for incident in result["incidents"])


def test_the_demo_heals_itself_without_prometheus(tmp_path):
    """--local-only: the job's own policy takes the same remedy."""
    result = run_demo("--scenario", "sustained", "--local-only", "--steps", "1300", out=tmp_path / "out")

    assert result["mode"] == "local"
    remedies = [r for incident in result["incidents"] for r in incident["remedies"] if r["action"] == "rollback"]
    assert [(r["source"], r["outcome"]) for r in remedies] == [("local", "done")]
    assert result["rollbacks"][0]["to_step"] < result["fault"]["first_step"]


def test_a_gradient_explosion_is_clipped_at_once(tmp_path):
    """A surge is clipped in its own step and costs no rollback."""
    result = run_demo("--scenario", "grad-explosion", "--steps", "900", out=tmp_path / "out")

    (incident,) = result["incidents"]
    assert incident["class"] == "gradient_explosion"
    assert incident["first_step"] == result["fault"]["first_step"] == 701
    assert [(r["action"], r["step"]) for r in incident["remedies"]] == [("clip", 701), ("lower_lr", 701)]
    assert result["rollbacks"] == []
    assert "TrainGradNormSurge" in result["alerts"]


def test_a_gpu_that_falls_off_the_bus_is_told_by_the_driver(tmp_path):
    """XID 79 by a fake driver, and all after it real: exporter, rule, delivery, evidence, a rollback, no lower rate."""
    skip_without_compiler()
    out = tmp_path / "out"
    result = run_demo("--scenario", "hardware", "--steps", "1200", out=out)

    words = (
        "Run demo: 1 of its GPUs report a fault (XID, uncorrected ECC error, rows that can't be remapped, lost, or a "
        f"recovery that the driver asks for): rank 0 on {uuid(0)}, GPU 0 of {socket.gethostname()}, last XID 79."
    )
    assert result["pages"]["TrainGpuFault"] == words
    assert f"TrainGpuFault: {words}" in (out / "report.txt").read_text()
    notes = [json.loads(line) for line in (out / "runs/demo/incidents.jsonl").read_text().splitlines()]
    (note,) = [one for one in notes if one["kind"] == "action" and one["action"] == "note"]
    assert (note["source"], note["alert"], note["outcome"], note["detail"]) == ("alert", "TrainGpuFault", "done", words)
    incident = result["incidents"][0]
    assert incident["class"] == "hardware"
    assert [line for line in incident["evidence"] if line.endswith(f": TrainGpuFault: {words}")]
    assert all(one["healed"] for one in result["incidents"])
    remedies = [(r["action"], r["outcome"]) for one in result["incidents"] for r in one["remedies"]]
    assert ("rollback", "done") in remedies
    assert "lower_lr" not in [action for action, _ in remedies]
    assert result["rollbacks"][0]["to_step"] < result["fault"]["first_step"]
    assert f"gpu_uuid: {uuid(0)}" in (out / "guard.yaml").read_text()


def test_a_clean_run_is_left_alone(tmp_path):
    """Nothing broken: no incident, no action, no alert but the watchdog."""
    result = run_demo("--scenario", "clean", "--steps", "800", out=tmp_path / "out")

    assert result["incidents"] == []
    assert result["rollbacks"] == []
    assert result["alerts"] == ["TrainWatchdog"]
    assert result["final"]["loss"] == result["final"]["baseline_loss"]


@contextmanager
def a_run(tmp_path, servers=None):
    """A run folder that is locked by a job, its page on a real port, and real servers around it; None: those found."""
    runs = tmp_path / "runs"
    folder = JobFolder(runs, "gpt-0")
    page = Page(run="gpt-0")
    server = MetricsServer(page, host="127.0.0.1", port=0)
    target = Target(runs, run="gpt-0", rank="0", address=f"127.0.0.1:{server.port}")
    try:
        with Stack(tmp_path / "servers", runs, files("alert_rules"), servers=servers) as stack:
            yield folder, page, stack
    finally:
        target.remove()
        server.close()
        folder.lock.release()


def step_signals(step: int, loss: float) -> Signals:
    """A step with nothing but a loss."""
    return Signals(
        step=step,
        loss=loss,
        grad_norm=1.0,
        layer_grad_norms={},
        clip_coefficient=1.0,
        surge=False,
        withheld=None,
        amp_loss_scale=None,
        learning_rates=(1e-3,),
        step_seconds=0.01,
        data_wait_seconds=0.0,
        data_position=None,
    )


def test_a_spike_sustained_for_200_steps_becomes_a_command(tmp_path):
    """R1 + R4: 199 steps at 3.5 x the baseline ask for nothing; the 200th leads to a rollback command in the inbox."""
    config = read_config({"detection": {"warmup_steps": 50}})
    monitor = Monitor(DetectionConfig(warmup_steps=50))
    with a_run(tmp_path) as (folder, page, stack):
        metrics = Metrics(
            page,
            config,
            layers=(),
            info=dict.fromkeys(
                ["framework", "torch", "world_size", "mode", "data_rewind", "loss_mean", "shield"], "none"
            ),
        )
        step = 0

        def run_steps(count, loss):
            nonlocal step
            for _ in range(count):
                step += 1
                signals = step_signals(step, loss + 0.01 * (step % 7))
                with page.update():
                    metrics.show(signals, *monitor.update(signals), now=float(step))
                    page.set("train_step", step)
                    page.add("train_steps_total")

        run_steps(300, 2.0)
        run_steps(199, 7.0)
        seen = 'train_loss_high_steps{above="3"}'
        wait_for(lambda: [s for s in stack.query(seen) if s["value"][1] == "199"])
        # Two evaluations later at the earliest would an alert of this state be there.
        evaluated = 'prometheus_rule_group_last_evaluation_timestamp_seconds{rule_group=~".*train-signals"}'
        before = max(float(s["value"][1]) for s in wait_for(lambda: stack.query(evaluated)))
        wait_for(lambda: max(float(s["value"][1]) for s in stack.query(evaluated)) > before + 2.0)
        assert "TrainLossSpikeSustained" not in {alert["labels"]["alertname"] for alert in stack.alerts()}
        assert [c for c in folder.inbox.waiting() if c.alert == "TrainLossSpikeSustained"] == []

        run_steps(1, 7.0)

        command = wait_for(
            lambda: next((c for c in folder.inbox.waiting() if c.alert == "TrainLossSpikeSustained"), None)
        )
        assert (command.action, command.source, command.run) == ("rollback", "alert", "gpt-0")
        assert command.step == command.steps_total == 500


def test_the_heartbeat_arrives_and_an_unknown_run_gets_no_command(tmp_path):
    """The watchdog's alert becomes the run's heartbeat; a run without a folder gets nothing, and no folder."""
    with a_run(tmp_path) as (folder, page, _stack):
        stranger = Page(run="stranger")
        server = MetricsServer(stranger, host="127.0.0.1", port=0)
        target = Target(tmp_path / "runs", run="stranger", rank="0", address=f"127.0.0.1:{server.port}")
        stranger.set("train_loss_unrecovered_steps", 500)
        page.set("train_step", 1)

        wait_for(folder.outer.heartbeat)
        log = tmp_path / "servers/receiver.log"
        wait_for(lambda: "unknown_run" in log.read_text() or "stranger" in log.read_text())

        target.remove()
        server.close()
        assert folder.inbox.waiting() == []
        assert not (tmp_path / "runs/stranger").exists()


def weights_after(steps: int, tmp_path: Path, name: str, *, stack: Stack | None, kills: dict[int, str]) -> bytes:
    """The weights of a short guarded training, while servers are killed at the given steps."""
    corpus = Corpus.load(500_000)
    folder = tmp_path / name
    config = read_config(
        {
            "run": name,
            "runs": str(tmp_path / "runs"),
            "metrics": {"port": 0},
            "checkpoints": {"local": str(folder / "local"), "shared": str(folder / "shared"), "every": 50},
        }
    )
    model = None

    def on_start(guard):
        nonlocal model
        model = guard._parts.state._model

    def on_step(step, _loss):
        if step in kills:
            stack.kill(kills[step])

    train_guarded(
        corpus,
        config,
        seed=3,
        steps=steps,
        faults=Faults(),
        local_only=stack is None,
        on_start=on_start,
        on_step=on_step,
    )
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


def test_killed_servers_leave_the_training_untouched(tmp_path):
    """Prometheus, Alertmanager and receiver die in mid-run: the weights are bit for bit those of an undisturbed run."""
    kills = {60: "prometheus", 100: "alertmanager", 140: "receiver"}
    undisturbed = weights_after(200, tmp_path, "undisturbed", stack=None, kills={})
    with Stack(tmp_path / "servers", tmp_path / "runs", files("alert_rules")) as stack:
        disturbed = weights_after(200, tmp_path, "disturbed", stack=stack, kills=kills)

    assert disturbed == undisturbed
    torch.manual_seed(3)
    fresh = Workbench(Corpus.load(500_000), seed=3, steps=200).model
    assert disturbed != b"".join(value.numpy().tobytes() for value in fresh.state_dict().values())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_demo_leaves_no_server_behind(tmp_path, how):
    """Ctrl-C, or even kill -9, in mid-run: all three servers are gone."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "trainer_plugin", "demo", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ports: list[int] = []
        for line in demo.stdout:
            ports += [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", line)]
            if "training" in line:
                break
        assert len(ports) == 4  # Three servers and the job's own page.
        assert all(listens(port) for port in ports)

        os.kill(demo.pid, how)

        _, err = demo.communicate(timeout=60)
        if how == signal.SIGINT:
            assert (demo.returncode, err) == (130, "trainer_plugin: interrupted\n")
        wait_for(lambda: not any(listens(port) for port in ports), 10.0)
    finally:
        demo.kill()
        demo.wait()


def listens(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_command_for_the_run_is_taken_from_the_inbox_once(tmp_path):
    """The live inbox keeps one file for two deliveries of one alert, whoever delivers it."""
    with a_run(tmp_path) as (folder, page, stack):
        page.set("train_loss_unrecovered_steps", 200)
        page.set("train_step", 900)
        page.add("train_steps_total", 900)

        command = wait_for(lambda: next(iter(folder.inbox.waiting()), None))
        stack.kill("alertmanager")

        assert command.alert == "TrainLossNotRecovering"
        assert [c.id for c in Inbox(folder.path).waiting()] == [command.id]

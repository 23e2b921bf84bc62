"""What docker-compose.yml starts, started here without an engine: its files, arguments and token, on loopback."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from compose import mounts, on_this_machine, services
from tools import NEWEST, programs_of

from trainer_plugin.demo.process import Process, free_addresses

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

STEPS = "--steps=1200"


def test_the_demo_of_compose_is_healed_by_an_alert(tmp_path):
    """Receiver with token, Alertmanager, Prometheus and demo, each as its service is: an alert heals the run."""
    stack = services()
    names = ("receiver", "alertmanager", "prometheus", "demo")
    free = dict(zip(names, free_addresses(len(names)), strict=True))
    ports = {"receiver": "9402", "alertmanager": "9093", "prometheus": "9090", "demo": "9401"}
    hosts = ("127.0.0.1", "0.0.0.0")  # noqa: S104 - what the files say, and this test replaces
    addresses = {f"{host}:{port}": free[name] for name, port in ports.items() for host in (name, *hosts)}
    volumes = {"/demo/runs": tmp_path / "runs", "/secrets": tmp_path, "/prometheus": tmp_path / "tsdb",
               "/alertmanager": tmp_path / "alerts", "/demo/demo-out": tmp_path / "out"}  # fmt: skip
    (tmp_path / "runs/targets").mkdir(parents=True)
    (tmp_path / "receiver_token").write_text("a-token-of-a-test")

    def here(name: str) -> list[str]:
        """The arguments of a service, and copies of its files, as they hold on this machine."""
        folder = tmp_path / f"{name}-files"
        folder.mkdir()
        places = dict(volumes)
        for place, path in mounts(stack[name]).items():
            places[place] = path if path.is_dir() else folder / path.name
        for path in mounts(stack[name]).values():
            if path.is_file():
                text = on_this_machine(path.read_text(), places, addresses)
                # The job's own port stands by itself in guard.yaml.
                (folder / path.name).write_text(text.replace("port: 9401", f"port: {free['demo'].rpartition(':')[2]}"))
        return [on_this_machine(argument, places, addresses) for argument in stack[name]["command"]]

    programs = programs_of(NEWEST)
    commands = {
        "receiver": [sys.executable, "-m", "exporter"],
        "alertmanager": [str(programs / "prometheus-alertmanager")],
        "prometheus": [str(programs / "prometheus")],
    }
    with ExitStack() as ends:
        for name, command in commands.items():
            arguments = [*command, *here(name)]
            if name != "receiver":
                arguments.append(f"--web.listen-address={free[name]}")
            cwd = None if name == "receiver" else programs
            process = Process(name, arguments, free[name], tmp_path / f"{name}.log", cwd)
            ends.callback(process.kill)
            process.wait_ready(time.monotonic() + 60)
        arguments = [*here("demo"), STEPS, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "demo.json")]
        done = subprocess.run(
            [sys.executable, "-m", "trainer_plugin", *arguments],
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    result = json.loads((tmp_path / "demo.json").read_text())
    remedies = [r for incident in result["incidents"] for r in incident["remedies"] if r["action"] == "rollback"]
    assert [(r["source"], r["alert"], r["outcome"]) for r in remedies] == [("alert", "TrainLossNotRecovering", "done")]
    assert all(incident["healed"] for incident in result["incidents"])
    (run,) = [path for path in (tmp_path / "runs").iterdir() if (path / "state.json").exists()]
    assert (run / "heartbeat.json").exists()

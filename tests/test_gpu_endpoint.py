"""`python -m exporter` with GPU metrics: where it serves them, beside the receiver or alone, and how it ends."""

import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from fake_nvml import FakeDriver, Shown, exporter_on
from waiting import wait_for

from exporter.__main__ import cli
from exporter.config import Address, Config, Gpu
from exporter.gpu.endpoint import GpuEndpoint, is_wanted
from trainer_plugin.faults.driver import h100s


def read(url: str) -> Shown:
    """A scrape."""
    answer = httpx.get(url)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Shown(answer.text)


def test_xid_79_at_a_moment_of_ones_choosing(tmp_path):
    """The real process on a scenario file: healthy, then XID 79 and no answer any more, seen by a scrape."""
    driver = FakeDriver(tmp_path, h100s(2))
    with exporter_on(driver, tmp_path) as url:
        wait_for(lambda: read(url).value("DCGM_FI_DEV_GPU_TEMP", gpu="0") == 61)
        driver.raise_xid(0, 79)
        driver.lose(0)
        wait_for(lambda: read(url).value("gpu_lost", gpu="0") == 1)
        shown = read(url)
        assert shown.value("gpu_xid_events_total", gpu="0", **{"class": "hardware"}) == 1
        assert shown.values("DCGM_FI_DEV_GPU_TEMP", gpu="0") == []
        assert shown.labels("DCGM_FI_DEV_GPU_TEMP")[0]["Hostname"] == "node-1"


def test_gpu_metrics_and_receiver_are_one_process(tmp_path):
    """Both have their own port; SIGTERM ends both, and the reading process with them, in order."""
    driver = FakeDriver(tmp_path, h100s(1))
    config = tmp_path / "exporter.yaml"
    gpu = {"listen": "127.0.0.1:0", "interval_seconds": 0.1}
    receiver = {"listen": "127.0.0.1:0"}
    config.write_text(json.dumps({"runs": str(tmp_path), "receiver": receiver, "gpu": gpu}))
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "exporter", "--config", str(config)],
        env=driver.environment | {"NODE_NAME": "node-of-the-pod"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first, second = process.stdout.readline(), process.stdout.readline()
        assert first.startswith("GPU metrics on http://127.0.0.1:")
        assert second.startswith("receiver listening on http://127.0.0.1:")
        wait_for(lambda: read(first.split()[-1]).value("gpu_exporter_nvml_up"))
        assert read(first.split()[-1]).labels("DCGM_FI_DEV_GPU_TEMP")[0]["Hostname"] == "node-of-the-pod"
        assert httpx.get(second.split()[-1] + "/-/healthy").status_code == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert time.monotonic() - began < 5.0
        assert "Traceback" not in process.stderr.read()
    assert driver.calls()[-1] == "nvmlShutdown"
    assert driver.calls().count("nvmlShutdown") == 1


def test_e08_alone_and_without_a_driver_it_stays_up(tmp_path):
    """A process that has only GPUs to show stays up where there are none, and says so (case E08)."""
    driver = FakeDriver(tmp_path, h100s(1))
    driver.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    with exporter_on(driver, tmp_path) as url:
        wait_for(lambda: read(url).value("gpu_exporter_restarts_total") >= 1)
        shown = read(url)
        assert (shown.value("gpu_exporter_nvml_up"), shown.value("gpu_exporter_gpus")) == (0, 0)


def test_an_address_in_use_is_one_line_and_1(tmp_path, capsys):
    """Where a dcgm-exporter has the port already the line names it; no other port is taken in silence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = tmp_path / "exporter.yaml"
        config.write_text(f"receiver: off\ngpu: {{listen: '{address}'}}\n")
        assert cli("--config", str(config)) == 1
    assert capsys.readouterr().err == f"python -m exporter: gpu.listen: {address}: Address already in use\n"


def test_a_taken_port_is_no_reason_to_be_no_receiver(tmp_path):
    """Beside a dcgm-exporter the receiver starts, and a line says why there are no GPU metrics."""
    driver = FakeDriver(tmp_path, h100s(1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = tmp_path / "exporter.yaml"
        config.write_text(json.dumps({"receiver": {"listen": "127.0.0.1:0"}, "gpu": {"listen": address}}))
        with subprocess.Popen(
            [sys.executable, "-m", "exporter", "--config", str(config), "--runs", str(tmp_path)],
            env=driver.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.readline().startswith("receiver listening on ")
            process.terminate()
            assert f"no GPU metrics: gpu.listen: {address}: Address already in use\n" in process.stderr.read()


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (Config(gpu="off"), False),
        (Config(receiver="off"), True),
        (Config(gpu=Gpu(mode="always")), True),
    ],
)
def test_when_gpu_metrics_are_served(config, wanted):
    """Where they are all there is, or asked for; beside a receiver only with a driver (see below)."""
    assert is_wanted(config) is wanted


def test_a_receiver_on_a_host_without_driver_opens_no_second_port(tmp_path):
    """In mode `auto` a host that only receives shows no GPUs."""
    driver = FakeDriver(tmp_path, h100s(1))
    code = "from exporter.config import Config; from exporter.gpu.endpoint import is_wanted; print(is_wanted(Config()))"
    for library, wanted in ((driver.environment["LD_LIBRARY_PATH"], True), (str(tmp_path), False)):
        told = subprocess.run(
            [sys.executable, "-c", code],
            env=driver.environment | {"LD_LIBRARY_PATH": library},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert told == f"{wanted}\n"


def test_the_hosts_own_name_unless_told_otherwise():
    """The label `Hostname` is the setting, else the node's name, else the host's."""
    for settings, node, wanted in (
        (Gpu(listen=Address("127.0.0.1:0"), hostname="a"), "b", "a"),
        (Gpu(listen=Address("127.0.0.1:0")), "b", "b"),
        (Gpu(listen=Address("127.0.0.1:0")), None, socket.gethostname()),
    ):
        endpoint = GpuEndpoint(settings, node_name=node)
        command = endpoint._page._command
        assert command[command.index("--hostname") + 1] == wanted
        endpoint.close()

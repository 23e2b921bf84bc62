"""From what fails to the alert that names it: real exporter and Prometheus, a rank's real page, the shipped fakes.

A GPU that falls off the bus by the driver, a link that goes down by node_exporter's counters.
"""

import subprocess
from contextlib import contextmanager

import httpx
import pytest
import yaml
from fake_nvml import FakeDriver, exporter_on
from test_rules import RULES
from tools import NEWEST, OLDEST, programs_of
from waiting import wait_for

from exporter.page import Page
from exporter.serving import MetricsServer
from trainer_plugin.demo.process import free_addresses
from trainer_plugin.faults.driver import h100s, uuid
from trainer_plugin.faults.links import FakeLinks

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


@contextmanager
def rank_on(gpu_uuid, hostname):
    """The page of rank 1 of a run, served; where to find it."""
    page = Page(run="gpt-0", rank="1")
    page.set("train_rank_info", 1.0, gpu_uuid, hostname)
    server = MetricsServer(page, host="127.0.0.1", port=0)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


class Asked:
    """A Prometheus, by its address."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1"

    def query(self, promql: str) -> list[dict]:
        """What it answers; nothing while it is still starting."""
        try:
            return httpx.get(f"{self._url}/query", params={"query": promql}).json()["data"]["result"]
        except (httpx.TransportError, ValueError):
            return []

    def alert(self, name: str) -> dict:
        """The one alert there is, once it fires."""
        wait_for(lambda: self.query(f'ALERTS{{alertname="{name}",alertstate="firing",run="gpt-0"}}'), 40)
        (alert,) = httpx.get(f"{self._url}/alerts").json()["data"]["alerts"]
        return alert


@contextmanager
def prometheus_on(folder, release, targets):
    """A Prometheus of a release with the rules of gpu.yml, that scrapes jobs at addresses once a second."""
    (address,) = free_addresses(1)
    jobs = [
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target]}]}
        for name, target in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES / "gpu.yml")],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [programs_of(release) / "prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        prometheus = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            yield Asked(address)
        finally:
            prometheus.terminate()
            prometheus.wait(20)


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_xid_79_is_an_alert_that_names_run_rank_and_gpu(tmp_path, release):
    """Healthy GPUs raise nothing; after XID 79 TrainGpuFault says which rank of which run, which GPU and which host."""
    driver = FakeDriver(tmp_path, h100s(2))
    with exporter_on(driver, tmp_path) as url, rank_on(uuid(1), "node-1") as rank:
        gpus = url.removeprefix("http://").removesuffix("/metrics")
        with prometheus_on(tmp_path, release, {"train": rank, "gpu": gpus}) as prometheus:
            wait_for(lambda: len(prometheus.query("gpu:device:info")) == 2 and prometheus.query("train_rank_info"), 40)
            assert prometheus.query("ALERTS") == []
            driver.fail(1, 79)
            alert = prometheus.alert("TrainGpuFault")
    assert f"rank 1 on {uuid(1)}, GPU 1 of node-1, last XID 79." in alert["annotations"]["description"]
    assert alert["labels"] == {"alertname": "TrainGpuFault", "severity": "critical", "action": "note", "run": "gpt-0"}


def test_an_ecc_error_is_an_alert_that_names_the_gpu(tmp_path):
    """An uncorrected error that the driver counts is a fault of that GPU, with no XID to tell."""
    driver = FakeDriver(tmp_path, h100s(2))
    with exporter_on(driver, tmp_path) as url, rank_on(uuid(1), "node-1") as rank:
        gpus = url.removeprefix("http://").removesuffix("/metrics")
        with prometheus_on(tmp_path, OLDEST, {"train": rank, "gpu": gpus}) as prometheus:
            wait_for(lambda: prometheus.query("gpu:ecc_uncorrected:increase5m") and prometheus.query("train_rank_info"))
            driver.count_ecc(1)
            alert = prometheus.alert("TrainGpuFault")
    assert f"rank 1 on {uuid(1)}, GPU 1 of node-1." in alert["annotations"]["description"]


def test_a_link_that_goes_down_is_an_alert_that_names_the_host(tmp_path):
    """The counters of a drill's page are joined to the run by the host's name: TrainNetworkErrors says which one."""
    links = FakeLinks("node-1")
    server = MetricsServer(links, host="127.0.0.1", port=0)
    try:
        with rank_on(uuid(1), "node-1") as rank:
            targets = {"train": rank, "node": f"127.0.0.1:{server.port}"}
            with prometheus_on(tmp_path, OLDEST, targets) as prometheus:
                healthy = "host:link_failures:increase5m == 0"
                wait_for(lambda: prometheus.query(healthy) and prometheus.query("train_rank_info"), 40)
                assert prometheus.query("ALERTS") == []
                links.fail()
                alert = prometheus.alert("TrainNetworkErrors")
    finally:
        server.close()
    assert "node-1: 1 link failures" in alert["annotations"]["description"]

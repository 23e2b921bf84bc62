"""A GPU that falls off the bus, from the driver to the alert: real exporter, real Prometheus, a rank's real page."""

import json
import subprocess

import httpx
import pytest
import yaml
from fake_nvml import FakeDriver, exporter_on, h100s, uuid
from test_rules import RULES
from tools import NEWEST, OLDEST, programs_of
from waiting import wait_for

from exporter.page import Page
from exporter.serving import MetricsServer
from trainer_plugin.demo.process import free_addresses

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_xid_79_is_an_alert_that_names_run_rank_and_gpu(tmp_path, release):
    """Healthy GPUs raise nothing; after XID 79 TrainGpuFault says which rank of which run, which GPU and which host."""
    page = Page(run="gpt-0", rank="1")
    page.set("train_rank_info", 1.0, uuid(1), "node-1")
    server = MetricsServer(page, host="127.0.0.1", port=0)
    driver = FakeDriver(tmp_path, h100s(2))
    (address,) = free_addresses(1)
    with exporter_on(driver, tmp_path) as url:
        targets = {"train": f"127.0.0.1:{server.port}", "gpu": url.removeprefix("http://").removesuffix("/metrics")}
        jobs = [
            {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target]}]}
            for name, target in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES / "gpu.yml")],
            "scrape_configs": jobs,
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [programs_of(release) / "prometheus", f"--config.file={tmp_path}/prometheus.yml"]
        command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]
        log = (tmp_path / "log").open("w")
        prometheus = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)

        def ask(query: str) -> list[dict]:
            try:
                return httpx.get(f"http://{address}/api/v1/query", params={"query": query}).json()["data"]["result"]
            except (httpx.TransportError, ValueError):  # It is still starting.
                return []

        try:
            wait_for(lambda: len(ask("gpu:device:info")) == 2 and ask("train_rank_info"), 40)
            assert ask("ALERTS") == []
            driver.raise_xid(1, 79)
            driver.lose(1)
            wait_for(lambda: ask('ALERTS{alertname="TrainGpuFault",alertstate="firing",run="gpt-0"}'), 40)
            alerts = httpx.get(f"http://{address}/api/v1/alerts").json()["data"]["alerts"]
        finally:
            prometheus.terminate()
            prometheus.wait(20)
            log.close()
            server.close()
    (alert,) = alerts
    assert f"rank 1 on {uuid(1)}, GPU 1 of node-1, last XID 79." in alert["annotations"]["description"], json.dumps(
        alert
    )
    assert alert["labels"] == {"alertname": "TrainGpuFault", "severity": "critical", "action": "note", "run": "gpt-0"}

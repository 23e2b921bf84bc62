"""A thousand collections and scrapes of eight GPUs by the real exporter: nothing grows (case E15)."""

import os
from pathlib import Path

import httpx
import pytest
from fake_nvml import FakeDriver, Shown, exporter_on
from test_gpu_collector import open_files, resident_bytes
from waiting import wait_for

from trainer_plugin.faults.driver import h100s

pytestmark = pytest.mark.soak


def processes_of(url: str) -> list[int]:
    """The exporter that listens there, by its parent, and its reading process."""
    children = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    (exporter,) = [pid for pid in children if b"exporter" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (worker,) = Path(f"/proc/{exporter}/task/{exporter}/children").read_text().split() or _by_any_thread(exporter)
    assert url
    return [exporter, int(worker)]


def _by_any_thread(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


@pytest.mark.timeout(300)
def test_e15_a_thousand_scrapes_and_collections(tmp_path):
    """One start of NVML; descriptors within 2 and memory within 5 MB of what they were, in both processes."""
    driver = FakeDriver(tmp_path, h100s(8))
    with exporter_on(driver, tmp_path, interval_seconds=0.001) as url, httpx.Client() as client:

        def scrape() -> Shown:
            return Shown(client.get(url).text)

        wait_for(lambda: scrape().value("gpu_exporter_nvml_up"))
        for _ in range(100):
            client.get(url)
        pids = processes_of(url)
        before = [(open_files(pid), resident_bytes(pid)) for pid in pids]
        began = driver.calls().count("nvmlDeviceGetCount_v2")
        for _ in range(1000):
            assert client.get(url).status_code == 200
        wait_for(lambda: driver.calls().count("nvmlDeviceGetCount_v2") - began >= 1000, 240)
        after = [(open_files(pid), resident_bytes(pid)) for pid in pids]
    for (files, memory), (files_after, memory_after) in zip(before, after, strict=True):
        assert abs(files_after - files) <= 2
        assert abs(memory_after - memory) <= 5_000_000
    assert driver.calls().count("nvmlInitWithFlags") == 1

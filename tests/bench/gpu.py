"""What reading GPUs costs: the real reading process and pynvml on a fake driver with eight of them.

    make bench-gpu

The fake looks its answers up in a text, so what is measured is the upper end of our own part and says nothing about a
real driver. Descriptors and memory are those of the reading process.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fake_nvml import FakeDriver, worker_on
from waiting import wait_for

from exporter.gpu.page import GpuPage
from trainer_plugin.faults.driver import h100s

SCRAPES = 200


def used(pid: int) -> tuple[int, float, float]:
    """Descriptors, MiB in memory and seconds of processor time of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE") / 2**20, seconds


def bench_collections(driver: FakeDriver, collections: int) -> None:
    """So many collections one after the other, and what the process has used at their beginning and end."""
    with worker_on(driver, interval=1e-4) as worker:
        for _ in range(100):
            worker.next()
        before = used(worker.process.pid)
        seconds = [worker.next().value("gpu_exporter_collect_seconds") or 0.0 for _ in range(collections)]
        after = used(worker.process.pid)
    ordered = sorted(seconds)
    print(
        f"{collections} collections: median {statistics.median(ordered) * 1e3:.1f} ms, "
        f"99 of 100 within {ordered[int(0.99 * len(ordered))] * 1e3:.1f} ms"
    )
    print(
        f"processor time: {(after[2] - before[2]) / collections * 1e3:.1f} ms a collection, rendering and pipe included"
    )
    print(f"descriptors: {before[0]} before, {after[0]} after")
    print(f"memory: {before[1]:.1f} MiB before, {after[1]:.1f} MiB after")


def bench_scrapes(driver: FakeDriver) -> None:
    """What a scrape costs the serving process, which only joins text."""
    page = GpuPage(interval_seconds=1.0, hostname="node-1", environment=driver.environment)
    page.start()
    try:
        wait_for(lambda: b"DCGM_FI_PROF_SM_ACTIVE" in page.render(), 60.0, pause_seconds=0.05)
        seconds = []
        for _ in range(SCRAPES):
            began = time.perf_counter()
            text = page.render()
            seconds.append(time.perf_counter() - began)
    finally:
        page.close()
    samples = sum(not line.startswith(b"#") for line in text.splitlines())
    print(
        f"a scrape of {samples} samples, {len(text) / 1024:.0f} KiB: median {statistics.median(seconds) * 1e3:.2f} ms"
    )


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description="What reading GPUs costs, on a fake driver.")
    parser.add_argument("--collections", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        driver = FakeDriver(Path(folder), h100s(options.gpus))
        del driver.environment["FAKE_NVML_CALLS"]
        print(f"{options.gpus} GPUs")
        bench_collections(driver, options.collections)
        bench_scrapes(driver)


if __name__ == "__main__":
    main()

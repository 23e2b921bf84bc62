"""A fake NVIDIA driver as a real shared library, and the exporter's processes run on it.

What a test, a demo or a person needs to raise XID 79 at a moment of their choosing:

    driver = FakeDriver(folder, h100s(8))
    with exporter_on(driver, runs) as url:       # python -m exporter, GPU metrics at `url`
        driver.raise_xid(0, 79)                  # falls off the bus: the event, and no answer from now on
        driver.lose(0)
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.gpu.families import METRICS

SOURCE = Path(__file__).with_suffix(".c")
ROOT = SOURCE.parents[1]
MOST_LINES = 400
GPU_IS_LOST = 15

# One H100 at work: key of the scenario and value. Field numbers are nvml.h's.
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "clock.1": 1980, "clock.2": 2619, "temp": 61, "power": 612345, "replay": 3,
    "util": 97, "memory_util": 54, "encoder": 1, "decoder": 2, "memory.total": 85899345920,
    "memory.reserved": 645922816, "memory.used": 68719476736, "clock_events": 4, "events": 8, "gpm": 1, "mig": 0,
    "field.82": 71, "field.83": 123456789012, "field.138": 1000, "field.139": 2000, "field.197": 5000,
    "field.198": 7000, "field.74": 11, "field.75": 12, "field.76": 13, "field.77": 14, "field.78": 15, "field.79": 16,
    "field.269": 17, "field.270": 18, "field.271": 19, "field.3": 20, "field.4": 21, "field.5": 22, "field.6": 23,
    "field.29": 24, "field.30": 25, "field.31": 26, "field.38": 27, "field.45": 28, "field.52": 29, "field.59": 30,
    "field.161": 41, "field.162": 42, "field.163": 43,
    "field.142": 31, "field.143": 32, "field.145": 0, "field.230": 0, "gpm.1": 96.5, "gpm.2": 88.5, "gpm.3": 40.5,
    "gpm.5": 55.5, "gpm.10": 33.5, "gpm.11": 1.5, "gpm.12": 12.5, "gpm.13": 2.5,
}  # fmt: skip


def h100s(count: int) -> dict[str, str | int | float]:
    """A scenario of so many healthy GPUs."""
    found: dict[str, str | int | float] = {"driver": "580.65.06", "count": count}
    for index in range(count):
        found |= {f"{index}.{key}": value for key, value in H100.items()}
        found |= {f"{index}.uuid": uuid(index), f"{index}.pci": f"00000000:{index + 10:02X}:00.0"}
    return found


def uuid(index: int) -> str:
    """The UUID of a GPU of `h100s`."""
    return f"GPU-0000000{index}-1111-2222-3333-444444444444"


@cache
def library(*, old: bool = False) -> Path:
    """The folder with the built library; an old driver lacks the newer functions. Without a compiler it is skipped."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, by which the fake driver is built")
    folder = Path(mkdtemp(prefix="fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = ["-DOLD_DRIVER"] if old else []
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-O1", *flags]
    subprocess.run([*command, "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    return folder


class FakeDriver:
    """A scenario file and the environment in which a process meets it instead of a driver."""

    def __init__(self, folder: Path, scenario: dict[str, str | int | float], *, old: bool = False) -> None:
        self._path, self._calls = folder / "scenario", folder / "calls"
        self._scenario = dict(scenario)
        self._events: list[str] = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LD_LIBRARY_PATH": str(library(old=old)),
            "FAKE_NVML": str(self._path),
            "FAKE_NVML_CALLS": str(self._calls),
        }
        self._write()

    def change(self, changes: dict[str, str | int | float | None]) -> None:
        """Change keys of the scenario; None removes one."""
        self._scenario = {key: value for key, value in (self._scenario | changes).items() if value is not None}
        self._write()

    def raise_xid(self, gpu: int, xid: int) -> None:
        """Have the driver report an XID now."""
        self._events.append(f"event {gpu} {xid}")
        self._write()

    def lose(self, gpu: int, code: int = GPU_IS_LOST) -> None:
        """From now on every call for this GPU fails."""
        self.change({f"{gpu}.error.all": code})

    def calls(self) -> list[str]:
        """The functions called so far, in order."""
        return [line.split()[1] for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    def _write(self) -> None:
        lines = [*(f"{key} {value}" for key, value in self._scenario.items()), *self._events]
        draft = self._path.with_suffix(".draft")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self._path)


class Shown:
    """A page, read by prometheus_client's own parser: each sample by its name and labels.

    That parser calls every counter `_total`; here it keeps the name that stands in the text, as with Prometheus.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [
            sample if sample.name in METRICS else sample._replace(name=sample.name.removesuffix("_total"))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
        assert [s.name for s in self.samples] == [line.partition("{")[0].split()[0] for line in text.splitlines()
                                                  if not line.startswith("#")]  # fmt: skip

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of a metric's samples that have these labels."""
        return [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the one sample with these labels, None if there is none."""
        found = self.values(name, **labels)
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else None

    def labels(self, name: str, **labels: str) -> list[dict[str, str]]:
        """The labels of a metric's samples that have these ones."""
        return [s.labels for s in self.samples if s.name == name and labels.items() <= s.labels.items()]


class Worker:
    """The reading process by itself: each line that it writes is one collection, so no test has to wait for a time."""

    def __init__(
        self, driver: FakeDriver, *, interval: float = 0.02, remember: dict | None = None, arguments=()
    ) -> None:
        command = [sys.executable, "-W", "error", "-m", "exporter.gpu.worker", "--hostname", "node-1"]
        self.process = subprocess.Popen(
            [*command, "--interval", str(interval), *map(str, arguments)],
            env=driver.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.process.stdin.write(json.dumps(remember or {}) + "\n")
        self.process.stdin.flush()
        self.line: dict[str, object] = {}

    def next(self) -> Shown:
        """The next collection."""
        self.line = json.loads(self.process.stdout.readline())
        return Shown("".join(self.line["families"][name] for name in METRICS if name in self.line["families"]))

    def skip(self, collections: int) -> None:
        """Let so many pass."""
        for _ in range(collections):
            self.process.stdout.readline()

    def until(self, holds: Callable[[Shown], object]) -> Shown:
        """The first collection of which this is true."""
        for _ in range(MOST_LINES):
            shown = self.next()
            if holds(shown):
                return shown
        raise AssertionError(f"not in {MOST_LINES} collections; the last one:\n{shown.text}")

    def close(self) -> str:
        """End it; what it wrote to stderr."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=10)
        return errors


@contextmanager
def worker_on(driver: FakeDriver, **options) -> Iterator[Worker]:
    """A reading process that is ended whatever happens."""
    worker = Worker(driver, **options)
    try:
        yield worker
    finally:
        worker.close()


@contextmanager
def exporter_on(driver: FakeDriver, folder: Path, **settings: object) -> Iterator[str]:
    """`python -m exporter` with GPU metrics alone, on a free port: the address of its page."""
    gpu = {"listen": "127.0.0.1:0", "interval_seconds": 0.1, "hostname": "node-1", **settings}
    config = folder / "exporter.yaml"
    config.write_text(json.dumps({"receiver": "off", "gpu": gpu}))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "exporter", "--config", str(config)],
        env=driver.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=10)

"""The fake driver of trainer_plugin/faults under tests: built once, its calls on record, and the exporter's processes.

driver = FakeDriver(folder, h100s(8))
with exporter_on(driver, runs) as url:       # python -m exporter, GPU metrics at `url`
driver.fail(0, 79)                       # falls off the bus: the event, and no answer from now on
"""

import atexit
import json
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
from trainer_plugin.faults import driver as fake

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 400


def skip_without_compiler() -> None:
    """Skip the test where the fake driver cannot be built."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("no C compiler here, by which the fake driver is built")


@cache
def library(*, old: bool = False) -> Path:
    """The folder with the built library; an old driver lacks the newer functions. Without a compiler it is skipped."""
    skip_without_compiler()
    folder = Path(mkdtemp(prefix="fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fake.build_library(folder, "-Wall", "-Werror", *(["-DOLD_DRIVER"] if old else []))


class FakeDriver(fake.FakeDriver):
    """The shipped one on this checkout's code; it tells which functions were called."""

    def __init__(self, folder: Path, scenario: dict[str, str | int | float], *, old: bool = False) -> None:
        super().__init__(folder, scenario, library=library(old=old))
        self._calls = folder / "calls"
        self.environment |= {"PYTHONPATH": str(ROOT), "FAKE_NVML_CALLS": str(self._calls)}

    def calls(self) -> list[str]:
        """The functions called so far, in order; a line that is being written is left out."""
        lines = self._calls.read_text().split("\n")[:-1] if self._calls.exists() else []
        return [line.split()[1] for line in lines]


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

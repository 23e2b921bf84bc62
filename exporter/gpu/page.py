"""The GPU page: what the reading process has written last, and how that process does. A scrape waits for nothing."""

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exporter.gpu.families import METRICS, Families

_log = logging.getLogger(__name__)
# A driver that resets a GPU may take its time; after this it is held for hung, and asked by a new process.
HUNG_SECONDS = 30.0
_LAST_WORDS_SECONDS = 1.0
_LAST_MOMENT_SECONDS = 0.3
_MOST_BYTES = 1 << 20


class _Reading(msgspec.Struct):
    """One line of the reading process."""

    up: bool
    reason: str
    families: dict[str, str]
    remember: dict[str, Any]


class GpuPage:
    """Keeps a reading process alive, and renders what it has read.

    What is older than three intervals (and 10 s) is off the page: a value that stands still looks like a healthy one.

    Args:
        interval_seconds: how often the GPUs are read.
        hostname: the label `Hostname`.
        job_mapping: a folder with a file of job ids for each GPU, if there is one.
        environment: of the reading process; by default this process's own.
        stale_seconds: how old a reading may be.
        hung_seconds: how long one may take.
        command: what reads the GPUs.
    """

    def __init__(
        self,
        *,
        interval_seconds: float,
        hostname: str,
        job_mapping: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stale_seconds: float | None = None,
        hung_seconds: float = HUNG_SECONDS,
        command: Sequence[str] = (sys.executable, "-m", "exporter.gpu.worker"),
    ) -> None:
        self._command = [*command, "--interval", str(interval_seconds), "--hostname", hostname]
        if job_mapping is not None:
            self._command += ["--job-mapping", str(job_mapping)]
        self._environment = environment
        self._retry_seconds = interval_seconds
        self._stale_seconds = max(3 * interval_seconds, 10.0) if stale_seconds is None else stale_seconds
        self._hung_seconds = max(hung_seconds, 3 * interval_seconds)
        self._last: tuple[float, float, _Reading] | None = None  # By two clocks, and what was read.
        self._reason = ""
        self._remember: dict[str, Any] = {}
        self._restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="gpu", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def render(self, names: frozenset[str] = frozenset()) -> bytes:
        """The page in Prometheus' text format 0.0.4; only the families in `names` if any are given."""
        last = self._last
        own = Families()
        fresh = last is not None and last[2].up and time.monotonic() - last[0] <= self._stale_seconds
        own.add("gpu_exporter_nvml_up", "", int(fresh))
        own.add("gpu_exporter_restarts_total", "", self._restarts)
        texts: dict[str, str] = {}
        if last is not None and fresh:
            own.add("gpu_exporter_last_collect_timestamp_seconds", "", last[1])
            texts = dict(last[2].families)
        else:
            own.add("gpu_exporter_gpus", "", 0)
        texts |= own.texts()
        return "".join(texts[name] for name in METRICS if name in texts and (not names or name in names)).encode()

    def close(self) -> None:
        """End the reading process: by asking, and a second later without."""
        self._closing.set()
        with self._lock:
            process = self._process
        if process is not None:
            _end(process)
        if self._thread.is_alive():
            self._thread.join(_LAST_MOMENT_SECONDS)

    def _keep_reading(self) -> None:
        while not self._closing.is_set():
            try:
                self._read_from_one()
            except (OSError, msgspec.MsgspecError, subprocess.SubprocessError) as error:
                # No more processes, no memory for one, or one that writes what this can't read.
                self._say(f"the reading process failed: {error!r:.200}")
            if self._closing.wait(self._retry_seconds):
                return
            self._restarts += 1

    def _read_from_one(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # Whoever ends us by a key press ends us, and we end it.
            )
        assert process.stdin is not None  # noqa: S101 - as Popen promises for a pipe
        assert process.stdout is not None  # noqa: S101
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(self._remember) + b"\n")
                process.stdin.flush()
            self._take_lines(process, process.stdout.fileno())
        finally:
            _end(process)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _take_lines(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        """Line by line, until there are no more or none has come for too long."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while selector.select(self._hung_seconds):
                piece = os.read(descriptor, _MOST_BYTES)
                if not piece:
                    if not self._closing.is_set() and (self._last is None or self._last[2].up):
                        self._say(f"the reading process has ended ({process.wait(_LAST_WORDS_SECONDS)})")
                        self._last = None
                    return
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._take(msgspec.json.decode(line, type=_Reading))
        self._say(f"no answer from the driver for {self._hung_seconds:g} s: asked anew by a new process")

    def _take(self, reading: _Reading) -> None:
        self._last = time.monotonic(), time.time(), reading
        self._remember = reading.remember
        self._say(reading.reason)

    def _say(self, reason: str) -> None:
        """When it changes."""
        if reason != self._reason:
            self._reason = reason
            if reason:
                _log.warning("no GPU metrics: %s", reason)
            else:
                _log.info("GPU metrics are read")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_LAST_WORDS_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # In the kernel it ends when its call returns, if ever.
            process.wait(_LAST_MOMENT_SECONDS)

"""One collection: every device through the table, each with a boundary of its own, as text by family."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exporter.exposition import series
from exporter.gpu.devices import Device, find_gpu, instances
from exporter.gpu.driver import AbsentError, Answer, Driver, DriverGoneError, LostError
from exporter.gpu.families import Families
from exporter.gpu.jobs import read_jobs
from exporter.gpu.profiling import Profiler
from exporter.gpu.reading import Past, Reading
from exporter.gpu.table import FIELDS, PROFILES, TABLE, Row
from exporter.gpu.xids import MESSAGES, WINDOW_SECONDS, Xids

_log = logging.getLogger(__name__)
# By bit of the mask, in dcgm-exporter's words.
_CLOCK_EVENTS = (
    "gpu_idle", "clocks_setting", "power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal",
    "hw_power_brake", "display_clocks",
)  # fmt: skip
_WINDOW = {"window_size_in_ms": str(WINDOW_SECONDS * 1000)}
# What DCGM and NVML put where they have no value, in each of their types.
_BLANKS = {
    *(0x7FFFFFF0 + n for n in range(4)),
    *(0x7FFFFFFFFFFFFFF0 + n for n in range(4)),
    *(140737488355328 + n for n in range(4)),
    2**64 - 1,
}


class Collector:
    """The devices of this host, read again and again.

    Args:
        driver: the session.
        xids: the events of the same session.
        remembered: what `remember` gave in a session before this one.
        hostname: the label `Hostname`.
        job_mapping: a folder with a file of job ids for each GPU, if there is one.
        proc: where processes are looked up.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        driver: Driver,
        xids: Xids,
        remembered: dict[str, Any] | None = None,
        *,
        hostname: str,
        job_mapping: Path | None = None,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self._xids, self._clock = driver, xids, clock
        self._job_mapping, self._proc = job_mapping, proc
        version = driver.words("nvmlSystemGetDriverVersion")
        self._constant_labels = {"Hostname": hostname, "DCGM_FI_DRIVER_VERSION": version}
        self._pasts: dict[str, Past] = {}
        state = remembered or {}
        self._seen: dict[str, dict[str, str]] = state.get("seen", {})
        self._invalid: int = state.get("invalid", 0)
        self._clock_events: dict[str, deque[tuple[float, int]]] = {}
        self._told: set[str] = set()
        self._told_absent: set[tuple[str, str]] = set()

    def collect(self) -> Families:
        """Read everything once.

        Raises:
            DriverGoneError: the session is dead.
        """
        began = self._clock()
        families = Families()
        self._unavailable: Counter[tuple[str, str]] = Counter()
        lost = dict.fromkeys(self._seen, True)
        present: set[str] = set()
        count = self._driver.call("nvmlDeviceGetCount")
        for index in range(count):
            failed = False
            try:
                gpu = find_gpu(self._driver, index, self._constant_labels)
                self._seen[gpu.uuid] = gpu.labels
                lost[gpu.uuid] = True  # Until it has answered everything.
                whole = Families()
                for device in (gpu, *instances(self._driver, gpu)):
                    failed |= self._read(device, whole)
                    present.add(device.key)
                families.merge(whole)
                lost[gpu.uuid] = False
            except DriverGoneError:
                raise
            except LostError as error:
                self._tell(f"GPU {index} is lost: {error}")
            except Exception as error:  # noqa: BLE001 - one GPU must not cost the others
                failed = True
                self._tell(f"GPU {index}: {error!r}")
                # An error is no loss.
                lost |= {uuid: False for uuid, labels in self._seen.items() if labels["gpu"] == str(index)}
            families.add("gpu_exporter_collector_error", series("", {"gpu": str(index)}), int(failed))
        for uuid, is_lost in lost.items():
            families.add("gpu_lost", series("", self._seen[uuid]), int(is_lost))
        self._forget(present)
        self._add_own(families, count, self._clock() - began)
        return families

    def add_events(self, families: Families, now: float) -> None:
        """The XIDs as they stand, of lost GPUs too; `now` is in Unix seconds."""
        known = {uuid: labels for uuid, labels in self._seen.items() if uuid in self._xids.counts}
        for name in ("DCGM_FI_DEV_XID_ERRORS", "gpu_xid_events_total", "DCGM_EXP_XID_ERRORS_COUNT"):
            families.samples[name].clear()
        for uuid, labels in known.items():
            xid = self._xids.last[uuid]
            error = {"err_code": str(xid), "err_msg": MESSAGES.get(xid, "Unknown Error") if xid else "No Error"}
            families.add("DCGM_FI_DEV_XID_ERRORS", series("", labels | error), xid)
            for name, count in self._xids.counts[uuid].items():
                families.add("gpu_xid_events_total", series("", labels | {"class": name}), count)
        for (uuid, xid), count in self._xids.recent(now).items():
            if uuid in known:
                labels = known[uuid] | {"xid": str(xid)} | _WINDOW
                families.add("DCGM_EXP_XID_ERRORS_COUNT", series("", labels), count)

    def remember(self) -> dict[str, Any]:
        """What a later session has to know, for JSON."""
        return {"seen": self._seen, "invalid": self._invalid}

    def _read(self, device: Device, families: Families) -> bool:
        """One device through the table; whether anything went wrong that is not just absent."""
        if device.instance is None:
            self._xids.register(device.handle, device.uuid)
        past = self._pasts.get(device.key)
        if past is None:
            gpu = device.handle if device.instance is None else device.parent
            past = self._pasts[device.key] = Past(Profiler(self._driver, gpu, instance=device.instance))
        reading = Reading(
            self._driver, device.handle, past, fields=FIELDS, profiles=PROFILES, now=self._clock()
        )  # fmt: skip
        labels = series("", device.labels)
        failed = False
        for row in _rows(device):
            try:
                self._add_value(row, row.read(reading), labels, families)
            except AbsentError as absent:
                self._absent(row, str(absent))
            except (LostError, DriverGoneError):
                raise
            except Exception as error:  # noqa: BLE001 - one reading must not cost the others
                failed = True
                self._tell(f"GPU {device.index}, {row.name}: {error!r}")
        if device.instance is None:
            self._add_clock_events(device, reading, families)
        self._add_job(device, families)
        return failed

    def _add_value(self, row: Row, value: Answer, labels: str, families: Families) -> None:
        low, high = row.bounds
        if value is None or math.isnan(value) or value in _BLANKS or not low <= value <= high:
            self._invalid += 1
        else:
            families.add(row.name, labels, value)

    def _absent(self, row: Row, reason: str) -> None:
        if reason == "no_data":  # There will be.
            return
        self._unavailable[row.name, reason] += 1

    def _add_clock_events(self, device: Device, reading: Reading, families: Families) -> None:
        try:
            mask = reading.clock_events()
        except AbsentError:
            return
        now = self._clock()
        recent = self._clock_events.setdefault(device.key, deque())
        recent.append((now, mask))
        while now - recent[0][0] > WINDOW_SECONDS:
            recent.popleft()
        for bit, event in enumerate(_CLOCK_EVENTS):
            labels = device.labels | {"clock_event": event} | _WINDOW
            count = sum(mask >> bit & 1 for _, mask in recent)
            families.add("DCGM_EXP_CLOCK_EVENTS_COUNT", series("", labels), count)

    def _add_job(self, device: Device, families: Families) -> None:
        try:
            running = self._driver.call("nvmlDeviceGetComputeRunningProcesses", device.handle)
        except (LostError, DriverGoneError):
            raise
        except Exception:  # noqa: BLE001 - whose work it is is not worth an error
            running = []
        file = str(device.index) if device.instance is None else f"{device.index}.{device.instance}"
        pids = [process.pid for process in running]
        job = read_jobs(pids, proc=self._proc, folder=self._job_mapping, file=file)
        if any(job.values()):
            families.add("gpu_job_info", series("", device.labels | job), 1)

    def _add_own(self, families: Families, count: int, seconds: float) -> None:
        families.add("gpu_exporter_gpus", "", count)
        families.add("gpu_exporter_collect_seconds", "", seconds)
        families.add("gpu_exporter_invalid_values_total", "", self._invalid)
        if new := self._unavailable.keys() - self._told_absent:
            self._told_absent |= new
            _log.info("not here: %s", ", ".join(f"{metric} ({reason})" for metric, reason in sorted(new)))
        for (metric, reason), devices in self._unavailable.items():
            families.add("gpu_exporter_unavailable", series("", {"metric": metric, "reason": reason}), devices)

    def _forget(self, present: set[str]) -> None:
        """A device that is gone starts anew when it comes back."""
        for key in self._pasts.keys() - present:
            self._pasts.pop(key).profiler.close()
            self._clock_events.pop(key, None)

    def _tell(self, line: str) -> None:
        """Once."""
        if line not in self._told:
            self._told.add(line)
            _log.warning("%s", line)


def _rows(device: Device) -> tuple[Row, ...]:
    """Of a GPU that is divided, what its instances show by themselves is theirs alone."""
    if device.instance is not None:
        return _BY_INSTANCE
    return _OF_THE_WHOLE if device.shared else TABLE


_BY_INSTANCE = tuple(row for row in TABLE if row.by_instance)
_OF_THE_WHOLE = tuple(row for row in TABLE if not row.by_instance)

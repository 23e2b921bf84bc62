"""XIDs, the driver's error reports: taken from NVML's event set, counted by what they speak of.

NVML keeps no last XID that could be read: what comes before a GPU is registered is lost, and each event comes once.
Which XID means what: NVIDIA's catalogue of XID errors. Most have several possible causes, so one alone proves nothing.
"""

import ctypes
import logging
import time
from collections import deque
from typing import Any

from exporter.gpu.driver import AbsentError, Answer, Driver, DriverGoneError, Handle, LostError

_log = logging.getLogger(__name__)
XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError.
# As dcgm-exporter's own default.
WINDOW_SECONDS = 300
# Of a storm; the counters go on.
_MOST_RECENT = 10_000
CLASSES = ("hardware", "nvlink", "software", "other")

_MEANINGS = {
    "hardware": {
        48: "Double bit ECC error", 62: "Internal micro-controller halt", 64: "Row remapping failure",
        79: "GPU has fallen off the bus", 94: "Contained memory error", 95: "Uncontained memory error",
        109: "Context switch timeout", 119: "GSP RPC timeout", 120: "GSP error",
        121: "C2C link error", 136: "Link training failed", 140: "Unrecovered ECC error",
        143: "GPU initialization error", 158: "GPU fatal timeout", 167: "PCIe fatal timeout",
        171: "Uncorrectable DRAM error", 172: "Uncorrectable SRAM error",
    },
    "nvlink": {
        74: "NVLink error", 144: "NVLink SAW error", 145: "NVLink RLW error", 146: "NVLink TLW error",
        147: "NVLink TREX error", 148: "NVLink NVLPW_CTRL error", 149: "NVLink NETIR error", 150: "NVLink MSE error",
        155: "NVLink software defined error",
    },
    "software": {
        13: "Graphics engine exception", 31: "MMU fault", 43: "Reset channel verification error",
        45: "Preemptive cleanup", 69: "Graphics engine class error",
    },
    "other": {63: "Row remapping event", 92: "High single-bit ECC error rate", 154: "GPU recovery action changed"},
}  # fmt: skip
MESSAGES = {xid: text for meanings in _MEANINGS.values() for xid, text in meanings.items()}
FAULTS = tuple(sorted({*_MEANINGS["hardware"], *_MEANINGS["nvlink"]}))


def class_of(xid: int) -> str:
    """What an XID speaks of."""
    return next((name for name, meanings in _MEANINGS.items() if xid in meanings), "other")


class Xids:
    """The XIDs of this host's GPUs, by UUID. Counts begin at 0 for each GPU that can report any.

    Args:
        driver: the session.
        remembered: what `remember` gave in a session before this one.
    """

    def __init__(self, driver: Driver, remembered: dict[str, Any] | None = None) -> None:
        self._driver = driver
        self._set: Any = None
        self._names: dict[int, str] = {}
        state = remembered or {}
        self.counts: dict[str, dict[str, int]] = state.get("counts", {})
        self.last: dict[str, int] = state.get("last", {})
        self._recent: deque[tuple[float, str, int]] = deque(
            (tuple(one) for one in state.get("recent", ())), maxlen=_MOST_RECENT
        )
        try:
            self._set = driver.call("nvmlEventSetCreate")
        except AbsentError:
            _log.info("this driver reports no XIDs")

    def register(self, handle: Handle, uuid: str) -> None:
        """Have this GPU's XIDs reported; done once for each."""
        address = _address(handle)
        if self._set is None or self._names.get(address) == uuid:
            return
        self._names[address] = uuid
        try:
            if not self._driver.call("nvmlDeviceGetSupportedEventTypes", handle) & XID_EVENT:
                return
            self._driver.call("nvmlDeviceRegisterEvents", handle, XID_EVENT, self._set)
        except AbsentError:
            return
        self.counts.setdefault(uuid, dict.fromkeys(CLASSES, 0))
        self.last.setdefault(uuid, 0)

    def wait(self, seconds: float, now: float) -> bool:
        """Wait for an XID, but not longer than this; whether one came. `now` is in Unix seconds."""
        end = time.monotonic() + seconds
        try:
            if self._set is not None and self._names:
                return self._take(self._driver.call("nvmlEventSetWait_v2", self._set, int(seconds * 1000)), now)
        except DriverGoneError:
            raise
        except (AbsentError, LostError):
            pass  # With one GPU lost it may answer so at once and for ever.
        except self._driver.nvml.NVMLError as error:
            if error.value == self._driver.constant("NVML_ERROR_TIMEOUT"):
                return False
        time.sleep(max(0.0, end - time.monotonic()))
        return False

    def recent(self, now: float) -> dict[tuple[str, int], int]:
        """How often each XID came to each GPU within the window."""
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        found: dict[tuple[str, int], int] = {}
        for _, uuid, xid in self._recent:
            found[uuid, xid] = found.get((uuid, xid), 0) + 1
        return found

    def remember(self) -> dict[str, Any]:
        """What a later session has to know, for JSON."""
        return {"counts": self.counts, "last": self.last, "recent": list(self._recent)}

    def _take(self, event: Answer, now: float) -> bool:
        uuid = self._names.get(_address(event.device), "")
        if not event.eventType & XID_EVENT or uuid not in self.counts:
            return False
        xid = int(event.eventData)
        self.counts[uuid][class_of(xid)] += 1
        self.last[uuid] = xid
        self._recent.append((now, uuid, xid))
        _log.warning("XID %d (%s) on GPU %s", xid, MESSAGES.get(xid, "not in our list"), uuid)
        return True


def _address(handle: Handle) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0

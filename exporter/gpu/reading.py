"""One device's answers in one collection: each asked for once, and what only two collections together can tell."""

from collections.abc import Sequence
from typing import Any

from exporter.gpu.driver import AbsentError, Answer, Driver, Handle, explained
from exporter.gpu.profiling import Profiler

# The member of nvmlValue_t that holds a value, by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Past:
    """What is kept of a device from one collection to the next."""

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler
        self.counted: dict[Sequence[str], tuple[float, float]] = {}


class Reading:
    """The answers of one device. An error is remembered like an answer, and raised to each who asks.

    Args:
        driver: the session.
        handle: the device, a GPU or a MIG instance.
        past: what the last collection left.
        fields: the names of all fields that will be asked for, and the scope of each.
        profiles: the names of all profiling figures that will be asked for.
        now: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        driver: Driver,
        handle: Handle,
        past: Past,
        *,
        fields: dict[str, int],
        profiles: list[str],
        now: float,
    ) -> None:
        self._driver, self._handle, self._past, self._now = driver, handle, past, now
        self._fields, self._profiles = fields, profiles
        self._answers: dict[str, Any] = {}

    def call(self, name: str, *arguments: Answer) -> Answer:
        """A function of NVML of this device."""
        return self._driver.call(name, self._handle, *arguments)

    def constant(self, name: str) -> int:
        """A constant of the binding."""
        return self._driver.constant(name)

    def once(self, name: str) -> Answer:
        """A function that answers more than one question."""
        return self._remembered(name, lambda: self.call(name))

    def field(self, name: str) -> Answer:
        """A field by the name of its constant."""
        return _value(self._remembered("fields", self._read_fields), name)

    def profile(self, name: str) -> Answer:
        """A profiling figure by the name of its constant, in per cent."""
        read = self._past.profiler.read
        return _value(self._remembered("profiles", lambda: read(self._profiles, self._now)), name)

    def rate(self, names: Sequence[str], scale: float) -> float:
        """What these fields together have gained a second since the last collection.

        Raises:
            AbsentError: this is the first one, or a counter went back: it wrapped, or the driver was loaded anew.
        """
        total = float(sum(self.field(name) for name in names))
        before, then = self._past.counted.get(names, (total, self._now))
        self._past.counted[names] = total, self._now
        gained, seconds = total - before, self._now - then
        if seconds <= 0 or gained < 0:
            raise AbsentError("no_data")
        return float(gained / seconds * scale)

    def memory(self, part: str) -> int:
        """Bytes that are `free`, `used` or `reserved`.

        The driver's own memory is told apart from what is used by the newer call only; the older counts it as used.
        """
        return int(getattr(self._remembered("memory", self._read_memory), part))

    def clock_events(self) -> int:
        """The bitmask of reasons why the clocks are what they are, by its new name or its old one."""
        return int(self._remembered("clock_events", self._read_clock_events))

    def _read_fields(self) -> dict[str, Any]:
        known = [name for name in self._fields if hasattr(self._driver.nvml, name)]
        asked = [(self.constant(name), self._fields[name]) for name in known]
        values = self.call("nvmlDeviceGetFieldValues", asked)
        error = self._driver.nvml.NVMLError
        return {
            name: explained(error(value.nvmlReturn))
            if value.nvmlReturn
            else getattr(value.value, _MEMBERS[value.valueType])
            for name, value in zip(known, values, strict=True)
        }

    def _read_memory(self) -> Answer:
        try:
            return self.call("nvmlDeviceGetMemoryInfo", self.constant("nvmlMemory_v2"))
        except AbsentError as absent:
            return _OldMemory(self.call("nvmlDeviceGetMemoryInfo"), absent)

    def _read_clock_events(self) -> Answer:
        try:
            return self.call("nvmlDeviceGetCurrentClocksEventReasons")
        except AbsentError:
            return self.call("nvmlDeviceGetCurrentClocksThrottleReasons")

    def _remembered(self, key: str, read: Answer) -> Answer:
        if key not in self._answers:
            try:
                self._answers[key] = read()
            except Exception as error:  # noqa: BLE001 - raised below, each time
                self._answers[key] = error
        answer = self._answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer


def _value(answers: dict[str, Any], name: str) -> Answer:
    value = answers.get(name, AbsentError("function_not_found"))
    if isinstance(value, Exception):
        raise value
    return value


class _OldMemory:
    """The answer of the old call, which does not know what is reserved."""

    def __init__(self, info: Answer, absent: AbsentError) -> None:
        self.free, self.used, self._absent = info.free, info.used, absent

    @property
    def reserved(self) -> int:
        raise self._absent

"""NVML's GPM: profiling figures of Hopper and newer, as means between two samples."""

import contextlib
from typing import Any

from exporter.gpu.driver import AbsentError, Driver, Handle, explained

_LEAST_SECONDS = 0.1
_METRICS_VERSION = 1  # NVML_GPM_METRICS_GET_VERSION.


class Profiler:
    """The figures of one device, from its sample of this collection and the one before.

    Samples are at least 100 ms apart, as the driver wants them: what asks more often gets the same figures again.
    """

    def __init__(self, driver: Driver, gpu: Handle, *, instance: int | None = None) -> None:
        self._driver, self._gpu, self._instance = driver, gpu, instance
        self._samples: list[Any] = []
        self._times: list[float] = []
        self._supported: bool | None = None

    def read(self, names: list[str], now: float) -> dict[str, Any]:
        """Each figure by the name of its constant in per cent, or the error that stands for it.

        Raises:
            AbsentError: the device has no GPM, or there is no earlier sample yet.
        """
        if self._supported is None:
            self._supported = bool(self._driver.call("nvmlGpmQueryDeviceSupport", self._gpu).isSupportedDevice)
        if not self._supported:
            raise AbsentError("not_supported")
        if not self._times or now - self._times[-1] >= _LEAST_SECONDS:
            self._take(now)
        if len(self._times) < 2:
            raise AbsentError("no_data")
        return self._figures(names)

    def close(self) -> None:
        """Give the driver its memory back."""
        for sample in self._samples:
            with contextlib.suppress(Exception):  # A device that is lost: nothing is left to free.
                self._driver.call("nvmlGpmSampleFree", sample)
        self._samples, self._times = [], []

    def _take(self, now: float) -> None:
        """A new sample, into the older one's place."""
        while len(self._samples) < 2:
            self._samples.append(self._driver.call("nvmlGpmSampleAlloc"))
        if len(self._times) == 2:
            self._samples.reverse()
            self._times.pop(0)
        sample = self._samples[len(self._times)]
        if self._instance is None:
            self._driver.call("nvmlGpmSampleGet", self._gpu, sample)
        else:
            self._driver.call("nvmlGpmMigSampleGet", self._gpu, self._instance, sample)
        self._times.append(now)

    def _figures(self, names: list[str]) -> dict[str, Any]:
        nvml = self._driver.nvml
        known = [name for name in names if hasattr(nvml, name)]
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = _METRICS_VERSION, len(known)
        asked.sample1, asked.sample2 = self._samples
        for place, name in enumerate(known):
            asked.metrics[place].metricId = getattr(nvml, name)
        self._driver.call("nvmlGpmMetricsGet", asked)
        return {
            name: explained(nvml.NVMLError(metric.nvmlReturn)) if metric.nvmlReturn else float(metric.value)
            for name, metric in zip(known, asked.metrics, strict=False)
        }

"""The metrics of GPUs: name, type, help and how each is read. The one list; the page follows its order.

Names, types, units and help are those of dcgm-exporter's `default-counters.csv`, in the spelling of all versions before
4.9: first what it exports by default and NVML can supply, then those of its commented-out rows that matter for
training. Its counters without `_total` keep their names. What NVML can't supply is left out: the vGPU licence, and
DCGM's own verdicts (health, P2P).

A reader raises AbsentError where there is no value: absent, never 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from exporter.gpu.reading import Reading

_MIB = 1024.0 * 1024.0
_PERCENT = (0.0, 100.0)
_RATIO = (0.0, 1.0)
_MEMORY = (0.0, 2.0**24)  # 16 TiB.
_BANDWIDTH = (0.0, 1e13)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One metric. A value outside `bounds` (both included) is a fault of the driver, and counted as such.

    `by_instance`: under MIG it is read for each instance, and not for the GPU that they share.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[Reading], float | None]
    bounds: tuple[float, float] = (0.0, math.inf)
    by_instance: bool = False


def _field(name: str, *, scope: int = 0) -> Callable[[Reading], float | None]:
    """A field of nvmlDeviceGetFieldValues by the name of its constant; all fields are read in one call."""
    FIELDS[name] = scope
    return lambda reading: reading.field(name)


def _call(name: str, *constants: str) -> Callable[[Reading], float | None]:
    return lambda reading: reading.call(name, *(reading.constant(one) for one in constants))


def _thousandth(name: str) -> Callable[[Reading], float | None]:
    return lambda reading: reading.call(name) / 1000


def _utilization(part: str) -> Callable[[Reading], float | None]:
    return lambda reading: getattr(reading.once("nvmlDeviceGetUtilizationRates"), part)


def _codec(name: str) -> Callable[[Reading], float | None]:
    return lambda reading: reading.call(name)[0]


def _memory(part: str) -> Callable[[Reading], float | None]:
    return lambda reading: reading.memory(part) / _MIB


def _profile(name: str) -> Callable[[Reading], float | None]:
    """A ratio of NVML's GPM, which is in per cent there. Hopper and newer."""
    PROFILES.append(name)
    return lambda reading: reading.profile(name) / 100.0


def _rate(*names: str, scale: float = 1.0, scope: int = 0) -> Callable[[Reading], float | None]:
    """What counters have gained since the last collection, a second."""
    FIELDS.update(dict.fromkeys(names, scope))
    return lambda reading: reading.rate(names, scale)


# Each field that is read, and its scope: which link, or all of them.
FIELDS: dict[str, int] = {}
_ALL_LINKS = 0xFFFFFFFF
PROFILES: list[str] = []

_DEFAULT = (
    Row(name="DCGM_FI_DEV_SM_CLOCK", kind="gauge", help="SM clock frequency (in MHz).",
        read=_call("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"), bounds=(0.0, 10_000.0)),
    Row(name="DCGM_FI_DEV_MEM_CLOCK", kind="gauge", help="Memory clock frequency (in MHz).",
        read=_call("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"), bounds=(0.0, 100_000.0)),
    Row(name="DCGM_FI_DEV_MEMORY_TEMP", kind="gauge", help="Memory temperature (in C).",
        read=_field("NVML_FI_DEV_MEMORY_TEMP"), bounds=(-100.0, 250.0)),
    Row(name="DCGM_FI_DEV_GPU_TEMP", kind="gauge", help="GPU temperature (in C).",
        read=_call("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"), bounds=(-100.0, 250.0)),
    Row(name="DCGM_FI_DEV_POWER_USAGE", kind="gauge", help="Power draw (in W).",
        read=_thousandth("nvmlDeviceGetPowerUsage"), bounds=(0.0, 10_000.0)),
    Row(name="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", kind="counter",
        help="Total energy consumption since boot (in mJ).", read=_field("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION")),
    Row(name="DCGM_FI_DEV_PCIE_REPLAY_COUNTER", kind="counter", help="Total number of PCIe retries.",
        read=_call("nvmlDeviceGetPcieReplayCounter")),
    Row(name="DCGM_FI_DEV_GPU_UTIL", kind="gauge", help="GPU utilization (in %).",
        read=_utilization("gpu"), bounds=_PERCENT),
    Row(name="DCGM_FI_DEV_MEM_COPY_UTIL", kind="gauge", help="Memory utilization (in %).",
        read=_utilization("memory"), bounds=_PERCENT),
    Row(name="DCGM_FI_DEV_ENC_UTIL", kind="gauge", help="Encoder utilization (in %).",
        read=_codec("nvmlDeviceGetEncoderUtilization"), bounds=_PERCENT),
    Row(name="DCGM_FI_DEV_DEC_UTIL", kind="gauge", help="Decoder utilization (in %).",
        read=_codec("nvmlDeviceGetDecoderUtilization"), bounds=_PERCENT),
    Row(name="DCGM_FI_DEV_FB_FREE", kind="gauge", help="Framebuffer memory free (in MiB).",
        read=_memory("free"), bounds=_MEMORY, by_instance=True),
    Row(name="DCGM_FI_DEV_FB_USED", kind="gauge", help="Framebuffer memory used (in MiB).",
        read=_memory("used"), bounds=_MEMORY, by_instance=True),
    Row(name="DCGM_FI_DEV_FB_RESERVED", kind="gauge", help="Framebuffer memory reserved (in MiB).",
        read=_memory("reserved"), bounds=_MEMORY, by_instance=True),
    Row(name="DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", kind="counter",
        help="Total number of NVLink bandwidth counters for all lanes.",
        read=_rate("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", scale=1e-3,
                   scope=_ALL_LINKS),
        bounds=_BANDWIDTH),
    Row(name="DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", kind="counter",
        help="Number of remapped rows for uncorrectable errors", read=_field("NVML_FI_DEV_REMAPPED_UNC")),
    Row(name="DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", kind="counter",
        help="Number of remapped rows for correctable errors", read=_field("NVML_FI_DEV_REMAPPED_COR")),
    Row(name="DCGM_FI_DEV_ROW_REMAP_FAILURE", kind="gauge", help="Whether remapping of rows has failed",
        read=_field("NVML_FI_DEV_REMAPPED_FAILURE"), bounds=_RATIO),
    Row(name="DCGM_FI_PROF_GR_ENGINE_ACTIVE", kind="gauge", help="Ratio of time the graphics engine is active.",
        read=_profile("NVML_GPM_METRIC_GRAPHICS_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", kind="gauge",
        help="Ratio of cycles the tensor (HMMA) pipe is active.",
        read=_profile("NVML_GPM_METRIC_ANY_TENSOR_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_DRAM_ACTIVE", kind="gauge",
        help="Ratio of cycles the device memory interface is active sending or receiving data.",
        read=_profile("NVML_GPM_METRIC_DRAM_BW_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_PCIE_TX_BYTES", kind="gauge",
        help="The rate of data transmitted over the PCIe bus - including both protocol headers and data payloads - "
        "in bytes per second.", read=_rate("NVML_FI_DEV_PCIE_COUNT_TX_BYTES"), bounds=_BANDWIDTH),
    Row(name="DCGM_FI_PROF_PCIE_RX_BYTES", kind="gauge",
        help="The rate of data received over the PCIe bus - including both protocol headers and data payloads - "
        "in bytes per second.", read=_rate("NVML_FI_DEV_PCIE_COUNT_RX_BYTES"), bounds=_BANDWIDTH),
)  # fmt: skip


def _counters(rows: tuple[tuple[str, str, str], ...], *, scope: int = 0) -> tuple[Row, ...]:
    return tuple(
        Row(name=name, kind="counter", help=text, read=_field(field, scope=scope)) for name, field, text in rows
    )


_FOR_TRAINING = (
    *_counters((
        ("DCGM_FI_DEV_POWER_VIOLATION", "NVML_FI_DEV_PERF_POLICY_POWER",
         "Throttling duration due to power constraints (in ns)."),
        ("DCGM_FI_DEV_THERMAL_VIOLATION", "NVML_FI_DEV_PERF_POLICY_THERMAL",
         "Throttling duration due to thermal constraints (in ns)."),
        ("DCGM_FI_DEV_SYNC_BOOST_VIOLATION", "NVML_FI_DEV_PERF_POLICY_SYNC_BOOST",
         "Throttling duration due to sync-boost constraints (in ns)."),
        ("DCGM_FI_DEV_BOARD_LIMIT_VIOLATION", "NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT",
         "Throttling duration due to board limit constraints (in ns)."),
        ("DCGM_FI_DEV_LOW_UTIL_VIOLATION", "NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION",
         "Throttling duration due to low utilization (in ns)."),
        ("DCGM_FI_DEV_RELIABILITY_VIOLATION", "NVML_FI_DEV_PERF_POLICY_RELIABILITY",
         "Throttling duration due to reliability constraints (in ns)."),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
         "Throttling duration due to the software's thermal slowdown (in ns)."),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS", "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
         "Throttling duration due to the hardware's thermal slowdown (in ns)."),
        ("DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS",
         "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
         "Throttling duration due to the external power brake (in ns)."),
    )),
    Row(name="DCGM_FI_DEV_CLOCKS_EVENT_REASONS", kind="gauge", help="Current clock event reasons (a bitmask).",
        read=lambda reading: reading.clock_events()),
    *_counters((
        ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
         "Total number of single-bit volatile ECC errors."),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
         "Total number of double-bit volatile ECC errors."),
        ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "NVML_FI_DEV_ECC_SBE_AGG_TOTAL",
         "Total number of single-bit persistent ECC errors."),
        ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "NVML_FI_DEV_ECC_DBE_AGG_TOTAL",
         "Total number of double-bit persistent ECC errors."),
        ("DCGM_FI_DEV_RETIRED_SBE", "NVML_FI_DEV_RETIRED_SBE",
         "Total number of retired pages due to single-bit errors."),
        ("DCGM_FI_DEV_RETIRED_DBE", "NVML_FI_DEV_RETIRED_DBE",
         "Total number of retired pages due to double-bit errors."),
        ("DCGM_FI_DEV_RETIRED_PENDING", "NVML_FI_DEV_RETIRED_PENDING",
         "Total number of pages pending retirement."),
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
         "Total number of NVLink flow-control CRC errors."),
        ("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
         "Total number of NVLink data CRC errors."),
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
         "Total number of NVLink retries."),
        ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
         "Total number of NVLink recovery errors."),
    )),
    # The same on Hopper, where the fields above are gone.
    *_counters((
        ("DCGM_FI_DEV_NVLINK_CRC_ERROR_TOTAL", "NVML_FI_DEV_NVLINK_ERROR_DL_CRC",
         "Total number of NVLink data-link CRC errors."),
        ("DCGM_FI_DEV_NVLINK_REPLAY_TOTAL", "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",
         "Total number of NVLink data-link replays."),
        ("DCGM_FI_DEV_NVLINK_RECOVERY_TOTAL", "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",
         "Total number of NVLink data-link recoveries."),
    ), scope=_ALL_LINKS),
    Row(name="DCGM_FI_PROF_SM_ACTIVE", kind="gauge", help="The ratio of cycles an SM has at least 1 warp assigned.",
        read=_profile("NVML_GPM_METRIC_SM_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_SM_OCCUPANCY", kind="gauge", help="The ratio of number of warps resident on an SM.",
        read=_profile("NVML_GPM_METRIC_SM_OCCUPANCY"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_PIPE_FP64_ACTIVE", kind="gauge", help="Ratio of cycles the fp64 pipes are active.",
        read=_profile("NVML_GPM_METRIC_FP64_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_PIPE_FP32_ACTIVE", kind="gauge", help="Ratio of cycles the fp32 pipes are active.",
        read=_profile("NVML_GPM_METRIC_FP32_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="DCGM_FI_PROF_PIPE_FP16_ACTIVE", kind="gauge", help="Ratio of cycles the fp16 pipes are active.",
        read=_profile("NVML_GPM_METRIC_FP16_UTIL"), bounds=_RATIO, by_instance=True),
    Row(name="gpu_recovery_action", kind="gauge",
        help="What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain of peers, 4 drain and reset.",
        read=_field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"), bounds=(0.0, 16.0)),
)  # fmt: skip

TABLE: tuple[Row, ...] = (*_DEFAULT, *_FOR_TRAINING)

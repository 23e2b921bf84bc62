"""Every metric of the table has the value and unit that DCGM gives it, read by the real pynvml from a real library."""

import re
import subprocess

import pytest
from fake_nvml import FakeDriver, Worker, worker_on
from test_rules import RULES
from tools import find_tool

from exporter.gpu.families import METRICS
from exporter.gpu.table import FIELDS, PROFILES, TABLE
from exporter.gpu.xids import FAULTS
from trainer_plugin.faults.driver import H100, h100s, uuid

MIB = 1024 * 1024
# By name, from the scenario's raw numbers: what NVML says in mW, bytes or per cent is W, MiB or a ratio here.
EXPECTED = {
    "DCGM_FI_DEV_SM_CLOCK": 1980, "DCGM_FI_DEV_MEM_CLOCK": 2619, "DCGM_FI_DEV_MEMORY_TEMP": 71,
    "DCGM_FI_DEV_GPU_TEMP": 61, "DCGM_FI_DEV_POWER_USAGE": 612.345,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123456789012, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 3,
    "DCGM_FI_DEV_GPU_UTIL": 97, "DCGM_FI_DEV_MEM_COPY_UTIL": 54, "DCGM_FI_DEV_ENC_UTIL": 1, "DCGM_FI_DEV_DEC_UTIL": 2,
    "DCGM_FI_DEV_FB_FREE": 81920 - 616 - 65536, "DCGM_FI_DEV_FB_USED": 65536, "DCGM_FI_DEV_FB_RESERVED": 616,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 32, "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": 31,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.965,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.555, "DCGM_FI_PROF_DRAM_ACTIVE": 0.335,
    "DCGM_FI_DEV_POWER_VIOLATION": 11, "DCGM_FI_DEV_THERMAL_VIOLATION": 12, "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": 13,
    "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": 14, "DCGM_FI_DEV_LOW_UTIL_VIOLATION": 15,
    "DCGM_FI_DEV_RELIABILITY_VIOLATION": 16, "DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS": 17,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": 18,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": 19, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 4,
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 20, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 21, "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": 22,
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": 23, "DCGM_FI_DEV_RETIRED_SBE": 24, "DCGM_FI_DEV_RETIRED_DBE": 25,
    "DCGM_FI_DEV_RETIRED_PENDING": 26, "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 27,
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 28, "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 29,
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 30, "DCGM_FI_DEV_NVLINK_REPLAY_TOTAL": 41,
    "DCGM_FI_DEV_NVLINK_RECOVERY_TOTAL": 42, "DCGM_FI_DEV_NVLINK_CRC_ERROR_TOTAL": 43,
    "DCGM_FI_PROF_SM_ACTIVE": 0.885, "DCGM_FI_PROF_SM_OCCUPANCY": 0.405, "DCGM_FI_PROF_PIPE_FP64_ACTIVE": 0.015,
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": 0.125, "DCGM_FI_PROF_PIPE_FP16_ACTIVE": 0.025, "gpu_recovery_action": 0,
}  # fmt: skip
RATES = {"DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES"}
# dcgm-exporter's etc/default-counters.csv at 4.5.3-4.8.2: what is on by default.
DEFAULT_OF_DCGM = {
    "DCGM_FI_DEV_SM_CLOCK": "gauge", "DCGM_FI_DEV_MEM_CLOCK": "gauge", "DCGM_FI_DEV_MEMORY_TEMP": "gauge",
    "DCGM_FI_DEV_GPU_TEMP": "gauge", "DCGM_FI_DEV_POWER_USAGE": "gauge",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "counter",
    "DCGM_FI_DEV_GPU_UTIL": "gauge", "DCGM_FI_DEV_MEM_COPY_UTIL": "gauge", "DCGM_FI_DEV_ENC_UTIL": "gauge",
    "DCGM_FI_DEV_DEC_UTIL": "gauge", "DCGM_FI_DEV_XID_ERRORS": "gauge", "DCGM_FI_DEV_FB_FREE": "gauge",
    "DCGM_FI_DEV_FB_USED": "gauge", "DCGM_FI_DEV_FB_RESERVED": "gauge",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "counter", "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "gauge",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "counter", "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "gauge", "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge", "DCGM_FI_PROF_DRAM_ACTIVE": "gauge",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "gauge", "DCGM_FI_PROF_PCIE_RX_BYTES": "gauge",
}  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of two GPUs once every figure is there, profiling ones too."""
    driver = FakeDriver(tmp_path_factory.mktemp("driver"), h100s(2))
    with worker_on(driver) as worker:
        yield worker.until(lambda shown: len(shown.values("DCGM_FI_PROF_SM_ACTIVE")) == 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_value_and_unit(shown, name):
    """The number is that of the driver in DCGM's unit, once for each GPU."""
    assert shown.value(name, UUID=uuid(0)) == pytest.approx(EXPECTED[name], rel=1e-12)
    assert len(shown.values(name)) == 2


def test_no_row_is_left_out():
    """Each row of the table has an expected value here, or is a rate."""
    assert {row.name for row in TABLE} == set(EXPECTED) | RATES


def test_labels_are_those_of_dcgm_exporter(shown):
    """Names and order of the labels are those of dcgm-exporter before its renames."""
    for row in TABLE:
        assert list(shown.labels(row.name, gpu="1")[0].items()) == [
            ("gpu", "1"),
            ("UUID", uuid(1)),
            ("pci_bus_id", "00000000:0B:00.0"),
            ("device", "nvidia1"),
            ("modelName", H100["name"]),
            ("Hostname", "node-1"),
            ("DCGM_FI_DRIVER_VERSION", "580.65.06"),
        ]


def test_every_default_counter_of_dcgm_exporter_is_there_but_for_the_vgpu_licence(shown):
    """What dcgm-exporter shows by default is here under the same name and type."""
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", shown.text, re.MULTILINE))
    wanted = {name: kind for name, kind in DEFAULT_OF_DCGM.items() if name != "DCGM_FI_DEV_VGPU_LICENSE_STATUS"}
    assert wanted.items() <= types.items()


def test_rates_are_what_counters_gain_a_second(tmp_path):
    """NVLink's counters in KiB give DCGM's MB/s, PCIe's bytes bytes a second; a counter that goes back gives none."""
    driver = FakeDriver(tmp_path, h100s(1))
    with worker_on(driver) as worker:
        worker.until(lambda shown: shown.value("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL") == 0.0)
        driver.change({"0.field.138": 11_000, "0.field.139": 22_000, "0.field.197": 25_000, "0.field.198": 37_000})
        moved = worker.until(lambda shown: shown.value("DCGM_FI_PROF_PCIE_TX_BYTES"))
        rates = [moved.value(f"DCGM_FI_PROF_PCIE_{way}_BYTES") for way in ("TX", "RX")]
        assert rates[1] / rates[0] == pytest.approx(30_000 / 20_000)
        assert moved.value("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL") / rates[0] == pytest.approx(30 / 20_000)
        assert 20_000 / rates[0] < 2.0  # Seconds between two collections 0.02 s apart, on a machine under any load.
        driver.change({"0.field.197": 10})
        worker.until(lambda shown: not shown.values("DCGM_FI_PROF_PCIE_TX_BYTES"))


def test_the_parser_of_prometheus_finds_nothing_but_dcgms_own_names(shown):
    """Promtool's linter complains of the names that DCGM has chosen, `modelName` among them, and of nothing of ours."""
    checked = subprocess.run(
        [find_tool("promtool"), "check", "metrics"], input=shown.text, capture_output=True, text=True, check=False
    )
    complaints = [line for line in (checked.stdout + checked.stderr).splitlines() if line]
    assert checked.returncode in (0, 3), complaints
    of_ours = [line for line in complaints if not line.startswith(("DCGM_FI_", "DCGM_EXP_"))]
    assert [
        line for line in of_ours if not line.endswith("label names should be written in 'snake_case' not 'camelCase'")
    ] == []


def test_names_of_our_own_follow_prometheus():
    """Our own counters end in _total, and nothing else of ours does; DCGM's keep their names."""
    for name, (kind, text) in METRICS.items():
        assert text
        if not name.startswith("DCGM_"):
            assert name.endswith("_total") == (kind == "counter"), name


def test_fields_and_figures_are_known_to_the_binding():
    """Every constant that the table names is one of pynvml's, so a misspelt one is not taken for an old binding."""
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in (*FIELDS, *PROFILES) if not hasattr(pynvml, name)] == []


def test_rules_ask_for_metrics_of_the_table():
    """Every classic name in the rules is one of the table's; the XIDs in the rules are those held for faults."""
    text = (RULES / "gpu.yml").read_text()
    # What dcgm-exporter alone has: the names of 4.9 and its own totals.
    theirs = {
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", "DCGM_FI_DEV_BOARD_POWER_WATTS",
        "DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED_BYTES", "DCGM_FI_DEV_FB_FREE_BYTES",
        "DCGM_FI_DEV_SM_CLOCK_HERTZ", "DCGM_FI_PROF_TENSOR_UTIL_RATIO", "DCGM_FI_PROF_SM_UTIL_RATIO",
        "DCGM_FI_PROF_DRAM_UTIL_RATIO", "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND",
        "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", "DCGM_FI_DEV_ROW_REMAP_FAILED", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL",
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_TOTAL", "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL",
        "DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL", "DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL",
        "DCGM_FI_DEV_XID_ERROR", "DCGM_EXP_XID_ERRORS_TOTAL",
    }  # fmt: skip
    asked = set(re.findall(r"\b(?:DCGM_\w+|gpu_\w+)\b(?!:)", re.sub(r"#.*", "", text))) - {"gpu_util"}
    assert asked - theirs <= set(METRICS)
    lists = set(re.findall(r'"((?:\d+\|)+\d+)"', text))
    assert lists == {"|".join(map(str, FAULTS))}


def test_a_line_is_one_collection(tmp_path):
    """The reading process writes a line for each collection, whole, with what the next process has to know."""
    with worker_on(FakeDriver(tmp_path, h100s(1))) as worker:
        assert isinstance(worker, Worker)
        worker.next()
        assert worker.line["up"] is True
        assert worker.line["remember"]["collector"]["seen"].keys() == {uuid(0)}

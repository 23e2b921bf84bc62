"""Real-life faults of drivers and GPUs (area exporter of the cases): what is left on the page, and what is not."""

import os
import types

import pytest
from fake_nvml import FakeDriver, worker_on

from exporter.gpu.collector import Collector
from exporter.gpu.driver import Driver, DriverGoneError
from exporter.gpu.families import METRICS
from exporter.gpu.xids import Xids
from trainer_plugin.faults.driver import h100s, uuid

NOT_SUPPORTED, LOST, MISMATCH, UNKNOWN = 3, 15, 18, 999
SENTINELS = [9223372036854775792, 9223372036854775794, 2147483632, 2**64 - 1]


class NVMLError(Exception):
    """As pynvml's: the code is in `value`."""

    def __init__(self, value):
        super().__init__(value)
        self.value = value


class Binding(types.SimpleNamespace):
    """A binding made by hand, for what no library can be made to do: what is not in it is not known to it."""

    def __init__(self, gpus=1, **functions):
        usual = {
            "NVMLError": NVMLError,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: b"580",
            "nvmlDeviceGetCount": lambda: gpus,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetName": lambda _: "NVIDIA A100-SXM4-80GB",
            "nvmlDeviceGetPciInfo": lambda _: types.SimpleNamespace(busId="0"),
            "nvmlDeviceGetTemperature": lambda *_: 40,
            "NVML_TEMPERATURE_GPU": 0,
        }
        super().__init__(**usual | functions)


def page_of(binding: Binding, times: int = 1) -> str:
    """The text after so many collections."""
    driver = Driver(binding)
    collector = Collector(driver, Xids(driver), hostname="h")
    for _ in range(times):
        families = collector.collect()
    texts = families.texts()
    return "".join(texts[name] for name in METRICS if name in texts)


def refuse(error):
    """A function that raises."""

    def function(*_):
        raise error

    return function


def test_e01_one_query_that_is_not_supported_costs_only_its_own_series(tmp_path):
    """What one GPU does not support is absent there, everything else is there, and the log has one line (case E01)."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.change({"0.error.nvmlDeviceGetPowerUsage": NOT_SUPPORTED, "0.encoder": None})
    with worker_on(driver) as worker:
        for _ in range(5):
            shown = worker.next()
        errors = worker.close()
    for name in ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_ENC_UTIL"):
        assert shown.values(name, gpu="0") == []
        assert len(shown.values(name, gpu="1")) == 1
    for name in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"):
        assert len(shown.values(name)) == 2
    assert errors.count("DCGM_FI_DEV_POWER_USAGE") == 1
    assert shown.value("gpu_exporter_unavailable", metric="DCGM_FI_DEV_POWER_USAGE", reason="not_supported") == 1


def test_e02_a_function_that_an_old_driver_lacks_costs_only_its_own_series(tmp_path):
    """A library without the newer functions serves the rest; what is missing is told once, and why (case E02)."""
    driver = FakeDriver(tmp_path, h100s(1), old=True)
    with worker_on(driver) as worker:
        shown = worker.next()
        assert worker.close().count("function_not_found") == 1
    assert shown.value("DCGM_FI_DEV_GPU_TEMP") == 61
    assert shown.value("DCGM_FI_DEV_CLOCKS_EVENT_REASONS") == 4  # By its old name.
    assert shown.labels("gpu_exporter_unavailable", reason="function_not_found") == [
        {"metric": "DCGM_FI_DEV_FB_RESERVED", "reason": "function_not_found"}
    ]


def test_e02_a_binding_that_lacks_a_function_or_a_constant_is_no_error():
    """An old pynvml without a function, or without a constant, costs the series that need it (case E02)."""
    text = page_of(Binding(nvmlDeviceGetClockInfo=lambda *_: 1980))
    assert "DCGM_FI_DEV_GPU_TEMP{" in text
    assert "DCGM_FI_DEV_SM_CLOCK{" not in text
    assert 'gpu_exporter_unavailable{metric="DCGM_FI_DEV_SM_CLOCK",reason="function_not_found"} 1\n' in text
    assert 'gpu_exporter_collector_error{gpu="0"} 0\n' in text


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_e05_what_stands_for_no_value_is_no_value(tmp_path, sentinel):
    """DCGM's and NVML's blanks are left out wherever they come, and counted (case E05)."""
    driver = FakeDriver(tmp_path, h100s(1))
    driver.change(
        {"0.field.82": sentinel, "0.temp": sentinel % 2**32, "0.power": sentinel % 2**32, "0.field.4": sentinel}
    )
    with worker_on(driver) as worker:
        shown = worker.next()
    for name in ("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"):
        assert shown.values(name) == []
    assert shown.values("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL") == []
    assert shown.value("gpu_exporter_invalid_values_total") == 4
    assert shown.value("DCGM_FI_DEV_MEM_CLOCK") == 2619


@pytest.mark.parametrize("value", [None, 140737488355328.0, float("nan")])
def test_e05_none_and_the_blank_of_floats_too(value):
    """None, the blank of a double and NaN are left out and counted as well (case E05)."""
    text = page_of(Binding(nvmlDeviceGetTemperature=lambda *_: value), times=2)
    assert "DCGM_FI_DEV_GPU_TEMP" not in text.replace('metric="DCGM_FI_DEV_GPU_TEMP"', "")
    assert "gpu_exporter_invalid_values_total 2\n" in text


def test_e06_a_utilisation_above_100_is_none():
    """Of 97, 2619, 4294967295 and 98 per cent only the first and the last are shown (case E06)."""
    values = iter([97, 2619, 4294967295, 98])
    rates = Binding(nvmlDeviceGetUtilizationRates=lambda _: types.SimpleNamespace(gpu=next(values), memory=1))
    driver = Driver(rates)
    collector = Collector(driver, Xids(driver), hostname="h")
    texts = [collector.collect().texts() for _ in range(4)]
    shown = [text.get("DCGM_FI_DEV_GPU_UTIL", "").split()[-1:] for text in texts]
    assert shown == [["97"], [], [], ["98"]]
    assert "gpu_exporter_invalid_values_total 2\n" in texts[-1]["gpu_exporter_invalid_values_total"]


def test_e07_mig_instances_have_their_own_memory_and_nothing_that_is_not_theirs(tmp_path):
    """Two 3g instances show memory and figures of their own, with id and known profile; a plain GPU all (case E07)."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.change({"0.mig": 1, "0.error.nvmlDeviceGetUtilizationRates": NOT_SUPPORTED})
    for place, number, name in ((0, 1, "NVIDIA A100-SXM4-80GB MIG 3g.40gb"), (1, 2, "<<<NULL>>>")):
        part = {
            "id": number,
            "name": name,
            "memory.total": 42949672960,
            "memory.used": 1048576 * (place + 1),
            "gpm.5": 50,
        }
        driver.change({f"0.{place}.{key}": value for key, value in part.items()})
    with worker_on(driver) as worker:
        shown = worker.until(lambda shown: len(shown.values("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")) == 3)
    assert [labels["gpu"] for labels in shown.labels("DCGM_FI_DEV_GPU_UTIL")] == ["1"]
    first, second = (shown.labels("DCGM_FI_DEV_FB_USED", GPU_I_ID=number)[0] for number in ("1", "2"))
    assert list(first)[4:7] == ["modelName", "GPU_I_PROFILE", "GPU_I_ID"]
    assert (first["GPU_I_PROFILE"], first["UUID"], "GPU_I_PROFILE" in second) == ("3g.40gb", uuid(0), False)
    assert shown.values("DCGM_FI_DEV_FB_USED", gpu="0") == [1, 2]  # No third one of the whole GPU.
    assert shown.values("DCGM_FI_DEV_GPU_TEMP", gpu="0") == [61]
    assert "NULL" not in shown.text
    assert len(shown.values("DCGM_FI_DEV_FB_USED", gpu="1")) == 1


def test_e11_memory_of_the_driver_is_not_used_and_units_are_dcgms(tmp_path):
    """An idle GPU has 0 MiB used and 616 reserved, all add up to its total; 61234 mW are 61.234 W (case E11)."""
    driver = FakeDriver(tmp_path, h100s(1))
    driver.change({"0.memory.used": 0, "0.power": 61234})
    with worker_on(driver) as worker:
        shown = worker.next()
    memory = [shown.value(f"DCGM_FI_DEV_FB_{part}") for part in ("USED", "RESERVED", "FREE")]
    assert memory == [0, 616, 81304]
    assert sum(memory) == 81920
    assert shown.value("DCGM_FI_DEV_POWER_USAGE") == pytest.approx(61.234)


def test_e11_where_there_is_only_the_old_call_nothing_is_reserved(tmp_path):
    """The old call can't tell what is reserved: that series is absent, and the page says why (case E11)."""
    with worker_on(FakeDriver(tmp_path, h100s(1), old=True)) as worker:
        shown = worker.next()
    assert shown.values("DCGM_FI_DEV_FB_RESERVED") == []
    assert shown.value("DCGM_FI_DEV_FB_USED") == 65536 + 616
    assert shown.value("gpu_exporter_unavailable", metric="DCGM_FI_DEV_FB_RESERVED") == 1


@pytest.mark.parametrize("kind", [str, str.encode])
def test_e13_names_may_be_bytes_or_text(kind):
    """A binding that gives bytes and one that gives text make the same labels (case E13)."""
    text = page_of(Binding(nvmlDeviceGetName=lambda _: kind("NVIDIA A100"), nvmlDeviceGetUUID=lambda _: kind("GPU-1")))
    assert 'UUID="GPU-1",pci_bus_id="0",device="nvidia0",modelName="NVIDIA A100",' in text


def test_e14_a_name_that_is_no_utf8_costs_nothing(tmp_path):
    """Junk bytes become a replacement character, the other GPU is as it was, and the page parses (case E14)."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.change({"0.name": "\\xf8A"})
    with worker_on(driver) as worker:
        shown = worker.next()
    assert [labels["modelName"] for labels in shown.labels("DCGM_FI_DEV_GPU_TEMP")] == [
        "\ufffdA",
        "NVIDIA H100 80GB HBM3",
    ]


def open_files(pid: int) -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - counted


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_e15_the_driver_is_opened_once_and_nothing_grows(tmp_path):
    """In 300 collections of 8 GPUs: one start of NVML, no descriptor more, memory flat (case E15; soak: 1,000)."""
    driver = FakeDriver(tmp_path, h100s(8))
    with worker_on(driver, interval=0.0001) as worker:
        worker.skip(100)
        before = open_files(worker.process.pid), resident_bytes(worker.process.pid)
        worker.skip(200)
        after = open_files(worker.process.pid), resident_bytes(worker.process.pid)
    assert abs(after[0] - before[0]) <= 2
    assert abs(after[1] - before[1]) <= 5_000_000
    assert driver.calls().count("nvmlInitWithFlags") == 1


def test_e17_one_gpu_that_raises_costs_only_itself():
    """Whatever is raised while GPU 5 is read, the others are there, the page is whole and tells of it (case E17)."""

    def temperature(handle, _):
        if handle == 5:
            raise RuntimeError("a bug")
        return 40 + handle

    text = page_of(Binding(gpus=8, nvmlDeviceGetTemperature=temperature), times=2)
    assert [f'gpu_exporter_collector_error{{gpu="{gpu}"}} {int(gpu == 5)}\n' in text for gpu in range(8)] == [True] * 8
    assert text.count("DCGM_FI_DEV_GPU_TEMP{") == 7
    assert text.endswith("\n")
    text = page_of(Binding(gpus=8, nvmlDeviceGetUUID=lambda handle: 1 / 0 if handle == 5 else f"GPU-{handle}"))
    assert text.count("DCGM_FI_DEV_GPU_TEMP{") == 7
    assert 'gpu_exporter_collector_error{gpu="5"} 1\n' in text


def test_e17_an_unknown_error_of_the_driver_is_an_error_of_that_gpu(tmp_path):
    """The driver's "unknown error" is told as an error, unlike what is just not supported (case E17)."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.change({"1.error.nvmlDeviceGetPowerUsage": UNKNOWN})
    with worker_on(driver) as worker:
        shown = worker.next()
    assert [shown.value("gpu_exporter_collector_error", gpu=gpu) for gpu in ("0", "1")] == [0, 1]
    assert len(shown.values("DCGM_FI_DEV_GPU_TEMP")) == 2


def test_e18_nothing_happened_is_0_and_not_supported_is_absent(tmp_path):
    """Without any event the event counters are 0 where they are supported, and absent where not (case E18)."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.change({"1.events": 0, "0.field.75": None})
    with worker_on(driver) as worker:
        shown = worker.next()
    assert shown.values("gpu_xid_events_total", gpu="0") == [0, 0, 0, 0]
    assert shown.values("gpu_xid_events_total", gpu="1") == []
    assert shown.labels("DCGM_FI_DEV_XID_ERRORS")[0]["err_code"] == "0"
    assert len(shown.values("DCGM_FI_DEV_THERMAL_VIOLATION")) == 1
    assert shown.value("DCGM_EXP_CLOCK_EVENTS_COUNT", gpu="0", clock_event="hw_thermal") == 0


def test_e19_a_job_that_changes_changes_no_series_of_the_gpu(tmp_path):
    """Who works on a GPU is in a series of its own, one a GPU; the GPU's labels never move (case E19)."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    driver = FakeDriver(tmp_path, h100s(1))
    with worker_on(driver, arguments=["--job-mapping", jobs]) as worker:
        labels = [worker.next().labels("DCGM_FI_DEV_GPU_TEMP")]
        for job in ("41", "42\n43"):
            (jobs / "0").write_text(job)
            wanted = ",".join(job.split())
            shown = worker.until(lambda shown, wanted=wanted: shown.labels("gpu_job_info", hpc_job=wanted))
            labels.append(shown.labels("DCGM_FI_DEV_GPU_TEMP"))
            assert len(shown.values("gpu_job_info")) == 1
    assert labels[0] == labels[1] == labels[2]


def test_a_gpu_that_falls_off_the_bus_leaves_the_page_and_is_called_lost(tmp_path):
    """XID 79, and no answer any more: its values end, the event stays counted, the others go on; then it is back."""
    driver = FakeDriver(tmp_path, h100s(2))
    with worker_on(driver) as worker:
        worker.next()
        driver.raise_xid(0, 79)
        driver.lose(0)
        lost = worker.until(lambda shown: shown.value("gpu_lost", gpu="0"))
        event = worker.until(lambda shown: shown.value("gpu_xid_events_total", gpu="0", **{"class": "hardware"}))
        assert lost.values("DCGM_FI_DEV_GPU_TEMP", gpu="0") == event.values("DCGM_FI_DEV_GPU_TEMP", gpu="0") == []
        assert event.value("DCGM_FI_DEV_XID_ERRORS", gpu="0", err_code="79") == 79
        assert event.value("gpu_lost", gpu="1") == 0
        assert len(event.values("DCGM_FI_DEV_GPU_TEMP", gpu="1")) == 1
        driver.change({"0.error.all": None})
        worker.until(
            lambda shown: shown.value("gpu_lost", gpu="0") == 0 and shown.values("DCGM_FI_DEV_GPU_TEMP", gpu="0")
        )


def test_a_gpu_that_is_lost_in_the_middle_of_a_reading_shows_nothing():
    """Half a reading is none: values from before the loss are not shown beside it."""
    answers = iter([40, NVMLError(LOST)])

    def power(_):
        return 1000 if next(answers) == 40 else refuse(NVMLError(LOST))()

    text = page_of(Binding(nvmlDeviceGetPowerUsage=power), times=2)
    assert "DCGM_FI_DEV_GPU_TEMP{" not in text
    assert "gpu_lost{" in text
    assert text.split("gpu_lost{")[1].splitlines()[0].endswith(" 1")


def test_an_error_is_no_loss():
    """A GPU whose UUID can't be read for once is an error and not lost, which would be an alert."""
    answers = iter([b"GPU-a", NVMLError(UNKNOWN), NVMLError(LOST)])

    def uuid_of(_):
        answer = next(answers)
        return answer if isinstance(answer, bytes) else refuse(answer)()

    driver = Driver(Binding(nvmlDeviceGetUUID=uuid_of))
    collector = Collector(driver, Xids(driver), hostname="h")
    lost = [collector.collect().texts()["gpu_lost"].split()[-1] for _ in range(3)]
    assert lost == ["0", "0", "1"]


def test_a_driver_that_is_gone_ends_the_collection():
    """A dead session is no matter of one GPU: only a new process can help."""
    binding = Binding()
    driver = Driver(binding)
    collector = Collector(driver, Xids(driver), hostname="h")
    collector.collect()
    binding.nvmlDeviceGetTemperature = refuse(NVMLError(MISMATCH))
    with pytest.raises(DriverGoneError, match="library and driver differ"):
        collector.collect()

"""XIDs: each event counted once by what it speaks of, whatever else happens, and remembered from process to process."""

from fake_nvml import FakeDriver, worker_on

from exporter.gpu.xids import CLASSES, FAULTS, MESSAGES, class_of
from trainer_plugin.faults.driver import h100s, uuid


def count(shown, name: str, gpu: str = "0") -> float | None:
    """The events of a class."""
    return shown.value("gpu_xid_events_total", gpu=gpu, **{"class": name})


def test_two_equal_xids_in_a_row_are_two_events(tmp_path):
    """The last code does not tell that it came twice; the counter and the window do."""
    driver = FakeDriver(tmp_path, h100s(2))
    with worker_on(driver) as worker:
        assert count(worker.next(), "hardware") == 0
        driver.raise_xid(0, 48)
        driver.raise_xid(0, 48)
        shown = worker.until(lambda shown: count(shown, "hardware") == 2)
    assert shown.value("DCGM_FI_DEV_XID_ERRORS", gpu="0") == 48
    assert shown.value("DCGM_EXP_XID_ERRORS_COUNT", gpu="0", xid="48", window_size_in_ms="300000") == 2
    assert count(shown, "hardware", "1") == 0


def test_an_xid_is_on_the_page_before_the_next_collection(tmp_path):
    """Between two collections an hour apart an event is shown when it comes."""
    driver = FakeDriver(tmp_path, h100s(1))
    with worker_on(driver, interval=3600.0) as worker:
        worker.next()
        driver.raise_xid(0, 79)
        shown = worker.next()
    assert count(shown, "hardware") == 1
    assert shown.value("DCGM_FI_DEV_GPU_TEMP") == 61
    assert shown.labels("DCGM_FI_DEV_XID_ERRORS")[0]["err_msg"] == "GPU has fallen off the bus"


def test_a_code_that_nobody_knows_is_counted_too(tmp_path):
    """An XID of a newer driver is an event of class `other`."""
    driver = FakeDriver(tmp_path, h100s(1))
    driver.raise_xid(0, 999)
    with worker_on(driver) as worker:
        shown = worker.until(lambda shown: count(shown, "other") == 1)
    assert shown.value("DCGM_FI_DEV_XID_ERRORS", err_code="999", err_msg="Unknown Error") == 999


def test_a_storm_of_events_loses_none(tmp_path):
    """500 events between two collections are 500 events."""
    driver = FakeDriver(tmp_path, h100s(1))
    for _ in range(500):
        driver.raise_xid(0, 31)
    with worker_on(driver) as worker:
        worker.until(lambda shown: count(shown, "software") == 500)


def test_a_new_process_counts_on(tmp_path):
    """What the next reading process is told makes it go on from there, also for a GPU that has gone meanwhile."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.raise_xid(0, 79)
    with worker_on(driver) as worker:
        worker.until(lambda shown: count(shown, "hardware") == 1)
        remember = worker.line["remember"]
    later = FakeDriver(tmp_path, h100s(2))
    later.lose(0)
    with worker_on(later, remember=remember) as worker:
        shown = worker.next()
    assert count(shown, "hardware") == 1
    assert shown.value("gpu_lost", UUID=uuid(0)) == 1
    assert shown.value("DCGM_FI_DEV_XID_ERRORS", UUID=uuid(0)) == 79


def test_waiting_that_fails_is_no_busy_loop(tmp_path):
    """With a GPU off the bus the driver may refuse to wait for events: then the process sleeps instead."""
    driver = FakeDriver(tmp_path, h100s(1))
    driver.change({"error.nvmlEventSetWait_v2": 15})
    with worker_on(driver, interval=0.2) as worker:
        for _ in range(3):
            worker.next()
    calls = driver.calls()
    assert calls.count("nvmlEventSetWait_v2") <= 2 * calls.count("nvmlDeviceGetCount_v2")


def test_every_code_is_of_one_class_and_has_words():
    """The classes divide the codes; faults are those of hardware and NVLink."""
    assert {class_of(xid) for xid in MESSAGES} == set(CLASSES)
    assert set(FAULTS) == {xid for xid in MESSAGES if class_of(xid) in ("hardware", "nvlink")}
    assert 79 in FAULTS
    assert not {13, 31, 43, 45, 63, 92, 154} & set(FAULTS)

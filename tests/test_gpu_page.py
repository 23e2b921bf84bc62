"""The GPU page: a scrape waits for nothing, what is old is off it, and whatever the driver does it comes back."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from fake_nvml import FakeDriver, Shown
from waiting import wait_for

from exporter.gpu.page import GpuPage
from trainer_plugin.faults.driver import h100s

MISMATCH = 18


@contextmanager
def page_on(driver, **options):
    """A page under way, closed whatever happens."""
    options = {"interval_seconds": 0.05, "stale_seconds": 1.0, "environment": driver.environment, **options}
    page = GpuPage(hostname="node-1", **options)
    page.start()
    try:
        yield page
    finally:
        page.close()


def shown(page) -> Shown:
    """The page, parsed."""
    return Shown(page.render().decode())


def up(page) -> float | None:
    """Whether the driver answers, by the page."""
    return shown(page).value("gpu_exporter_nvml_up")


def test_the_page_has_all_families_or_those_that_are_asked_for(tmp_path):
    """The GPUs and the exporter itself are on it; a scrape may ask for some families only."""
    with page_on(FakeDriver(tmp_path, h100s(2))) as page:
        assert up(page) == 0  # Nothing has been read yet, and the page is there all the same.
        wait_for(lambda: up(page))
        assert len(shown(page).values("DCGM_FI_DEV_GPU_TEMP")) == 2
        assert shown(page).value("gpu_exporter_gpus") == 2
        assert abs(shown(page).value("gpu_exporter_last_collect_timestamp_seconds") - time.time()) < 60
        some = page.render(frozenset({"DCGM_FI_DEV_GPU_TEMP", "gpu_exporter_nvml_up"})).decode()
        assert [line.split()[2] for line in some.splitlines() if line.startswith("# TYPE")] == [
            "DCGM_FI_DEV_GPU_TEMP",
            "gpu_exporter_nvml_up",
        ]


def test_e08_without_driver_or_library_the_page_is_there(tmp_path):
    """Where there is no library the page says that no driver answers, again and again, and no GPU (case E08)."""
    driver = FakeDriver(tmp_path, h100s(1))
    driver.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    with page_on(driver) as page:
        wait_for(lambda: shown(page).value("gpu_exporter_restarts_total") >= 2)
        assert up(page) == 0
        assert shown(page).value("gpu_exporter_gpus") == 0
        assert shown(page).values("DCGM_FI_DEV_GPU_TEMP") == []


def test_e08_a_driver_that_was_replaced_is_opened_anew(tmp_path):
    """A version mismatch takes all GPU values off; once a new start works all is back, counts too (case E08)."""
    driver = FakeDriver(tmp_path, h100s(1))
    with page_on(driver) as page:
        driver.raise_xid(0, 79)
        wait_for(lambda: sum(shown(page).values("gpu_xid_events_total")) == 1)
        first = page._process.pid
        driver.change({"error.all": MISMATCH})
        wait_for(lambda: up(page) == 0)
        assert [sample.name for sample in shown(page).samples if sample.name.startswith("DCGM_")] == []
        wait_for(lambda: page._process.pid != first)
        driver.change({"error.all": None})
        wait_for(lambda: up(page))
        back = shown(page)
        assert back.value("DCGM_FI_DEV_GPU_TEMP") == 61
        # The new process meets the event in the fake's file as a new one, so it counts on from 1 instead of anew.
        wait_for(lambda: shown(page).value("gpu_xid_events_total", **{"class": "hardware"}) == 2)


def test_a_call_that_hangs_takes_the_values_off_and_no_scrape_waits(tmp_path):
    """While a call hangs scrapes answer at once, without old values; when it returns, all are back."""
    driver = FakeDriver(tmp_path, h100s(1))
    with page_on(driver, stale_seconds=0.3) as page:
        wait_for(lambda: up(page))
        driver.change({"hang.nvmlDeviceGetPowerUsage": 1500})
        wait_for(lambda: up(page) == 0)
        assert shown(page).values("DCGM_FI_DEV_GPU_TEMP") == []
        driver.change({"hang.nvmlDeviceGetPowerUsage": None})
        wait_for(lambda: up(page))
        assert shown(page).value("gpu_exporter_restarts_total") == 0


def test_a_call_that_never_returns_is_given_up_for_a_new_process(tmp_path):
    """After `hung_seconds` another process asks; nobody has to restart the exporter."""
    driver = FakeDriver(tmp_path, h100s(1))
    with page_on(driver, stale_seconds=0.3, hung_seconds=0.5) as page:
        wait_for(lambda: up(page))
        driver.change({"hang.nvmlDeviceGetPowerUsage": 600_000})
        wait_for(lambda: up(page) == 0)
        driver.change({"hang.nvmlDeviceGetPowerUsage": None})
        wait_for(lambda: up(page))
        assert shown(page).value("gpu_exporter_restarts_total") >= 1


def test_a_reading_process_that_dies_is_replaced(tmp_path):
    """A library that takes its process with it does not take the page, nor the counts."""
    with page_on(FakeDriver(tmp_path, h100s(1))) as page:
        wait_for(lambda: up(page))
        os.kill(page._process.pid, signal.SIGSEGV)
        wait_for(lambda: shown(page).value("gpu_exporter_restarts_total") == 1 and up(page))


def test_a_reader_that_can_not_be_started_is_no_end(tmp_path):
    """Without a program to start the page is there, empty."""
    with page_on(FakeDriver(tmp_path, h100s(1)), command=[str(tmp_path / "none")]) as page:
        wait_for(lambda: shown(page).value("gpu_exporter_restarts_total") >= 2)
        assert up(page) == 0


@pytest.mark.parametrize("written", ["no json", "{}", "[]", ""])
def test_a_reader_that_writes_something_else_is_no_end(tmp_path, written):
    """Whatever comes in the place of a reading, or nothing, the next process is asked."""
    command = [sys.executable, "-c", f"print({written!r})"]
    with page_on(FakeDriver(tmp_path, h100s(1)), command=command) as page:
        wait_for(lambda: shown(page).value("gpu_exporter_restarts_total") >= 2)
        assert up(page) == 0


@pytest.mark.parametrize("hung", [False, True])
def test_e21_the_end_takes_less_than_2_seconds(tmp_path, hung):
    """In a collection and in a hung call: the end comes within 2 s, with one shutdown at most and last (case E21)."""
    driver = FakeDriver(tmp_path, h100s(8))
    with page_on(driver) as page:
        wait_for(lambda: up(page))
        if hung:
            driver.change({"hang.nvmlDeviceGetPowerUsage": 600_000})
            wait_for(lambda: driver.calls()[-1] == "nvmlDeviceGetPowerUsage")
            wait_for(lambda: up(page) == 0)
        reader = page._process
        began = time.monotonic()
        page.close()
        assert time.monotonic() - began < 2.0
        wait_for(lambda: reader.poll() is not None)
    calls = driver.calls()
    assert calls.count("nvmlShutdown") == (0 if hung else 1)
    assert hung or calls[-1] == "nvmlShutdown"


def test_the_reading_process_ends_with_its_parent(tmp_path):
    """If the exporter is killed, nobody reads any more, and the reading process leaves the driver in order."""
    driver = FakeDriver(tmp_path, h100s(1))
    command = [sys.executable, "-m", "exporter.gpu.worker", "--interval", "0.05", "--hostname", "h"]
    with subprocess.Popen(
        command, env=driver.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 0
    assert driver.calls()[-1] == "nvmlShutdown"

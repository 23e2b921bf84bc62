"""The driver library: what its errors mean, and where there is none."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_nvml import ROOT, FakeDriver
from test_gpu_collector import Binding, NVMLError, refuse

from exporter.gpu.driver import AbsentError, Driver, DriverGoneError, LostError, explained
from trainer_plugin.faults.driver import h100s


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (3, AbsentError),
        (4, AbsentError),
        (13, AbsentError),
        (21, AbsentError),
        (15, LostError),
        (16, LostError),
        (1, DriverGoneError),
        (9, DriverGoneError),
        (12, DriverGoneError),
        (18, DriverGoneError),
        (999, NVMLError),
        (10, NVMLError),
    ],
)
def test_errors_are_told_apart(code, meaning):
    """Absent here, a lost GPU, a dead session, and errors that are none of these."""
    assert isinstance(explained(NVMLError(code)), meaning)
    driver = Driver(Binding(nvmlDeviceGetTemperature=refuse(NVMLError(code))))
    with pytest.raises(meaning):
        driver.call("nvmlDeviceGetTemperature", 0, 0)


def test_errors_of_the_real_binding_are_told_apart_too():
    """Pynvml's own exception classes carry their codes as expected here."""
    pynvml = pytest.importorskip("pynvml")
    assert isinstance(explained(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)), AbsentError)
    assert isinstance(explained(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)), LostError)
    assert isinstance(explained(pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)), DriverGoneError)
    assert explained(pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)).value == pynvml.NVML_ERROR_UNKNOWN


def test_a_shutdown_that_fails_is_none():
    """The driver ends the session with the process anyway."""
    Driver(Binding(nvmlShutdown=refuse(NVMLError(999)))).close()


def test_a_missing_binding_is_named_with_its_remedy():
    """Without pynvml the reason says what to install."""
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from exporter.gpu.driver import Driver, DriverGoneError\n"
        "try: Driver()\nexcept DriverGoneError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == "pynvml is not installed: pip install 'pretraining-guard[gpu]'\n"


@pytest.mark.parametrize("there", [True, False])
def test_whether_there_is_a_driver_is_known_without_asking_it(tmp_path, there):
    """The library is looked for where the loader would, and not one function is called."""
    driver = FakeDriver(tmp_path, h100s(1))
    if not there:
        driver.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    code = "from exporter.gpu.driver import is_here; print(is_here())"
    told = subprocess.run(
        [sys.executable, "-c", code], env=driver.environment, capture_output=True, text=True, check=True
    ).stdout
    assert told == f"{there}\n"
    assert driver.calls() == []


def test_the_exporter_does_not_load_the_binding():
    """Pynvml is for the reading process alone."""
    code = "import sys, exporter.gpu.endpoint, exporter.__main__; print('pynvml' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == "False\n"


def test_a_constant_that_is_not_known_is_absent():
    """An old binding does not know every constant."""
    with pytest.raises(AbsentError, match="function_not_found"):
        Driver(Binding()).constant("NVML_CLOCK_SM")
    assert Driver(Binding(NVML_CLOCK_SM=1)).constant("NVML_CLOCK_SM") == 1
    assert isinstance(Binding(), SimpleNamespace)

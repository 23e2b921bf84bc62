"""The fake driver of fire drills: built by whatever compiler is there, and met by one process alone."""

import os

import pytest
from fake_nvml import FakeDriver, worker_on

from trainer_plugin.faults import driver as fake
from trainer_plugin.faults.driver import CompilerError, build_library, h100s, uuid


def test_a_lost_gpu_and_an_ecc_error_are_what_the_exporter_reads(tmp_path):
    """An XID 79 takes its GPU away, another XID does not, and an uncorrected error counts on."""
    driver = FakeDriver(tmp_path, h100s(3))
    with worker_on(driver) as worker:
        before = worker.next().value("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", UUID=uuid(2))
        driver.fail(0, 79)
        driver.fail(1, 48)
        driver.count_ecc(2)
        driver.count_ecc(2)
        lost = worker.until(lambda s: s.value("gpu_lost", UUID=uuid(0)) and s.value("DCGM_FI_DEV_XID_ERRORS", gpu="1"))
        assert lost.value("DCGM_FI_DEV_XID_ERRORS", UUID=uuid(0)) == 79
        assert lost.value("DCGM_FI_DEV_XID_ERRORS", UUID=uuid(1)) == 48
        assert lost.value("gpu_lost", UUID=uuid(1)) == 0
        worker.until(lambda s: s.value("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", UUID=uuid(2)) == before + 2)


def test_it_is_in_the_environment_of_one_process_alone(tmp_path, monkeypatch):
    """The library goes before what is on the path, and this process's own environment stays as it is."""
    library = FakeDriver(tmp_path, h100s(1)).environment["LD_LIBRARY_PATH"].split(os.pathsep)[0]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    before = dict(os.environ)
    environment = fake.FakeDriver(tmp_path, h100s(1), library=tmp_path / "nvml").environment
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path}/nvml:/opt/lib"
    assert dict(os.environ) == before
    assert library != "/opt/lib"


def compiler(folder, script):
    """A `cc` that does this, in a folder of its own."""
    folder.mkdir()
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return os.fspath(folder)


def test_no_compiler_and_one_that_fails_are_one_line(tmp_path, monkeypatch):
    """What is missing, or what the compiler said, is told; no half-made library is taken for one."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(CompilerError, match=r"^a C compiler wanted for the fake driver, found neither cc nor gcc"):
        build_library(tmp_path / "none")
    monkeypatch.setenv(
        "PATH", compiler(tmp_path / "bin", "echo 'nvml.c:30: note: x' >&2\necho 'x.h: fatal error: no' >&2\nexit 4")
    )
    with pytest.raises(CompilerError, match=r"cc ended with exit code 4: x\.h: fatal error: no$"):
        build_library(tmp_path / "failed")


def test_the_source_is_in_the_wheel():
    """The file that is compiled is package data, beside the module that compiles it."""
    text = (fake._SOURCE.parents[2] / "pyproject.toml").read_text()
    assert '"faults/nvml.c"' in text
    assert fake._SOURCE.is_file()

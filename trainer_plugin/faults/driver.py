"""A fake NVIDIA driver as a real shared library, for drills: XID 79 or an ECC error at a moment of one's choosing.

    driver = FakeDriver(folder, h100s(8))
    subprocess.Popen(["python", "-m", "exporter"], env=driver.environment)
    driver.fail(0, 79)

Only a process that is started in this environment meets it. Everybody else keeps the driver that is installed, and no
file outside of `folder` is touched.
"""

import os
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("nvml.c")
_LIBRARY = "libnvidia-ml.so.1"
_GPU_IS_LOST = 15
_OFF_THE_BUS = 79
# NVML_FI_DEV_ECC_DBE_VOL_TOTAL: uncorrected errors since the driver was loaded.
_UNCORRECTED = "field.4"

# One H100 at work: key of the scenario and value. Field numbers are nvml.h's.
H100: dict[str, str | int | float] = {
    "name": "NVIDIA H100 80GB HBM3", "clock.1": 1980, "clock.2": 2619, "temp": 61, "power": 612345, "replay": 3,
    "util": 97, "memory_util": 54, "encoder": 1, "decoder": 2, "memory.total": 85899345920,
    "memory.reserved": 645922816, "memory.used": 68719476736, "clock_events": 4, "events": 8, "gpm": 1, "mig": 0,
    "field.82": 71, "field.83": 123456789012, "field.138": 1000, "field.139": 2000, "field.197": 5000,
    "field.198": 7000, "field.74": 11, "field.75": 12, "field.76": 13, "field.77": 14, "field.78": 15, "field.79": 16,
    "field.269": 17, "field.270": 18, "field.271": 19, "field.3": 20, "field.4": 21, "field.5": 22, "field.6": 23,
    "field.29": 24, "field.30": 25, "field.31": 26, "field.38": 27, "field.45": 28, "field.52": 29, "field.59": 30,
    "field.161": 41, "field.162": 42, "field.163": 43,
    "field.142": 31, "field.143": 32, "field.145": 0, "field.230": 0, "gpm.1": 96.5, "gpm.2": 88.5, "gpm.3": 40.5,
    "gpm.5": 55.5, "gpm.10": 33.5, "gpm.11": 1.5, "gpm.12": 12.5, "gpm.13": 2.5,
}  # fmt: skip


def h100s(count: int) -> dict[str, str | int | float]:
    """A scenario of so many healthy GPUs."""
    found: dict[str, str | int | float] = {"driver": "580.65.06", "count": count}
    for index in range(count):
        found |= {f"{index}.{key}": value for key, value in H100.items()}
        found |= {f"{index}.uuid": uuid(index), f"{index}.pci": f"00000000:{index + 10:02X}:00.0"}
    return found


def uuid(index: int) -> str:
    """The UUID of a GPU of `h100s`."""
    return f"GPU-0000000{index}-1111-2222-3333-444444444444"


class CompilerError(RuntimeError):
    """There is no C compiler here, or it fails; the text is one line."""


def build_library(folder: Path, *flags: str) -> Path:
    """Compile the library into a new folder, and return that.

    Args:
        folder: made if it is not there.
        flags: for the compiler; `-DOLD_DRIVER` makes a driver that lacks the newer functions.

    Raises:
        CompilerError: it cannot be compiled here.
        OSError: the folder cannot be written.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CompilerError("a C compiler wanted for the fake driver, found neither cc nor gcc on the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-shared", "-fPIC", "-O1", *flags, "-o", str(folder / _LIBRARY), str(_SOURCE)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if told.returncode != 0:
        words = next((line for line in told.stderr.splitlines() if "error" in line), told.stderr.strip()[-200:])
        raise CompilerError(f"{compiler} ended with exit code {told.returncode}: {words}")
    return folder


class FakeDriver:
    """A scenario file, and the environment in which a process meets it instead of a driver.

    Args:
        folder: where the scenario lies, and the library in `nvml/`.
        scenario: keys and values as told at the head of nvml.c; see `h100s`.
        library: the folder of a library that is there already; built if None.

    Raises:
        CompilerError: the library cannot be compiled here.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, scenario: dict[str, str | int | float], *, library: Path | None = None) -> None:
        folder = folder.absolute()
        library = library or build_library(folder / "nvml")
        self._path = folder / "scenario"
        self._scenario = dict(scenario)
        self._events: list[str] = []
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH")])),
            "FAKE_NVML": str(self._path),
        }
        self._write()

    def change(self, changes: dict[str, str | int | float | None]) -> None:
        """Change keys of the scenario; None removes one."""
        self._scenario = {key: value for key, value in (self._scenario | changes).items() if value is not None}
        self._write()

    def fail(self, gpu: int, xid: int) -> None:
        """Have the driver report an XID now; a GPU that has fallen off the bus (79) is lost from then on."""
        self.raise_xid(gpu, xid)
        if xid == _OFF_THE_BUS:
            self.lose(gpu)

    def raise_xid(self, gpu: int, xid: int) -> None:
        """Have the driver report an XID now, and nothing else."""
        self._events.append(f"event {gpu} {xid}")
        self._write()

    def lose(self, gpu: int, code: int = _GPU_IS_LOST) -> None:
        """From now on every call for this GPU fails."""
        self.change({f"{gpu}.error.all": code})

    def count_ecc(self, gpu: int) -> None:
        """Count one more uncorrected ECC error."""
        key = f"{gpu}.{_UNCORRECTED}"
        self.change({key: int(self._scenario.get(key, 0)) + 1})

    def _write(self) -> None:
        lines = [*(f"{key} {value}" for key, value in self._scenario.items()), *self._events]
        draft = self._path.with_suffix(".draft")
        draft.write_text("\n".join(lines) + "\n")
        draft.replace(self._path)

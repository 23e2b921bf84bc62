"""NVIDIA's driver library through `pynvml`, and what its errors mean here."""

import ctypes
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
# A pointer that only NVML can read.
Handle = Any
# Whatever a function of NVML gives: numbers, text, structures.
Answer = Any
# Codes of nvmlReturn_t, the same in every version of the library.
_ABSENT = {
    2: "invalid_argument", 3: "not_supported", 4: "no_permission", 6: "not_found", 13: "function_not_found",
    21: "no_data", 25: "version_mismatch", 26: "deprecated", 27: "not_ready",
}  # fmt: skip
_GONE = {1: "not initialised", 9: "driver not loaded", 12: "library not found", 18: "library and driver differ"}
_LOST = {15: "gpu_is_lost", 16: "reset_required", 28: "gpu_not_found"}


class AbsentError(Exception):
    """This reading does not exist here; the text is the reason in one word."""


class LostError(Exception):
    """This GPU does not answer any more; the text is the reason in one word."""


class DriverGoneError(Exception):
    """There is no driver to talk to, or it is another one than at the start: only a new process can help."""


class Driver:
    """One session with the driver, opened once.

    Args:
        module: the binding, `pynvml`.

    Raises:
        DriverGoneError: there is no binding, no library or no driver.
    """

    def __init__(self, module: ModuleType | None = None) -> None:
        self.nvml = module or _import()
        self.call("nvmlInit")

    def call(self, name: str, *arguments: Answer) -> Answer:
        """Call a function of NVML by its name.

        Raises:
            AbsentError: there is no such reading here, or no such function in this driver or binding.
            LostError: the GPU does not answer.
            DriverGoneError: the session is dead.
            Exception: any other error of the binding, as it is.
        """
        function = getattr(self.nvml, name, None)
        if function is None:
            raise AbsentError("function_not_found")
        return self._checked(function, arguments)

    def words(self, name: str, *arguments: Answer) -> str:
        """Call a function that gives text, whichever of bytes and str this binding makes of it.

        What is not UTF-8 is replaced: the binding's own decoding would raise.
        """
        function = getattr(self.nvml, name, None)
        if function is None:
            raise AbsentError("function_not_found")
        return as_text(self._checked(getattr(function, "__wrapped__", function), arguments))

    def constant(self, name: str) -> int:
        """A constant of the binding.

        Raises:
            AbsentError: this binding is too old to know it.
        """
        value = getattr(self.nvml, name, None)
        if value is None:
            raise AbsentError("function_not_found")
        return int(value)

    def close(self) -> None:
        """End the session. The driver does so anyway when the process ends, so an error is none."""
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError:
            return

    def _checked(self, function: Callable[..., Any], arguments: tuple[Answer, ...]) -> Answer:
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            raise explained(error) from error


def explained(error: Answer) -> Exception:
    """An error of NVML as one of ours; one that says nothing about the device or the session stays as it is."""
    code = getattr(error, "value", None)
    if code in _ABSENT:
        return AbsentError(_ABSENT[code])
    if code in _LOST:
        return LostError(_LOST[code])
    if code in _GONE:
        return DriverGoneError(_GONE[code])
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def is_here() -> bool:
    """Whether this host has the driver's library and the binding, without a word to the driver itself."""
    if find_spec("pynvml") is None:
        return False
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def as_text(value: str | bytes) -> str:
    """Text that the page can hold."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _import() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise DriverGoneError("pynvml is not installed: pip install 'pretraining-guard[gpu]'") from error

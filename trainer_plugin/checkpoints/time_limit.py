"""Work that may hang for ever, given so many seconds: a shared file system must not take the training with it."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_SLOWEST_BYTES_PER_SECOND = 50e6
# A machine that stood still for half a minute (a frozen virtual one) has used up one part only, not the disk's time.
_PARTS = 30


def begin(work: Callable[..., _T], *arguments: object) -> Callable[[float], _T]:
    """Start `work` in a thread of its own, and return what waits for it: `within`, cut in two."""
    done: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(*arguments), None))
        except Exception as error:  # noqa: BLE001 - handed over
            done.put((None, error))

    threading.Thread(target=run, name="time-limit", daemon=True).start()

    def wait(seconds: float) -> _T:
        for _ in range(_PARTS):
            try:
                result, error = done.get(timeout=seconds / _PARTS)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return cast("_T", result)
        raise TimeoutError(f"no answer within {seconds:.0f} s")

    return wait


def within(seconds: float, work: Callable[..., _T], *arguments: object) -> _T:
    """What `work` returns, done in a thread that is left behind if it takes longer.

    Raises:
        TimeoutError: it took longer.
        Exception: whatever `work` raised.
    """
    return begin(work, *arguments)(seconds)


class Disk:
    """A disk that is asked one thing after the other; one that has not answered within `seconds` is not asked again."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._hangs = False

    def ask(self, work: Callable[[], _T]) -> _T:
        """What `work` returns.

        Raises:
            TimeoutError: it takes too long, or another work did.
        """
        if self._hangs:
            raise TimeoutError("it has not answered before")
        try:
            return within(self._seconds, work)
        except TimeoutError:
            self._hangs = True
            raise

    def ask_or_none(self, work: Callable[[], _T]) -> _T | None:
        """As above, and None where the disk fails: others wait to be told."""
        try:
            return self.ask(work)
        except OSError as error:
            _log.warning("tier %s: %s", self._name, error)
            return None


def patience(size_bytes: int, hang_seconds: float) -> float:
    """Seconds after which a tier that works on so many bytes is taken to hang."""
    return hang_seconds + size_bytes / _SLOWEST_BYTES_PER_SECOND

"""SIGTERM and SIGUSR1 as a wish to end in order: a flag set anywhere, obeyed at one boundary."""

import signal
import threading
from types import FrameType
from typing import Any

from exporter.forks import let_go_in_children

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Listens from `install` to `remove`; does nothing outside the main thread, where Python takes no handlers."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._removed = False

    def install(self) -> None:
        """Take the signals; a handler that the program has put there already is called as well."""
        if threading.current_thread() is threading.main_thread():
            for sent in _SIGNALS:
                self._before[sent] = signal.signal(sent, self._ask)
            let_go_in_children(self)

    def remove(self) -> None:
        """Put back what was there, whichever of several is removed first."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._removed = True
        for sent in self._before:
            # Compared by value: every access to a bound method makes a new object.
            if signal.getsignal(sent) == self._ask:
                signal.signal(sent, self._outer(sent))

    def _outer(self, sent: signal.Signals) -> Any:  # noqa: ANN401 - as `signal.signal` has it
        """The handler before this one, past those that have been removed meanwhile."""
        before = self._before[sent]
        owner = getattr(before, "__self__", None)
        return owner._outer(sent) if isinstance(owner, StopSignals) and owner._removed else before  # noqa: SLF001

    def let_go(self) -> None:
        """In a forked child: it has no boundary to end at, and must die of a SIGTERM."""
        self.remove()

    def _ask(self, sent: int, frame: FrameType | None) -> None:
        # Nothing else here: the handler may run in the middle of anything, locks held.
        if not self._removed:
            self.asked = signal.Signals(sent).name
        before = self._before.get(signal.Signals(sent))
        if callable(before):
            before(sent, frame)

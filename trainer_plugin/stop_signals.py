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

    def install(self) -> None:
        """Take the signals; a handler that the program has put there already is called as well."""
        if threading.current_thread() is threading.main_thread():
            for sent in _SIGNALS:
                self._before[sent] = signal.signal(sent, self._ask)
            let_go_in_children(self)

    def remove(self) -> None:
        """Put back what was there."""
        if threading.current_thread() is not threading.main_thread():
            return
        for sent, before in self._before.items():
            # Compared by value: every access to a bound method makes a new object.
            if signal.getsignal(sent) == self._ask:
                signal.signal(sent, before)
        self._before.clear()

    def let_go(self) -> None:
        """In a forked child: it has no boundary to end at, and must die of a SIGTERM."""
        self.remove()

    def _ask(self, sent: int, frame: FrameType | None) -> None:
        # Nothing else here: the handler may run in the middle of anything, locks held.
        self.asked = signal.Signals(sent).name
        before = self._before.get(signal.Signals(sent))
        if callable(before):
            before(sent, frame)

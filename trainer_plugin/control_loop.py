"""The job's end of the outer loop: a thread that reads the inbox and the heartbeat, and writes what the guard keeps.

The boundary looks at memory only: a file system that hangs stops this thread, never the training.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from exporter.commands import Command, Record
from trainer_plugin.run_folder import JobFolder

_log = logging.getLogger(__name__)
# DESIGN decision 9: the watchdog reaches the receiver every 20 s; four lost ones are an outage.
HEARTBEAT_TIMEOUT_SECONDS = 90.0
_POLL_SECONDS = 0.1
_LOCK_BEAT_SECONDS = 10.0


class ControlLoop:
    """Commands in, records out. `on_error` hears of every error that was held back in the thread."""

    def __init__(
        self, folder: JobFolder, *, on_error: Callable[[Exception], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._on_error = on_error
        self._clock = clock
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._commands: list[Command] = []
        self._given: set[str] = set()
        self._unwritten: dict[str, Record] = {}
        self._heartbeat = folder.outer.heartbeat()
        self._beat_at: float | None = None
        self._lock_beat_at = clock()
        self._thread = threading.Thread(target=self._run, name="control-loop", daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether a heartbeat has come lately. Judged by its arrival here: the hosts' clocks need not agree."""
        return self._beat_at is not None and self._clock() - self._beat_at < HEARTBEAT_TIMEOUT_SECONDS

    def commands(self) -> list[Command]:
        """The commands that wait, oldest first; one stays here until it is finished."""
        return [command for command in self._commands if command.id not in self._given]

    def finish(self, record: Record) -> None:
        """Give a command its outcome; it does not come again."""
        self._given.add(record.command.id)
        self.write(lambda: self._keep(record))

    def _keep(self, record: Record) -> None:
        """Write a record, later if the disk is full: the next job would obey a command without one again."""
        self._unwritten[record.command.id] = record
        self._folder.inbox.finish(record)
        del self._unwritten[record.command.id]

    def write(self, job: Callable[[], None]) -> None:
        """Do some writing in the background, in order."""
        self._jobs.put(job)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything handed in is written; False if that takes longer."""
        if not self._thread.is_alive():
            return True
        written = threading.Event()
        self._jobs.put(written.set)
        self._wake.set()
        return written.wait(timeout_seconds)

    def stop(self) -> None:
        """Write what is left and end the thread; a hung file system is not waited for."""
        self.flush(5.0)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def poll(self) -> None:
        """One round: write what waits, then look for commands and for a heartbeat."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            self._held_back(job)
        # Each by itself: of an inbox that cannot be read the lock must not look like a dead job's.
        for part in (self._look, self._listen, self._beat):
            self._held_back(part)

    def _look(self) -> None:
        self._commands = self._folder.inbox.waiting()

    def _listen(self) -> None:
        heartbeat = self._folder.outer.heartbeat()
        if heartbeat is not None and heartbeat != self._heartbeat:
            self._heartbeat = heartbeat
            self._beat_at = self._clock()

    def _beat(self) -> None:
        if self._clock() - self._lock_beat_at >= _LOCK_BEAT_SECONDS:
            self._lock_beat_at = self._clock()
            self._folder.lock.beat()
            for record in list(self._unwritten.values()):
                self._keep(record)

    def _held_back(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a broken disk must not end this thread
            self._on_error(error)

    def _run(self) -> None:
        while not self._stopping:
            self.poll()
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
        self.poll()

"""Lines between the ranks beside the training's group: small messages of threads, which must not use a collective.

Each rank has a line to the first one, which passes nothing on. Whoever ends without a `bye` has died: its line breaks.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import msgspec

from exporter.forks import let_go_in_children
from trainer_plugin.checkpoints.time_limit import within
from trainer_plugin.ranks import Ranks, RanksError

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.5


class Lines:
    """All lines of one rank; none of one alone. All ranks have to make theirs.

    A message is a `kind`, and a `body` that JSON can hold. `on(kind, hear)` has `hear(rank, body)` called in the lines'
    own thread, which must not be kept waiting; `every` is called in it again and again. `open_to` are the ranks that
    have neither left nor died.

    Raises:
        RanksError: a rank has not come, or cannot reach the first one.
    """

    def __init__(self, ranks: Ranks, *, meeting_seconds: float = 60.0) -> None:
        self._ranks = ranks
        self._meeting_seconds = meeting_seconds
        self._lines: dict[int, Connection] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._hears: dict[str, Callable[[int, Any], None]] = {}
        self._every: list[Callable[[], None]] = []
        self._lost: list[Callable[[int], None]] = []
        self._over = threading.Event()
        if not ranks.alone:
            self._connect()
            self._locks = {rank: threading.Lock() for rank in self._lines}
            let_go_in_children(self)
        self.open_to = set(self._lines)

    def on(self, kind: str, hear: Callable[[int, Any], None]) -> None:
        """Have messages of a kind heard; before `start`."""
        self._hears[kind] = hear

    def on_lost(self, lost: Callable[[int], None]) -> None:
        """Have it heard when a rank has died."""
        self._lost.append(lost)

    def every(self, work: Callable[[], None]) -> None:
        """Have something done about twice a second."""
        self._every.append(work)

    def start(self) -> None:
        """Begin to listen."""
        if self._lines:
            self._thread = threading.Thread(target=self._run, name="rank-lines", daemon=True)
            self._thread.start()

    def send(self, kind: str, body: Any = None, *, at_once: bool = False) -> None:  # noqa: ANN401 - what JSON can hold
        """To the first rank; from there, to all others. Whoever is gone does not hear it.

        With `at_once` neither does a rank that another message does not get through to: it may hang.
        """
        message = msgspec.json.encode((kind, body))
        for rank, line in self._lines.items():
            if not self._locks[rank].acquire(timeout=_WAIT_SECONDS if at_once else -1):
                continue
            try:
                with suppress(OSError, ValueError):  # Whoever reads finds out.
                    line.send_bytes(message)
            finally:
                self._locks[rank].release()

    def close(self) -> None:
        """Leave in order."""
        if self._lines and not self._over.is_set():
            self._over.set()
            self.send("bye", at_once=True)
            self._thread.join(2.0 * _WAIT_SECONDS)
            self.let_go()

    def let_go(self) -> None:
        """In a forked child: the lines are its parent's, whose end must be seen at their other side."""
        for line in self._lines.values():
            line.close()

    def _connect(self) -> None:
        ranks = self._ranks
        one_host = len(set(ranks.hosts)) == 1
        listener, secret = None, secrets.token_bytes(32)
        if ranks.first:
            listener = Listener(("127.0.0.1" if one_host else "", 0), backlog=ranks.size, authkey=secret)
        port, secret = ranks.from_first((listener.address[1] if listener is not None else 0, secret))
        if listener is None:
            # By torch's own convention MASTER_ADDR is where rank 0 is.
            host = "127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", ranks.hosts[0])
            try:
                self._lines[0] = Client((host, port), authkey=secret)
                self._lines[0].send_bytes(msgspec.json.encode(ranks.rank))
            except (OSError, EOFError, AuthenticationError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise RanksError(f"rank {ranks.rank} cannot reach rank 0 at {host}:{port}: {reason}") from error
            return
        try:
            within(self._meeting_seconds, self._accept, listener)
        except (OSError, EOFError, AuthenticationError) as error:
            missing = next(rank for rank in range(1, ranks.size) if rank not in self._lines)
            raise RanksError(
                f"rank {missing} on {ranks.hosts[missing]} has not come to rank 0 at port {port}, by which the ranks "
                f"hear of each other: {error}"
            ) from error
        finally:
            listener.close()

    def _accept(self, listener: Listener) -> None:
        for _ in range(self._ranks.size - 1):
            line = listener.accept()
            self._lines[msgspec.json.decode(line.recv_bytes(), type=int)] = line

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            lines = [(rank, line) for rank, line in self._lines.items() if rank in self.open_to]
            heard = wait([line for _, line in lines], timeout=_WAIT_SECONDS)
            if not lines:
                self._over.wait(_WAIT_SECONDS)
            for rank, line in lines:
                if line in heard and not self._over.is_set():
                    self._hear(rank, line)
            if time.monotonic() - last >= _WAIT_SECONDS:
                last = time.monotonic()
                self._held_back(*self._every)

    def _hear(self, rank: int, line: Connection) -> None:
        try:
            kind, body = msgspec.json.decode(line.recv_bytes())
        except (OSError, EOFError, msgspec.MsgspecError):
            self.open_to.discard(rank)
            self._held_back(*[lambda lost=lost: lost(rank) for lost in self._lost])
            return
        if kind == "bye":
            _log.info("rank %d has left", rank)
            self.open_to.discard(rank)
        elif kind in self._hears:
            self._held_back(lambda: self._hears[kind](rank, body))

    @staticmethod
    def _held_back(*works: Callable[[], object]) -> None:
        for work in works:
            try:
                work()
            except Exception:  # noqa: BLE001 - the next message may be of use again
                _log.exception("held back in the lines between the ranks")

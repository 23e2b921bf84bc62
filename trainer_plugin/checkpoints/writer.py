"""The background writer: snapshots from kept memory into the tiers, in the order in which they were taken."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from msgspec.structs import replace

from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.slots import Slot
from trainer_plugin.checkpoints.tier import Tier
from trainer_plugin.checkpoints.time_limit import patience, within

_log = logging.getLogger(__name__)


class Writer:
    """Writes each snapshot into the local tier, then into the shared one. A tier that fails or hangs is counted.

    `rotate` removes from a tier what it keeps no longer. `at` names the tier that is being written to, or comes next.
    """

    def __init__(
        self,
        local: Tier,
        shared: Tier,
        *,
        rotate: Callable[[Tier, Manifest], None],
        on_failure: Callable[[str], None],
        hang_seconds: float,
    ) -> None:
        self.at = local.name
        self._local = local
        self._shared = shared
        self._rotate = rotate
        self._on_failure = on_failure
        self._hang_seconds = hang_seconds
        self._joint = local.slowness > 1.0
        self._ended = threading.Event()
        self._ended.set()

    def start(self, slot: Slot, draft: Manifest, *, local_only: bool) -> None:
        """Write what a slot holds, and let go of it, once all that was started before has ended.

        Raises:
            RuntimeError: there are no more threads.
        """
        before, ended = self._ended, threading.Event()

        def write() -> None:
            try:
                before.wait()
                self._write(slot, draft, local_only=local_only)
            except Exception as error:  # noqa: BLE001 - a state of a kind that nobody thought of
                _log.warning("checkpoint of step %d failed: %s", draft.step, error)
                self._on_failure(self._local.name)
            finally:
                self.at = self._local.name  # Where the next one begins.
                ended.set()

        writer = threading.Thread(target=write, name="checkpoint-writer", daemon=True)
        self._ended = ended
        try:
            writer.start()
        except RuntimeError:  # An interrupt in here leaves the writer at work, and is not caught.
            slot.release()
            ended.set()
            raise

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer."""
        return self._ended.wait(timeout_seconds)

    def _write(self, slot: Slot, draft: Manifest, *, local_only: bool) -> None:
        """The shared tier gets a copy of the local one, or from memory where the local one is out of order."""
        local, shared = self._local, self._shared
        attempt = partial(self._attempt, began=time.monotonic(), size_bytes=slot.size_bytes)
        with ExitStack() as holding:
            holding.callback(slot.release)
            draft = replace(draft, finite=slot.snapshot.finite)
            if not draft.finite:
                _log.warning("checkpoint of step %d holds values that are not finite: never a target", draft.step)
                self._on_failure(local.name)
            written = attempt(local, draft, lambda: self._from_memory(local, slot, draft))
            # Of several ranks another one's part may be what is not finite.
            finite = written.finite if written is not None else draft.finite
            if draft.finite and not finite:
                self._on_failure(local.name)
            if not finite and (written is not None or not self._joint):
                return  # Evidence, in one tier, until the next one is written.
            if written is None:
                attempt(shared, draft, lambda: self._from_memory(shared, slot, draft))
        if written is not None and not local_only:
            attempt(shared, draft, lambda: shared.take(local, draft.name, attempt=str(draft.created)))

    def _from_memory(self, tier: Tier, slot: Slot, draft: Manifest) -> Manifest:
        slot.hold()  # Here, since one that hangs reads on when nobody waits for it any more.
        try:
            return tier.write(slot.snapshot, draft)
        finally:
            slot.release()

    def _attempt(
        self, tier: Tier, draft: Manifest, write: Callable[[], Manifest], *, began: float, size_bytes: int
    ) -> Manifest | None:
        """Write into a tier and rotate it; a failure is counted, and the training goes on."""

        def work() -> Manifest:
            written = write()
            tier.seconds = time.monotonic() - began
            self._rotate(tier, written)
            return written

        self.at = tier.name
        try:
            return within(patience(size_bytes, self._hang_seconds) * tier.slowness, work)
        except Exception as error:  # noqa: BLE001 - whatever the disk says
            _log.warning("checkpoint of step %d failed in tier %s: %s", draft.step, tier.name, error)
            self._on_failure(tier.name)
            return None

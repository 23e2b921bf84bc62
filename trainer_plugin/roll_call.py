"""The roll call: every rank says again and again that it is there, and all end when one is gone or silent for too long.

A collective that a dead rank never comes to is waited for half an hour by default, and by a hung one for ever. This
does not go over the training's group, nor in its thread: a rank that is merely slow goes on saying that it is there.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from trainer_plugin.lines import Lines
from trainer_plugin.ranks import Ranks

_log = logging.getLogger(__name__)
_MOST_BEAT_SECONDS = 5.0
# For so long a rank may still end by itself, and tell how, when another one is gone.
_GRACE_SECONDS = 5.0


class RollCall:
    """One for a process; without a time-out nobody is waited for by the clock.

    `end` is called, in a thread, with a line that says who is missing; it does not return. `clock` tells seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        lines: Lines,
        *,
        timeout_seconds: float | None,
        end: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._lines = lines
        self._timeout_seconds = timeout_seconds
        self._end = end or _end
        self._clock = clock
        self._beat_at = self._looked_at = clock()
        self._heard_at = dict.fromkeys(lines.open_to, clock())
        self._missing: tuple[str, float] | None = None
        if timeout_seconds is not None:
            lines.on("here", lambda rank, _: self._heard_at.update({rank: self._clock()}))
            lines.on("missing", lambda _, who: self._miss(who))
            lines.on_lost(lambda rank: self._miss(f"rank {rank} on {ranks.hosts[rank]} has died"))
            lines.every(self._look)

    def _look(self) -> None:
        limit_seconds = self._timeout_seconds or 0.0
        stood_still_seconds, self._looked_at = self._clock() - self._looked_at, self._clock()
        if stood_still_seconds > limit_seconds / 2.0:  # Suspended, with the whole job maybe: nobody could be heard.
            self._heard_at = dict.fromkeys(self._heard_at, self._clock())
        if self._clock() - self._beat_at >= min(_MOST_BEAT_SECONDS, limit_seconds / 5.0):
            self._beat_at = self._clock()
            self._lines.send("here", at_once=True)
        for rank in sorted(self._lines.open_to):
            silent_seconds = self._clock() - self._heard_at[rank]
            if silent_seconds > limit_seconds:
                told = f"is silent for {silent_seconds:.0f} s (ranks.timeout_seconds is {limit_seconds:g})"
                self._miss(f"rank {rank} on {self._ranks.hosts[rank]} {told}")
        if self._missing is not None and self._clock() - self._missing[1] > _GRACE_SECONDS:
            self._end(f"rank {self._ranks.rank} ends, as it cannot go on alone: {self._missing[0]}")

    def _miss(self, who: str) -> None:
        """No further step is possible."""
        if self._missing is None:
            self._missing = who, self._clock()
            _log.critical("%s: no further step is possible; started again, the run goes on from its checkpoint", who)
            self._lines.send("missing", who, at_once=True)


def _end(line: str) -> NoReturn:
    """The training's own thread waits in a collective, where no exception reaches it."""
    _log.critical("%s", line)
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

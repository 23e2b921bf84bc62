"""Errors of our own, held back: inside a training step nothing of ours raises."""

import logging
from collections.abc import Callable
from typing import Any

from exporter.page import Page
from trainer_plugin.ranks import RanksError

_log = logging.getLogger(__name__)
_MOST_KINDS = 100


class Errors:
    """Counts every error on the page, and logs each kind once: the run goes on without what failed."""

    def __init__(self, run: str, page: Page) -> None:
        self._run = run
        self._page = page
        self._seen: set[str] = set()

    def attempt(self, part: Callable[[Any], object], what: object, *, step: int) -> None:
        """Do `part(what)`, or hold its error back.

        Raises:
            RanksError: the ranks have lost each other: no step can be run any more.
        """
        try:
            part(what)
        except RanksError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self.hold_back(error, step=step)

    def hold_back(self, error: Exception, *, step: int) -> None:
        """Tell of an error, and go on."""
        self._page.add("train_guard_errors_total")
        kind = f"{type(error).__name__}: {error}"
        if kind not in self._seen and len(self._seen) < _MOST_KINDS:
            self._seen.add(kind)
            _log.error("run %s, step %d: held back %s", self._run, step, kind, exc_info=error)

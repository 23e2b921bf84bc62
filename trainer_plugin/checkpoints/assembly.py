"""How the writers of all ranks come to one result without a collective: each reports, the first one gives the word."""

import threading
import time
from collections import OrderedDict
from typing import Any

from trainer_plugin.lines import Lines
from trainer_plugin.ranks import Ranks

_MOST_KEPT = 1000


class Assembly:
    """Of one rank; for whatever is agreed upon there is a key that all ranks use once."""

    def __init__(self, ranks: Ranks, lines: Lines) -> None:
        self._ranks = ranks
        self._lines = lines
        self._news = threading.Condition()
        self._reports: OrderedDict[str, dict[int, Any]] = OrderedDict()
        self._words: OrderedDict[str, Any] = OrderedDict()
        lines.on("report", lambda rank, body: self._take_report(rank, *body))
        lines.on("word", lambda _, body: self._take_word(*body))

    def report(self, key: str, body: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """Tell the first rank."""
        if self._ranks.first:
            self._take_report(0, key, body)
        else:
            self._lines.send("report", [key, body])

    def collect(self, key: str, ranks: tuple[int, ...], seconds: float) -> dict[int, Any]:
        """On the first rank: what these have reported.

        Raises:
            OSError: one is gone, or has not reported in time.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while missing := [rank for rank in ranks if rank not in self._reports.get(key, {})]:
                gone = [rank for rank in missing if rank != 0 and rank not in self._lines.open_to]
                left_seconds = deadline - time.monotonic()
                if gone or left_seconds <= 0:
                    why = "is gone" if gone else f"has not answered within {seconds:.0f} s"
                    raise TimeoutError(f"rank {(gone or missing)[0]} {why}")
                self._news.wait(min(left_seconds, 0.5))
            return self._reports.pop(key)

    def give(self, key: str, body: Any) -> None:  # noqa: ANN401
        """On the first rank: the word that all wait for."""
        self._take_word(key, body)
        self._lines.send("word", [key, body])

    def word(self, key: str, seconds: float) -> Any:  # noqa: ANN401
        """What the first rank says.

        Raises:
            OSError: it is gone, or has not said anything in time.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while key not in self._words:
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0 or (not self._ranks.first and 0 not in self._lines.open_to):
                    raise TimeoutError(f"rank 0 has not answered within {seconds:.0f} s, or is gone")
                self._news.wait(min(left_seconds, 0.5))
            return self._words.pop(key)

    def _take_report(self, rank: int, key: str, body: Any) -> None:  # noqa: ANN401
        with self._news:
            self._reports.setdefault(key, {})[rank] = body
            _trim(self._reports)
            self._news.notify_all()

    def _take_word(self, key: str, body: Any) -> None:  # noqa: ANN401
        with self._news:
            self._words[key] = body
            _trim(self._words)
            self._news.notify_all()


def _trim(kept: OrderedDict[str, Any]) -> None:
    """What came too late for anybody to take is not kept for ever."""
    while len(kept) > _MOST_KEPT:
        kept.popitem(last=False)

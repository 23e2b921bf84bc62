"""The training data as the guard hands it out: batch by batch, with a position that can go back, and a quarantine."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

_KEPT_POSITIONS = 5000


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Batches `first` to `last` (data positions, both included) are not trained on, because of an incident."""

    first: int
    last: int
    incident: int
    reason: str
    schema: int = 1


class Data:
    """Any iterable of batches. One with `state_dict` and `load_state_dict` can go back; others go on forward.

    A *position* is the number of batches drawn before a batch, epochs joined end to end: it goes back with the
    weights, whereas the quarantine does not.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self.rewindable = callable(getattr(source, "state_dict", None)) and callable(
            getattr(source, "load_state_dict", None)
        )
        self.position = 0
        self.quarantine: list[Quarantine] = []
        self._iterator: Iterator[Any] | None = None
        self._position_of_step: deque[tuple[int, int]] = deque(maxlen=_KEPT_POSITIONS)

    def next_batch(self, step: int) -> tuple[Any, int]:
        """The next batch that is not in quarantine, for step number `step`; and how many were left out on the way.

        Raises:
            ValueError: the data source is empty.
        """
        left_out = 0
        while True:
            batch = self._draw()
            position = self.position
            self.position += 1
            if any(entry.first <= position <= entry.last for entry in self.quarantine):
                left_out += 1
                continue
            self._position_of_step.append((step, position))
            return batch, left_out

    def positions(self, first_step: int, last_step: int) -> tuple[int, int] | None:
        """First and last position handed out for these steps, as they were last run; None if that is not known."""
        latest: dict[int, list[int]] = {}
        for step, position in self._position_of_step:
            latest.setdefault(step, []).append(position)
        found = [position for step, all_ in latest.items() if first_step <= step <= last_step for position in all_]
        return (min(found), max(found)) if found else None

    def state_dict(self) -> dict[str, Any]:
        """The position, and the source's own state where it has one."""
        source = self._source.state_dict() if self.rewindable else None  # type: ignore[attr-defined]
        return {"position": self.position, "source": source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; a source that cannot goes on where it is, and its position with it."""
        if not self.rewindable or state["source"] is None:
            return
        self._source.load_state_dict(state["source"])  # type: ignore[attr-defined]
        self.position = state["position"]
        self._iterator = None
        self._position_of_step = deque(
            ((step, position) for step, position in self._position_of_step if position < self.position),
            maxlen=_KEPT_POSITIONS,
        )

    def _draw(self) -> Any:  # noqa: ANN401 - whatever the source yields
        if self._iterator is not None:
            try:
                return next(self._iterator)
            except StopIteration:
                pass  # An epoch ends; the next one begins.
        self._iterator = iter(self._source)
        try:
            return next(self._iterator)
        except StopIteration:
            pass
        # A source restored exactly at an epoch's end yields nothing once, then the next epoch.
        self._iterator = iter(self._source)
        try:
            return next(self._iterator)
        except StopIteration:
            raise ValueError("data yields no batch") from None

"""The training data as the guard hands it out: batch by batch, with a position that can go back, and a quarantine."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from trainer_plugin.data.source import Places, source_of

_log = logging.getLogger(__name__)
_KEPT_POSITIONS = 5000
# The ids of a batch take a hundred times the memory of its position.
_KEPT_TOLD = 1000


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Batches `first` to `last` (data positions, both included) are suspect, because of an incident.

    `sample_ids` are what was in them: as the `IndexSampler` has it, else as far as the loop has told.
    """

    first: int
    last: int
    incident: int
    reason: str
    sample_ids: tuple[str, ...] = ()
    schema: int = 1


def merged(entries: Sequence[Quarantine]) -> Quarantine | None:
    """What several ranks have found suspect of the same steps, as one; None where none has found anything."""
    if not entries:
        return None
    return msgspec.structs.replace(
        entries[0],
        first=min(entry.first for entry in entries),
        last=max(entry.last for entry in entries),
        sample_ids=tuple(dict.fromkeys(one for entry in entries for one in entry.sample_ids)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """A batch that was handed out, and for which step."""

    step: int
    position: int
    suspect: bool
    places: Places | None


class Data:
    """Batches by position: the number of batches drawn before one, epochs joined end to end.

    The position goes back with the weights, if the source can go back; the quarantine does not. `suspect_weight` is
    what a suspect batch counts for. With 0 it is left out: by its position, or by an `IndexSampler` sample for sample,
    in the epochs to come too.

    Raises:
        ValueError: the source is a loader that cannot work as it is set up.
    """

    def __init__(self, batches: Iterable[Any], *, suspect_weight: float = 0.0) -> None:
        self._source = source_of(batches)
        self.rewindable = self._source.rewindable
        self.position = 0
        self._suspect_weight = suspect_weight
        self._quarantine: list[Quarantine] = []
        self._by_position: list[Quarantine] = []
        self._drawn: deque[_Drawn] = deque(maxlen=_KEPT_POSITIONS)
        self._told: deque[tuple[int, Sequence[object]]] = deque(maxlen=_KEPT_TOLD)
        self._forward_said = False

    @property
    def quarantine(self) -> list[Quarantine]:
        """What is suspect. Set it before a state is loaded: a loader reads ahead as soon as it has gone back."""
        return self._quarantine

    @quarantine.setter
    def quarantine(self, entries: Iterable[Quarantine]) -> None:
        self._quarantine = self._by_position = list(entries)
        if not self._suspect_weight:
            by_id = self._source.leave_out([entry.sample_ids for entry in self._quarantine])
            self._by_position = [entry for entry, done in zip(self._quarantine, by_id, strict=True) if not done]
        if not self.rewindable:  # Its positions begin anew with each process: they mean other batches.
            self._by_position = []

    def next_batch(self, step: int) -> tuple[Any, int]:
        """The next batch that is not left out, for step number `step`; and how many were left out on the way.

        Raises:
            ValueError: the data source is empty.
        """
        left_out = 0
        while True:
            batch, places = self._source.draw()
            position = self.position
            self.position += 1
            suspect = any(entry.first <= position <= entry.last for entry in self._by_position)
            if suspect and not self._suspect_weight:
                left_out += 1
                continue
            self._drawn.append(_Drawn(step=step, position=position, suspect=suspect, places=places))
            return batch, left_out

    def weight(self, step: int) -> float:
        """What step number `step` counts for: less than 1 if one of its batches is suspect."""
        own = takewhile(lambda drawn: drawn.step == step, reversed(self._drawn))
        return self._suspect_weight if any(drawn.suspect for drawn in own) else 1.0

    def tell(self, sample_ids: Sequence[object]) -> None:
        """Hear which samples were in the batch handed out last."""
        if self._drawn and self._drawn[-1].places is None and len(sample_ids):
            self._told.append((self._drawn[-1].position, sample_ids))

    def sample_ids_of(self, step: int) -> list[str]:
        """The samples that a step of late has used, where the source knows them by place."""
        places = [drawn.places for drawn in self._drawn if drawn.step == step and drawn.places is not None]
        return self._source.sample_ids(places, ahead=0)

    def suspect(self, first_step: int, last_step: int, *, incident: int, reason: str) -> Quarantine | None:
        """The data of these steps, as they were last run; None where that is not known, or of no use.

        A step that was not run yet is taken to need as many batches as the one before it.
        """
        latest: dict[int, list[_Drawn]] = {}
        for drawn in self._drawn:
            latest.setdefault(drawn.step, []).append(drawn)
        found = [drawn for step, all_ in latest.items() if first_step <= step <= last_step for drawn in all_]
        if not found:
            return None
        newest = self._drawn[-1].step
        ahead = max(0, last_step - newest) * len(latest[newest])
        first = min(drawn.position for drawn in found)
        last = max(drawn.position for drawn in found)
        ids = self._source.sample_ids([drawn.places for drawn in found if drawn.places is not None], ahead=ahead)
        ids += [str(one) for position, told in self._told if first <= position <= last for one in told]
        if not ids and not self.rewindable:
            return None
        return Quarantine(
            first=first, last=last + ahead, incident=incident, reason=reason, sample_ids=tuple(dict.fromkeys(ids))
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, and the source's own state where it has one."""
        return {"position": self.position, "source": self._source.state_dict(), "epoch": self._source.epoch}

    def load_state_dict(self, state: dict[str, Any], *, split_anew: bool = False) -> None:
        """Go back to a state; a source that cannot goes on where it is, and its position with it.

        `split_anew`: it is that of another number of ranks.

        Raises:
            ValueError: the source does not take its state.
        """
        if not self.rewindable or state["source"] is None or (split_anew and not self._source.splits_anew):
            self._say_forward(state["position"])
            return
        self._source.load_state_dict(state["source"], epoch=state.get("epoch"))
        self.position = state["position"]
        self._drawn = deque((one for one in self._drawn if one.position < self.position), maxlen=_KEPT_POSITIONS)
        self._told = deque((one for one in self._told if one[0] < self.position), maxlen=_KEPT_TOLD)

    def close(self) -> None:
        """No batch is wanted any more."""
        self._source.close()

    def _say_forward(self, wanted: int) -> None:
        if not self._forward_said:
            self._forward_said = True
            _log.warning(
                "data cannot go back: it goes on with its batch %d, the weights were at batch %d", self.position, wanted
            )

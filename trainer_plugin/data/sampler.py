"""The index sampler: which samples of a map-style data set make up which batch, and a place to go back to."""

import logging
from collections.abc import Callable, Iterator
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)


class IndexSampler:
    """Batches of indices: `DataLoader(dataset, batch_sampler=IndexSampler(len(dataset), ...))`, or to loop over.

    The order of an epoch follows from seed and epoch alone. `place` counts the samples of the epoch that are used up,
    by all ranks together, so ranks and batch size may change at any place: what was used does not come again. One
    batch of all ranks is the next `batch_size * world_size` samples; rank r has every `world_size`-th of them from
    number r on. An iterator begins at the place of its sampler, and moves it along: with workers ahead of the training,
    and only the guard knows how far.

    Args:
        size: samples in the data set.
        batch_size: samples in a batch of one rank.
        seed: 0 or more; the same on every rank.
        shuffle: whether each epoch has an order of its own, or that of the data set.
        drop_last: whether an epoch's last batch is left out if it is not full. If not, it is shared evenly, and up to
            `world_size - 1` samples are left.
        rank: which part is drawn here, from 0 on.
        world_size: the number of parts.
        sample_id: the id of a sample by its index, as it stands in `quarantine.jsonl`.

    Raises:
        TypeError: an id is no text.
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        sample_id: Callable[[int], str] = str,
    ) -> None:
        for name, number in (("size", size), ("batch_size", batch_size), ("world_size", world_size)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, found {number}")
        if not 0 <= rank < world_size:
            raise ValueError(f"`rank` must be at least 0 and below world_size {world_size}, found {rank}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"`seed` must be at least 0 and below 2^64, found {seed}")
        if not isinstance(sample_id(0), str):
            raise TypeError(f"`sample_id` must give a text, found {sample_id(0)!r} for sample 0")
        self.epoch = 0
        self.place = 0
        # Ids of samples that are in no batch; for a change to hold at once, iterate anew.
        self.left_out: frozenset[str] = frozenset()
        self._order_of = {"size": size, "seed": seed, "shuffle": shuffle}
        self.size = size
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank = rank
        self._world_size = world_size
        self._sample_id = sample_id

    def __len__(self) -> int:
        """Batches in a whole epoch that nothing is left out of."""
        full, rest = divmod(self.size, self._batch_size * self._world_size)
        return full + (not self._drop_last and rest >= self._world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch, on this rank; after its end the next call begins the next one."""
        return self._rest(copy(self))

    def _rest(self, ahead: "IndexSampler") -> Iterator[list[int]]:
        # By a copy: another iterator, of somebody who only wants to look, does not disturb this one.
        while (batch := ahead.advance()) is not None:
            self.go_to(ahead)
            yield batch[self._rank :: self._world_size]
        self.go_to(ahead)

    def go_to(self, other: "IndexSampler") -> None:
        """Take over the place of another sampler of the same order."""
        self.epoch, self.place = other.epoch, other.place

    def advance(self) -> list[int] | None:
        """The next batch of all ranks together; None at the epoch's end, where the place becomes the next one's."""
        wanted = self._batch_size * self._world_size
        batch, place = self._take(wanted)
        if len(batch) < wanted:  # What cannot be shared is not used up: another split may still use it.
            batch, place = self._take(0 if self._drop_last else len(batch) // self._world_size * self._world_size)
        if not batch:
            self.epoch, self.place = self.epoch + 1, 0
            return None
        self.place = place
        return batch

    def sample_ids(self, epoch: int, first: int, last: int) -> list[str]:
        """The ids of the samples from place `first` to before place `last`, those that are left out too."""
        return [self._sample_id(index) for index in self._samples(epoch, first, last)]

    def state_dict(self) -> dict[str, Any]:
        """The place, and the order that it is a place of."""
        return {**self._order_of, "epoch": self.epoch, "place": self.place, "world_size": self._world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place, back or forward.

        Raises:
            ValueError: it is a place in another order.
        """
        theirs = {name: state[name] for name in self._order_of}
        if theirs != self._order_of:
            raise ValueError(f"a place in the order of {self._order_of} wanted, found one of {theirs}")
        self.epoch, self.place = state["epoch"], state["place"]
        if state["world_size"] != self._world_size and self._rank == 0:
            _log.warning(
                "data: split over %d ranks, before it was %d: from sample %d of epoch %d on",
                self._world_size,
                state["world_size"],
                self.place,
                self.epoch,
            )

    def _take(self, wanted: int) -> tuple[list[int], int]:
        """So many samples from here on, or what there is, and the place after them."""
        batch: list[int] = []
        place = self.place
        while len(batch) < wanted and place < self.size:
            ahead = self._samples(self.epoch, place, place + wanted - len(batch))
            place += len(ahead)
            if self.left_out:
                ahead = [index for index in ahead if self._sample_id(index) not in self.left_out]
            batch += ahead
        return batch, place

    def _samples(self, epoch: int, first: int, last: int) -> list[int]:
        if not self._order_of["shuffle"]:
            return list(range(first, min(last, self.size)))
        indices: list[int] = _shuffled(self.size, int(self._order_of["seed"]), epoch)[first:last].tolist()
        return indices


@lru_cache(maxsize=2)  # One epoch, and the next one where a loader reads ahead.
def _shuffled(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers below `size` in an order of their own.

    By sorting raw Philox numbers (Salmon et al., 2011), which numpy promises to keep: its `permutation` may change with
    a release, and a run that goes on after an upgrade would see some samples twice and others never.
    Two seconds for ten million.
    """
    return np.argsort(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size), kind="stable")

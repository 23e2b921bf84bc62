"""Where the batches come from, epochs joined end to end: read on from a place, or only forward."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from trainer_plugin.data.sampler import IndexSampler

# Epoch, first place in it, and the place after the last one.
Places = tuple[int, int, int]
# More than this share of a data set is not left out for good: a window may be longer than a short epoch.
_MOST_LEFT_OUT_RATIO = 0.1


class Source:
    """Any iterable of batches. One with `state_dict` and `load_state_dict` can go back; others go on forward.

    `splits_anew`: its place is one for any number of ranks.
    """

    splits_anew = False

    def __init__(self, batches: Iterable[Any]) -> None:
        self.rewindable = _has_state(batches)
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._shuffler = _shuffler_of(batches)
        self._epoch_begun: int | None = None

    def draw(self) -> tuple[Any, Places | None]:
        """The next batch and, where that is known, the places of its samples.

        Raises:
            ValueError: there is none.
        """
        # An epoch may just have ended, and a source restored exactly there yields nothing once more.
        for _ in range(3):
            if self._iterator is not None:
                try:
                    return next(self._iterator), self._follow()
                except StopIteration:
                    self._end_epoch()
            self._begin()
        raise ValueError("data yields no batch")

    def leave_out(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """Leave these samples out from the next batch on; for each group, whether that can be done."""
        return [False] * len(groups)

    def sample_ids(self, places: list[Places], *, ahead: int) -> list[str]:
        """The ids of the samples at these places, and of those in so many batches that are still to come."""
        del places, ahead
        return []

    def state_dict(self) -> Any:  # noqa: ANN401 - the source's own
        """Where it is, if it can come back there."""
        return self._batches.state_dict() if self.rewindable else None  # type: ignore[attr-defined]

    @property
    def epoch(self) -> int | None:
        """The number by which a sampler such as the `DistributedSampler` shuffles, where there is one."""
        return None if self._shuffler is None else int(self._shuffler.epoch)

    def load_state_dict(self, state: Any, *, epoch: int | None = None) -> None:  # noqa: ANN401
        """Go to where it was, in the order of that `epoch`.

        Raises:
            ValueError: it is no state of this source's.
        """
        self._iterator = None  # First: the workers of a loader end with it.
        if self._shuffler is not None and epoch is not None:
            self._shuffler.set_epoch(epoch)
        try:
            self._go_to(state)
            # Now, and not when a batch is wanted: here a loader draws its workers' seed from torch's generator, which
            # is restored after the data. The run that was saved had drawn it before.
            self._begin()
        except Exception as error:
            raise ValueError(f"data does not take the state that it was saved with: {error!r}") from error

    def close(self) -> None:
        """Let go of what is being read, now: the workers of a loader that the garbage collector finds end 5 s each."""
        self._iterator = None

    def _go_to(self, state: Any) -> None:  # noqa: ANN401
        self._batches.load_state_dict(state)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        """Begin an epoch, or what is left of one."""
        self._epoch_begun = self.epoch
        self._iterator = iter(self._batches)

    def _follow(self) -> Places | None:
        """A batch was drawn."""
        return None

    def _end_epoch(self) -> None:
        """An epoch has ended: the next one has another order. A loop that sees to that itself is not disturbed."""
        epoch = self.epoch
        if epoch is not None and epoch == self._epoch_begun:
            self._shuffler.set_epoch(epoch + 1)


class SampledSource(Source):
    """An `IndexSampler`, or a loader that draws by one, however far it reads ahead: what counts is what was drawn here.

    A second sampler of the same order stands where the drawing stands.
    """

    splits_anew = True

    def __init__(self, batches: Iterable[Any], sampler: IndexSampler) -> None:
        super().__init__(batches)
        self.rewindable = True
        self._sampler = sampler
        self._drawn = copy(sampler)

    def leave_out(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """As above. A group with which too much of the data would be left out is not."""
        ids: frozenset[str] = frozenset()
        done = []
        for group in groups:
            more = ids.union(group)
            done.append(bool(group) and len(more) <= self._sampler.size * _MOST_LEFT_OUT_RATIO)
            ids = more if done[-1] else ids
        if ids != self._drawn.left_out:
            self._sampler.left_out = self._drawn.left_out = ids
            self._iterator = None  # What was read ahead has them still.
        return done

    def sample_ids(self, places: list[Places], *, ahead: int) -> list[str]:
        """As above."""
        drawn = copy(self._drawn)
        coming = [_advance(drawn) for _ in range(ahead)]
        return [one for part in (*places, *coming) for one in drawn.sample_ids(*part)]

    def state_dict(self) -> Any:  # noqa: ANN401
        """As above."""
        return self._drawn.state_dict()

    def _go_to(self, state: Any) -> None:  # noqa: ANN401
        self._drawn.load_state_dict(state)

    def _begin(self) -> None:
        self._sampler.go_to(self._drawn)
        super()._begin()

    def _follow(self) -> Places | None:
        return _advance(self._drawn)

    def _end_epoch(self) -> None:
        self._drawn.advance()


def source_of(batches: Iterable[Any]) -> Source:
    """How these batches are read.

    Raises:
        ValueError: an `IndexSampler` is given to a loader in a way that it cannot work in.
    """
    if isinstance(batches, IndexSampler):
        return SampledSource(batches, batches)
    misplaced = isinstance(getattr(batches, "sampler", None), IndexSampler)
    if misplaced:
        raise ValueError("an IndexSampler makes whole batches: a loader needs it as `batch_sampler`, not as `sampler`")
    sampler = getattr(batches, "batch_sampler", None)
    if not isinstance(sampler, IndexSampler) or _has_state(batches):  # A loader's own state knows better.
        return Source(batches)
    if not getattr(batches, "in_order", True):
        raise ValueError("a loader with in_order=False hands out batches in an order that cannot be gone back in")
    return SampledSource(batches, sampler)


def _shuffler_of(batches: object) -> Any:  # noqa: ANN401 - a sampler
    """What has to be told of each epoch, or has the order of the first one in all."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    for one in (getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(one, "set_epoch", None)) and isinstance(getattr(one, "epoch", None), int):
            return one
    return None


def _has_state(batches: object) -> bool:
    return all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict"))


def _advance(sampler: IndexSampler) -> Places:
    """Go one batch on, over the end of an epoch if need be, and say where that batch is."""
    first = sampler.place
    if sampler.advance() is None:
        first = 0
        sampler.advance()
    return sampler.epoch, first, sampler.place

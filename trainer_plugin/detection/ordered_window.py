"""A window of the newest numbers that knows their order, so that a quantile costs the same for any length. Pure."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

# How far apart the quartiles and the outer tenths of a normal distribution are, in standard deviations: 2 Phi^-1(3/4)
# and 2 Phi^-1(9/10). Of two kinds of batches the quartiles may both fall into one; the tenths hold both.
_QUARTERS = 1.349
_TENTHS = 2.563


class OrderedWindow:
    """The newest `size` numbers; `ordered` holds the same ones, smallest first, and is not to be changed."""

    __slots__ = ("_newest", "_ranks", "ordered", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.ordered: list[float] = []
        self._newest: deque[float] = deque()
        self._ranks = _ranks(size)

    def add(self, value: float) -> None:
        """Take a finite number in; the oldest leaves a full window."""
        ordered, newest = self.ordered, self._newest
        newest.append(value)
        if len(ordered) == self.size:
            del ordered[bisect_left(ordered, newest.popleft())]
        insort(ordered, value)

    def deviations(self) -> tuple[float, float]:
        """The standard deviation of normal noise that reaches as far, by quartiles and by outer tenths; 0 if empty."""
        ordered = self.ordered
        if not ordered:
            return 0.0, 0.0
        tenth, quarter, last_quarter, last_tenth = self._ranks if len(ordered) == self.size else _ranks(len(ordered))
        return (
            (ordered[last_quarter] - ordered[quarter]) / _QUARTERS,
            (ordered[last_tenth] - ordered[tenth]) / _TENTHS,
        )

    @property
    def values(self) -> list[float]:
        """The numbers, oldest first."""
        return list(self._newest)

    def fill(self, values: Iterable[float]) -> None:
        """Hold these numbers and no others, oldest first."""
        self._newest.clear()
        self._newest.extend(values)
        self.ordered[:] = sorted(self._newest)


def _ranks(count: int) -> tuple[int, int, int, int]:
    """Where in so many ordered numbers the first tenth, the quartiles and the last tenth begin."""
    return count // 10, count // 4, 3 * count // 4, 9 * count // 10

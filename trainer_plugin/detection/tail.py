"""The tail: how far out a run's own noise reaches, against a normal one. Pure."""

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Any

# One value in 400 of a normal distribution is further out than this, Phi^-1(1 - 1/400): far enough to tell Student's
# t3 from it (6.6 by the same quartiles), and never further than the third largest, which no two values can move.
_SHARE = 1 / 400
_SCORE = 2.807
_LEAST_RANK = 3
# Student's t3 reaches 2.3. Noise with more than 3 has no variance, and a threshold would never be reached again.
_MAX_RATIO = 3.0
_LEAST_SCORES = 100
# Only the largest are kept: the one in 400 is among those above this (one in 15 of normal noise), or the ratio is 1.
_KEPT_ABOVE = 1.5


class Tail:
    """`ratio` is the score that one in 400 of the last `size` exceeded, over what it is for normal noise; at least 1.

    A score counts only if it stood alone, the next one less than half of it: noise does, what goes wrong comes in a
    row, and must not raise the threshold that it is held against.
    """

    def __init__(self, size: int) -> None:
        self.ratio = 1.0
        self._size = size
        self._seen = 0
        self._pending: float | None = None
        self._ordered: list[float] = []
        # Number and score of those kept.
        self._newest: deque[tuple[int, float]] = deque()

    def update(self, score: float | None) -> None:
        """Take in the score before this one, if it stood alone; None for a score that is not to be learnt."""
        pending, self._pending = self._pending, score
        if pending is None:
            return
        newest = self._newest
        if pending > _KEPT_ABOVE:
            if pending > _SCORE and (score is None or score > pending / 2.0):
                return
            insort(self._ordered, pending)
            newest.append((self._seen, pending))
        self._seen += 1
        if newest and newest[0][0] < self._seen - self._size:
            del self._ordered[bisect_left(self._ordered, newest.popleft()[1])]
        elif pending <= _KEPT_ABOVE:
            return
        count = min(self._seen, self._size)
        rank = max(_LEAST_RANK, math.ceil(_SHARE * count))
        if count >= _LEAST_SCORES:
            reached = self._ordered[-rank] if rank <= len(self._ordered) else 0.0
            self.ratio = min(max(reached / _SCORE, 1.0), _MAX_RATIO)

    def forget_newest(self) -> None:
        """What comes next is not beside what was last."""
        self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """The scores kept."""
        return {
            "ratio": self.ratio,
            "seen": self._seen,
            "pending": self._pending,
            "newest": [list(kept) for kept in self._newest],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.ratio, self._seen, self._pending = state["ratio"], state["seen"], state["pending"]
        self._newest.clear()
        self._newest.extend((number, score) for number, score in state["newest"])
        self._ordered = sorted(score for _, score in self._newest)

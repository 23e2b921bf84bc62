"""A curve of any length in a few thousand points: the lowest and highest value of each stretch."""

import math

_MOST_STRETCHES = 4096


class Curve:
    """Values by step, in memory that does not grow: when there are too many stretches, each takes in its neighbour."""

    def __init__(self) -> None:
        self._rows_each = 1
        self._rows = 0
        # First step, lowest, highest.
        self._stretches: list[tuple[int, float, float]] = []

    def add(self, step: int, value: float | None) -> None:
        """Take in one logged value; one that is not finite or not there leaves a gap."""
        number = math.nan if value is None or not math.isfinite(value) else value
        if self._rows % self._rows_each == 0:
            if len(self._stretches) == _MOST_STRETCHES:
                self._halve()
            self._stretches.append((step, number, number))
        else:
            first, low, high = self._stretches[-1]
            self._stretches[-1] = first, _least(low, number), _largest(high, number)
        self._rows += 1

    def points(self) -> tuple[list[int], list[float], list[float]]:
        """Steps, and the lowest and highest value at each; NaN where there is none."""
        steps, lows, highs = ([stretch[column] for stretch in self._stretches] for column in range(3))
        return steps, lows, highs  # type: ignore[return-value]

    def _halve(self) -> None:
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [(a[0], _least(a[1], b[1]), _largest(a[2], b[2])) for a, b in pairs]
        self._rows_each *= 2


def _least(a: float, b: float) -> float:
    return b if math.isnan(a) or b < a else a


def _largest(a: float, b: float) -> float:
    return b if math.isnan(a) or b > a else a

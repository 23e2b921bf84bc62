"""Spikes of the loss in a row, and whether those behind the first may be withheld. Pure: no torch, no clock."""

import math
from typing import Any

# Of a row none beyond this one is withheld: what goes on longer is no bad batch.
MOST_IN_A_ROW = 4
# Data that are that hard now and then, and several in a row, are to be learnt: a row that comes sooner is trained on.
ALONE_STEPS = 5000


class Spikes:
    """How many spikes of the loss there are in a row, and how long ago the last row of them was.

    One bad batch behind a clip does no harm, several in a row do. So by default the first of a row is applied, and
    three behind it are withheld, if this is the first such row for 5,000 steps.

    `in_a_row`: spikes up to the step seen last, 0 if that was none. `repeated`: it was one of those to be withheld.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self.repeated = False
        self._row_began: int | None = None
        self._last_row_ended: int | None = None

    def update(self, step: int, loss: float, *, spike: bool) -> None:
        """Take in a step. NaN says nothing of the row."""
        self.repeated = False
        if not math.isfinite(loss):
            return
        if not spike:
            self._end(step)
            return
        if self._row_began is None:
            self._row_began = step
        self.in_a_row += 1
        self.repeated = 1 < self.in_a_row <= MOST_IN_A_ROW and self.alone(step)

    def alone(self, step: int) -> bool:
        """Whether the row that is there, or would begin at this step, is the only one of late."""
        began = step if self._row_began is None else self._row_began
        return self._last_row_ended is None or began - self._last_row_ended > ALONE_STEPS

    def state_dict(self) -> dict[str, Any]:
        """The row that is there, and the last one."""
        return {"in_a_row": self.in_a_row, "row_began": self._row_began, "last_row_ended": self._last_row_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; a checkpoint of before it was kept has none.

        A row that was there ends here: what the device knew of it is gone, and the rest must not count as a new one.
        """
        self.repeated = False
        self.in_a_row, self._last_row_ended = state.get("in_a_row", 0), state.get("last_row_ended")
        self._row_began = state.get("row_began")
        if self._row_began is not None:
            self._end(self._row_began + self.in_a_row)

    def _end(self, step: int) -> None:
        if self.in_a_row > 1:
            self._last_row_ended = step
        self.in_a_row, self._row_began = 0, None

"""Logged steps in the order in which they happened, and where a run among them begins again."""

import math
from collections.abc import Generator, Iterable, Iterator

import msgspec

from trainer_plugin.backtest.notes import Notes

# A row as a reader finds it: line, step, loss, gradient norm, learning rate, loss scale, id of the run.
FoundRow = tuple[int, int, float, float | None, float | None, float | None, str | None]

_MOST_SHORT_PARTS = 10
_MOST_LATE_ROWS = 20


class LogRow(msgspec.Struct, frozen=True, gc=False):
    """One logged step. What the log lacks is None; a loss may be NaN or Inf, as it was printed.

    `run` counts the runs in the log from 1: with each, what was learnt before counts no longer. `restart` counts, from
    0, how often steps of this run have come again, because it went on from a checkpoint.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float | None
    amp_loss_scale: float | None
    run: int
    restart: int


def in_order(found: Iterable[FoundRow], notes: Notes) -> Generator[LogRow, None, int]:
    """Number runs and restarts; rows stay in the order of the log. Returns the number of runs.

    Raises:
        ValueError: the steps are in no order, or runs are mixed.
    """
    story = _Story(notes)
    for row in found:
        _, step, loss, grad_norm, learning_rate, amp_loss_scale, run_id = row
        if step > story.last and run_id == story.run_id and story.held is None:
            story.last, story.previous = step, row
            story.part_rows += 1
            yield LogRow(step, loss, grad_norm, learning_rate, amp_loss_scale, story.run, story.restart)
        else:
            yield from story.take(row)
    yield from story.end()
    return story.run


class _Story:
    """What has been seen of a log. A row whose step falls back is held until the next one says what it was."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.run = 0
        self.restart = 0
        self.run_id: str | None = None
        self.last: float = math.inf
        self.previous: FoundRow | None = None
        self.held: FoundRow | None = None
        self.part_rows = 0
        self._first = 0
        self._rows = 0
        self._ids: set[str | None] = set()
        self._late = 0
        self._short_parts = 0
        self._part_step: int | None = None

    def take(self, row: FoundRow) -> Iterator[LogRow]:
        """A row that does not simply come after the one before it."""
        if self.run == 0 or row[6] != self.run_id:
            yield from self.end()
            self._begin_run_by_id(row)
        elif self.held is not None:
            held, self.held = self.held, None
            if row[1] > self.last:
                self._count_late(held)
            else:
                self._fall_back(held)
            yield self._row(held)
            yield from self.take(row)
            return
        elif row[1] < self.last:
            self.held = row
            return
        elif row[1] == self.last and self.previous is not None:
            if str(row[2:]) == str(self.previous[2:]):
                self._notes.count("the same as the one before: left out", row[0])
                return
            self._notes.count("with the step of the one before and another value: kept", row[0])
        self.last, self.previous = row[1], row
        self.part_rows += 1
        yield self._row(row)

    def end(self) -> Iterator[LogRow]:
        """The row that is still held, if any: nothing came after it."""
        if self.held is not None:
            held, self.held = self.held, None
            self._fall_back(held)
            yield self._row(held)

    def _row(self, found: FoundRow) -> LogRow:
        return LogRow(found[1], *found[2:6], self.run, self.restart)

    def _begin_run_by_id(self, row: FoundRow) -> None:
        line, step, run_id = row[0], row[1], row[6]
        if run_id in self._ids:
            raise ValueError(
                f"{self._notes.place} {line}: the rows of several runs are mixed (run {run_id!r} comes again after "
                f"{self.run_id!r}); wanted one run after the other, or one file for each"
            )
        if self.run:
            self._notes.say(f"run {run_id!r} begins in {self._notes.place} {line}: a new run", kind="runs")
        self._ids.add(run_id)
        self.run_id = run_id
        self._begin_run(step)

    def _begin_run(self, step: int) -> None:
        self.run += 1
        self.restart = 0
        self._first = step
        self._begin_part(step)

    def _begin_part(self, step: int) -> None:
        self._rows += self.part_rows
        self.part_rows = 0
        self.last = step
        self._part_step = step

    def _fall_back(self, row: FoundRow) -> None:
        """The steps go on from an earlier one: the run, or another one, was started again."""
        line, step, last = row[0], row[1], int(self.last)
        self._check_order(line, step, last)
        where = f"{self._notes.place} {line}"
        # Back to where it began, give or take how soon something is logged.
        if step - self._first <= max(1, (last - self._first) // 100):
            self._notes.say(f"after step {last} comes step {step} ({where}): taken as a new run", kind="runs")
            self._begin_run(step)
        else:
            self._notes.say(
                f"steps {step} to {last} come twice ({where}): taken as a restart from a checkpoint", kind="restarts"
            )
            self.restart += 1
            self._begin_part(step)
        self.previous = row
        self.part_rows = 1

    def _check_order(self, line: int, step: int, last: int) -> None:
        # A job that crashes again and again does so from the same checkpoint: that is an order.
        short = self.part_rows <= 2 and step != self._part_step
        self._short_parts = self._short_parts + 1 if short else 0
        if self._short_parts > _MOST_SHORT_PARTS:
            raise ValueError(
                f"{self._notes.place} {line}: the steps are in no order (step {step} after {last}, and the like "
                "before); wanted them as they happened: sort the log by step"
            )

    def _count_late(self, row: FoundRow) -> None:
        self._notes.count("with a step below the one before, and alone in it: kept where found", row[0])
        self._late += 1
        if self._late > _MOST_LATE_ROWS and self._late * 10 > self._rows + self.part_rows:
            raise ValueError(
                f"{self._notes.place} {row[0]}: the steps are in no order (step {row[1]} after {int(self.last)}, and "
                "the like before); wanted one run, as it happened: several may be mixed"
            )

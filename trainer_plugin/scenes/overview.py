"""The whole run at a glance: loss and gradient norm from its first step on, in so few numbers that all are kept.

`<runs>/<run>/recorder.overview.json` holds at most `MOST_STRETCHES` stretches of steps; when there are more, each two
neighbours become one. A stretch never spans a rollback or a restart. Written every half minute and at the end: what a
killed job lacks there is in the recorder's lines.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from exporter.runs import write_atomically
from trainer_plugin.signals import Signals

SCHEMA = 1
NAME = "recorder.overview.json"
MOST_STRETCHES = 1000
_WRITE_SECONDS = 30.0
_MAX_BYTES = 1 << 24


class Range(msgspec.Struct):
    """Least, mean and largest of the finite values, and how many there were; zeros for none."""

    least: float = 0.0
    mean: float = 0.0
    largest: float = 0.0
    count: int = 0

    def add(self, other: "Range") -> None:
        """Take in the values of another one."""
        if not other.count:
            return
        total = self.count + other.count
        self.least = min(self.least, other.least) if self.count else other.least
        self.largest = max(self.largest, other.largest) if self.count else other.largest
        self.mean += (other.mean - self.mean) * other.count / total
        self.count = total


class Stretch(msgspec.Struct, kw_only=True):
    """Some steps that followed each other; `nonfinite` of them had a loss that is NaN or Inf."""

    first_step: int
    last_step: int
    steps_total: int
    branch: int
    loss: Range
    grad_norm: Range
    nonfinite: int = 0


class _File(msgspec.Struct):
    stretches: list[Stretch]
    steps_each: int
    schema: int = SCHEMA


class Overview:
    """Grows with the run. `write` hands some work to a thread, in order."""

    def __init__(
        self,
        folder: Path,
        *,
        write: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / NAME
        self._write = write
        self._clock = clock
        self._written_at = clock()
        known = _read(self._path)
        self.stretches = known.stretches if known is not None else []
        self._steps_each = known.steps_each if known is not None else 1

    def add(self, signals: Signals, *, steps_total: int, branch: int) -> None:
        """Take in a step."""
        step, loss, norm = signals.step, signals.loss, signals.grad_norm
        new = Stretch(
            first_step=step,
            last_step=step,
            steps_total=steps_total,
            branch=branch,
            loss=_range(loss),
            grad_norm=_range(math.nan if norm is None else norm),
            nonfinite=int(not math.isfinite(loss)),
        )
        last = self.stretches[-1] if self.stretches else None
        if last is not None and _follows(last, new) and last.last_step - last.first_step + 1 < self._steps_each:
            _join(last, new)
        else:
            self.stretches.append(new)
            if len(self.stretches) > MOST_STRETCHES:
                self._halve()
        if self._clock() - self._written_at >= _WRITE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write it in the background."""
        self._written_at = self._clock()
        content = msgspec.json.encode(_File(self.stretches, self._steps_each))
        self._write(lambda: write_atomically(self._path, content))

    def _halve(self) -> None:
        """Each two that follow each other become one; the oldest goes where rollbacks alone are too many."""
        self._steps_each *= 2
        halved: list[Stretch] = []
        for one in self.stretches:
            last = halved[-1] if halved else None
            if last is not None and _follows(last, one) and one.last_step - last.first_step < self._steps_each:
                _join(last, one)
            else:
                halved.append(one)
        self.stretches = halved[-MOST_STRETCHES:]


def read_overview(run_folder: Path) -> list[Stretch]:
    """The stretches of a run, in the order in which they were run; none where there are none that can be read."""
    known = _read(run_folder / NAME)
    return known.stretches if known is not None else []


def _read(path: Path) -> _File | None:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        known = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError):
        return None
    return known if known.schema == SCHEMA else None


def _range(value: float) -> Range:
    return Range(value, value, value, 1) if math.isfinite(value) else Range()


def _follows(last: Stretch, new: Stretch) -> bool:
    return new.branch == last.branch and new.first_step == last.last_step + 1


def _join(last: Stretch, new: Stretch) -> None:
    last.last_step, last.steps_total = new.last_step, new.steps_total
    last.loss.add(new.loss)
    last.grad_norm.add(new.grad_norm)
    last.nonfinite += new.nonfinite

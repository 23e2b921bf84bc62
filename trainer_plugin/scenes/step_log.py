"""The flight recorder on disk: every step of late as a line of JSON, readable after a kill -9.

`<runs>/<run>/recorder.0.jsonl` and `recorder.1.jsonl` are filled in turn: when one is full the other begins anew, so
that together they hold at least the last `steps` steps, and at most twice as many. The lines are written in the
background, a tenth of a second late at most; a killed job loses no line that was handed over, a dead host may.
"""

import math
import os
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.readings import Readings
from trainer_plugin.scenes.recorder import Start
from trainer_plugin.scenes.step_line import NAMES, StepLine, read_lines, when_run
from trainer_plugin.signals import Signals

# A step may have thousands of samples; whoever looks for more has its positions.
_MOST_IDS = 64


class StepLog:
    """The writer. `write` hands some work to a thread, in order; while that hangs, only the newest steps are kept."""

    def __init__(self, folder: Path, *, steps: int, write: Callable[[Callable[[], None]], None]) -> None:
        self._folder = folder
        self._steps = steps
        self._write = write
        self._waiting: deque[tuple[StepLine, Any, Any]] = deque(maxlen=max(steps, 1))
        self._asked = False
        # Which file is being filled, and how many lines it has; found out by the writer.
        self._number = -1
        self._lines = 0
        # What a disk that fails could not take yet, and whether it may have taken half a line.
        self._encoded: deque[bytes] = deque(maxlen=max(steps, 1))
        self._torn = False

    def add(
        self,
        signals: Signals,
        readings: Readings,
        verdicts: list[Verdict],
        start: Start,
        *,
        steps_total: int,
        branch: int,
        now: float,
        lr_factor: float,
    ) -> None:
        """Take in a step; nothing is written here."""
        if not self._steps:
            return
        line = StepLine(
            step=signals.step,
            steps_total=steps_total,
            branch=branch,
            time=now,
            loss=_number(signals.loss),
            grad_norm=_number(signals.grad_norm),
            loss_center=_number(readings.loss_robust_center),
            loss_scale=_number(readings.loss_robust_scale),
            clip_coefficient=_number(signals.clip_coefficient),
            surge=signals.surge,
            withheld=signals.withheld,
            amp_loss_scale=_number(signals.amp_loss_scale),
            learning_rates=tuple(map(_number, signals.learning_rates)),
            lr_factor=lr_factor,
            step_seconds=_number(signals.step_seconds),
            data_wait_seconds=_number(signals.data_wait_seconds),
            position=signals.data_position,
            sample_ids=signals.sample_ids[:_MOST_IDS],
            verdicts=tuple(f"{verdict.detector} {verdict.signal}" for verdict in verdicts),
        )
        self._waiting.append((line, signals, start.rng[0].get("torch") if start.rng else None))
        if not self._asked:
            self._asked = True
            self._write(self._flush)

    def _flush(self) -> None:
        """In the writer's thread: add what waits."""
        self._asked = False
        while self._waiting:
            self._encoded.append(msgspec.json.encode(_whole(*self._waiting.popleft())) + b"\n")
        if self._number < 0:
            self._number, self._lines = self._newest()
        while self._encoded:
            if self._lines >= self._steps:
                (self._folder / NAMES[1 - self._number]).unlink(missing_ok=True)
                self._number, self._lines = 1 - self._number, 0
            taken = list(islice(self._encoded, self._steps - self._lines))
            ended, self._torn = b"\n" * self._torn, True
            _append(self._folder / NAMES[self._number], ended + b"".join(taken))
            self._torn = False
            self._lines += len(taken)
            for _ in taken:
                self._encoded.popleft()

    def _newest(self) -> tuple[int, int]:
        """The file that was being filled last, and its lines; one that a killed job left half is ended."""
        last = [max(map(when_run, read_lines(self._folder / name)), default=(-1, -1)) for name in NAMES]
        number = last.index(max(last))
        path = self._folder / NAMES[number]
        if not path.exists():
            return number, 0
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")
        return number, content.count(b"\n") + 1


def _append(path: Path, content: bytes) -> None:
    """All of it or, as far as a disk that fails allows, nothing."""
    with path.open("ab", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size_bytes)
            raise


def _whole(line: StepLine, signals: Signals, rng: Any) -> StepLine:  # noqa: ANN401 - a tensor, or what the loop has
    """The line with what takes its time."""
    norms = {layer: _number(norm) for layer, norm in signals.layer_grad_norms.items()}
    nonfinite = tuple(
        f"{name}={value}"
        for name, value in (("loss", signals.loss), ("grad_norm", signals.grad_norm))
        if value is not None and not math.isfinite(value)
    )
    mark = zlib.crc32(rng.numpy().tobytes()) if isinstance(rng, torch.Tensor) else None
    return msgspec.structs.replace(line, layer_grad_norms=norms, nonfinite=nonfinite, rng=mark)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

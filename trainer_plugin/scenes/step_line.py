"""A step in the flight recorder: one line of JSON, and the lines that a run's folder holds. No torch."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

SCHEMA = 1
NAMES = ("recorder.0.jsonl", "recorder.1.jsonl")
_MOST_LINE_BYTES = 1 << 20


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step. A number that is not finite is null, and its name is in `nonfinite`; times are Unix seconds.

    `loss_center` and `loss_scale` are the robust detector's after the step, `verdicts` are "detector signal",
    `rng` is the CRC-32 of torch's random state with which the step's first batch went into the forward pass: two runs
    of one step have the same, or drew different numbers.
    """

    step: int
    steps_total: int
    branch: int
    time: float
    loss: float | None
    grad_norm: float | None
    loss_center: float | None = None
    loss_scale: float | None = None
    clip_coefficient: float = 1.0
    surge: bool = False
    withheld: str | None = None
    amp_loss_scale: float | None = None
    learning_rates: tuple[float, ...] = ()
    lr_factor: float = 1.0
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    position: int | None = None
    sample_ids: tuple[str, ...] = ()
    rng: int | None = None
    verdicts: tuple[str, ...] = ()
    layer_grad_norms: Mapping[str, float | None] = {}
    nonfinite: tuple[str, ...] = ()
    schema: int = SCHEMA


def read_steps(run_folder: Path) -> list[StepLine]:
    """The steps that a run's recorder holds, in the order in which they were run; lines that are damaged are left out.

    A job may be writing: both files are opened before either is read, so that one which begins anew meanwhile takes
    away nothing in between.

    Raises:
        OSError: a file is there and cannot be read.
    """
    files: list[BinaryIO] = []
    with ExitStack() as opened:
        for name in NAMES:
            with suppress(FileNotFoundError):
                files.append(opened.enter_context((run_folder / name).open("rb")))
        lines = [line for file in files for line in _decoded(file.read())]
    return sorted(lines, key=lambda line: line.steps_total)


def read_lines(path: Path) -> list[StepLine]:
    """The lines of one file that can be read; of none where there is no file."""
    return _decoded(path.read_bytes()) if path.exists() else []


def _decoded(content: bytes) -> list[StepLine]:
    lines: list[StepLine] = []
    for line in content.splitlines():
        try:
            one = msgspec.json.decode(line[:_MOST_LINE_BYTES], type=StepLine)
        except (msgspec.MsgspecError, RecursionError):
            continue
        if one.schema == SCHEMA:
            lines.append(one)
    return lines

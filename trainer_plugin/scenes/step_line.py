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
    clip_coefficient: float | None = 1.0
    surge: bool = False
    withheld: str | None = None
    amp_loss_scale: float | None = None
    learning_rates: tuple[float | None, ...] = ()
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

    Raises:
        OSError: a file is there and cannot be read.
    """
    return read_recorder(run_folder)[0]


def read_recorder(run_folder: Path) -> tuple[list[StepLine], list[str]]:
    """The same, and what could not be read, a line for each file.

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
        found = [(Path(file.name).name, *_decoded(file.read())) for file in files]
    lines = [line for _, decoded, _ in found for line in decoded]
    problems = [f"{name}: {damaged} lines cannot be read and are left out" for name, _, damaged in found if damaged]
    return sorted(lines, key=when_run), problems


def when_run(line: StepLine) -> tuple[int, int]:
    """What orders lines: a killed job's last steps are counted again by the next one, in a branch of its own."""
    return line.branch, line.steps_total


def read_lines(path: Path) -> list[StepLine]:
    """The lines of one file that can be read; of none where there is no file."""
    return _decoded(path.read_bytes())[0] if path.exists() else []


def _decoded(content: bytes) -> tuple[list[StepLine], int]:
    """The lines, and how many others there are; one that has no end yet may still be written."""
    lines: list[StepLine] = []
    damaged = 0
    for line in content.splitlines(keepends=True):
        if not line.strip():
            continue
        try:
            one = msgspec.json.decode(line[:_MOST_LINE_BYTES], type=StepLine)
        except (msgspec.MsgspecError, RecursionError):
            damaged += line.endswith(b"\n")
            continue
        if one.schema == SCHEMA:
            lines.append(one)
        else:
            damaged += 1
    return lines, damaged

"""A step in the flight recorder: one line of JSON, and the lines that a run's folder holds. No torch."""

from collections.abc import Mapping
from pathlib import Path

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

    Raises:
        OSError: a file is there and cannot be read.
    """
    lines = [line for name in NAMES for line in read_lines(run_folder / name)]
    return sorted(lines, key=lambda line: line.steps_total)


def read_lines(path: Path) -> list[StepLine]:
    """The lines of one file that can be read."""
    lines: list[StepLine] = []
    if not path.exists():
        return lines
    for line in path.read_bytes().splitlines():
        try:
            one = msgspec.json.decode(line[:_MOST_LINE_BYTES], type=StepLine)
        except (msgspec.MsgspecError, RecursionError):
            continue
        if one.schema == SCHEMA:
            lines.append(one)
    return lines

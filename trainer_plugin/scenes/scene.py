"""The spike scene on disk (R15, R19): what an incident began with, in plain files. Pure: no torch.

`<runs>/<run>/scenes/step-<step>-<branch>/` holds
    scene.json      written last: a folder without it is no scene. `Scene` says what is in it.
    manifest.json   as of a checkpoint, kind `scene`: size and SHA-256 of the other files.
    plain.pt        for `torch.load(..., weights_only=True)`: what a checkpoint holds beside its tensors, and `scene`:
                    `rng`, the random state with which each batch of the step went into the forward pass (in the form
                    of the checkpoint's own `rng`), and `batches`, those batches in their order.
    *.distcp, .metadata   weights, buffers and optimizer state, as in a checkpoint.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from exporter.runs import write_atomically
from trainer_plugin.signals import Signals

SCHEMA = 1
NAME = "scene.json"
_MAX_BYTES = 1 << 26


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """An incident's first scene.

    `steps` are the signals of the last steps, the oldest first and the one that opened the incident last; a number that
    is not finite is the text `nan`, `inf` or `-inf`. The stored weights are those that step `weights_step` left: where
    that is the step before the incident's, because its update was withheld, the step can be run again as it was.
    `positions` are where in the data its batches came from. `batches` says how many are stored, `batches_left_out` why
    they are not.
    """

    run: str
    step: int
    weights_step: int
    steps_total: int
    branch: int
    created: float
    incident: int
    class_: str = msgspec.field(name="class")
    evidence: list[str]
    steps: list[dict[str, Any]]
    positions: list[int]
    batches: int
    batches_left_out: str
    torch: str
    schema: int = SCHEMA


def write(folder: Path, scene: Scene) -> None:
    """Make a folder that holds everything else a scene.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(folder / NAME, msgspec.json.encode(scene))


def read(folder: Path) -> Scene | None:
    """The scene in a folder; None where there is none, or none that can be understood."""
    path = folder / NAME
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        scene = msgspec.json.decode(path.read_bytes(), type=Scene)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    return scene if scene.schema == SCHEMA else None


def plain_signals(signals: Signals) -> dict[str, Any]:
    """One step's signals as JSON can hold them."""
    return {name: _plain(getattr(signals, name)) for name in signals.__struct_fields__}


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of Signals
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else _plain(msgspec.to_builtins(value))

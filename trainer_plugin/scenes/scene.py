"""The spike scene on disk (R15, R19): what an incident began with, in plain files. Pure: no torch.

`<runs>/<run>/scenes/step-<step>-<branch>/` holds
    scene.json      written last: a folder without it is no scene. `Scene` says what is in it.
    manifest.json   as of a checkpoint, kind `scene`: size and SHA-256 of the other files.
    plain.pt        for `torch.load(..., weights_only=True)`: what a checkpoint holds beside its tensors, and `scene`:
                    `rng`, the random state with which each batch of the step went into the forward pass (in the form
                    of the checkpoint's own `rng`), and `batches`, those batches in their order; `before` has the same
                    of the step before it.
    *.distcp, .metadata   weights, buffers and optimizer state, as in a checkpoint.
"""

import math
import re
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
    is not finite is the text `nan`, `inf` or `-inf`. The stored weights and buffers are those that step `weights_step`
    left: where that is the step before the incident's, it can be run again as it was. The optimizer's state is that of
    after the step in any case. `positions` are where in the data its batches came from, `sample_ids` what was in them,
    as the loop has told, else as the `IndexSampler` has it. `batches` says how many are stored, `batches_left_out` why
    they are not. `factory` is who builds the model anew, as `module:function`.
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
    sample_ids: tuple[str, ...] = ()
    factory: str = ""
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


def factory_name(text: str) -> str:
    """The name of a factory, checked; empty for none.

    Raises:
        ValueError: it is no `module:function`.
    """
    if text and re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", text) is None:
        raise ValueError(f"factory: `module:function` wanted, such as train:build, found {text!r}")
    return text


def plain_signals(signals: Signals) -> dict[str, Any]:
    """One step's signals as JSON can hold them."""
    return {name: plain_value(getattr(signals, name)) for name in signals.__struct_fields__}


def plain_value(value: Any) -> Any:  # noqa: ANN401 - any field of Signals
    """A value as JSON can hold it: a number that is not finite is a text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else plain_value(msgspec.to_builtins(value))

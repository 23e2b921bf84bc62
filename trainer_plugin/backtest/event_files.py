"""TensorBoard's event files, by TensorBoard's own reader."""

import re
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer_plugin.backtest.cells import whole_step
from trainer_plugin.backtest.columns import choose, missing_loss
from trainer_plugin.backtest.log_files import LogFile
from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow

_LOADER = "tensorboard.backend.event_processing.event_file_loader"
_EVENT = "tensorboard.compat.proto.event_pb2"
_TENSORS = "tensorboard.util.tensor_util"
# Around the data of a record: its length, and a checksum of each.
_RECORD_FRAME_BYTES = 16
# By the tag's name: event number, step and value of each time it was logged.
_Series = dict[str, list[tuple[int, int, float]]]


def is_event_file(path: Path, head: bytes) -> bool:
    """Whether a file is one: by its first record, which gives the format's version, or by its name."""
    return b"brain.Event:" in head[:64] or "tfevents" in path.name


def find_event_files(folder: Path) -> list[Path]:
    """The event files of one run, oldest first: those in the folder itself, else in the only folder below that has any.

    Raises:
        ValueError: there are none, or those of several runs.
    """
    try:
        # Going through a folder that may not be read finds nothing, without a word; listing it says why.
        any(folder.iterdir())
        found = sorted((path for path in folder.rglob("*tfevents*") if path.is_file()), key=_age)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror or error}") from error
    homes = sorted({path.parent for path in found})
    if not found:
        raise ValueError(f"{folder}: a log file wanted, or a folder with TensorBoard's event files; found none in it")
    if folder in homes:
        homes = [folder]
    if len(homes) > 1:
        names = ", ".join(home.relative_to(folder).as_posix() for home in homes[:8]) + (", ..." if homes[8:] else "")
        raise ValueError(f"{folder}: event files of one run wanted, found those of {len(homes)} in it: {names}")
    return [path for path in found if path.parent == homes[0]]


def read_events(paths: list[Path], notes: Notes, *, name: Path) -> Iterator[FoundRow]:
    """The rows of one run's event files; `name` is what the user called them.

    Raises:
        ValueError: TensorBoard is not installed, no tag is a loss, or a file cannot be read.
    """
    series: _Series = {}
    count = 0
    for path in paths:
        for count, tag, step, value in _scalars(path, notes, count):  # noqa: B020 - goes on counting
            series.setdefault(tag, []).append((count, step, value))
    columns = choose(sorted(series))
    if columns.loss is None:
        raise ValueError(f"{name}: {missing_loss(sorted(series))} among its tags")
    for remark in columns.remarks:
        notes.say(remark)
    others = [_by_step(series.get(tag or "", [])) for tag in
              (columns.grad_norm, columns.learning_rate, columns.amp_loss_scale)]  # fmt: skip
    losses = series[columns.loss]
    times = {step: len(values) for step, values in _by_step(losses).items()}
    for event, step, loss in losses:
        whole = whole_step(step)
        if whole is None:
            notes.count("with a step below 0: left out", event)
            continue
        # Where steps come again after a restart, the last of each series belong together, and so on backwards.
        norm, rate, scale = (_nth_last(values.get(step, []), times[step]) for values in others)
        times[step] -= 1
        yield event, whole, loss, norm, rate, scale, None


def _age(path: Path) -> list[str | int]:
    """Sorts by the time and the number in a file's name as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


def _by_step(series: list[tuple[int, int, float]]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for _, step, value in series:
        values.setdefault(step, []).append(value)
    return values


def _nth_last(values: list[float], number: int) -> float | None:
    return values[-number] if number <= len(values) else None


def _scalars(path: Path, notes: Notes, count: int) -> Iterator[tuple[int, str, int, float]]:
    """Every scalar in a file: number of the event (from `count` on), tag, step, value."""
    try:
        loader, event_type = import_module(_LOADER).RawEventFileLoader, import_module(_EVENT).Event
        make_array = import_module(_TENSORS).make_ndarray
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: TensorBoard's event files are read by the package tensorboard, and {error.name} is not "
            "installed: pip install tensorboard"
        ) from error
    file = LogFile(path)
    with tempfile.TemporaryDirectory() as folder:
        plain_path = path
        if file.gzipped:
            plain_path = Path(folder) / "events"
            with plain_path.open("wb") as unpacked:
                unpacked.writelines(file.unpacked())
            file.tell_if_cut(notes)
        read_bytes = 0
        for record in loader(str(plain_path)).Load():
            read_bytes += len(record) + _RECORD_FRAME_BYTES
            count += 1
            try:
                event = event_type.FromString(record)
            except Exception:  # noqa: BLE001 - of protobuf, in whichever of its versions
                notes.count("that cannot be read: left out", count, noun="event")
                continue
            for value in event.summary.value:
                scalar = _scalar(value, make_array)
                if scalar is not None:
                    yield count, value.tag, event.step, scalar
        if read_bytes < plain_path.stat().st_size:
            if not read_bytes:
                raise ValueError(f"{path}: an event file wanted, found one without a whole record")
            notes.say(f"{path.name} is cut off or damaged after event {count}: read up to there")


def _scalar(value: Any, make_array: Any) -> float | None:  # noqa: ANN401 - of protobuf, which has no types
    """The number in a summary, in the old form or in the new one; None if it holds something else."""
    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if value.WhichOneof("value") != "tensor" or value.tensor.tensor_shape.dim:
        return None
    try:
        return float(make_array(value.tensor))
    except (TypeError, ValueError):
        return None

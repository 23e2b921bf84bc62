"""What one JSON object of a log says about a step."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from trainer_plugin.backtest.cells import LARGEST_STEP, number, says_nothing, try_number, whole_step
from trainer_plugin.backtest.columns import Columns, choose, is_evaluation, missing_loss, shown
from trainer_plugin.backtest.gaps import EMPTY_LOSS, goes_on
from trainer_plugin.backtest.notes import EVALUATED, Notes
from trainer_plugin.backtest.rows import FoundRow

# Whatever a decoder raises on what it cannot read.
BROKEN = (msgspec.DecodeError, ValueError, RecursionError)
_MOST_DEPTH = 3
# Python writes NaN and Infinity, and others print worse; none of it is JSON.
_BARE = re.compile(rb"(?<=[\[:,\s])([-+]?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE)


class Values(msgspec.Struct, gc=False):
    """The values of one object that matter, as they are written; the loss is unset if the object has none."""

    step: Any = None
    loss: Any = msgspec.UNSET
    grad_norm: Any = None
    learning_rate: Any = None
    amp_loss_scale: Any = None
    run: Any = None
    split: Any = None


def load(text: bytes) -> Any:  # noqa: ANN401 - any document
    """A JSON document, also with the numbers that JSON does not have.

    Raises:
        ValueError, RecursionError, msgspec.DecodeError: it is none.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        pass
    try:
        return msgspec.json.decode(_BARE.sub(rb'"\1"', text))
    except msgspec.DecodeError:
        # Such a word was inside a text.
        return json.loads(text)


def load_line(line: bytes) -> dict[str, object] | None:
    """The object in a line; None if there is none."""
    try:
        entry = load(line[line.index(b"{") :])
    except BROKEN:
        return None
    return entry if isinstance(entry, dict) else None


def names(entry: dict[str, Any], prefix: str = "", depth: int = 1) -> list[str]:
    """The names in an object, those of objects in it with a slash between."""
    found = []
    for key, value in entry.items():
        if isinstance(value, dict) and depth < _MOST_DEPTH:
            found += names(value, f"{prefix}{key}/", depth + 1)
        else:
            found.append(f"{prefix}{key}")
    return found


def choose_keys(entries: Iterable[dict[str, Any]]) -> Columns:
    """The names of the values in the objects that have a loss; of all of them if none has."""
    every: dict[str, None] = {}
    with_loss: dict[str, None] = {}
    for entry in entries:
        own = dict.fromkeys(names(entry))
        every |= own
        columns = choose(own)
        if columns.loss is not None and not columns.guessed:
            with_loss |= own
    return choose(with_loss or every)


def decoder(columns: Columns) -> Callable[[bytes], Values]:
    """A function that reads the values out of an object's text, quickly where they are not nested."""
    keys = {name: key for name in Values.__struct_fields__ if (key := getattr(columns, name)) is not None}
    if not all(key.isprintable() and not set(key) & set('/"\\') for key in keys.values()):
        return lambda text: pick(msgspec.json.decode(text), columns)
    fields = [(name, Any, msgspec.UNSET if name == "loss" else None) for name in Values.__struct_fields__]
    # What the log lacks gets a name that no log has, and odd letters in a name are not for this way.
    rename = {name: keys.get(name, f"not in this log: {name}") for name in Values.__struct_fields__}
    entry: Any = msgspec.defstruct("Entry", fields, rename=rename, gc=False)
    decode: Callable[[bytes], Values] = msgspec.json.Decoder(entry).decode
    return decode


def pick(entry: Any, columns: Columns) -> Values:  # noqa: ANN401 - whatever was in the log
    """The values of an object that was read.

    Raises:
        ValueError: it is no object.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"an object wanted, found {type(entry).__name__}")  # noqa: TRY004 - bad input
    found = {name: _find(entry, getattr(columns, name)) for name in Values.__struct_fields__}
    return Values(**{name: value for name, value in found.items() if value is not msgspec.UNSET})


class Entries:
    """Makes rows of values.

    Args:
        columns: where the values come from.
        notes: where it tells what it leaves out.
    """

    def __init__(self, columns: Columns, notes: Notes) -> None:
        if columns.loss is None:
            raise ValueError(missing_loss([]))
        self._columns = columns
        self._without = f"without {shown(columns.loss)}: left out"
        self._notes = notes
        self._losses = 0
        self._latest: object = None
        for remark in columns.remarks:
            notes.say(remark)
        if columns.step is None:
            notes.say("no step is named: rows are counted from 1")

    def row(self, values: Values, place: int, whole: object) -> FoundRow | None:
        """The row of an object; None where it tells of no step.

        Args:
            values: those of the object that matter.
            place: its line, or its number.
            whole: all of it: its line, the object, or the values again where no more is known.
        """
        step, loss = values.step, values.loss
        if values.split is not None and is_evaluation(values.split):
            self._notes.count(EVALUATED, place)
            return None
        if type(loss) is not float:
            loss = self._odd_loss(loss, place, whole)
            if loss is None:
                return None
        if loss is not EMPTY_LOSS:
            self._latest = whole
        self._losses += 1
        if self._columns.step is None:
            step = self._losses
        elif type(step) is not int or not 0 <= step <= LARGEST_STEP:
            step = whole_step(step)
            if step is None:
                self._notes.count("without a step that is a whole number from 0 on: left out", place)
                return None
        norm, rate, scale, run = values.grad_norm, values.learning_rate, values.amp_loss_scale, values.run
        return (
            place,
            step,
            loss,
            norm if type(norm) is float else try_number(norm),
            rate if type(rate) is float else try_number(rate),
            scale if type(scale) is float else try_number(scale),
            None if run is None else str(run),
        )

    def _odd_loss(self, written: object, place: int, whole: object) -> float | None:
        """A loss that was not written as a plain number; None if the object tells of no step."""
        try:
            loss = None if written is msgspec.UNSET else number(written)
        except ValueError:
            self._notes.count("with a loss that is no number: left out", place)
            return None
        if loss is not None:
            return loss
        if written is not msgspec.UNSET and goes_on(_filled(whole), _filled(self._latest), self._columns):
            return EMPTY_LOSS
        self._notes.count(self._without, place)
        return None


def _filled(whole: object) -> set[str]:
    """The names in an object, or in its line, that hold something."""
    if isinstance(whole, Values):
        whole = {name: getattr(whole, name) for name in Values.__struct_fields__}
    entry = load_line(whole) if isinstance(whole, bytes) else whole
    if not isinstance(entry, dict):
        return set()
    return {
        name for name in names(entry) if (found := _find(entry, name)) is not msgspec.UNSET and not says_nothing(found)
    }


def _find(entry: dict[str, Any], key: str | None) -> Any:  # noqa: ANN401 - any value
    """The value under a name, unset if there is none; a slash may be in the key itself, or lead into an object."""
    if key is None:
        return msgspec.UNSET
    if key in entry:
        return entry[key]
    head, _, rest = key.partition("/")
    while rest:
        inner = entry.get(head)
        if isinstance(inner, dict):
            return _find(inner, rest)
        more, _, rest = rest.partition("/")
        head = f"{head}/{more}"
    return msgspec.UNSET

"""Hugging Face's trainer_state.json, and other JSON documents with a list of logged steps."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from trainer_plugin.backtest.columns import Columns, missing_loss
from trainer_plugin.backtest.json_entries import BROKEN, Entries, Values, choose_keys, load, names, pick
from trainer_plugin.backtest.log_files import LogFile
from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow
from trainer_plugin.backtest.samples import in_steps

_COLUMNS = Columns(step="step", loss="loss", grad_norm="grad_norm", learning_rate="learning_rate")
_NAN_FILTER = (
    "the Trainer's logging_nan_inf_filter, on unless switched off, keeps losses that are not finite out of this log"
)


class _State(msgspec.Struct):
    log_history: list[Values]


def read_trainer_state(file: LogFile, notes: Notes) -> Iterator[FoundRow]:
    """The rows of a document.

    Raises:
        ValueError: it has no history, no loss, or cannot be read.
    """
    text = file.content()
    try:
        history: list[Any] = msgspec.json.decode(text, type=_State).log_history
        columns = _COLUMNS
    except BROKEN:
        history, columns = _odd_history(file, text)
    try:
        entries = Entries(columns, notes)
    except ValueError as error:
        every = dict.fromkeys(name for entry in history if isinstance(entry, dict) for name in names(entry))
        raise ValueError(f"{file.path}: {missing_loss(every)}") from error
    rows = _rows(history, entries, columns, notes)
    yield from rows if columns.samples is None else in_steps(rows, columns.samples, notes)


def _rows(history: list[Any], entries: Entries, columns: Columns, notes: Notes) -> Iterator[FoundRow]:
    finite = True
    for place, entry in enumerate(history, start=1):
        if not isinstance(entry, Values | dict):
            notes.count("that is no JSON object: left out", place, noun="entry")
            continue
        row = entries.row(entry if isinstance(entry, Values) else pick(entry, columns), place, entry)
        if row is not None:
            finite = finite and math.isfinite(row[2])
            yield row
    if finite and columns is _COLUMNS:
        notes.say(_NAN_FILTER)


def _odd_history(file: LogFile, text: bytes) -> tuple[list[Any], Columns]:
    """The history of a document with other numbers or of another form, and where its values are."""
    try:
        document = load(text)
    except BROKEN as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        cut = " (cut off?)" if not text.rstrip().endswith((b"}", b"]")) else ""
        raise ValueError(f"{file.path}: a whole JSON document wanted, found a broken one{cut}: {found}") from error
    if isinstance(document, dict) and isinstance(document.get("log_history"), list):
        return document["log_history"], _COLUMNS
    if isinstance(document, list):
        return document, choose_keys(entry for entry in document if isinstance(entry, dict))
    found = (
        ", ".join(repr(key[:40]) for key in list(document)[:8]) if isinstance(document, dict) else repr(document)[:40]
    )
    raise ValueError(
        f"{file.path}: a JSON document with the list `log_history`, or a list of logged steps wanted; "
        f"found {found or 'an empty object'}"
    )

"""Text logs of Megatron-LM and of what prints like it: GPT-NeoX, NeMo, nanotron.

A step is one line: `iteration 10/ 500 | lm loss: 2.3E+00 | grad norm: 0.3 |`, whatever stands before it.
"""

import math
import re
from collections.abc import Iterator

from trainer_plugin.backtest.cells import try_number, whole_step
from trainer_plugin.backtest.columns import choose, missing_loss, plain
from trainer_plugin.backtest.log_files import LogFile
from trainer_plugin.backtest.notes import Notes
from trainer_plugin.backtest.rows import FoundRow

# No word boundary before it: what begins with plain letters is found quickly.
_STEP = rb"iteration:?\s+(\d{1,15})\s*/\s*(?:\d+|infinity)\s*"
ITERATION = re.compile(_STEP + rb"\|")
# Not the first digits of a number that was cut off in its exponent.
_NUMBER = re.compile(rb"[-+]?(?:\d[\d.,]*(?:e[-+]?\d+|(?!\d*[.,e]))|nan|inf(?:inity)?)[KMGBT]?", re.IGNORECASE)
_MOST_LAYOUTS = 1000
_COLORS = re.compile(rb"\x1b\[[0-9;]*m")
_SKIPPED = b"| number of skipped iterations:"
_NAN = b"| number of nan iterations:"


def read_megatron(file: LogFile, notes: Notes) -> Iterator[FoundRow]:
    """The rows of a text log.

    Raises:
        ValueError: no line of it tells of a loss, or it cannot be read.
    """
    lines = _Lines(file, notes)
    search = ITERATION.search
    any_row = False
    for place, line in enumerate(file.lines(), start=1):
        at = line.find(b"iteration")
        if at < 0:
            continue
        row = lines.quick_row(line, at, place)
        if row is None and (match := search(line)):
            while later := search(line, match.end()):
                # Two lines in one: the first was cut off, and another process wrote on behind it.
                notes.count("cut off in the middle of the log: left out", place, noun="line")
                match = later
            row = lines.row(line, match, place)
        if row is not None:
            any_row = True
            yield row
    if not any_row:
        raise ValueError(f"{file.path}: {missing_loss(lines.names)}")
    file.tell_if_cut(notes)


class _Layout:
    """What the parts of a line are called, in their order.

    A label is what stands before a value, from the bar on: `| lm loss:`. `quick` matches lines whose parts are the
    same, and `groups` says which group of it is loss, gradient norm, learning rate, loss scale, and the step if it is
    a part; -1 for what there is none of.
    """

    def __init__(self, parts: list[bytes], *, may_guess: bool) -> None:
        labels = dict(item for part in parts if (item := _item(part)) is not None)
        self.names = list(labels)
        self.columns = choose(name for name in labels if "samples" not in name)
        loss = None if self.columns.guessed and not may_guess else self.columns.loss
        step = next((name for name in labels if plain(name) == "global_step"), None)
        names = (loss, self.columns.grad_norm, self.columns.learning_rate, self.columns.amp_loss_scale, step)
        self.labels = [None if name is None else labels[name] for name in names]
        self.groups = [-1] * len(names)
        self.quick = None if loss is None else self._pattern(parts)

    def _pattern(self, parts: list[bytes]) -> re.Pattern[bytes]:
        pattern, count = _STEP, 0
        for index, part in enumerate(parts):
            item = _item(part)
            label = b"|" + part.partition(b":")[0] if item is None else item[1]
            if label in self.labels:
                count += 1
                self.groups[self.labels.index(label)] = count
                pattern += re.escape(label) + rb"([^|]*)"
            elif index == len(parts) - 1:
                # Behind the last bar stands what had no line of its own.
                pattern += rb"\|[^|]*"
            else:
                pattern += re.escape(label) + (rb"\s*0\s*" if label == _NAN else rb"[^|]*")
        return re.compile(pattern + rb"$")


class _Lines:
    """Reads lines by the layouts of those before, which hardly ever change."""

    def __init__(self, file: LogFile, notes: Notes) -> None:
        self._file = file
        self._notes = notes
        self.names: list[str] = []
        self._layouts: dict[tuple[bytes, ...], _Layout] = {}
        self._latest: _Layout | None = None
        self._may_guess = True

    def quick_row(self, line: bytes, at: int, place: int) -> FoundRow | None:
        """The row in a line that is like the one before from `at` on; None if it is not, or has something odd."""
        layout = self._latest
        match = None if layout is None or layout.quick is None else layout.quick.match(line, at)
        if match is None or layout is None or self._file.unfinished:
            return None
        # The last is for what there is none of.
        texts = (*match.groups(), b"")
        loss, norm, rate, scale, step = layout.groups
        try:
            return (
                place,
                int(texts[0] if step < 0 else texts[step]),
                float(texts[loss]),
                float(texts[norm]) if norm > 0 else None,
                float(texts[rate]) if rate > 0 else None,
                float(texts[scale]) if scale > 0 else None,
                None,
            )
        except ValueError:
            return None

    def row(self, line: bytes, match: re.Match[bytes], place: int) -> FoundRow | None:
        """The row in any line with an iteration in it; None where it tells of no loss."""
        # From the bar on that ends the iteration.
        items = line[match.end() - 1 :]
        if b"\x1b" in items:
            items = _COLORS.sub(b"", items)
        layout = self._layout(items)
        if self._file.unfinished and _is_cut(items, layout.labels[0]):
            self._notes.say(f"cut off in line {place}: read up to there")
            return None
        loss, norm, rate, scale, step = (_value(_after(items, label)) for label in layout.labels)
        loss = self._loss(items, loss, place)
        if loss is None:
            return None
        return place, whole_step(step) or int(match[1]), loss, norm, rate, scale, None

    def _layout(self, items: bytes) -> _Layout:
        parts = items.split(b"|")[1:]
        key = tuple(part.partition(b":")[0] for part in parts)
        layout = self._layouts.get(key)
        if layout is None:
            layout = _Layout(parts, may_guess=self._may_guess)
            if len(self._layouts) < _MOST_LAYOUTS:
                self._layouts[key] = layout
            self.names = self.names or layout.names
            if layout.labels[0] is not None:
                # Once the loss is known by name, that of a part does not stand in for it.
                self._may_guess = self._may_guess and layout.columns.guessed
                for remark in layout.columns.remarks:
                    self._notes.say(remark)
        if layout.quick is not None:
            self._latest = layout
        return layout

    def _loss(self, items: bytes, printed: float | None, place: int) -> float | None:
        """The loss; NaN where the line says so in another way than by printing it."""
        if _value(_after(items, _NAN)):
            self._notes.count("with nan iterations in it: its loss is read as nan", place)
            return math.nan
        if printed is not None:
            return printed
        if _value(_after(items, _SKIPPED)):
            self._notes.count("of nothing but skipped iterations, which print no loss: left out", place)
        elif _NAN in items:
            # Megatron prints a loss only if it is above zero, and a NaN is not.
            self._notes.count("without a loss though nothing was skipped, as Megatron prints a NaN: read as nan", place)
            return math.nan
        else:
            self._notes.count("without a loss: left out", place)
        return None


def _item(part: bytes) -> tuple[str, bytes] | None:
    """The name of a number, and its label; old versions print no colon between name and number."""
    words = part.split()
    if len(words) < 2 or not _NUMBER.fullmatch(words[-1]):
        return None
    label = part.rstrip()[: -len(words[-1])]
    name = label.strip().rstrip(b":=").rstrip()
    return name.decode(errors="replace"), b"|" + (label.rstrip() if label.rstrip().endswith((b":", b"=")) else label)


def _is_cut(items: bytes, label: bytes | None) -> bool:
    """Whether a line without an end stops before its loss is through."""
    at = -1 if label is None else items.find(label)
    return label is None or at < 0 or items.find(b"|", at + len(label)) < 0


def _after(items: bytes, label: bytes | None) -> bytes | None:
    """What stands between a label and the next bar; None if there is no such label."""
    if label is None or (at := items.find(label)) < 0:
        return None
    return items[at + len(label) :].split(b"|", 1)[0]


def _value(text: bytes | None) -> float | None:
    """The number that a text begins with."""
    match = None if text is None else _NUMBER.match(text.lstrip())
    return try_number(match[0]) if match else None

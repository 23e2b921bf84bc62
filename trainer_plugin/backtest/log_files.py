"""A log file as lines of bytes, in little memory: plain or gzipped, in UTF-8 or UTF-16, also where it is cut off."""

import codecs
import gzip
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from trainer_plugin.backtest.notes import Notes

_BLOCK_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 26
_GZIP_MAGIC = b"\x1f\x8b"
# What no text has: control characters other than tab, line ends, form feed, backspace, bell and escape.
_CONTROL = bytes(set(range(1, 32)) - set(b"\a\b\t\n\v\f\r\x1b"))
_MOST_CONTROL = 0.02


class LogFile:
    """A file that can be read again and again. `unfinished` says that the line given last has no end.

    Raises:
        ValueError: it cannot be opened, is no file, or holds nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unfinished = False
        self.cut_off = False
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError(f"{path}: a log file wanted, or a folder of event files; found neither")
            with path.open("rb") as file:
                self.gzipped = file.read(2) == _GZIP_MAGIC
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        self.head = next(self._blocks(_HEAD_BYTES), b"")
        if not self.head.strip(b"\0 \t\r\n"):
            raise ValueError(f"{path}: a log wanted, found an empty file")
        self.encoding = _encoding(self.head)

    def is_text(self) -> bool:
        """Whether the beginning reads as text."""
        if self.encoding != "utf-8":
            return True
        visible = self.head.translate(None, b"\0")
        return len(visible) - len(visible.translate(None, _CONTROL)) <= _MOST_CONTROL * len(visible)

    def lines(self) -> Iterator[bytes]:
        """Every line, as UTF-8 without its end and without NUL bytes; the line number is the caller's business.

        Raises:
            ValueError: a line is longer than any log's, or reading fails.
        """
        self.unfinished = False
        # The beginning of a line whose end has not come yet, in pieces.
        begun: list[bytes] = []
        for block in self._text_blocks():
            half_before = bool(begun) and begun[-1].endswith(b"\r")
            if b"\n" not in block and b"\r" not in block and not half_before:
                begun.append(block)
                if sum(map(len, begun)) > _MOST_LINE_BYTES:
                    raise ValueError(
                        f"{self.path}: lines of a log wanted, found one of more than {_MOST_LINE_BYTES} bytes"
                    )
                continue
            data = b"".join([*begun, block])
            # A carriage return at the very end may be half of a line end.
            half = b"\r" if data.endswith(b"\r") else b""
            if b"\r" in data:
                data = data.removesuffix(half).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            lines = data.split(b"\n")
            begun = [lines.pop() + half]
            yield from lines
        last = b"".join(begun)
        if last:
            self.unfinished = not last.endswith(b"\r")
            yield last.removesuffix(b"\r")

    def content(self) -> bytes:
        """All of it at once, as UTF-8.

        Raises:
            ValueError: reading fails.
        """
        return b"".join(self._text_blocks())

    def unpacked(self) -> Iterator[bytes]:
        """The bytes as they are, but for gzip.

        Raises:
            ValueError: reading fails.
        """
        return self._blocks(_BLOCK_BYTES)

    def tell_if_cut(self, notes: Notes) -> None:
        """Note that the gzip file has no end, once it was read."""
        if self.cut_off:
            notes.say("the gzip file is cut off or damaged: read up to there")

    def _text_blocks(self) -> Iterator[bytes]:
        if self.encoding == "utf-8":
            first = True
            for block in self._blocks(_BLOCK_BYTES):
                text = block.removeprefix(codecs.BOM_UTF8) if first else block
                first = False
                yield text.replace(b"\0", b"") if b"\0" in text else text
            return
        decoder = codecs.getincrementaldecoder(self.encoding)(errors="replace")
        for block in self._blocks(_BLOCK_BYTES):
            yield decoder.decode(block).replace("\0", "").removeprefix("\ufeff").encode(errors="replace")

    def _blocks(self, size_bytes: int) -> Iterator[bytes]:
        self.cut_off = False
        any_data = False
        try:
            with gzip.open(self.path) if self.gzipped else self.path.open("rb") as file:
                try:
                    while block := file.read1(size_bytes):
                        any_data = True
                        yield block
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    if not any_data:
                        raise ValueError(f"{self.path}: a gzip file wanted, found a damaged one ({error})") from error
                    self.cut_off = True
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror or error}") from error


def _encoding(head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Without a mark: of ASCII every other byte is NUL.
    if len(head) >= 16:
        for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
            nuls, others = head[first::2], head[1 - first :: 2]
            if nuls.count(0) > 0.9 * len(nuls) and others.count(0) < 0.05 * len(others):
                return encoding
    return "utf-8"

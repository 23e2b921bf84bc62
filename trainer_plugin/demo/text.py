"""Real text that is on every machine, in batches that can go back: the source of the Python standard library."""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HELD_OUT_EVERY = 20
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Text:
    """Some files as one run of bytes, with the way back from an offset to the file.

    Args:
        files: name and content of each file, in order.
    """

    def __init__(self, files: Sequence[tuple[str, bytes]]) -> None:
        self.names = [name for name, _ in files]
        self.data: NDArray[np.uint8] = np.frombuffer(b"".join(content for _, content in files), dtype=np.uint8)
        self._starts = np.cumsum([0, *(len(content) for _, content in files)])

    def __len__(self) -> int:
        return len(self.data)

    def locate(self, offset: int) -> tuple[str, int]:
        """The file in which the byte at `offset` lies, and its offset in that file (bytes)."""
        if not 0 <= offset < len(self):
            raise IndexError(f"offset must be from 0 to {len(self) - 1}, found {offset}")
        index = int(np.searchsorted(self._starts, offset, side="right")) - 1
        return self.names[index], offset - int(self._starts[index])

    def windows(self, offsets: NDArray[np.int64], length: int) -> Tensor:
        """The `length` bytes from each offset on, [len(offsets), length], as int64 token ids from 0 to 255."""
        picked = self.data[offsets[:, None] + np.arange(length)]
        return torch.from_numpy(picked.astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text to train on and text held out; no file is in both."""

    train: Text
    held_out: Text

    @classmethod
    def load(cls, max_bytes: int | None = None) -> Self:
        """Read the standard library's source files without its tests; every 20th file, by sorted name, is held out.

        Args:
            max_bytes: read no further training file once this many bytes are there; the held-out text stays whole, so
                that losses can be compared whatever the size.

        Raises:
            FileNotFoundError: this Python has no source files, for example because it is packed into an archive.
        """
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file())
        names = [name for name in names if _LEFT_OUT.isdisjoint(name.split("/"))]
        if len(names) < HELD_OUT_EVERY:
            raise FileNotFoundError(f"the standard library's source files wanted in {root}, found {len(names)} of them")
        train: list[tuple[str, bytes]] = []
        size_bytes = 0
        for number, name in enumerate(names, start=1):
            if number % HELD_OUT_EVERY and (max_bytes is None or size_bytes < max_bytes):
                train.append((name, (root / name).read_bytes()))
                size_bytes += len(train[-1][1])
        held_out = [(name, (root / name).read_bytes()) for name in names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
        return cls(train=Text(train), held_out=Text(held_out))


class Batch(TypedDict):
    """What one step trains on: `tokens`, int64 [B, T + 1], and where each row comes from, as `file:offset`.

    Plain values, so that a spike scene can hold it.
    """

    tokens: Tensor
    sample_ids: list[str]


class ByteBatches:
    """An endless source of random windows of the training text; it knows its position and can go back to any other.

    Batch number n follows from the seed and n alone, so it is the same after a rollback or a restart, and no random
    generator of the process is touched. Iterators share the position of their source: one that is under way when the
    source goes back goes on from there.

    Args:
        corpus: its training half is read.
        batch_size: rows in a batch, B.
        context: predicted tokens in a row, T; a row holds one more.
        seed: 0 or more.
        damage: what becomes of the tokens of a batch, by its number; a fault that lies in the data.
    """

    def __init__(
        self,
        corpus: Corpus,
        batch_size: int,
        context: int,
        seed: int,
        damage: Callable[[int, Tensor], tuple[Tensor, ...]] | None = None,
    ) -> None:
        if len(corpus.train) <= context:
            raise ValueError(
                f"training text must be longer than a context of {context}, found {len(corpus.train)} bytes"
            )
        self._text = corpus.train
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._damage = damage
        self._next_batch = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._next_batch)
        self._next_batch += 1
        return batch

    def batch(self, number: int) -> Batch:
        """Batch number `number` (from 0 on), wherever the source stands; its position stays."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, number]))
        offsets = generator.integers(len(self._text) - self._context, size=self._batch_size)
        places = [self._text.locate(int(offset)) for offset in offsets]
        tokens = self._text.windows(offsets, self._context + 1)
        if self._damage is not None:
            (tokens,) = self._damage(number, tokens)
        return Batch(
            tokens=tokens,
            sample_ids=[f"{name}:{offset}" for name, offset in places],
        )

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of the next batch, and the seed that the numbers belong to."""
        return {"next_batch": self._next_batch, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave, back or forward.

        Raises:
            ValueError: the position belongs to another seed, so the batches would be others.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"a position of seed {self._seed} wanted, found one of seed {state['seed']}")
        self._next_batch = int(state["next_batch"])


def held_out_batches(corpus: Corpus, context: int = 64, batch_size: int = 128, tokens: int = 65_536) -> list[Tensor]:
    """The fixed set that losses are compared on: windows spread evenly over the held-out text, the same for every seed.

    Args:
        corpus: its held-out half is read.
        context: predicted tokens in a row, T.
        batch_size: rows in a batch (the last one may be shorter).
        tokens: predicted tokens in all, at least.

    Returns:
        Token ids, int64 [rows, T + 1] each.

    Raises:
        ValueError: the held-out text is too short for so many tokens.
    """
    rows = -(-tokens // context)
    if len(corpus.held_out) < tokens + context:
        raise ValueError(f"held-out text must have {tokens + context} bytes, found {len(corpus.held_out)}")
    offsets = np.linspace(0, len(corpus.held_out) - context - 1, rows).astype(np.int64)
    windows = corpus.held_out.windows(offsets, context + 1)
    return [windows[row : row + batch_size] for row in range(0, rows, batch_size)]

"""Gradient accumulation: the loss of one step from those of its micro-batches, on the device."""

from collections.abc import Sequence
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

Mean = Literal["none", "micro_batch", "token"]


class Accumulation:
    """Collects the micro-batches of one step. No host read.

    The step's loss is their mean: weighted by tokens where every micro-batch tells its number of them, else each
    micro-batch counts the same. `mean` is how the last step's was made.
    """

    def __init__(self) -> None:
        self.mean: Mean = "none"
        self._losses: list[Tensor] = []
        self._tokens: list[int | None] = []
        self._sample_ids: list[str] = []

    def add(self, loss: Tensor, *, tokens: object, sample_ids: Sequence[str]) -> None:
        """Take in a micro-batch: its own mean loss, not divided by the number of micro-batches.

        Raises:
            ValueError: `tokens` is no number of tokens. The loss counts all the same.
        """
        self._losses.append(loss.detach().float().reshape(()))
        self._sample_ids += sample_ids
        self._tokens.append(None)
        if isinstance(tokens, Integral) and int(tokens) >= 0:
            self._tokens[-1] = int(tokens)
        elif tokens is not None:
            raise ValueError(f"micro_step needs tokens as an integer that is at least 0, found {tokens!r}")

    def finish(self) -> tuple[Tensor, int | None, list[str]] | None:
        """The step's loss, its tokens where all are known, and its sample ids; None if there was no micro-batch."""
        losses, tokens, sample_ids = self._losses, self._tokens, self._sample_ids
        self.clear()  # First: what cannot be made a loss of must not stand in the way of the next step.
        if not losses:
            return None
        known = [count for count in tokens if count is not None]
        total = sum(known) if len(known) == len(tokens) else 0
        if total > 0:
            self.mean = "token"
            # Plain numbers, not a tensor of them: that would have to be copied to the device, and be waited for.
            loss = torch.stack([one * (count / total) for one, count in zip(losses, known, strict=True)]).sum()
        else:
            self.mean = "micro_batch"
            loss = torch.stack(losses).mean()
        return loss, total or None, sample_ids

    def clear(self) -> None:
        """Forget the micro-batches of a step that was not finished."""
        self._losses, self._tokens, self._sample_ids = [], [], []

"""Gradient accumulation: the loss of one step from those of its micro-batches, on the device."""

from collections.abc import Sequence
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

    def add(self, loss: Tensor, *, tokens: int | None, sample_ids: Sequence[str]) -> None:
        """Take in a micro-batch: its own mean loss, not divided by the number of micro-batches."""
        self._losses.append(loss.detach().float().reshape(()))
        self._tokens.append(tokens)
        self._sample_ids += sample_ids

    def finish(self) -> tuple[Tensor, int | None, list[str]] | None:
        """The step's loss, its tokens where all are known, and its sample ids; None if there was no micro-batch."""
        if not self._losses:
            return None
        known = [tokens for tokens in self._tokens if tokens is not None]
        total = sum(known) if len(known) == len(self._tokens) else 0
        if total > 0:
            self.mean = "token"
            # Plain numbers, not a tensor of them: that would have to be copied to the device, and be waited for.
            loss = torch.stack([one * (count / total) for one, count in zip(self._losses, known, strict=True)]).sum()
        else:
            self.mean = "micro_batch"
            loss = torch.stack(self._losses).mean()
        sample_ids = self._sample_ids
        self.clear()
        return loss, total or None, sample_ids

    def clear(self) -> None:
        """Forget the micro-batches of a step that was not finished."""
        self._losses, self._tokens, self._sample_ids = [], [], []

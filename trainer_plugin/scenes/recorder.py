"""The flight recorder: what the last steps have shown, and what the last three began with."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_plugin.checkpoints.rng import rng_state
from trainer_plugin.scenes.weights import StepWeights
from trainer_plugin.signals import Signals

KEPT_STEPS = 64
# On an accelerator a step is judged one boundary late, and its scene has the batches of the step before it too.
_KEPT_STARTS = 3
# A step's batches beyond this are not held: they would stay in memory for three steps more.
_MOST_BATCH_BYTES = 1 << 26


@dataclass(kw_only=True, slots=True)
class Start:
    """What a step began with: for each of its batches the random state when it was handed out, position and batch.

    `batches` are the loop's own, not copies; `left_out` says why there are none. A loop that draws its own batches has
    one random state, that of the boundary before.
    """

    rng: list[dict[str, Any]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    left_out: str = ""
    bytes: int = 0


class Recorder:
    """One for a run. Without `starts` only signals are kept; `weights` keeps those with which a step began."""

    def __init__(self, *, starts: bool, weights: StepWeights | None = None) -> None:
        self._keep_starts = starts
        self._weights = weights
        self._signals: deque[Signals] = deque(maxlen=KEPT_STEPS)
        self._starts: deque[tuple[int, Start]] = deque(maxlen=_KEPT_STARTS)
        self._start = Start()
        self._hands_out = False

    def hand_out(self, batch: Any, position: int) -> None:  # noqa: ANN401 - whatever `data` yields
        """The loop gets this batch; it is about to go into the forward pass."""
        if not self._keep_starts:
            return
        start = self._start
        if not self._hands_out:
            self._hands_out, start.rng = True, []
            if self._weights is not None:
                self._weights.keep()
        # Now, and not before the batch was made: a collate function may draw too.
        start.rng.append(rng_state())
        start.positions.append(position)
        try:
            start.bytes += _bytes_of(batch)
        except TypeError as error:
            start.left_out = str(error)
        except RecursionError:
            start.left_out = "a batch is nested too deeply"
        if start.bytes > _MOST_BATCH_BYTES:
            start.left_out = f"more than {_MOST_BATCH_BYTES >> 20} MiB"
        if start.left_out:
            start.batches = []
        else:
            start.batches.append(batch)

    def before_optimizer(self) -> None:
        """The weights are about to change."""
        if self._weights is not None:
            self._weights.settle()

    def end_step(self, step: int) -> None:
        """Step number `step` has been run."""
        self._starts.append((step, self._start))
        if self._weights is not None:
            self._weights.end_step(step)

    def begin_step(self) -> None:
        """The next step begins."""
        self._start, handed_out, self._hands_out = Start(), self._hands_out, False
        if self._keep_starts and not handed_out:
            self._start.rng.append(rng_state())

    def add(self, signals: Signals) -> None:
        """Keep what a step has shown."""
        self._signals.append(signals)

    @property
    def signals(self) -> list[Signals]:
        """The last steps, in the order in which they were run; steps that were undone since are still there."""
        return list(self._signals)

    def take_weights(self, step: int) -> dict[str, torch.Tensor] | None:
        """The model's state with which a step began, for the caller to keep; None if that is not known."""
        return self._weights.take(step) if self._weights is not None else None

    def start_of(self, step: int) -> Start:
        """What a step began with, as it was run last; empty if that is not known any more."""
        return next((start for number, start in reversed(self._starts) if number == step), Start())


def _bytes_of(value: Any) -> int:  # noqa: ANN401 - any batch
    """The size of a batch made of plain values and tensors, which can be read back without running any code.

    Raises:
        TypeError: it is made of something else; the message says what.
    """
    # By their very types: a class of one's own that is a float too, or a Tensor, is not read back without its code.
    kind = type(value)
    if isinstance(value, torch.Tensor) and kind.__module__.partition(".")[0] == "torch":
        if value.is_meta or value.layout == torch.sparse_coo:
            what = "without data" if value.is_meta else "sparse"
            raise TypeError(f"a batch is or holds a tensor that is {what}, no plain value")
        return int(value.nbytes)
    if kind is dict:
        return sum(_bytes_of(key) + _bytes_of(item) for key, item in value.items())
    if kind in (list, tuple):
        return sum(map(_bytes_of, value))
    if kind in (str, bytes):
        return len(value)
    if value is None or kind in (bool, int, float):
        return 0
    raise TypeError(f"a batch is or holds a {kind.__name__}, no plain value")

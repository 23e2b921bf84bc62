"""What the callbacks of frameworks share: the options, the guard while training runs, and the loss of a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_plugin.config import Config, read_config
from trainer_plugin.guard import Guard


class FrameworkCallback:
    """A guard that lives as long as a framework's training.

    Weights, optimizer, schedule, scaler and random state go back on a rollback; the framework's own count of steps and
    its data go on forward. A restart is the framework's business: budgets, incidents and the learning rate's factor are
    the run folder's, and are taken up again.

    Args:
        config: guard.yaml's path, a mapping of its keys, or a `Config`.
        run: the run's name; replaces the config's.
        options: what else `Guard` takes by name, such as `local_only` or `on_signals`.

    Raises:
        ValueError: an option cannot be used; in one line.
        OSError: guard.yaml cannot be read.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any] | Config, *, run: str | None = None, **options: Any
    ) -> None:
        self._config = read_config(config, run=run)
        self._options = options
        self._losses: list[Tensor] = []
        self.guard: Guard | None = None

    def _begin(self, *, framework: str, start_step: int, **parts: Any) -> None:
        """Make the guard of these parts; an earlier one is closed first."""
        self.close()
        self.guard = Guard(
            self._config, resume="never", start_step=start_step, framework=framework, **parts, **self._options
        )

    def _loss(self) -> Tensor | None:
        """The step's own loss: the sum over micro-batches, whose losses a framework has divided by their number."""
        losses, self._losses = self._losses, []
        return torch.stack([loss.float().reshape(()) for loss in losses]).sum() if losses else None

    def close(self) -> None:
        """Leave the run folder. Doing so twice changes nothing."""
        if self.guard is not None:
            self.guard.close()
            self.guard = None
        self._losses.clear()

"""The guard in Lightning's Trainer: `GuardCallback`, by the callback's own events alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from trainer_plugin.config import Config, read_config
from trainer_plugin.guard import Guard

if TYPE_CHECKING:
    import lightning


class GuardCallback(Callback):
    """Watches and heals a Lightning training with automatic optimization.

        trainer = lightning.Trainer(..., gradient_clip_val=None, callbacks=[GuardCallback("guard.yaml", run="gpt-0")])

    The guard clips (`clip_max_norm`), so the Trainer must not. Weights, optimizer, schedule, scaler and random state
    go back on a rollback; the Trainer's own count of steps and its data go on forward. A restart is the Trainer's
    business (`ckpt_path`): budgets, incidents and the learning rate's factor are the run folder's, and are taken up.

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
        self._step = 0
        self.guard: Guard | None = None

    def on_train_start(self, trainer: "lightning.Trainer", pl_module: "lightning.LightningModule") -> None:
        """Model, optimizers and schedules are what they will be: make the guard.

        Raises:
            ValueError: the trainer runs in a way that the guard cannot follow; in one line.
        """
        if trainer.gradient_clip_val:
            raise ValueError(
                f"GuardCallback: the guard clips (clip_max_norm): gradient_clip_val=None wanted, found "
                f"{trainer.gradient_clip_val}"
            )
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ValueError(
                "GuardCallback: automatic optimization with one optimizer wanted; with your own loop use Guard itself"
            )
        self.close()
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._step = trainer.global_step
        self.guard = Guard(
            self._config,
            model=pl_module,
            optimizer=trainer.optimizers,
            scheduler=schedulers[0] if schedulers else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            resume="never",
            start_step=trainer.global_step,
            framework="lightning",
            **self._options,
        )

    def on_before_backward(
        self, trainer: "lightning.Trainer", pl_module: "lightning.LightningModule", loss: Tensor
    ) -> None:
        """A micro-batch's loss, divided by their number, and multiplied by AMP's scale where there is one."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler._scale if scaler is not None else None  # noqa: SLF001 - get_scale reads the host
        self._losses.append(loss.detach() if scale is None else loss.detach() / scale)

    def on_before_optimizer_step(
        self, trainer: "lightning.Trainer", pl_module: "lightning.LightningModule", optimizer: Optimizer
    ) -> None:
        """The gradients are whole and not clipped."""
        losses, self._losses = self._losses, []
        if self.guard is not None and losses:
            self.guard.before_optimizer(torch.stack([loss.float().reshape(()) for loss in losses]).sum())

    def on_train_batch_end(
        self,
        trainer: "lightning.Trainer",
        pl_module: "lightning.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The boundary between two steps, where this batch was the last of one."""
        if self.guard is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self.guard.end_step()
            trainer.should_stop |= self.guard.stopping

    def on_train_end(self, trainer: "lightning.Trainer", pl_module: "lightning.LightningModule") -> None:
        """Training is over: leave the run folder."""
        self.close()

    def on_exception(
        self, trainer: "lightning.Trainer", pl_module: "lightning.LightningModule", exception: BaseException
    ) -> None:
        """Training ended by an error: leave the run folder all the same."""
        self.close()

    def close(self) -> None:
        """Leave the run folder. Doing so twice changes nothing."""
        if self.guard is not None:
            self.guard.close()
            self.guard = None
        self._losses.clear()

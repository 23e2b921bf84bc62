"""The guard in Lightning's Trainer: `GuardCallback`, by the callback's own events alone."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from trainer_plugin.framework import FrameworkCallback

if TYPE_CHECKING:
    import lightning


class GuardCallback(FrameworkCallback, Callback):
    """Watches and heals a Lightning training with automatic optimization.

        trainer = lightning.Trainer(..., gradient_clip_val=None, callbacks=[GuardCallback("guard.yaml", run="gpt-0")])

    The guard clips (`clip_max_norm`), so the Trainer must not. What goes back on a rollback, what does not, and the
    arguments: `FrameworkCallback`. The Trainer's own restart is `ckpt_path`.
    """

    _step = 0

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
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._step = trainer.global_step
        self._begin(
            framework="lightning",
            start_step=trainer.global_step,
            model=pl_module,
            optimizer=trainer.optimizers,
            scheduler=schedulers[0] if schedulers else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
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
        loss = self._loss()
        if self.guard is not None and loss is not None:
            self.guard.before_optimizer(loss)

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

"""The guard in Hugging Face's Trainer: `GuardCallback`, and one line more, `guard.attach(trainer)`.

A callback alone comes after the Trainer's own clip, which turns one NaN into a NaN in every gradient, and hears of the
loss only as the Trainer logs it, with a NaN left out. So two methods of the trainer are wrapped: `training_step`, whose
returned losses add up to the step's own, and the accelerator's `clip_grad_norm_`, in whose place the guard clips.
"""

import logging
from collections.abc import Iterable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_plugin.framework import FrameworkCallback
from trainer_plugin.guard import Guard

_log = logging.getLogger(__name__)


class GuardCallback(FrameworkCallback, TrainerCallback):
    """Watches and heals a Trainer's training; give it to the Trainer as a callback, then `attach` it.

        guard = GuardCallback("guard.yaml", run="gpt-0")
        trainer = Trainer(..., callbacks=[guard])
        guard.attach(trainer)
        trainer.train()

    What goes back on a rollback, what does not, and the arguments: `FrameworkCallback`. The Trainer's own restart is
    `resume_from_checkpoint`.
    """

    _trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Take the place of the trainer's clip, and hear of its true losses. Doing so twice changes nothing.

        Raises:
            ValueError: the trainer runs in a way that the guard cannot follow; in one line.
        """
        if self._trainer is trainer:
            return
        if trainer.is_deepspeed_enabled:
            raise ValueError("GuardCallback: DeepSpeed clips and steps inside its engine, where no guard can stand")
        self._trainer = trainer
        training_step, clip = trainer.training_step, trainer.accelerator.clip_grad_norm_

        @wraps(training_step)
        def heard(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            if self.guard is not None:
                self._losses.append(loss.detach())
            return loss

        @wraps(clip)
        def guarded(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
            if self.guard is None:
                norm: Tensor | None = clip(parameters, max_norm, norm_type)
                return norm
            return self._before_optimizer(self.guard)

        vars(trainer)["training_step"] = heard
        vars(trainer.accelerator)["clip_grad_norm_"] = guarded

    def _before_optimizer(self, guard: Guard) -> Tensor | None:
        guard.before_optimizer(self._loss())
        return guard.grad_norm

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Model, optimizer and schedule are what they will be: make the guard."""
        trainer = self._trainer
        if trainer is None:
            raise ValueError("GuardCallback: guard.attach(trainer) is missing: a callback alone comes after the clip")
        clip = self._config.actions.clip_max_norm
        recipe = args.max_grad_norm if args.max_grad_norm > 0.0 else None
        if clip != recipe:
            _log.warning("the guard clips to %s (clip_max_norm), not the Trainer's max_grad_norm of %s", clip, recipe)
        optimizer = kwargs["optimizer"]
        self._begin(
            framework="transformers",
            start_step=state.global_step,
            model=trainer.accelerator.unwrap_model(kwargs["model"]),
            optimizer=getattr(optimizer, "optimizer", optimizer),
            scheduler=kwargs["lr_scheduler"],
            scaler=trainer.accelerator.scaler,
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The boundary between two steps."""
        if self.guard is not None:
            self.guard.end_step()
            control.should_training_stop |= self.guard.stopping

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Training is over: leave the run folder."""
        self.close()

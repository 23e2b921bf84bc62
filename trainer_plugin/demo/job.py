"""The demo's training job: a byte-level GPT on real text under a Guard, and its twin without guard or fault."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from trainer_plugin.checkpoints.proof import LossFn
from trainer_plugin.config import Config
from trainer_plugin.demo.gpt import GPT, held_out_loss, loss, sample_losses
from trainer_plugin.demo.text import ByteBatches, Corpus, held_out_batches
from trainer_plugin.faults import Faults
from trainer_plugin.guard import Guard
from trainer_plugin.signals import Signals

WIDTH = 128
CONTEXT = 64
BATCH_SIZE = 12
_PEAK_LR = 2e-3
_WARMUP_STEPS = 100
# The last part of the run, in which the rate falls to a tenth: warm-up, stable, decay.
_DECAY_SHARE = 0.2
_CLIP_MAX_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training: steps in the history of its weights, those applied, and the held-out loss (nats a byte)."""

    step: int
    applied_steps: int
    held_out_loss: float
    steps_per_second: float
    losses: dict[int, float]


class Workbench:
    """Everything of a training loop but the loop: the same for the guarded run and for its twin."""

    def __init__(
        self, corpus: Corpus, *, seed: int, steps: int, faults: Faults | None = None, width: int = WIDTH
    ) -> None:
        torch.manual_seed(seed)
        self.model = GPT(width=width, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _schedule(step, steps))
        damage = faults.on_data if faults is not None else None
        self.data = ByteBatches(corpus, BATCH_SIZE, CONTEXT, seed, damage)


def build() -> tuple[nn.Module, LossFn]:
    """The factory by which `python -m trainer_plugin replay` runs a demo's scene again."""
    return GPT(width=WIDTH, context=CONTEXT), lambda model, batch: sample_losses(model, batch["tokens"])


def train_guarded(
    corpus: Corpus,
    config: Config,
    *,
    seed: int,
    steps: int,
    faults: Faults,
    local_only: bool,
    on_start: Callable[[Guard], None],
    on_step: Callable[[int, float], None],
) -> Trained:
    """Train under a Guard while `faults` break things; `on_step` hears of each step's number and loss."""
    bench = Workbench(corpus, seed=seed, steps=steps, faults=faults)
    model, optimizer, scheduler = bench.model, bench.optimizer, bench.scheduler
    applied: dict[int, bool] = {}
    losses: dict[int, float] = {}

    def note(signals: Signals) -> None:
        applied[signals.step] = signals.withheld is None
        losses[signals.step] = signals.loss
        on_step(signals.step, signals.loss)

    guard = Guard(
        config,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=bench.data,
        factory="trainer_plugin.demo.job:build",
        local_only=local_only,
        on_signals=note,
    )
    began, run = time.monotonic(), 0
    try:
        on_start(guard)
        while guard.step < steps and not guard.stopping:
            batch = guard.next_batch()
            faults.on_forward(model)
            step_loss = loss(model, batch["tokens"])
            step_loss.backward()  # type: ignore[no-untyped-call]
            faults.on_gradients(model)
            faults.before_step(optimizer)
            guard.before_optimizer(step_loss, sample_ids=batch["sample_ids"])
            optimizer.step()
            faults.after_step(optimizer)
            scheduler.step()
            optimizer.zero_grad()
            guard.end_step()
            run += 1
    finally:
        seconds = time.monotonic() - began
        guard.close()
    return Trained(
        step=guard.step,
        applied_steps=sum(was for step, was in applied.items() if step <= guard.step),
        held_out_loss=held_out_loss(model, held_out_batches(corpus, CONTEXT)),
        steps_per_second=run / seconds,
        losses=losses,
    )


def train_twin(
    corpus: Corpus, *, seed: int, steps: int, read_after: int, on_step: Callable[[int, float], None]
) -> Trained:
    """The same seed without fault and without Guard, under torch's own clip; read after `read_after` steps."""
    bench = Workbench(corpus, seed=seed, steps=steps)
    losses: dict[int, float] = {}
    began = time.monotonic()
    for step, batch in enumerate(islice(bench.data, read_after), start=1):
        step_loss = loss(bench.model, batch["tokens"])
        step_loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(bench.model.parameters(), _CLIP_MAX_NORM)
        bench.optimizer.step()
        bench.scheduler.step()
        bench.optimizer.zero_grad()
        losses[step] = step_loss.item()
        on_step(step, losses[step])
    return Trained(
        step=read_after,
        applied_steps=read_after,
        held_out_loss=held_out_loss(bench.model, held_out_batches(corpus, CONTEXT)),
        steps_per_second=read_after / (time.monotonic() - began),
        losses=losses,
    )


def _schedule(step: int, steps: int) -> float:
    """The share of the peak rate in the step after `step` ones."""
    warmup = (step + 1) / _WARMUP_STEPS
    decay = 0.1 + 0.9 * (steps - step) / (_DECAY_SHARE * steps)
    return min(1.0, warmup, decay)

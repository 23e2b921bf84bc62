"""Whether a partial rollback heals: a small GPT, damaged in one block or in all, and what each remedy makes of it.

    make bench-partial

The layers are chosen as the policy would choose them, by their surge against their own past. Losses are nats a byte,
the last column on text held out, `undamaged` is the same run without the damage. A rollback loses 50 steps of training.
"""

import copy
import math
from itertools import islice

import torch

from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.demo.gpt import GPT, held_out_loss, loss
from trainer_plugin.demo.text import ByteBatches, Corpus, held_out_batches
from trainer_plugin.detection.layer_baselines import OUTLIER_RATIO, LayerBaselines
from trainer_plugin.step.probe import Limits, Probe, layer_of

SAVED, DAMAGED, FOUND, END = 700, 720, 750, 1050
LR, WARMUP_STEPS, CONTEXT = 2e-3, 100, 64
BLOCK = "blocks.2"
MOST_LAYERS = 3
CORPUS = Corpus.load(max_bytes=3_000_000)
BATCHES = [batch["tokens"] for batch in islice(ByteBatches(CORPUS, 12, CONTEXT, 0), END)]
HELD_OUT = held_out_batches(CORPUS, CONTEXT)[:8]


class Run:
    """One training of a GPT with six blocks; every run sees the same batch at the same step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(width=64, layers=6, heads=4, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        self.state = TrainingState(model=self.model, optimizers=[self.optimizer])
        self.layers = LayerState(self.model, [self.optimizer])
        self.probe = Probe(self.model)
        self.baselines = LayerBaselines(alpha=0.99)
        self.surges: dict[str, float] = {}
        self.learn = True

    def step(self, number: int, *, damage: str | None = None, lr_factor: float = 1.0) -> float:
        """Step number `number` with a clip of 1; the loss."""
        step_loss = loss(self.model, BATCHES[number - 1])
        step_loss.backward()
        values = self.probe.measure(step_loss, Limits(max_norm=1.0))[0].read()
        self.baselines.update(values.layer_grad_norms, learn=self.learn)
        for layer, ratio in self.baselines.ratios.items():
            self.surges[layer] = max(ratio, self.surges.get(layer, 0.0))
        group = self.optimizer.param_groups[0]
        group["lr"] = LR * lr_factor * min(1.0, number / WARMUP_STEPS) * (100.0 if damage == "all" else 1.0)
        before = [p.detach().clone() for p in self.block] if damage == "block" else []
        if values.grad_norm is not None and math.isfinite(values.grad_norm):
            self.optimizer.step()
        for parameter, old in zip(self.block, before, strict=False):
            parameter.data = old + 100.0 * (parameter.data - old)
        self.optimizer.zero_grad()
        return values.loss

    @property
    def block(self) -> list[torch.nn.Parameter]:
        """The parameters of the block that is damaged."""
        return [p for name, p in self.model.named_parameters() if layer_of(name) == BLOCK]


def damaged(run: Run, damage: str) -> Run:
    """The run 30 steps after a damage began."""
    run.learn, run.surges = False, {}
    if damage == "weights":
        for parameter in run.block:
            parameter.data.mul_(6.0)
    for number in range(DAMAGED + 1, FOUND + 1):
        run.step(number, damage=damage if number <= DAMAGED + 10 else None)
    return run


def told(run: Run, first: int, *, lr_factor: float = 1.0) -> str:
    """Train on to the end; the loss early, late, and on held-out text."""
    losses = [
        run.step(number, lr_factor=lr_factor if number <= first + 200 else 1.0) for number in range(first + 1, END + 1)
    ]
    early, late = sum(losses[:5]) / 5, sum(losses[-50:]) / 50
    return f"{early:6.3f}  {late:6.3f}  {held_out_loss(run.model, HELD_OUT):7.4f}"


def main() -> None:
    """Train, damage, heal, and tell."""
    torch.set_num_threads(1)
    run = Run()
    for number in range(1, DAMAGED + 1):
        run.step(number)
        if number == SAVED:
            good = run.state.capture({})
    start = run
    print(f"{'':38}after 1-5  last 50  held out", flush=True)
    print(f"{'undamaged':40}{told(copy.deepcopy(start), DAMAGED)}", flush=True)
    for damage, what in (
        ("block", f"learning rate x 100 for ten steps in {BLOCK}"),
        ("weights", f"weights x 6 in {BLOCK}"),
        ("all", "learning rate x 100 for ten steps in all"),
    ):
        run = damaged(copy.deepcopy(start), damage)
        ranked = sorted(run.surges, key=lambda layer: -run.surges[layer])
        surging = [layer for layer in ranked if run.surges[layer] > OUTLIER_RATIO]
        print(f"{what}: {len(surging)} of {len(ranked)} layers surged,", end=" ")
        print(", ".join(f"{layer} x {run.surges[layer]:.0f}" for layer in ranked[:4]), flush=True)
        for remedy, layers in (
            ("no remedy", []),
            (f"the {MOST_LAYERS} that surged most", ranked[:MOST_LAYERS]),
            (f"{BLOCK} alone", [BLOCK]),
        ):
            healed = copy.deepcopy(run)
            if layers:
                healed.layers.restore(good, layers)
            print(f"  {remedy:38}{told(healed, FOUND, lr_factor=0.5 if layers else 1.0)}", flush=True)
        back = copy.deepcopy(run)
        back.state.restore(good)
        print(f"  {'rollback':38}{told(back, FOUND, lr_factor=0.5)}", flush=True)


if __name__ == "__main__":
    main()

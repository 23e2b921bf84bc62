"""Whether replay finds the culprit: faults injected into a small GPT, and what it says of their scenes.

    make bench-replay

Each run goes on from a model that its seed has trained for some time; the fault hits one step, one sample or one layer,
drawn by seed and fault. Where the guard opened no incident at that step (a step may be broken and look ordinary), the
scene is kept by hand, so that the faults that are easy to see are not the only ones. `again` is how often the recorded
loss came again to 1e-6, `norms` the norms of all layers too (a fault in the gradients cannot come again), `rank 1` how
often the broken sample led the ranking, `named` how often the verdict names the culprit.
"""

import argparse
import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_plugin.demo.gpt import GPT
from trainer_plugin.demo.text import ByteBatches, Corpus
from trainer_plugin.guard import Guard
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.replay.factory import Built
from trainer_plugin.replay.finding import Finding
from trainer_plugin.replay.investigate import TOLERANCE, investigate
from trainer_plugin.replay.material import read_material
from trainer_plugin.signals import Signals
from trainer_plugin.step.probe import layer_of

CONTEXT, BATCH_SIZE, LAYERS = 64, 12, 4
LR, WARMUP_STEPS, BASE_STEPS = 1e-3, 40, 1200
FIRST, LAST = 60, 90
CORPUS = Corpus.load(max_bytes=3_000_000)


def sample_losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Cross-entropy of each sample, times its weight."""
    logits = model(batch["inputs"])
    each = functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none").mean(dim=1)
    return each * batch["weights"]


def build() -> Built:
    """The model."""
    return Built(model=GPT(width=64, layers=LAYERS, heads=4, context=CONTEXT), loss_fn=sample_losses)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Its optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


@cache
def base(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer after a training without a fault."""
    torch.manual_seed(seed)
    model = build().model
    optimizer = optimizer_of(model)
    for number, batch in enumerate(islice(batches(seed, 0), BASE_STEPS), start=1):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, number / 100)
        sample_losses(model, batch).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def batches(seed: int, first: int) -> Iterator[dict[str, Any]]:
    """Plain batches of the text, from a number on."""
    source = ByteBatches(CORPUS, BATCH_SIZE, CONTEXT, seed)
    for number in count(first):
        tokens, weights = source.batch(number)["tokens"], torch.ones(BATCH_SIZE)
        yield {"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone(), "weights": weights}


# --- Faults in one sample: the batch and a place in it ----------------------------------------------------------------


def garbage(batch: dict[str, Any], place: int, draw: random.Random) -> None:
    """Random bytes in place of a text."""
    noise = torch.tensor([draw.randrange(256) for _ in range(CONTEXT + 1)])
    batch["inputs"][place], batch["targets"][place] = noise[:-1], noise[1:]


def shuffled(batch: dict[str, Any], place: int, draw: random.Random) -> None:
    """The labels of one sample in another order."""
    order = list(range(CONTEXT))
    draw.shuffle(order)
    batch["targets"][place] = batch["targets"][place][order]


def huge(batch: dict[str, Any], place: int, _: random.Random) -> None:
    """A sample that counts a hundred times."""
    batch["weights"][place] = 100.0


def missing(batch: dict[str, Any], place: int, _: random.Random) -> None:
    """A sample whose weight is NaN."""
    batch["weights"][place] = math.nan


# --- Faults in one layer: its parameters, before the forward pass, and after the backward pass ------------------------


def nan_weight(parameters: list[nn.Parameter], draw: random.Random) -> None:
    """One weight is NaN."""
    draw.choice(parameters).data.view(-1)[0] = math.nan


def bit_flip(parameters: list[nn.Parameter], draw: random.Random) -> None:
    """The highest bit of the exponent of one weight of a matrix is flipped."""
    weight = draw.choice([parameter for parameter in parameters if parameter.dim() == 2]).data.view(-1)
    place = draw.randrange(len(weight))
    weight.view(torch.int32)[place] ^= 1 << 30


def blown_up(parameters: list[nn.Parameter], _: random.Random) -> None:
    """All weights of the layer are six times as large."""
    for parameter in parameters:
        parameter.data.mul_(6.0)


def nan_gradient(parameters: list[nn.Parameter], draw: random.Random) -> None:
    """One element of a gradient is NaN."""
    draw.choice(parameters).grad.view(-1)[0] = math.nan


def grown_gradient(parameters: list[nn.Parameter], _: random.Random) -> None:
    """The layer's gradient is ten thousand times as large."""
    for parameter in parameters:
        parameter.grad.mul_(1e4)


def exploding(model: GPT, number: int) -> Any:
    """What goes back through one block is a thousand times as large, in it and before it."""
    return model.blocks[number].ln_2.register_full_backward_hook(lambda _, given, __: (given[0] * 1e3,))


SAMPLES: dict[str, Callable[..., None]] = {
    "garbage text": garbage, "shuffled labels": shuffled, "huge sample": huge, "NaN sample": missing,
}  # fmt: skip
WEIGHTS: dict[str, Callable[..., None]] = {
    "NaN in a weight": nan_weight, "bit flip in a weight": bit_flip, "weights x 6": blown_up,
}  # fmt: skip
GRADIENTS: dict[str, Callable[..., None]] = {"NaN in a gradient": nan_gradient, "gradient x 10,000": grown_gradient}
EXPLODING = "backward pass x 1,000"
KINDS = (*SAMPLES, *WEIGHTS, *GRADIENTS, EXPLODING)


def run(kind: str, seed: int, folder: Path) -> tuple[Finding, str, bool]:
    """Train until the fault has hit; the finding, the culprit's name, and whether the guard saw it by itself."""
    draw = random.Random(f"{kind} {seed}")
    step_hit, place, block = draw.randrange(FIRST, LAST), draw.randrange(BATCH_SIZE), draw.randrange(LAYERS)
    model = build().model
    optimizer = optimizer_of(model)
    for part, state in zip((model, optimizer), copy.deepcopy(base(seed)), strict=True):
        part.load_state_dict(state)
    data = batches(seed, BASE_STEPS)
    config = {
        "runs": str(folder / "runs"),
        "run": "replay",
        "metrics": {"port": 0},
        "detection": {"warmup_steps": WARMUP_STEPS},
        "checkpoints": {"local": str(folder / "a"), "shared": str(folder / "b"), "every": 20, "scenes": 20},
    }
    seen: list[Signals] = []
    guard = Guard(config, model=model, optimizer=optimizer, data=data, local_only=True, on_signals=seen.append)
    block_parameters = [p for name, p in model.named_parameters() if layer_of(name) == f"blocks.{block}"]
    for number in range(1, step_hit + 1):
        if number == step_hit and kind in WEIGHTS:
            WEIGHTS[kind](block_parameters, draw)
        batch, hook = guard.next_batch(), None
        if number == step_hit and kind in SAMPLES:
            SAMPLES[kind](batch, place, draw)
        elif number == step_hit and kind == EXPLODING:
            hook = exploding(model, block)
        loss = sample_losses(model, batch).mean()
        loss.backward()
        if hook is not None:
            hook.remove()
        if number == step_hit and kind in GRADIENTS:
            GRADIENTS[kind](block_parameters, draw)
        guard.before_optimizer(loss, sample_ids=[f"{number}-{one}" for one in range(BATCH_SIZE)])
        optimizer.step()
        optimizer.zero_grad()
        if number == step_hit:
            _keep_by_hand(guard)
        guard.end_step()
        guard._parts.checkpoints.wait()
    guard._parts.scenes.wait()
    guard.close()
    (scene,) = (folder / "runs" / "replay" / "scenes").glob(f"step-{step_hit:09d}-*")
    material = read_material(scene)
    culprit = f"{step_hit}-{place}" if kind in SAMPLES else f"blocks.{block}"
    return investigate(material, build(), "bench:build"), culprit, material.scene.incident != 0


def _keep_by_hand(guard: Guard) -> None:
    """At the coming boundary, after the guard has judged, have the scene kept where it saw nothing."""
    scenes, told = guard._parts.scenes, guard._boundary._on_signals

    def keep(signals: Signals) -> None:
        told(signals)
        scenes.wait()
        if scenes.newest_step != signals.step:
            opened = Incident(id=0, first_step=signals.step, detected_step=signals.step, last_step=signals.step)
            scenes.keep(opened, signals)

    guard._boundary._on_signals = keep


def main() -> None:
    """Inject, replay, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="runs of each fault")
    parser.add_argument("--verbose", action="store_true", help="each verdict that names another")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("runs", "seen", "again", "norms", "rank 1", "named")
    print(f"{'':24}" + "".join(f"{column:>8}" for column in columns), flush=True)
    for kind in KINDS:
        counts = dict.fromkeys(columns, 0)
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                finding, culprit, seen = run(kind, seed, Path(folder))
            named = finding.verdict is not None and finding.verdict.name == culprit
            counts["runs"] += 1
            counts["seen"] += seen
            counts["again"] += finding.errors["loss"] <= TOLERANCE
            counts["norms"] += finding.reproduced
            counts["rank 1"] += finding.samples[0].id == culprit
            counts["named"] += named
            if options.verbose and not named:
                print(f"  {culprit}, seed {seed}: {finding.verdict.line if finding.verdict else None}", flush=True)
        shown = {**counts, **({} if kind in SAMPLES else {"rank 1": "-"})}
        print(f"{kind:24}" + "".join(f"{shown[column]:>8}" for column in columns), flush=True)


if __name__ == "__main__":
    main()

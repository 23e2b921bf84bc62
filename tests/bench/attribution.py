"""How often the class of an incident is the right one: a small GPT under a guard, hurt on purpose in every way.

    make bench-attribution

Every kind of fault of `trainer_plugin/faults/table.py`, at several moments and strengths, over the seeds of
`REPORTED`; what is right was written there before. The rules were made while looking at `DEVELOPED` only. A run's class
is that of its first incident when that has healed. Runs are whole: guard, remedies and checkpoints act.
"""

import argparse
import copy
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from waiting import wait_for

from exporter.commands import Command, Inbox
from trainer_plugin.demo.gpt import GPT
from trainer_plugin.demo.gpt import loss as mean_loss
from trainer_plugin.demo.text import ByteBatches, Corpus
from trainer_plugin.faults import Faults
from trainer_plugin.faults.table import RIGHT
from trainer_plugin.guard import Guard
from trainer_plugin.policy.incidents import Incident

DEVELOPED = (0, 1, 11)
REPORTED = (21, 22, 23, 24, 25)
MORE_CLEAN = tuple(range(101, 111))
STEPS, WARMUP_STEPS, LR, LR_WARMUP_STEPS = 300, 150, 4e-3, 60
BASE_STEPS = 800
CONTEXT, BATCH = 32, 16
MOMENTS = (165, 180, 195)
CORPUS = Corpus.load(max_bytes=3_000_000)


def new_model(seed: int) -> tuple[GPT, torch.optim.Optimizer]:
    """A GPT of 30,000 parameters and its optimizer."""
    torch.manual_seed(seed)
    model = GPT(width=32, layers=2, heads=4, context=CONTEXT)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


@cache
def base(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and moments after so many plain steps: what has learnt nothing yet is not hurt by much."""
    model, optimizer = new_model(seed)
    for step, batch in enumerate(islice(ByteBatches(CORPUS, BATCH, CONTEXT, seed + 1000), BASE_STEPS)):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / LR_WARMUP_STEPS)
        mean_loss(model, batch["tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


@dataclass
class Case:
    """One run: its fault, as a plan on the injector, and what it is called. `tell` makes the machine speak."""

    kind: str
    name: str
    seed: int
    inject: Callable[[Faults, "Run"], Any]
    amp: bool = False
    from_start: bool = False


class Data:
    """Batches of inputs and targets that can go back, damaged where they lie."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self._batches = ByteBatches(CORPUS, BATCH, CONTEXT, seed)
        self._faults = faults
        self.position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            tokens = self._batches.batch(self.position)["tokens"]
            self.position += 1
            yield self._faults.on_data(self.position - 1, tokens[:, :-1], tokens[:, 1:])

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.position = state["position"]


@dataclass
class Run:
    """One training under a guard, in a folder of its own."""

    case: Case
    folder: Path
    incidents: list[Incident] = field(default_factory=list)
    guard: Guard | None = None
    ids: Iterator[int] = field(default_factory=count)

    def tell(self, alert: str, reason: str) -> None:
        """What the receiver puts into the inbox when this alert is delivered; taken before the next step."""
        inbox, guard = Inbox(self.folder / "runs" / "bench"), self.guard
        assert guard is not None
        command = Command(
            id=f"note{next(self.ids)}", run="bench", action="note", source="alert", received=time.time(), alert=alert,
            starts_at=time.time(), reason=reason, step=guard.step, steps_total=guard.step,
        )  # fmt: skip
        inbox.put(command)
        wait_for(lambda: command.id in {one.id for one in guard._parts.loop.commands()}, 60.0)

    def train(self) -> "Run":
        """Train to the end."""
        case, faults = self.case, Faults(seed=self.case.seed)
        model, optimizer = new_model(case.seed)
        if not case.from_start:
            weights, moments = base(case.seed)
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(moments))
        # From the start the rate climbs all along, as over the first thousands of steps of a true run.
        warmup_steps = STEPS if case.from_start else 1
        optimizer.param_groups[0].update(lr=LR, initial_lr=LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000) if case.amp else None
        case.inject(faults, self)
        self.guard = guard = Guard(
            {
                "run": "bench", "runs": str(self.folder / "runs"), "metrics": {"port": 0},
                "detection": {"warmup_steps": WARMUP_STEPS},
                "checkpoints": {
                    "local": str(self.folder / "local"), "shared": str(self.folder / "shared"), "every": 100,
                    "scenes": 0,
                },
            },
            model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=Data(case.seed, faults),
            local_only=True,
        )  # fmt: skip
        state = guard._parts.policy.state
        # What has healed is called as it will be called.
        while guard.step < STEPS and not guard.stopping and not (state.incidents and state.incidents[0].healed):
            inputs, targets = guard.next_batch()
            faults.on_forward(model)
            losses = functional.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(1)
            loss = faults.on_losses(losses).mean()
            (scaler.scale(loss) if scaler else loss).backward()
            faults.on_gradients(model)
            faults.before_step(optimizer)
            guard.before_optimizer(loss)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            faults.after_step(optimizer)
            scheduler.step()
            optimizer.zero_grad()
            guard.end_step()
        guard.close()
        self.incidents = state.incidents
        self.fired = sum(faults.fired.values())
        return self


@dataclass
class PlayedDriver:
    """In the place of a driver: the note that its alert leads to."""

    run: Run

    def fail(self, gpu: int, xid: int) -> None:
        """An XID."""
        self.run.tell("TrainGpuFault", f"rank 0 on GPU-{gpu}, GPU {gpu} of node-1, last XID {xid}")

    def count_ecc(self, gpu: int) -> None:
        """An uncorrected ECC error."""
        self.run.tell("TrainGpuFault", f"rank 0 on GPU-{gpu}, GPU {gpu} of node-1")


@dataclass
class PlayedLinks:
    """The same of a host's links."""

    run: Run

    def fail(self) -> None:
        """A link went down."""
        self.run.tell("TrainNetworkErrors", "node-1: 1 link failures")


def clean(seed: int) -> Case:
    """Nothing is broken."""
    return Case(kind="none", name="clean", seed=seed, inject=lambda _, __: None)


def cases(seed: int) -> Iterator[Case]:
    """Every kind of fault for a seed, at moments and of strengths that change with it."""
    at = MOMENTS[seed % len(MOMENTS)]
    few = 1 + seed % 3
    layer = f"blocks.{seed % 2}."

    def case(kind: str, inject: Callable[[Faults, Run], Any], name: str = "", *, amp: bool = False) -> Case:
        return Case(kind=kind, name=name or kind, seed=seed, inject=inject, amp=amp)

    yield clean(seed)
    yield replace(clean(seed), name="clean, GradScaler", amp=True)
    yield case("garbage_text", lambda f, _: f.garbage_text(at=at, steps=few))
    yield case("shuffled_labels", lambda f, _: f.shuffled_labels(at=at, steps=few))
    yield case("duplicated_document", lambda f, _: f.duplicated_document(at=at))
    yield case("huge_sample", lambda f, _: f.huge_sample(at=at, times=(100.0, 1000.0)[seed % 2]))
    yield case("lr_jump", lambda f, _: f.lr_jump(at=at, times=(30.0, 100.0)[seed % 2], steps=10))
    yield case("lr_jump", lambda f, _: f.lr_jump(at=at, times=40.0, steps=STEPS), "lr_jump for good")
    peak = (100.0, 200.0, 300.0)[seed % 3]
    yield replace(case("lr_peak", lambda f, _: f.lr_peak(times=peak)), from_start=True)
    yield case("grad_scale", lambda f, _: f.grad_scale(at=at, times=10.0 ** (2 + seed % 5), steps=few))
    yield case("exploding_layer", lambda f, _: f.exploding_layer(at=at, times=1e4, parameter=layer, steps=few))
    yield case("fp16_overflow", lambda f, _: f.fp16_overflow(at=at, steps=few))
    yield case("layer_norm_eps", lambda f, _: f.layer_norm_eps(at=at, steps=few))
    yield case("nan_gradient", lambda f, _: f.nan_gradient(at=at, steps=few, parameter=layer))
    yield case("amp_collapse", lambda f, _: f.amp_collapse(at=at, steps=30), amp=True)
    yield case("slow_rank", lambda f, _: f.slow_rank(at=at, seconds=0.05, steps=40))
    yield case("stalled_loader", lambda f, _: f.stalled_loader(at=at, seconds=1.0, steps=2))
    yield case("bit_flip", lambda f, _: f.bit_flip(at=at, parameter=layer))
    yield case("weight_noise", lambda f, _: f.weight_noise(at=at, times=4.0))
    yield case("xid", lambda f, r: f.xid(at=at - 5, driver=PlayedDriver(r)).weight_noise(at=at, times=4.0))
    yield case("ecc", lambda f, r: f.ecc(at=at - 5, driver=PlayedDriver(r)).bit_flip(at=at, parameter=layer))
    yield case(
        "network_errors", lambda f, r: f.network_errors(at=at - 5, links=PlayedLinks(r)).weight_noise(at=at, times=4.0)
    )


def found(run: Run) -> str:
    """The class of the first incident, `none` where there is none."""
    return run.incidents[0].class_ if run.incidents else "none"


def right(case: Case) -> tuple[str, ...]:
    """What is right for a case."""
    return ("none",) if case.kind == "none" else RIGHT[case.kind].classes  # type: ignore[index]


def main() -> None:
    """Run them all, and print the matrix."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="*", default=REPORTED)
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    wrong = 0
    every = [one for seed in options.seeds for one in cases(seed)]
    every += [clean(seed) for seed in MORE_CLEAN if options.seeds == REPORTED]
    for case in every:
        if options.kinds and case.kind not in options.kinds:
            continue
        folder = Path(tempfile.mkdtemp(prefix="attribution-"))
        try:
            run = Run(case, folder).train()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        class_, ok = found(run), found(run) in right(case)
        wrong += not ok
        counts.setdefault(case.name, Counter())[class_] += 1
        if options.verbose or not ok:
            print(f"{'right' if ok else 'WRONG'}  seed {case.seed}  {case.name}: {class_}", flush=True)
            for incident in run.incidents:
                print(
                    f"    {incident.id} {incident.first_step} {incident.class_} healed {incident.healed_step}: "
                    f"{'; '.join(incident.evidence)}",
                    [f"{r.step} {r.action} {r.outcome}" for r in incident.remedies],
                )
    total = sum(sum(each.values()) for each in counts.values())
    for name, each in counts.items():
        print(f"{name:24}", dict(each))
    print(f"{total - wrong} of {total} right, {(total - wrong) / total:.1%}")


if __name__ == "__main__":
    sys.exit(main())

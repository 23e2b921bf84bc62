"""The check on a GPU: no sync in the hot path, true norms, a shield that holds, the GPU page, and what it all costs.

    python tests/gpu_check.py [--pairs N] [--steps N]

Under 10 minutes. The page is held against nvidia-smi. Prints one line for each thing checked; exit code 1 if any of
them is not so. Without a GPU it says so and does nothing.
"""

import argparse
import contextlib
import math
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))
from fake_nvml import Shown
from nvidia_smi import ask, differences
from overhead import bench_before_optimizer, bench_loop, bench_worst_step
from waiting import wait_for

from exporter.gpu.page import GpuPage
from trainer_plugin.demo.gpt import GPT, loss
from trainer_plugin.guard import Guard
from trainer_plugin.placement import placement_of
from trainer_plugin.step.row import HUGE_NORM

SETUPS: dict[str, dict[str, Any]] = {
    "fp32, fused AdamW": {},
    "fp32, foreach AdamW": {"fused": False},
    "bf16 autocast, fused AdamW": {"autocast": torch.bfloat16},
    "bf16 weights, fused AdamW": {"weights": torch.bfloat16},
    "fp16 autocast and GradScaler, fused AdamW": {"autocast": torch.float16, "scaled": True},
    "fp16 autocast and GradScaler, foreach AdamW": {"autocast": torch.float16, "scaled": True, "fused": False},
    "accumulation of 4, mean by token": {"micro_batches": 4},
    "activations watched": {"activations": True},
}


class Training:
    """A small GPT on the GPU under a guard with everything on, every layer read at every step."""

    def __init__(
        self,
        folder: Path,
        *,
        fused: bool = True,
        autocast: torch.dtype | None = None,
        weights: torch.dtype = torch.float32,
        scaled: bool = False,
        micro_batches: int = 1,
        activations: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = GPT(width=128, layers=4, heads=4, context=64).to("cuda", weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9999)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if scaled else None
        self.autocast = autocast
        self.micro_batches = micro_batches
        self.tokens = torch.randint(256, (8, 65), device="cuda")
        self.signals: list[Any] = []
        tiers = {"local": str(folder / "local"), "shared": str(folder / "shared"), "every": 1 << 40}
        self.guard = Guard(
            {
                "runs": str(folder / "runs"),
                "metrics": {"port": 0, "layers_every": 1, "activations": activations},
                "checkpoints": tiers,
            },
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            local_only=True,
            on_signals=self.signals.append,
        )

    def step(self, damage: Callable[[nn.Module], None] | None = None, *, strict: bool = False) -> None:
        """One step; with `strict`, a sync between `before_optimizer` and the boundary is an error."""
        for _ in range(self.micro_batches):
            with torch.autocast("cuda", self.autocast) if self.autocast else nullcontext():
                step_loss = loss(self.model, self.tokens)
            scaled = step_loss / self.micro_batches
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
            if self.micro_batches > 1:
                self.guard.micro_step(step_loss, tokens=self.tokens.numel())
        if damage is not None:
            damage(self.model)
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        self.guard.before_optimizer(None if self.micro_batches > 1 else step_loss)
        # A scaler, and an optimizer that takes no flag, read the device themselves: only what is ours is held to it.
        theirs = self.scaler is not None or not self.optimizer.param_groups[0]["fused"]
        torch.cuda.set_sync_debug_mode("error" if strict and not theirs else "default")
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        self.guard.end_step()
        torch.cuda.set_sync_debug_mode("default")

    def errors(self) -> float:
        """Errors of the guard's own that were held back, those by a sync among them."""
        return self.guard.page.value("train_guard_errors_total") or 0.0

    def outcome(self) -> list[torch.Tensor]:
        """Weights, moments and step counts."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in [*self.model.parameters(), *states] if torch.is_tensor(value)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether all are the same bit for bit."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def fill(value: float) -> Callable[[nn.Module], None]:
    """A damage: every element of one gradient is this."""

    def damage(model: nn.Module) -> None:
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(value)  # type: ignore[union-attr]

    return damage


def check(name: str, options: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What has to be true in one set-up."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), **options)
        for _ in range(5):
            training.step()
        yield f"{name}: no error in 5 ordinary steps", training.errors() == 0
        for _ in range(20):
            training.step(strict=True)
        yield f"{name}: no sync in the hot path, 20 steps", training.errors() == 0

        exact: list[float] = []

        def measure(model: nn.Module) -> None:
            scale = training.scaler.get_scale() if training.scaler is not None else 1.0
            gradients = [p.grad.double() / scale for p in model.parameters() if p.grad is not None]
            exact.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))

        training.step(measure)
        training.step()
        training.step()
        norm = next(signals.grad_norm for signals in training.signals if signals.step == 26)
        off = abs(norm - exact[0]) / exact[0] if norm is not None else math.inf
        yield f"{name}: the norm is off by {off:.1e} of a float64 reference", off <= 1e-5

        before = training.outcome()
        training.step(fill(math.nan))
        yield f"{name}: a NaN gradient changes no bit", equal(before, training.outcome())
        training.step()
        yield f"{name}: the next step trains", not equal(before, training.outcome())
        if training.scaler is None and options.get("weights") != torch.bfloat16:
            before = training.outcome()
            training.step(fill(1e20))
            same = equal(before, training.outcome())
            training.step()
            training.step()
            (huge,) = [signals for signals in training.signals if signals.huge]
            right = huge.withheld == "spike" and huge.grad_norm is not None and huge.grad_norm >= HUGE_NORM
            yield f"{name}: a huge gradient is withheld and told from an infinite one", same and right
        saved, parts = training.outcome(), training.guard._parts
        parts.keeper.save_checkpoint()
        training.step()  # While it is on its way to the disk.
        parts.checkpoints.wait()
        (newest, *_) = parts.checkpoints.targets(1 << 62, proven_only=False)
        parts.state.restore(parts.checkpoints.load(newest).snapshot)
        yield f"{name}: a checkpoint in pinned memory is the state of its step", equal(saved, training.outcome())
        parts.state.restore(parts.checkpoints._local.read(newest.name))
        yield f"{name}: on disk as well", equal(saved, training.outcome())
        yield f"{name}: no error of the guard's own", training.errors() == 0
        training.guard.close()


def check_page() -> Iterator[tuple[str, bool]]:
    """Our GPU page against nvidia-smi, and the GPU that a rank names against both."""
    page = GpuPage(interval_seconds=1.0, hostname=socket.gethostname())
    page.start()
    try:
        reads = set[bytes]()
        with contextlib.suppress(TimeoutError):  # Then the comparison says what is missing.
            # Three, for what only two whole collections can tell.
            wait_for(lambda: len(reads) >= 3, 30.0, pause_seconds=0.1, meanwhile=lambda: reads.update(_read_at(page)))
        shown = Shown(page.render().decode())
    finally:
        page.close()
    told = ask()
    for line in differences(shown, told) or ["nothing"]:
        yield f"GPU page: differs from nvidia-smi in {line}", line == "nothing"
    missing = [f"{labels['metric']} ({labels['reason']})" for labels in shown.labels("gpu_exporter_unavailable")]
    yield f"GPU page: {len(shown.samples)} samples; not here: {', '.join(missing) or 'nothing'}", bool(shown.samples)
    rank = placement_of(nn.Linear(1, 1).cuda()).gpu_uuid
    yield f"a rank's GPU is {rank}, which nvidia-smi knows", bool(rank) and rank in told


def _read_at(page: GpuPage) -> list[bytes]:
    """When the GPUs that a page shows were read, if any were."""
    return re.findall(rb"^gpu_exporter_last_collect_timestamp_seconds (\S+)", page.render(), re.MULTILINE)


def main() -> int:
    """Check everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=300, help="pairs for (a); 0 leaves the figures out")
    parser.add_argument("--steps", type=int, default=1000, help="pairs of steps for (b)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: no GPU here, nothing was checked")
        return 0
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = 0
    for name, setup in SETUPS.items():
        for what, right in check(name, setup):
            failed += not right
            print(f"{'ok  ' if right else 'FAIL'} {what}", flush=True)
    for what, right in check_page():
        failed += not right
        print(f"{'ok  ' if right else 'FAIL'} {what}", flush=True)
    if options.pairs:
        for millions in (10, 85):
            figure = bench_before_optimizer(millions, options.pairs, "cuda")
            print(f"(a) before_optimizer / clip_grad_norm_, {millions} M: {figure}", flush=True)
        print(f"(b) whole step / plain step, 10 M, batch 8 x 256: {bench_loop(options.steps, 8, 'cuda')}", flush=True)
        for line in bench_worst_step(1000, 4600, "cuda"):
            print(f"(c) {line}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

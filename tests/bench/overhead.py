"""What the guard costs: `before_optimizer` against torch's clip, a whole loop against a plain one, and a scrape.

    python tests/bench/overhead.py [--pairs N] [--steps N]

Ratios are paired in one run, the order drawn for each pair, and told as median with a 95 % interval of the median
(bootstrap). Absolute times are of this machine and of this moment; the ratios are what counts.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import prometheus_client
import torch
from torch import nn

from exporter.page import Page
from trainer_plugin.demo.gpt import GPT, loss
from trainer_plugin.guard import Guard

CONTEXT = 256
BATCH_SIZE = 8


def model_of(millions: int) -> GPT:
    """A GPT of about 10 or 85 million parameters."""
    torch.manual_seed(0)
    sizes = {10: {"width": 384, "layers": 6, "heads": 6}, 85: {"width": 768, "layers": 12, "heads": 12}}
    return GPT(context=CONTEXT, **sizes[millions])


def seconds(work: Callable[[], object]) -> float:
    """How long it takes once."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def paired(first: Callable[[], object], second: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """Seconds of both, pair by pair, in drawn order, after one pair that does not count."""
    times = []
    for _ in range(pairs + 1):
        if random.random() < 0.5:
            a, b = seconds(first), seconds(second)
        else:
            b, a = seconds(second), seconds(first)
        times.append((a, b))
    return times[1:]


def told(times: list[tuple[float, float]]) -> str:
    """Median ratio with its interval, and both medians."""
    ratios = [a / b for a, b in times]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000))
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return (
        f"{statistics.median(ratios):.3f} x (95 % {medians[25]:.3f} to {medians[974]:.3f}); "
        f"{a * 1e3:.2f} ms against {b * 1e3:.2f} ms, {len(ratios)} pairs"
    )


def guard_on(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Guard:
    """A guard with everything on but checkpoints."""
    tiers = {"local": str(folder / "local"), "shared": str(folder / "shared"), "every": 1 << 40}
    config = {"runs": str(folder / "runs"), "metrics": {"port": 0}, "checkpoints": tiers}
    return Guard(config, model=model, optimizer=optimizer, local_only=True)


def bench_before_optimizer(millions: int, pairs: int) -> str:
    """(a) On the same gradients."""
    model = model_of(millions)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    step_loss = torch.tensor(2.0)
    with tempfile.TemporaryDirectory() as folder:
        guard = guard_on(model, optimizer, Path(folder))

        def ours() -> None:
            guard.before_optimizer(step_loss)
            guard._parts.reader.forget()

        times = paired(ours, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), pairs)
        guard.close()
    return told(times)


def bench_loop(pairs: int) -> str:
    """(b) A whole step with everything on, scraped once a second, against one with torch's clip."""
    guarded, plain = model_of(10), model_of(10)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (guarded, plain)]
    tokens = torch.randint(256, (BATCH_SIZE, CONTEXT + 1))
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        guard = guard_on(guarded, optimizers[0], Path(folder))

        def scrape() -> None:
            while not stop.wait(1.0):
                urllib.request.urlopen(f"http://127.0.0.1:{guard.metrics_port}/metrics").read()

        threading.Thread(target=scrape, daemon=True).start()

        def ours() -> None:
            step_loss = loss(guarded, tokens)
            step_loss.backward()
            guard.before_optimizer(step_loss)
            optimizers[0].step()
            optimizers[0].zero_grad()
            guard.end_step()

        def theirs() -> None:
            step_loss = loss(plain, tokens)
            step_loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizers[1].step()
            optimizers[1].zero_grad()

        times = paired(ours, theirs, pairs)
        series = sum(not line.startswith(b"#") for line in guard.page.render().splitlines())
        stop.set()
        guard.close()
    return f"{told(times)}; {series} series, one scrape a second"


def bench_scrape(series: int) -> str:
    """(c) Our page against prometheus_client's, with as many series."""
    page = Page(run="bench")
    registry = prometheus_client.CollectorRegistry()
    gauge = prometheus_client.Gauge("train_layer_grad_norm", "n", ["run", "rank", "layer"], registry=registry)
    have = sum(not line.startswith(b"#") for line in page.render().splitlines())
    for number in range(series):
        if number >= have:
            page.set("train_layer_grad_norm", random.random(), f"layer.{number}")
        gauge.labels("bench", "0", f"layer.{number}").set(random.random())
    return told(paired(page.render, lambda: prometheus_client.generate_latest(registry), 100))


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300, help="pairs for (a)")
    parser.add_argument("--steps", type=int, default=1000, help="pairs of steps for (b); 0 leaves it out")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for millions in (10, 85):
        print(
            f"(a) before_optimizer / clip_grad_norm_, {millions} M: {bench_before_optimizer(millions, options.pairs)}"
        )
    for series in (300, 5000):
        print(f"(c) page / generate_latest, {series} series: {bench_scrape(series)}")
    if options.steps:
        print(f"(b) whole step / plain step, 10 M, batch {BATCH_SIZE} x {CONTEXT}: {bench_loop(options.steps)}")


if __name__ == "__main__":
    main()

"""What the guard costs: `before_optimizer` against torch's clip, a whole loop against a plain one, and a scrape.

    python tests/bench/overhead.py [--pairs N] [--steps N] [--batch N] [--device cuda]

Ratios are paired in one run, the order drawn for each pair, and told as median with a 95 % interval of the median
(bootstrap), and as ratio of the means, in which the rare dearer steps count. Absolute times are of this machine and of
this moment; the ratios are what counts.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import prometheus_client
import torch
from torch import nn

from exporter.page import Page
from trainer_plugin.demo.gpt import GPT, loss
from trainer_plugin.guard import Guard

CONTEXT = 256


def model_of(millions: int, device: str = "cpu") -> GPT:
    """A GPT of about 10 or 85 million parameters."""
    torch.manual_seed(0)
    sizes = {10: {"width": 384, "layers": 6, "heads": 6}, 85: {"width": 768, "layers": 12, "heads": 12}}
    return GPT(context=CONTEXT, **sizes[millions]).to(device)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes once, to the end of what it has started on a GPU."""
    began = time.perf_counter()
    work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
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
        f"{statistics.median(ratios):.3f} x (95 % {medians[25]:.3f} to {medians[974]:.3f}), means "
        f"{sum(a for a, _ in times) / sum(b for _, b in times):.3f} x; "
        f"{a * 1e3:.2f} ms against {b * 1e3:.2f} ms, {len(ratios)} pairs"
    )


def guard_on(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Guard:
    """A guard with everything on but checkpoints."""
    tiers = {"local": str(folder / "local"), "shared": str(folder / "shared"), "every": 1 << 40}
    config = {"runs": str(folder / "runs"), "metrics": {"port": 0}, "checkpoints": tiers}
    return Guard(config, model=model, optimizer=optimizer, local_only=True)


def bench_before_optimizer(millions: int, pairs: int, device: str = "cpu") -> str:
    """(a) On the same gradients, the layers' turns included."""
    model = model_of(millions, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device != "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    step_loss = torch.tensor(2.0, device=device)
    with tempfile.TemporaryDirectory() as folder:
        guard = guard_on(model, optimizer, Path(folder))

        def ours() -> None:
            guard.before_optimizer(step_loss)
            guard._parts.reader.forget()
            guard._parts.history.step += 1

        times = paired(ours, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), pairs)
        guard.close()
    return told(times)


class Loop:
    """A guarded and a plain loop on the same batch; 10 million parameters."""

    def __init__(self, folder: Path, batch_size: int, device: str = "cpu") -> None:
        self.models = [self.make_model(device) for _ in range(2)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=device != "cpu") for m in self.models]
        self.tokens = torch.randint(256, (batch_size, CONTEXT + 1), device=device)
        self.guard = guard_on(self.models[0], self.optimizers[0], folder)

    def make_model(self, device: str) -> nn.Module:
        """One of the two."""
        return model_of(10, device)

    def ours(self) -> None:
        """One step with everything on."""
        step_loss = loss(self.models[0], self.tokens)
        step_loss.backward()
        self.guard.before_optimizer(step_loss)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        self.guard.end_step()

    def theirs(self) -> None:
        """One step with torch's clip."""
        step_loss = loss(self.models[1], self.tokens)
        step_loss.backward()
        nn.utils.clip_grad_norm_(self.models[1].parameters(), 1.0)
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()

    def add_series(self, layers: int) -> int:
        """Put so many layers more on the page; the number of its series."""
        for number in range(layers):
            self.guard.page.set("train_layer_grad_norm", random.random(), f"more.{number}")
        return sum(not line.startswith(b"#") for line in self.guard.page.render().splitlines())


@contextmanager
def scraped(guard: Guard, interval_seconds: float | None) -> Iterator[None]:
    """Scrape the guard's page so often meanwhile; never with None."""
    stop = threading.Event()

    def scrape() -> None:
        while interval_seconds is not None and not stop.wait(interval_seconds):
            urllib.request.urlopen(f"http://127.0.0.1:{guard.metrics_port}/metrics").read()

    thread = threading.Thread(target=scrape)
    thread.start()
    yield
    stop.set()
    thread.join()


def bench_loop(pairs: int, batch_size: int, device: str = "cpu") -> str:
    """(b) A whole step with everything on, scraped once a second, against one with torch's clip."""
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder), batch_size, device)
        with scraped(loop.guard, 1.0):
            times = paired(loop.ours, loop.theirs, pairs)
        series = loop.add_series(0)
        loop.guard.close()
    return f"{told(times)}; {series} series, one scrape a second"


def bench_worst_step(steps: int, more_layers: int, device: str = "cpu") -> Iterator[str]:
    """(c) What scrapes do to the steps of a small batch: median, 99th percentile and worst."""
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder), 1, device)
        series = loop.add_series(more_layers)
        loop.ours()
        for interval_seconds, name in ((None, "no scrape"), (1.0, "1 scrape a second"), (0.25, "4 scrapes a second")):
            with scraped(loop.guard, interval_seconds):
                times = sorted(seconds(loop.ours) for _ in range(steps))
            middle, late, worst = (times[min(steps - 1, int(steps * part))] * 1e3 for part in (0.5, 0.99, 1.0))
            yield f"{series} series, {name}: median {middle:.1f} ms, 99 % {late:.1f} ms, worst {worst:.1f} ms"
        loop.guard.close()


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
    parser.add_argument("--pairs", type=int, default=300, help="pairs for (a); 0 leaves it out")
    parser.add_argument("--steps", type=int, default=1000, help="pairs of steps for (b); 0 leaves it out")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 256 bytes in a step of (b)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.device}")
    if options.pairs:
        for millions in (10, 85):
            figure = bench_before_optimizer(millions, options.pairs, options.device)
            print(f"(a) before_optimizer / clip_grad_norm_, {millions} M: {figure}", flush=True)
        for series in (300, 5000):
            print(f"(c) page / generate_latest, {series} series: {bench_scrape(series)}", flush=True)
    if options.steps:
        figure = bench_loop(options.steps, options.batch, options.device)
        print(f"(b) whole step / plain step, 10 M, batch {options.batch} x {CONTEXT}: {figure}", flush=True)
        for layers in (0, 4600):
            for line in bench_worst_step(min(options.steps, 200), layers, options.device):
                print(f"(c) batch 1 x {CONTEXT}, {line}", flush=True)


if __name__ == "__main__":
    main()

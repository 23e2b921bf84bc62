"""What the rules cost a Prometheus that watches many runs, and how long a condition takes to become a command.

    python tests/bench/rules.py [--runs N ...] [--minutes N] [--incidents N]

Each run has 8 ranks: rank 0 with every series of a run of 64 layers, the others with those that every rank exports.
All pages are real ones, served by this process under paths of one port; a scrape moves its page on by a few steps.
Real Prometheus, shipped rules, 15 s between scrapes and between evaluations. First all is well, then every run spikes.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from waiting import wait_for

from exporter.catalog import CATALOG
from exporter.page import Page
from exporter.serving import CONTENT_TYPE, MetricsServer, Target
from trainer_plugin.config import Config
from trainer_plugin.demo.servers import Stack, Watcher
from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.readings import Readings
from trainer_plugin.metrics import Metrics, Standing
from trainer_plugin.run_folder import JobFolder
from trainer_plugin.signals import LayerReading, Signals

RANKS, LAYERS = 8, [f"blocks.{number}" for number in range(64)]
INTERVAL_SECONDS = 15.0
STEPS_PER_SCRAPE = 5
REACH = 0.2
INFO = dict.fromkeys((label for metric in CATALOG if metric.name == "train_info" for label, _ in metric.labels), "none")
# What Prometheus says of itself: name, query, factor, digits.
OWN = (
    ("series", "prometheus_tsdb_head_series", 1.0, 0),
    ("MiB", 'process_resident_memory_bytes{job="prometheus"}', 2.0**-20, 0),
    ("cores", 'rate(process_cpu_seconds_total{job="prometheus"}[2m])', 1.0, 3),
    ("ms a scrape of rank 0", 'avg(scrape_duration_seconds{job="train",rank="0"})', 1e3, 1),
    ("of another", 'avg(scrape_duration_seconds{job="train",rank!="0"})', 1e3, 1),
    ("longest", 'max(scrape_duration_seconds{job="train"})', 1e3, 0),
    ("samples on a page of rank 0", 'max(scrape_samples_scraped{job="train",rank="0"})', 1.0, 0),
    ("on another", 'max(scrape_samples_scraped{job="train",rank!="0"})', 1.0, 0),
    ("failed scrapes", 'count(up{job="train"} == 0)', 1.0, 0),
    ("alerts firing", 'count(ALERTS{alertstate="firing"})', 1.0, 0),
    ("evaluations missed", "sum(prometheus_rule_group_iterations_missed_total)", 1.0, 0),
)
Step = tuple[Signals, Readings, list[Verdict]]


def recorded(steps: int, *, loss: float) -> list[Step]:
    """So many steps as a run shows them after its warm-up, at this many times its usual loss."""
    monitor, shown = Monitor(Config().detection), []
    reading = LayerReading(
        weight_norm=1.0, update_ratio=1e-3, first_moment_norm=0.1, second_moment_norm=0.1, activation_max=None
    )
    for step in range(1, 601 + steps):
        norms = {layer: random.lognormvariate(0.0, 0.2) for layer in LAYERS}
        signals = Signals(
            step=step,
            loss=random.gauss(2.0, 0.04) * (loss if step > 600 else 1.0),
            grad_norm=random.lognormvariate(0.0, 0.1),
            layer_grad_norms=norms,
            amp_loss_scale=65536.0,
            learning_rates=(1e-3,),
            step_seconds=random.lognormvariate(0.0, 0.1),
            data_wait_seconds=0.01,
            layers=dict.fromkeys(LAYERS, reading),
        )
        readings, verdicts = monitor.update(signals)
        shown.append((signals, readings, verdicts))
    return shown[600:]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, *_: object) -> None:
        """A Prometheus that ends in the middle of a scrape is not worth a traceback."""


class Fleet:
    """The pages of many runs on one port. `steps` is what every run goes through."""

    def __init__(self, names: list[str], steps: list[Step]) -> None:
        self.steps = steps
        self._pages: dict[str, tuple[Page, Metrics | None]] = {}
        self._counts = dict.fromkeys(names, 0)
        for name in names:
            for rank in map(str, range(RANKS)):
                page = Page(run=name, rank=rank)
                self._pages[f"/{name}/{rank}"] = (page, self._first(page) if rank == "0" else None)
                page.set("train_info", 1.0, *INFO.values())
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = fleet.scraped(self.path)
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are not worth a line."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def targets(self) -> list[dict[str, Any]]:
        """The file_sd entries."""
        address = f"127.0.0.1:{self._server.server_address[1]}"
        return [
            {
                "targets": [address],
                "labels": {"__metrics_path__": path, "instance": f"host:{path}", "run": run, "rank": rank},
            }
            for path in self._pages
            for _, run, rank in [path.split("/")]
        ]

    def scraped(self, path: str) -> bytes:
        """A page's text, some steps further on."""
        page, metrics = self._pages[path]
        run = path.split("/")[1]
        for _ in range(STEPS_PER_SCRAPE):
            signals, readings, verdicts = random.choice(self.steps)
            if metrics is None:
                page.observe("train_step_seconds", signals.step_seconds)
                page.observe("train_data_wait_seconds", signals.data_wait_seconds)
                continue
            self._counts[run] += 1
            metrics.show(signals, readings, verdicts, time.time())
            metrics.stand(self._counts[run], _standing(self._counts[run]))
        return page.render()

    @staticmethod
    def _first(page: Page) -> Metrics:
        moments = dict.fromkeys(LAYERS, ("first", "second"))
        return Metrics(page, Config(), layers=LAYERS, info=INFO, scaled=True, moments=moments)


def _standing(count: int) -> Standing:
    return Standing(
        steps_total=count, lr_factor=1.0, clip_max_norm=1.0, incident_open=False, loop_up=True,
        rollback_target_step=0, checkpoint_steps={"local": count, "shared": count}, checkpoint_seconds={},
        scene_step=-1,
    )  # fmt: skip


class Watched:
    """A Prometheus with its fleet, and what it says about itself."""

    def __init__(self, stack: Stack) -> None:
        self._prometheus = Watcher(stack.urls["prometheus"])

    def number(self, promql: str) -> float:
        """The one value of a query; NaN if there is none."""
        found = self._prometheus.query(promql)
        return float(found[0]["value"][1]) if found else float("nan")

    def groups(self, minutes: float) -> Iterator[tuple[str, float, float]]:
        """Each group of the rules with its mean and its longest duration of late, as parts of its interval."""
        window = f"[{round(minutes * 60)}s]"
        interval = "prometheus_rule_group_interval_seconds"
        for series in self._prometheus.query(interval):
            group = series["metric"]["rule_group"]
            last = f'prometheus_rule_group_last_duration_seconds{{rule_group="{group}"}}{window}'
            mean, longest = (self.number(f"{kind}_over_time({last})") for kind in ("avg", "max"))
            yield group.rpartition(";")[2], mean / INTERVAL_SECONDS, longest / INTERVAL_SECONDS

    def dearest_rules(self, count: int = 6) -> list[tuple[str, float]]:
        """The rules that took longest in the last evaluation, in milliseconds."""
        groups = self._prometheus._get("/api/v1/rules")["groups"]
        times = [(rule["name"], 1e3 * rule["evaluationTime"]) for group in groups for rule in group["rules"]]
        return sorted(times, key=lambda rule: -rule[1])[:count]

    def told(self, title: str, minutes: float) -> Iterator[str]:
        """Lines for the log."""
        yield f"{title}: load {os.getloadavg()[0]:.1f}"
        for group, mean, longest in self.groups(minutes):
            verdict = "" if longest < REACH else f"  MISSES {REACH:.0%}"
            yield f"  {group}: {mean:.3%} of its interval, at most {longest:.3%}{verdict}"
        yield "  dearest rules: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.dearest_rules())
        yield "  " + ", ".join(
            f"{what} {scale * self.number(promql):.{digits}f}" for what, promql, scale, digits in OWN
        )


def bench_rules(runs: int, minutes: float) -> Iterator[str]:
    """So many runs, watched for so many minutes while all is well, and for a third of that in a storm."""
    calm, storm = recorded(100, loss=1.0), recorded(300, loss=3.5)[200:]
    names = [f"run-{number:03d}" for number in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(names, calm)
        targets = Path(folder) / "runs/targets/fleet.json"
        targets.parent.mkdir(parents=True)
        targets.write_bytes(msgspec.json.encode(fleet.targets()))
        pace = {"scrape_seconds": INTERVAL_SECONDS, "evaluation_seconds": INTERVAL_SECONDS}
        with Stack(Path(folder) / "servers", Path(folder) / "runs", files("alert_rules"), **pace) as stack:
            watched, pause = Watched(stack), threading.Event()
            pause.wait(minutes * 60)
            yield from watched.told(f"{runs} runs x {RANKS} ranks, all is well", minutes / 2)
            fleet.steps = storm
            pause.wait(minutes * 20)
            yield from watched.told(f"{runs} runs x {RANKS} ranks, every one spikes", minutes / 6)
        fleet.close()


@contextmanager
def silent_run(runs: Path, name: str) -> Iterator[tuple[Page, JobFolder]]:
    """A run that can be scraped and commanded, and makes no step by itself."""
    with ExitStack() as undo:
        folder = JobFolder(runs, name)
        undo.callback(folder.lock.release)
        page = Page(run=name)
        page.set("train_loss_unrecovered_steps", 0.0)
        server = MetricsServer(page, host="127.0.0.1", port=0)
        undo.callback(server.close)
        undo.callback(Target(runs, run=name, rank="0", address=f"127.0.0.1:{server.port}").remove)
        yield page, folder


def latencies(page: Page, folder: JobFolder, count: int) -> Iterator[float]:
    """Seconds from a condition that becomes true to its command in the inbox, at times that no scrape knows of."""
    pause = threading.Event()
    for number in range(count):
        pause.wait(random.uniform(3.0, 5.0))  # Long enough for the end of the last one to be seen.
        page.add("train_steps_total")
        page.set("train_loss_unrecovered_steps", 250.0)
        began = time.monotonic()
        while len(list(folder.inbox.new.glob("*.json"))) <= number:
            pause.wait(0.005)
            if time.monotonic() - began > 30.0:
                raise TimeoutError(f"incident {number} of {folder.path.name} led to no command within 30 s")
        yield time.monotonic() - began
        page.set("train_loss_unrecovered_steps", 0.0)


def bench_delivery(incidents: int, runs: int = 5) -> str:
    """Condition true -> command in the inbox, a second between scrapes and between evaluations."""
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        path = Path(folder) / "runs"
        stack = undo.enter_context(Stack(Path(folder) / "servers", path, files("alert_rules")))
        watched = [undo.enter_context(silent_run(path, f"run-{number}")) for number in range(runs)]
        # Until all are scraped and judged.
        wait_for(lambda: len(stack.query('ALERTS{alertname="TrainWatchdog"}')) >= runs, 120.0, pause_seconds=0.2)
        threads = [
            threading.Thread(target=lambda one=one: found.extend(latencies(*one, incidents // runs))) for one in watched
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found.sort()
    return (
        f"{len(found)} incidents of {runs} runs: p50 {statistics.median(found):.2f} s, "
        f"p99 {found[int(len(found) * 0.99) - 1]:.2f} s, longest {found[-1]:.2f} s (reach: p99 2.5 s); "
        f"load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="*", default=[8, 128], help="sizes of the fleet")
    parser.add_argument("--minutes", type=float, default=12.0, help="how long each is watched; rules look back 10")
    parser.add_argument("--incidents", type=int, default=100, help="from condition to command; 0 leaves it out")
    options = parser.parse_args()
    if options.incidents:
        print(f"condition -> command: {bench_delivery(options.incidents)}", flush=True)
    for runs in options.runs:
        for line in bench_rules(runs, options.minutes):
            print(line, flush=True)


if __name__ == "__main__":
    main()

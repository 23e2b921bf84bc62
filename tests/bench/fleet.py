"""Many runs on one Prometheus, Alertmanager and receiver: 20 of them are hurt at once, and each gets its command.

    python tests/bench/fleet.py [--runs N ...] [--rounds N] [--interval SECONDS]

Runs are pages as in `rules.py`, 8 ranks each, with real run folders and inboxes. A hurt run says that its loss has not
recovered for 250 steps; the clock runs from there to the command in its inbox. What any other inbox gets is counted.
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

import msgspec
from rules import RANKS, Fleet, Step, Watched, recorded

from exporter.commands import Command
from trainer_plugin.demo.servers import Stack
from trainer_plugin.run_folder import JobFolder

HURT = 20
LONGEST_WAIT_SECONDS = 120.0


class HurtFleet(Fleet):
    """A fleet of which some runs do not recover: `hurt` holds their names."""

    def __init__(self, names: list[str], steps: list[Step]) -> None:
        self.hurt: frozenset[str] = frozenset()
        super().__init__(names, steps)

    def scraped(self, path: str) -> bytes:
        """As above, and what a hurt run's first rank says besides."""
        body = super().scraped(path)
        _, run, rank = path.split("/")
        if run not in self.hurt or rank != "0":
            return body
        page = self._pages[path][0]
        page.set("train_loss_unrecovered_steps", 250.0)
        return page.render()


class Inboxes:
    """Every command that has come, by run, with the moment in which it was seen."""

    def __init__(self, folders: list[JobFolder]) -> None:
        self._folders = folders
        self._seen: set[tuple[str, str]] = set()

    def look(self) -> Iterator[tuple[str, Command]]:
        """What is new: the run in whose inbox it lies, and the command."""
        for folder in self._folders:
            run = folder.path.name
            for command in folder.inbox.waiting():
                if (run, command.id) not in self._seen:
                    self._seen.add((run, command.id))
                    yield run, command


def one_round(fleet: HurtFleet, inboxes: Inboxes, names: list[str], settle_seconds: float) -> tuple[list[float], int]:
    """Hurt some runs at once: the seconds until each had its rollback, and how many commands went wrong.

    Raises:
        TimeoutError: a hurt run got none.
    """
    hurt = frozenset(random.sample(names, min(HURT, len(names))))
    pause, found, astray = threading.Event(), {}, 0
    list(inboxes.look())
    began, fleet.hurt = time.monotonic(), hurt
    settled = None
    while settled is None or time.monotonic() < settled:
        for run, command in inboxes.look():
            if command.action != "rollback":
                continue
            right = run == command.run and run in hurt and run not in found
            astray += not right
            if right:
                found[run] = time.monotonic() - began
        if settled is None and len(found) == len(hurt):
            settled = time.monotonic() + settle_seconds  # Whether more comes than should.
        if settled is None and time.monotonic() - began > LONGEST_WAIT_SECONDS:
            raise TimeoutError(f"no command within {LONGEST_WAIT_SECONDS:.0f} s for {sorted(hurt - set(found))}")
        pause.wait(0.02)
    fleet.hurt = frozenset()
    pause.wait(2 * settle_seconds)  # Until the end of these is seen.
    return sorted(found.values()), astray


def bench_fleet(runs: int, rounds: int, interval: float) -> str:
    """So many runs, hurt so many times."""
    names = [f"run-{number:03d}" for number in range(runs)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        path = Path(folder) / "runs"
        folders = [JobFolder(path, name) for name in names]
        for one in folders:
            undo.callback(one.lock.release)
        fleet = HurtFleet(names, recorded(100, loss=1.0))
        undo.callback(fleet.close)
        (path / "targets").mkdir(exist_ok=True)
        (path / "targets" / "fleet.json").write_bytes(msgspec.json.encode(fleet.targets()))
        pace = {"scrape_seconds": interval, "evaluation_seconds": interval}
        stack = undo.enter_context(Stack(Path(folder) / "servers", path, files("alert_rules"), **pace))
        watched, pause, began = Watched(stack), threading.Event(), time.monotonic()
        while watched.number('count(ALERTS{alertname="TrainWatchdog"})') != runs:
            if time.monotonic() - began > LONGEST_WAIT_SECONDS:
                raise TimeoutError(f"{runs} runs are not watched after {LONGEST_WAIT_SECONDS:.0f} s")
            pause.wait(1.0)
        inboxes = Inboxes(folders)
        results = [one_round(fleet, inboxes, names, 4 * interval) for _ in range(rounds)]
        seconds = sorted(one for found, _ in results for one in found)
        cores = watched.number('rate(process_cpu_seconds_total{job="prometheus"}[1m])')
    return (
        f"{runs} runs x {RANKS} ranks, {len(seconds)} incidents, {len(results[0][0])} at once: p50 "
        f"{statistics.median(seconds):.2f} s, p99 {seconds[-1 - len(seconds) // 100]:.2f} s, "
        f"longest {seconds[-1]:.2f} s; {sum(astray for _, astray in results)} commands astray; "
        f"Prometheus {cores:.2f} cores; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="*", default=[8, 32, 128], help="sizes of the fleet")
    parser.add_argument("--rounds", type=int, default=5, help="how often some are hurt")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between scrapes, and between evaluations")
    options = parser.parse_args()
    for runs in options.runs:
        print(bench_fleet(runs, options.rounds, options.interval), flush=True)


if __name__ == "__main__":
    main()

"""How much of a run each remedy saves: faults on purpose in a small GPT on real text, under nine strategies.

    make bench-recovery
    python tests/bench/recovery.py [--quick] [--workers N] [--out DIR] [--plan]

Each trial leaves its seed's fault-free twin at the newest checkpoint before the fault, and goes on for 600 steps. A run
that is cut off goes on where it was. Table and plot come at the end, or from `recovery_table.py` at any time.
"""

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path

import torch
from recovery_plan import FULL, QUICK, Trial
from recovery_sums import measure
from recovery_table import RESULTS, read_results, tell
from trial import run_trial
from twins import Twins


class Results:
    """The lines of a results file: its settings, then one for each trial.

    Raises:
        ValueError: the results that lie there are of other settings.
    """

    def __init__(self, path, settings):
        self._path = path
        kept, results = read_results(path)
        if kept not in (None, settings):
            raise ValueError(f"{path} holds results of other settings: give another --out")
        self.done = {Trial(*(result[name] for name in Trial._fields)) for result in results}
        # Written anew, without a line that was cut off.
        draft = path.with_suffix(".draft")
        draft.write_text("".join(f"{json.dumps(entry)}\n" for entry in (settings, *results)))
        draft.replace(path)

    def add(self, result):
        """Keep a result."""
        with self._path.open("a") as file:
            file.write(f"{json.dumps(result)}\n")
            file.flush()
            os.fsync(file.fileno())


class Progress:
    """How far it is, and how long it will take."""

    def __init__(self, count):
        self._count = count
        self._done = 0
        self._began = time.monotonic()

    def tell(self, what):
        """One more is done."""
        self._done += 1
        left = (time.monotonic() - self._began) / self._done * (self._count - self._done)
        print(f"[{self._done:4d}/{self._count}] {what}; {left / 60.0:.0f} min left", flush=True)


def prepare():
    """In every process: one thread each, and quiet."""
    torch.set_num_threads(1)
    logging.getLogger("trainer_plugin").setLevel(logging.CRITICAL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel):
    wait([sentinel])
    os._exit(1)


def train_twin(twins, seed):
    """A seed's twin."""
    began = time.monotonic()
    twins.train(seed)
    return f"seed {seed}: twin, {time.monotonic() - began:.0f} s"


def attempt(function, *arguments):
    """What it gives and None, or None and how it failed: one trial that fails must not end a night's run."""
    try:
        return function(*arguments), None
    except Exception:  # noqa: BLE001 - whatever it was is told
        return None, traceback.format_exc()


def all_of(jobs, workers):
    """The outcome of each job, a function with its arguments, as it comes."""
    if workers == 1:
        prepare()
        for job in jobs:
            yield attempt(*job)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=prepare) as pool:
        futures = [pool.submit(attempt, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def told_of(result):
    """A result in a line."""
    one = measure(result)
    state = "healed" if one.healed else "stopped" if result["stopped"] else "not healed"
    return (
        f"seed {result['seed']}, {result['fault']} at {result['moment']}, {result['strategy']}: {state}, "
        f"{one.steps_lost} steps lost, {one.final_ratio:.3f} x the twin's loss"
    )


def run(plan, folder, workers):
    """Run what is not done yet; the number of jobs that failed."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)  # Of a run that was killed.
    work.mkdir(parents=True)
    results, twins = Results(folder / RESULTS, plan.settings()), Twins(folder, plan)
    todo = [trial for trial in plan.trials() if trial not in results.done]
    seeds = sorted({trial.seed for trial in todo})
    progress, failed = Progress(len(seeds) + len(todo)), 0
    for told, error in all_of([(train_twin, twins, seed) for seed in seeds], workers):
        progress.tell(told or error)
        failed += error is not None
    if failed:
        return failed
    for result, error in all_of([(run_trial, trial, plan, twins, work) for trial in todo], workers):
        if error is None:
            results.add(result)
        progress.tell(error or told_of(result))
        failed += error is not None
    return failed


def main():
    """Run what is not done yet, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: whether it runs")
    parser.add_argument("--workers", type=int, default=2, help="trials at a time (default 2, one a core)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the results")
    parser.add_argument("--plan", action="store_true", help="say what there is to run, and run nothing")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    folder = options.out / ("recovery-quick" if options.quick else "recovery")
    if options.plan:
        print(f"{len(plan.trials())} trials of about {plan.after + plan.every // 2} steps, {len(plan.seeds)} twins")
        return
    failed = run(plan, folder, options.workers)
    tell(folder, folder / "lost.png")
    if failed:
        raise SystemExit(f"{failed} jobs failed; the same command runs them again")


if __name__ == "__main__":
    main()

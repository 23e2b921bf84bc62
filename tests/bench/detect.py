"""How well the detectors detect: on old logs, on synthetic scenes beside the peers' rules, and how fast.

    python tests/bench/detect.py [--curves DIR] [--json FILE] [--seeds N] [--only scenes|curves|families|speed]

`--curves` is a folder of CSV logs with a `labels.json`; `--json` writes what `score.py` there reads. Results go to
tests/bench/LOG.md.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import msgspec
import numpy as np
from labels import score
from peers import PEERS
from scenes import BLOOM_FIRST_STEP, SCENES, bloom

from trainer_plugin.backtest.judge import Options, judge
from trainer_plugin.backtest.logs import read_log
from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.decisions import ActionsConfig
from trainer_plugin.signals import Signals

# Logs of one model and one recipe: what is chosen on one of them fits the others, so they are left out together.
FAMILIES = (
    "gptoss20b", "llama31_8b", "mixtral8x7b", "gpt3_15b", "gpt2_124m_linesearch", "gpt2_124m_llmc", "gpt2_124m_muon",
    "gpt3_125m_llmc", "bert_base", "bert_large", "neox", "pgolf",
)  # fmt: skip
# The free constants, and what each might have been.
GRID = {
    "robust_score": (7.0, 8.0, 10.0),
    "drift_limit": (5.0, 6.0, 7.0),
    "drift_least_ratio": (1.04, 1.05, 1.06),
    "robust_window": (96, 128, 160),
}


class Ours:
    """All acting detectors of the monitor, or one of them."""

    def __init__(self, warmup_steps, *, detector=None):
        self._monitor = Monitor(DetectionConfig(warmup_steps=warmup_steps))
        self._detector = detector
        self._step = 0

    def fires(self, loss, grad_norm):
        """Judge a step."""
        self._step += 1
        _, verdicts = self._monitor.update(signals(self._step, loss, grad_norm))
        said = [v for v in verdicts if (v.detector, v.signal) in Monitor.ACTING]
        return any(self._detector in (None, verdict.detector) for verdict in said)


def watch(rule, scene):
    """Share of the faults found, mean delay in steps, and false verdicts (before the first fault, or with none)."""
    fired = [step for step, (loss, norm) in enumerate(zip(scene.loss.tolist(), scene.grad_norm.tolist(), strict=True))
             if rule.fires(loss, norm)]  # fmt: skip
    if not scene.faults:
        return None, None, len(fired)
    delays = []
    for fault, end in zip(scene.faults, [*scene.faults[1:], len(scene.loss)], strict=True):
        within = [step - fault for step in fired if fault <= step < end]
        delays += within[:1]
    return len(delays) / len(scene.faults), sum(delays) / len(delays) if delays else math.nan, 0


def scene_table(seeds):
    """Found % / mean delay for each rule and scene; verdicts per 10,000 steps where nothing is to be found."""
    rules = {"ours, all": Ours}
    rules |= {f"ours, {name}": lambda warmup, name=name: Ours(warmup, detector=name) for name in ("robust", "drift")}
    rules |= {name: lambda _, peer=peer: peer() for name, peer in PEERS.items()}
    table = {}
    for (rule, build), (name, make) in itertools.product(rules.items(), SCENES.items()):
        results = [(scene := make(seed), watch(build(scene.warmup_steps), scene))[1] for seed in range(seeds)]
        if results[0][0] is None:
            steps = seeds * len(make(0).loss)
            table[rule, name] = (None, 1e4 * sum(false for _, _, false in results) / steps)
        else:
            delays = [delay for _, delay, _ in results if not math.isnan(delay)]
            found = 100.0 * sum(share for share, _, _ in results) / seeds
            table[rule, name] = (found, sum(delays) / len(delays) if delays else math.nan)
    return list(rules), table


def print_scenes(seeds):
    """The table, a rule a line, and which peer is better at what than all of ours."""
    rules, table = scene_table(seeds)
    print("found % / mean delay in steps; for scenes without a fault, verdicts per 10,000 steps\n")
    print("| rule | " + " | ".join(SCENES) + " |\n" + "|---" * (len(SCENES) + 1) + "|")
    for rule in rules:
        cells = []
        for name in SCENES:
            found, other = table[rule, name]
            cells.append(f"{other:.1f}" if found is None else f"{found:.0f}" + (f"/{other:.1f}" if found else ""))
        print(f"| {rule} | " + " | ".join(cells) + " |")
    quiet = [name for name in SCENES if table[rules[0], name][0] is None]
    for peer in PEERS:
        finds_more = [
            name for name in SCENES if name not in quiet and table[peer, name][0] > table["ours, all", name][0]
        ]
        quieter = [name for name in quiet if table[peer, name][1] < table["ours, all", name][1]]
        if finds_more:
            print(f"{peer} finds more in {finds_more}; it is quieter in {quieter or 'none'}")


def print_bloom():
    """At which iteration each rule first speaks about the published spike."""
    for name, build in {"ours": lambda: Ours(500), **PEERS}.items():
        steps = []
        for seed in range(5):
            rule = build()
            fired = [step for step, loss, norm in bloom(seed) if rule.fires(loss, norm) and step >= BLOOM_FIRST_STEP]
            steps.append(fired[0] if fired else None)
        print(f"BLOOM-176B {name}: first at {steps}")


def backtest(path, detection):
    """As `backtest --json` has it, with every other option as shipped."""
    options = Options(detection=detection, actions=ActionsConfig(), budget=BudgetConfig(), checkpoint_every_steps=1000)
    return msgspec.to_builtins(judge(read_log(path), options))


def signals(step, loss, grad_norm=None, lr=None):
    """What a log tells of a step."""
    return Signals(step=step, loss=loss, grad_norm=grad_norm, learning_rates=() if lr is None else (lr,))


def print_curves(folder, out):
    """Each log's score and the sums, and the file for `score.py`."""
    labels = json.loads((folder / "labels.json").read_text())
    files, total = [], dict.fromkeys(("events", "found", "late", "false", "rows", "rollbacks"), 0)
    for name, label in labels.items():
        began = time.perf_counter()
        result = backtest(folder / name, DetectionConfig())
        seconds = time.perf_counter() - began
        files.append(result)
        scored = score(label, result)
        _add(total, scored)
        print(
            f"{name:38s} events {scored['found']}/{scored['events']} missed {scored['missed']} late {scored['late']} "
            f"false {scored['false']} rollbacks {scored['rollbacks']}  {seconds:.1f} s"
        )
    print(_line("shipped defaults", total))
    if out:
        out.write_text(json.dumps({"files": files}))


def print_families(folder):
    """Leave one family out: the constants chosen on the others, and how they do on it."""
    labels = json.loads((folder / "labels.json").read_text())
    scores = {}
    for values in itertools.product(*GRID.values()):
        config = msgspec.structs.replace(DetectionConfig(), **dict(zip(GRID, values, strict=True)))
        scores[values] = {name: score(label, backtest(folder / name, config)) for name, label in labels.items()}
        print(values, _line("", _sum(scores[values].values())), flush=True)
    total = dict.fromkeys(("events", "found", "late", "false", "rows", "rollbacks"), 0)
    shipped = tuple(getattr(DetectionConfig(), name) for name in GRID)
    for family in FAMILIES:
        inside = [name for name in labels if name.startswith(family)]
        others = [name for name in labels if name not in inside]

        def cost(values, names=others):
            part = _sum(scores[values][name] for name in names)
            missed = part["events"] - part["found"] + part["late"] + part["rollbacks"]
            # Among equals the nearest to what is shipped, by places in the grid.
            away = sum(
                abs(GRID[key].index(a) - GRID[key].index(b)) for key, a, b in zip(GRID, values, shipped, strict=True)
            )
            return missed, part["false"], away

        chosen = min(scores, key=cost)
        left = _sum(scores[chosen][name] for name in inside)
        _add_sum(total, left)
        print(_line(f"without {family}: {dict(zip(GRID, chosen, strict=True))}; on it:", left))
    print(_line("leave one family out", total))


def _sum(scored):
    total = dict.fromkeys(("events", "found", "late", "false", "rows", "rollbacks"), 0)
    for one in scored:
        _add(total, one)
    return total


def _add(total, scored):
    for key in total:
        total[key] += scored[key] if isinstance(scored[key], int) else len(scored[key])


def _add_sum(total, other):
    for key in total:
        total[key] += other[key]


def _line(what, total):
    rate = 1e4 * total["false"] / max(total["rows"], 1)
    return (
        f"{what} found {total['found']}/{total['events']}, late {total['late']}, false {total['false']} "
        f"({rate:.2f} per 10,000 rows), rollbacks on eventless runs {total['rollbacks']}"
    )


def print_speed(steps=200_000):
    """Microseconds a step for the whole monitor on loss, gradient norm and learning rate, without and with readings."""
    rng = np.random.default_rng(0)
    loss = (2.3 + 1.5 * np.exp(-np.arange(steps) / 6000) + rng.normal(0.0, 0.025, steps)).tolist()
    norm = (0.3 * np.exp(rng.normal(0.0, 0.1, steps))).tolist()
    seen = [signals(step, loss[step], norm[step], 3e-4 * (1.0 - step / steps)) for step in range(steps)]
    for what in ("judge", "update"):
        take_in, chunk, taken = getattr(Monitor(DetectionConfig()), what), 500, []
        for first in range(0, steps, chunk):
            began = time.perf_counter()
            for one in seen[first : first + chunk]:
                take_in(one)
            taken.append((time.perf_counter() - began) / chunk * 1e6)
        taken.sort()
        print(
            f"monitor.{what}: {sum(taken) / len(taken):.1f} us a step over {steps:,} steps (median "
            f"{taken[len(taken) // 2]:.1f}, quietest tenth {taken[len(taken) // 10]:.1f})"
        )


def main():
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("scenes", "curves", "families", "speed"))
    args = parser.parse_args()

    def wanted(part):
        return args.only in (None, part)

    if wanted("scenes"):
        print_scenes(args.seeds)
        print_bloom()
    if args.curves and wanted("curves"):
        print_curves(args.curves, args.json)
    if args.curves and args.only == "families":  # The longest part: only when asked for.
        print_families(args.curves)
    if wanted("speed"):
        print_speed()


if __name__ == "__main__":
    main()

"""The table and the plot of `make bench-recovery`, from its results.

    python tests/bench/recovery_table.py FOLDER [--plot FILE.png]

Of a run that is under way they show what is done so far.
"""

import argparse
import json
import math
from pathlib import Path

from recovery_plan import CLEAN, FAULTS, LOOK_STEPS, PROMETHEUS, RESTART_MINUTES, STEP_SECONDS, STRATEGIES
from recovery_sums import CLOSE_RATIO, by_fault, by_strategy, step_ratio, sum_up

RESULTS = "results.jsonl"
NOTES = f"""\
Steps lost: rolled back, withheld, and until the held-out loss is within {CLOSE_RATIO:.0%} of the fault-free twin's at
as many applied steps; where it never is (≥), all to the end of the trial. Healed: within as much at the end. Final /
twin: the held-out loss there over the twin's; a learning rate that is still lowered flatters it. min: until the loss is
the twin's in a run of {STEP_SECONDS:.0f} s a step, with {RESTART_MINUTES:.0f} min for each restart of the human, who
looks every {LOOK_STEPS} steps; s: in seconds of training here. Medians, with the least and the largest. The ladder
through Prometheus ran at one moment of each seed only; an alert takes seconds, which is many of these steps. The last
column is of clean runs one after the other, and rough: `make bench` measures side by side."""
_CLEAN_COLUMNS = ("clean runs acted on", "clean final / twin", "step / clip's")
_ORDER = (*FAULTS, *STRATEGIES, PROMETHEUS)


def read_results(path):
    """Settings and results of a file; a last line that was cut off is none."""
    lines = path.read_text().split("\n") if path.exists() else []
    entries = [json.loads(line) for line in lines[:-1]]
    if not entries:
        return None, []
    # With several workers they lie there as they came.
    results = sorted(entries[1:], key=lambda one: (_ORDER.index(one["fault"]), _ORDER.index(one["strategy"])))
    return entries[0], results


def table(results):
    """All of it as Markdown."""
    parts = [NOTES, _over_all(results)]
    for fault, groups in by_fault(results).items():
        lines = [f"### {fault}", "", _head("strategy", "healed", "steps lost", "final / twin", "min", "s")]
        for strategy, measured in groups.items():
            sums = sum_up(measured)
            lines.append(
                f"| {strategy} | {sums.healed} of {sums.trials} | {_least(sums)}{_spread(sums.lost, '.0f')} | "
                f"{_spread(sums.final, '.3f')} | {_number(sums.minutes, '.0f')} | {_number(sums.seconds, '.1f')} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _over_all(results):
    clean = by_strategy(results, clean=True)
    lines = [
        "### All faults",
        "",
        _head("strategy", "healed", "steps lost, mean", "median", "final / twin", *_CLEAN_COLUMNS),
    ]
    for strategy, measured in by_strategy(results).items():
        sums = sum_up(measured)
        quiet = clean.get(strategy, [])
        acted, final = "-", "-"
        if quiet:
            acted = f"{sum(one.actions > 0 for one in quiet)} of {len(quiet)}"
            final = _spread(sum_up(quiet).final, ".3f")
        lines.append(
            f"| {strategy} | {sums.healed / sums.trials:.0%} of {sums.trials} | {_least(sums)}{sums.mean_lost:.0f} | "
            f"{_least(sums)}{_spread(sums.lost, '.0f')} | {_spread(sums.final, '.3f')} | {acted} | {final} | "
            f"{_number(step_ratio(results, strategy, 'clip 1.0'), '.2f')} |"
        )
    return "\n".join(lines)


def _head(*names):
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _least(sums):
    """A trial that never recovers has lost more than it had steps to lose."""
    return "" if sums.recovered == sums.trials else "≥ "


def _spread(values, form):
    """A median, and how far from it the trials are."""
    middle, least, largest = ("NaN" if value == math.inf else _number(value, form) for value in values)
    return middle if least == largest else f"{middle} ({least} to {largest})"


def _number(value, form):
    return "never" if value == math.inf else "-" if math.isnan(value) else format(value, form)


def plot(results, path):
    """Steps lost by fault and strategy, bars of the mean, a dot for each trial, a cross where it never recovered.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only those who want a picture need it

    groups = by_fault(results)
    names = list(by_strategy(results))
    figure = Figure(figsize=(11, 2.2 * max(1, len(groups))), layout="constrained")
    axes = figure.subplots(max(1, len(groups)), sharex=True, squeeze=False)[:, 0]
    for axis, (fault, measured) in zip(axes, groups.items(), strict=False):
        for place, name in enumerate(names):
            trials = measured.get(name, [])
            lost = [one.steps_lost for one in trials]
            if lost:
                axis.barh(place, sum(lost) / len(lost), color="#0b6fb8" if "ladder" in name else "#b0b7bd")
            for mark, recovered in (("o", True), ("x", False)):
                there = [one.steps_lost for one in trials if (one.recovery_steps is not None) == recovered]
                axis.plot(there, [place] * len(there), mark, color="#d1495b", markersize=5)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(fault, loc="left", fontsize="medium")
    axes[-1].set_xlabel("steps lost: rolled back, withheld, and until the held-out loss is the twin's (x: never)")
    figure.savefig(path, dpi=120)


def tell(folder, picture):
    """Write table and plot of a folder's results, and print the table."""
    _, results = read_results(folder / RESULTS)
    if not any(result["fault"] != CLEAN for result in results):
        print("no results yet")
        return
    text = table(results)
    (folder / "table.md").write_text(text)
    plot(results, picture)
    print(f"{text}\n{len(results)} trials; the table is in {folder / 'table.md'}, the plot in {picture}")


def main():
    """Read, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the results lie")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where the plot goes (default: beside them)")
    options = parser.parse_args()
    tell(options.folder, options.plot or options.folder / "lost.png")


if __name__ == "__main__":
    main()

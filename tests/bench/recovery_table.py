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
# Shades of the plot, as log(1 + steps).
_MOST_LOST, _DARK = 1000.0, math.log1p(80.0)
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
    """Steps lost by strategy and fault: the mean of the trials in each field, darker for more.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only those who want a picture need it

    faults, names = by_fault(results), list(by_strategy(results))
    figure = Figure(figsize=(2.5 + 0.8 * len(faults), 2.5 + 0.45 * len(names)), layout="constrained")
    axis = figure.subplots()
    shades = [[math.nan] * len(faults) for _ in names]
    for column, groups in enumerate(faults.values()):
        for name, measured in groups.items():
            sums, row = sum_up(measured), names.index(name)
            # Of one step and of six hundred both should be seen.
            shades[row][column] = shade = math.log1p(sums.mean_lost)
            words = f"{_least(sums)}{sums.mean_lost:.0f}"
            axis.text(column, row, words, ha="center", va="center", color="white" if shade > _DARK else "black")
    axis.imshow(shades, cmap="Blues", vmin=0.0, vmax=math.log1p(_MOST_LOST), aspect="auto")
    axis.set_xticks(range(len(faults)), faults, rotation=40, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(names)), names)
    axis.spines[:].set_visible(False)
    axis.set_title(
        "Steps lost to a fault, mean of the trials (≥: in some of them the loss never came back)", loc="left"
    )
    figure.savefig(path, dpi=100)


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

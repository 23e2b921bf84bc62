"""What the results of `make bench-recovery` come to: each trial's measures, and their sums. Pure."""

import math
import statistics
from dataclasses import dataclass

from recovery_plan import CLEAN, RESTART_MINUTES, STEP_SECONDS

# As the twin's: within so much of its held-out loss, at so many looks in a row. No longer so: likewise, or by
# twice as much at one look. Other data than the twin's, as after a rollback, are a look just beyond it now and then.
CLOSE_RATIO = 0.02
LOOKS_IN_A_ROW = 3
# The end of a trial is the mean of its last looks.
LAST_LOOKS = 5


@dataclass(frozen=True, kw_only=True)
class Measures:
    """One trial, measured.

    `steps_lost` is what was rolled back, withheld or not run at all (steps planned less steps applied at the end), and
    the applied steps from the fault (or the last rollback) until the loss was the twin's again; no step counts twice.
    Where it never was, all to the end count. `recovery_steps`, `recovery_seconds` (of training, as it went here) and
    `recovery_minutes` (of a large run, with the human's restarts) are from the fault to then, None if never.
    `final_ratio` is the held-out loss at the end over the twin's at as many applied steps.
    """

    steps_lost: int
    recovery_steps: int | None
    recovery_seconds: float | None
    recovery_minutes: float | None
    final_ratio: float
    healed: bool
    actions: int
    step_ms: float


def measure(result):
    """The measures of one result line."""
    clean = result["moment"] - result["fork"]
    gone_back = result["rollbacks"][-1] if result["rollbacks"] else None
    since_run, since_applied, since_seconds = gone_back or (clean, result["moment"], None)
    looks = [(run, applied, seconds, _finite(ratio)) for run, applied, seconds, ratio in result["looks"]]
    after = [one for one in looks if one[0] > since_run]
    if since_seconds is None:
        since_seconds = _seconds_at(looks, clean)
    recovered = _recovery(after, (since_run, since_applied, since_seconds))
    kept = (recovered[1] if recovered else result["applied"]) - since_applied
    undone = result["fork"] + result["planned"] - result["applied"]
    last = [ratio for *_, ratio in after[-LAST_LOOKS:]]
    final_ratio = statistics.fmean(last) if last else math.inf
    steps = recovered[0] - clean if recovered else None
    restarts = result["actions"].get("restart", 0)
    return Measures(
        steps_lost=undone + max(0, kept),
        recovery_steps=steps,
        recovery_seconds=recovered[2] - _seconds_at(looks, clean) if recovered else None,
        recovery_minutes=None if steps is None else steps * STEP_SECONDS / 60.0 + restarts * RESTART_MINUTES,
        final_ratio=final_ratio,
        healed=final_ratio <= 1.0 + CLOSE_RATIO and not result["stopped"],
        actions=sum(result["actions"].values()),
        step_ms=result["step_ms"],
    )


def _recovery(looks, start):
    """Where the loss is the twin's again: the first of three close looks after it was away; `start` if it never was."""
    close = [look[3] <= 1.0 + CLOSE_RATIO for look in looks]
    away = next(
        (
            place
            for place, look in enumerate(looks)
            if look[3] > 1.0 + 2.0 * CLOSE_RATIO or close[place : place + LOOKS_IN_A_ROW] == [False] * LOOKS_IN_A_ROW
        ),
        None,
    )
    if away is None:
        return start if looks else None
    for place in range(away, len(looks) - LOOKS_IN_A_ROW + 1):
        if all(close[place : place + LOOKS_IN_A_ROW]):
            return looks[place][:3]
    return None


def _finite(ratio):
    return math.inf if ratio is None else ratio


def _seconds_at(looks, run):
    """Seconds of training after so many steps, between two looks in proportion."""
    before = max((one for one in looks if one[0] <= run), default=(0, 0, 0.0))
    behind = min((one for one in looks if one[0] > run), default=before)
    share = (run - before[0]) / (behind[0] - before[0]) if behind[0] > before[0] else 0.0
    return before[2] + share * (behind[2] - before[2])


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Some trials together: `lost` and `final` as median, least and largest, the other ones medians or as they say."""

    trials: int
    healed: int
    recovered: int
    lost: tuple[float, float, float]
    mean_lost: float
    final: tuple[float, float, float]
    minutes: float
    seconds: float


def sum_up(measured):
    """The sums of some measures; a trial that never recovered takes for ever."""
    lost, final = ([getattr(one, name) for one in measured] for name in ("steps_lost", "final_ratio"))
    return Sums(
        trials=len(measured),
        healed=sum(one.healed for one in measured),
        recovered=sum(one.recovery_steps is not None for one in measured),
        lost=(statistics.median(lost), min(lost), max(lost)),
        mean_lost=statistics.fmean(lost),
        final=(statistics.median(final), min(final), max(final)),
        minutes=_median_or_never([one.recovery_minutes for one in measured]),
        seconds=_median_or_never([one.recovery_seconds for one in measured]),
    )


def _median_or_never(values):
    return statistics.median([math.inf if value is None else value for value in values])


def by_strategy(results, *, clean=False):
    """Measures by strategy, of the trials without a fault or of all others."""
    groups = {}
    for result in results:
        if (result["fault"] == CLEAN) == clean:
            groups.setdefault(result["strategy"], []).append(measure(result))
    return groups


def by_fault(results):
    """Measures by fault, and in it by strategy."""
    groups = {}
    for result in results:
        if result["fault"] != CLEAN:
            groups.setdefault(result["fault"], {}).setdefault(result["strategy"], []).append(measure(result))
    return groups


def step_ratio(results, strategy, against):
    """A step's time under a strategy over that under another: the median over the clean trials of both; nan if none."""
    times = {(one["strategy"], one["seed"], one["moment"]): one["step_ms"] for one in results if one["fault"] == CLEAN}
    ratios = [
        ms / times[against, seed, moment]
        for (name, seed, moment), ms in times.items()
        if name == strategy and (against, seed, moment) in times
    ]
    return statistics.median(ratios) if ratios else math.nan

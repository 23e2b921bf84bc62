"""The same steps through the detectors and through Prometheus: where the two disagree."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from parity_scenes import SLACK_SECONDS, Pace, Scene
from simulated_run import SimulatedRun, play
from test_loop import wait_for

from trainer_plugin.demo.servers import Stack


@contextmanager
def watched(
    folder: Path, pace: Pace, parts: list[tuple[Scene, float]], rules: Traversable | None = None
) -> Iterator[tuple[Stack, list[SimulatedRun]]]:
    """A run for each scene and its steps a second, each scraped and judged by real servers at least once.

    What a counter did before its first scrape is not seen by anybody, and the first evaluation of a Prometheus comes
    up to two intervals after its start. `rules` are others than those shipped.
    """
    runs_folder = folder / "runs"
    with ExitStack() as undo:
        stack = undo.enter_context(
            Stack(
                folder / "servers",
                runs_folder,
                rules or files("alert_rules"),
                scrape_seconds=pace.scrape_seconds,
                evaluation_seconds=pace.evaluation_seconds,
            )
        )
        runs = []
        for scene, steps_per_second in parts:
            name = f"{scene.__name__}-{steps_per_second:g}"
            runs.append(SimulatedRun(runs_folder, name, steps_per_second=steps_per_second))
            undo.callback(runs[-1].close)
        wait_for(lambda: len(stack.query('ALERTS{alertname="TrainWatchdog"}')) == len(runs), 60.0)
        yield stack, runs


def compared(folder: Path, pace: Pace, parts: list[tuple[Scene, float]], rules: Traversable | None = None) -> list[str]:
    """Play scenes at so many steps a second under real servers; the disagreements."""
    with watched(folder, pace, parts, rules) as (stack, runs):
        play((run, scene(run, pace)) for run, (scene, _) in zip(runs, parts, strict=True))
        return [said for run in runs for said in judged(stack, run, pace)]


def judged(stack: Stack, run: SimulatedRun, pace: Pace) -> list[str]:
    """What is wrong with the alerts and the commands of a run."""
    return [*disagreements(run, fired(stack, run), pace), *wrong_commands(run, pace)]


def fired(stack: Stack, run: SimulatedRun) -> dict[str, list[float]]:
    """The evaluations at which each alert of a run was firing, but for the watchdog (Unix seconds)."""
    times: dict[str, set[float]] = {}
    for series in stack.query(f'ALERTS{{alertstate="firing",alertname!="TrainWatchdog",run="{run.name}"}}[1h]'):
        times.setdefault(series["metric"]["alertname"], set()).update(when for when, _ in series["values"])
    return {alert: sorted(found) for alert, found in times.items()}


def disagreements(run: SimulatedRun, alerts: dict[str, list[float]], pace: Pace) -> list[str]:
    """Where an alert fired without its verdict, before it, too late, too long, or not at all; in words.

    A state that is over, or that the page hides, sooner than it must be seen may have been missed.
    """
    nobodys = sorted(set(alerts) - set(run.events) - set(run.states))
    return [
        *(f"{run.name}: {alert} fired, and no detector said so" for alert in nobodys),
        *(f"{run.name}: {alert} {what}" for alert in run.events for what in _wrong_events(run, alert, alerts, pace)),
        *(f"{run.name}: {alert} {what}" for alert in run.states for what in _wrong_states(run, alert, alerts, pace)),
    ]


def _latest(run: SimulatedRun, when: float, pace: Pace) -> float:
    """When it must have been seen: once the page can be scraped again, if it went dark before."""
    until = when + pace.latest_seconds
    for dark, light in run.dark:
        if dark <= until and when < light:
            until = max(until, light + pace.latest_seconds)
    return until


def _wrong_events(run: SimulatedRun, alert: str, alerts: dict[str, list[float]], pace: Pace) -> Iterator[str]:
    verdicts, times = run.events[alert], alerts.get(alert, [])
    if times and times[0] < verdicts[0]:
        yield f"fired {verdicts[0] - times[0]:.2f} s before the step"
    for verdict in verdicts:
        latest = _latest(run, verdict, pace)
        if not any(verdict <= when <= latest for when in times):
            yield f"did not fire within {latest - verdict:.1f} s"


def _wrong_states(run: SimulatedRun, alert: str, alerts: dict[str, list[float]], pace: Pace) -> Iterator[str]:
    spans, times = run.states[alert], alerts.get(alert, [])
    for begin, end in spans:
        latest = _latest(run, begin, pace)
        if end > latest and not any(begin <= when <= latest for when in times):
            late = min((when - begin for when in times if when > begin), default=math.inf)
            yield f"fired after {late:.2f} s, not within {latest - begin:.1f} s"
    for when in times:
        if not any(begin <= when <= _latest(run, end, pace) for begin, end in spans):
            nearest = min((begin for begin, _ in spans), key=lambda begin, when=when: abs(begin - when))
            yield f"fired {when - nearest:+.2f} s from the beginning of its state"


def wrong_commands(run: SimulatedRun, pace: Pace) -> Iterator[str]:
    """Commands that do not speak of where the run was at the scrape that was evaluated, a scrape ago at most; in words.

    That is all that an annotation can know: at 15 s and 50 steps a second, the run may be 750 steps further on.
    """
    for command in run.folder.inbox.waiting():
        since = command.received - pace.scrape_seconds - 2.0 * SLACK_SECONDS
        shown = [step for step in run.steps if step[0] <= command.received]
        first = max((place for place, step in enumerate(shown) if step[0] <= since), default=0)
        told = (command.step, command.steps_total)
        if told not in [step[1:] for step in shown[first:]]:
            yield f"{run.name}: {command.alert} speaks of step {told}, not of {shown[first][1:]} to {shown[-1][1:]}"

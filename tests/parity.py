"""The same steps through the detectors and through Prometheus: scenes of a run, and where the two disagree."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from simulated_run import DISCOVERY_SECONDS, Series, SimulatedRun, play
from test_loop import wait_for

from trainer_plugin.demo.servers import Stack

# Beyond one scrape and one evaluation: what a scrape takes, and a machine that has other work.
SLACK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often Prometheus looks."""

    scrape_seconds: float
    evaluation_seconds: float

    @property
    def latest_seconds(self) -> float:
        """How long after a step its alert fires at the latest."""
        return self.scrape_seconds + self.evaluation_seconds + SLACK_SECONDS

    @property
    def seen_seconds(self) -> float:
        """How long a state must last to be seen for certain, and to be seen to have ended."""
        return self.latest_seconds + 1.0


def steps(run: SimulatedRun, seconds: float) -> int:
    """The steps of a run in so many seconds."""
    return math.ceil(seconds * run.steps_per_second)


def events(run: SimulatedRun, pace: Pace) -> Series:
    """What one step tells: a loss that jumps, a gradient that surges, a NaN; and a row of withheld steps."""
    yield run.next(loss=1.5)
    yield from run.calm(steps(run, 1.0))
    yield run.next(grad_norm=20.0)
    yield from run.calm(steps(run, 1.0))
    yield run.next(loss=math.nan, grad_norm=math.nan, withheld="nonfinite")
    yield from run.calm(steps(run, pace.seen_seconds))
    yield from run.calm(10 + steps(run, pace.seen_seconds), grad_norm=math.nan, withheld="nonfinite")
    yield from run.calm(steps(run, pace.seen_seconds))


def calm(run: SimulatedRun, pace: Pace) -> Series:
    """Nothing happens."""
    yield from run.calm(steps(run, 5.0 + 2.0 * pace.seen_seconds))


def collapse(run: SimulatedRun, pace: Pace) -> Series:
    """AMP's loss scale is halved in a row of overflows, stays there, and comes back."""
    yield from run.calm(steps(run, pace.seen_seconds), amp_loss_scale=2.0**16)
    for power in range(15, -3, -1):
        yield run.next(amp_loss_scale=2.0**power, withheld="amp_overflow")
    yield from run.calm(steps(run, pace.seen_seconds), amp_loss_scale=2.0**-3)
    yield from run.calm(steps(run, pace.seen_seconds), amp_loss_scale=2.0)


def slow_signs(run: SimulatedRun, pace: Pace) -> Series:
    """A loss that is thrown out again and again, and then one that climbs by 0.3 % a step."""
    for _ in range(4):
        yield run.next(loss=1.13)
        yield run.next(loss=1.09)
        yield from run.calm(25)
    yield from run.calm(steps(run, pace.seen_seconds))
    for number in range(60):
        yield run.next(loss=1.003**number)
    yield from run.calm(steps(run, pace.seen_seconds))


def sustained(run: SimulatedRun, pace: Pace) -> Series:
    """3.5 times the loss, for long enough to be seen as sustained; then all is well again."""
    yield from run.calm(200 + steps(run, pace.seen_seconds), loss=3.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def not_recovering(run: SimulatedRun, pace: Pace) -> Series:
    """1.5 times the loss: out of its band for good, and far below 3 times its average."""
    yield from run.calm(200 + steps(run, pace.seen_seconds), loss=1.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def interrupted(run: SimulatedRun, pace: Pace) -> Series:
    """Twice 199 steps at 3.5 times the loss with one good step between: no 200 in a row, and not recovered either."""
    yield from run.calm(199, loss=3.5)
    yield run.next()
    yield from run.calm(199, loss=3.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def rolled_back(run: SimulatedRun, pace: Pace) -> Series:
    """Sustained, rolled back, and the same once more."""
    yield run.save
    for _ in range(2):
        yield from run.calm(20)
        yield from run.calm(200 + steps(run, pace.seen_seconds), loss=3.5)
        yield run.roll_back
        yield from run.calm(steps(run, pace.seen_seconds))


def gap(run: SimulatedRun, pace: Pace) -> Series:
    """The page does not answer for three scrapes: one spike in that time, and later the 200th step of a state."""
    seconds = 3.0 * pace.scrape_seconds
    yield run.go_dark
    yield from run.calm(steps(run, seconds / 2))
    yield run.next(loss=1.5)
    yield from run.calm(steps(run, seconds / 2))
    yield run.answer
    yield from run.calm(steps(run, pace.seen_seconds))
    before = max(1, 200 - steps(run, seconds / 2))
    yield from run.calm(before, loss=3.5)
    yield run.go_dark
    yield from run.calm(steps(run, seconds), loss=3.5)
    yield run.answer
    yield from run.calm(200 - before + steps(run, pace.seen_seconds), loss=3.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def slight(run: SimulatedRun, pace: Pace) -> Series:
    """Twenty deviations of a loss that is nearly without noise, which is a rise of 2 % and nothing to act upon."""
    run.noise = 0.001
    yield lambda: run.hurry(300)
    yield from run.calm(steps(run, pace.seen_seconds))
    yield run.next(loss=1.02)
    yield from run.calm(steps(run, pace.seen_seconds))


def planned(run: SimulatedRun, pace: Pace) -> Series:
    """A learning rate that doubles, and a loss that goes up for that by ten deviations for a while."""
    rate = {"learning_rates": (2e-3,)}
    yield run.next(**rate)
    yield from run.calm(20, loss=1.2, **rate)
    yield from run.calm(steps(run, pace.seen_seconds), **rate)


def started_again(run: SimulatedRun, pace: Pace, *, same_port: bool = False) -> Series:
    """A spike; the job is killed 100 steps into a state, starts again where all was well, and the state comes whole."""
    known = DISCOVERY_SECONDS + pace.scrape_seconds + SLACK_SECONDS
    yield run.next(loss=1.5)
    yield from run.calm(steps(run, pace.seen_seconds))
    yield run.save
    yield from run.calm(100, loss=3.5)
    yield lambda: run.die_and_start_again(port=(run.endpoint.port or 0) if same_port else 0)
    yield from run.calm(steps(run, known))
    yield run.next(grad_norm=20.0)
    yield from run.calm(199, loss=3.5)
    yield from run.calm(1 + steps(run, pace.seen_seconds), loss=3.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def started_in_place(run: SimulatedRun, pace: Pace) -> Series:
    """The same with the new page on the old port, where the counters of the same series go back to 0."""
    yield from started_again(run, pace, same_port=True)


Scene = Callable[[SimulatedRun, Pace], Series]
SCENES: tuple[Scene, ...] = (
    calm, events, collapse, slow_signs, slight, planned, sustained, not_recovering, interrupted, rolled_back, gap,
    started_again, started_in_place,
)  # fmt: skip


@contextmanager
def watched(folder: Path, pace: Pace, parts: list[tuple[Scene, float]]) -> Iterator[tuple[Stack, list[SimulatedRun]]]:
    """A run for each scene and its steps a second, each scraped and judged by real servers at least once.

    What a counter did before its first scrape is not seen by anybody, and the first evaluation of a Prometheus comes
    up to two intervals after its start.
    """
    runs_folder = folder / "runs"
    with ExitStack() as undo:
        stack = undo.enter_context(
            Stack(
                folder / "servers",
                runs_folder,
                files("alert_rules"),
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


def compared(folder: Path, pace: Pace, parts: list[tuple[Scene, float]]) -> list[str]:
    """Play scenes at so many steps a second under real servers; the disagreements."""
    with watched(folder, pace, parts) as (stack, runs):
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

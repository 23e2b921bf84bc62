"""Scenes of a run that detectors and rules are held together by, at any pace of steps and of scrapes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from simulated_run import DISCOVERY_SECONDS, Series, SimulatedRun

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


def one_short(run: SimulatedRun, pace: Pace) -> Series:
    """199 steps at 3.5 times the loss and nine withheld, and a pause in which both are seen: one more is missing."""
    yield from _seen_twice(run, pace, high=199, withheld=9)


def just_enough(run: SimulatedRun, pace: Pace) -> Series:
    """The same with the one more: 200 and ten."""
    yield from _seen_twice(run, pace, high=200, withheld=10)


def _seen_twice(run: SimulatedRun, pace: Pace, *, high: int, withheld: int) -> Series:
    """So many steps at 3.5 times the loss, then so many withheld, each with a pause in which it is seen."""
    yield from run.calm(high, loss=3.5)
    yield pace.seen_seconds
    yield from run.calm(10 + steps(run, pace.seen_seconds))
    yield from run.calm(withheld, grad_norm=math.nan, withheld="nonfinite")
    yield pace.seen_seconds
    yield from run.calm(steps(run, pace.seen_seconds))


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
    calm, events, collapse, slow_signs, slight, planned, sustained, not_recovering, interrupted, one_short, just_enough,
    rolled_back, gap, started_again, started_in_place,
)  # fmt: skip

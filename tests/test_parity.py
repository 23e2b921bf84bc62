"""Detectors and rules agree: the same steps in the job and through real Prometheus give the same verdicts in time."""

import math
import time
from types import SimpleNamespace

import parity
import pytest
from simulated_run import play
from test_loop import wait_for

QUICK = parity.Pace(scrape_seconds=1.0, evaluation_seconds=1.0)
RARE = parity.Pace(scrape_seconds=15.0, evaluation_seconds=1.0)


def one_step(run, pace):
    """One bad step of many between two scrapes."""
    yield from run.calm(parity.steps(run, 2.0))
    yield run.next(loss=1.5)
    yield from run.calm(parity.steps(run, pace.scrape_seconds))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenes under two Prometheus servers at once, one in a hurry and one not; what is wrong, and a seldom seen run."""
    parts = [
        (parity.events, 5.0),
        (parity.slight, 5.0),
        (parity.sustained, 20.0),
        (parity.interrupted, 50.0),
        (parity.rolled_back, 50.0),
        (parity.started_in_place, 50.0),
    ]
    folder = tmp_path_factory.mktemp("parity")
    with (
        parity.watched(folder / "rare", RARE, [(one_step, 50.0)]) as (rare, (seldom,)),
        parity.watched(folder / "quick", QUICK, parts) as (quick, runs),
    ):
        series = [(run, scene(run, QUICK)) for run, (scene, _) in zip(runs, parts, strict=True)]
        play([(seldom, one_step(seldom, RARE)), *series])
        (alert,) = wait_for(lambda: [a for a in rare.alerts() if a["labels"]["alertname"] == "TrainLossSpike"])
        yield SimpleNamespace(
            quick=[said for run in runs for said in parity.judged(quick, run, QUICK)],
            rare=parity.judged(rare, seldom, RARE),
            seldom=seldom,
            told=tuple(int(alert["annotations"][name]) for name in ("step", "steps_total")),
            asked=time.time(),
        )


@pytest.mark.live
@pytest.mark.timeout(120)
def test_rules_say_what_the_detectors_say(played):
    """A verdict is an alert within a scrape, an evaluation and half a second; none is without, before or long after.

    So the sustained alerts do not fire before the 200th consecutive step, and fire again after a rollback.
    """
    assert played.quick == []


@pytest.mark.live
@pytest.mark.timeout(120)
def test_r18_one_step_between_two_scrapes_is_alerted_with_the_step_of_the_evaluation(played):
    """One bad step of 750 between two scrapes fires, and says where the run was at the scrape that was evaluated."""
    assert played.rare == []
    assert list(played.seldom.events) == ["TrainLossSpike"]
    since = played.asked - RARE.scrape_seconds - RARE.evaluation_seconds - parity.SLACK_SECONDS
    assert played.told in [step[1:] for step in played.seldom.steps if step[0] >= since] + [played.seldom.steps[-1][1:]]


@pytest.mark.parametrize(
    ("fired", "said"),
    [
        ({"TrainLossSpike": [101.0], "TrainNoUpdates": [203.0, 212.0]}, []),
        ({"TrainLossSpike": [99.9, 101.0], "TrainNoUpdates": [203.0]}, ["TrainLossSpike fired 0.10 s before the step"]),
        ({"TrainLossSpike": [102.6], "TrainNoUpdates": [203.0]}, ["TrainLossSpike did not fire within 2.5 s"]),
        ({"TrainLossSpike": [101.0]}, ["TrainNoUpdates fired after inf s, not within 2.5 s"]),
        ({"TrainLossSpike": [101.0], "TrainNoUpdates": [203.6]}, ["TrainNoUpdates fired after 2.60 s"]),
        ({"TrainLossSpike": [101.0], "TrainNoUpdates": [199.0, 203.0]}, ["TrainNoUpdates fired -2.00 s from the"]),
        ({"TrainLossSpike": [101.0], "TrainNoUpdates": [203.0, 212.6]}, ["TrainNoUpdates fired +11.60 s from the"]),
        (
            {"TrainLossSpike": [101.0], "TrainNoUpdates": [203.0], "TrainLossDrift": [5.0]},
            ["TrainLossDrift fired, and no detector said so"],
        ),
    ],
)
def test_a_disagreement_is_found(fired, said):
    """An alert that is early, late, missing, too long or nobody's is told; what agrees is not."""
    run = SimpleNamespace(
        name="gpt-0",
        events={"TrainLossSpike": [100.0]},
        states={"TrainNoUpdates": [[201.0, 210.0]], "TrainLossNotRecovering": [[300.0, 302.0]]},
        dark=[],
    )
    found = parity.disagreements(run, fired, QUICK)
    assert len(found) == len(said)
    assert all(f"gpt-0: {what}" in told for what, told in zip(said, found, strict=True))


def test_what_cannot_be_scraped_may_be_told_later():
    """A verdict in the dark has its time from when the page answers again."""
    run = SimpleNamespace(name="gpt-0", events={"TrainLossSpike": [100.0]}, states={}, dark=[[101.0, 120.0]])
    assert parity.disagreements(run, {"TrainLossSpike": [122.0]}, QUICK) == []
    run.dark = [[101.0, math.inf]]
    assert parity.disagreements(run, {}, QUICK) == ["gpt-0: TrainLossSpike did not fire within inf s"]


@pytest.mark.parametrize(
    ("told", "right"),
    [((47, 147), True), ((50, 150), True), ((29, 129), False), ((51, 151), False), ((47, 150), False)],
)
def test_a_command_with_another_step_is_found(told, right):
    """A command speaks of a step, and of as many steps in all, that the last scrape can have shown; of no other."""
    command = SimpleNamespace(alert="TrainNoUpdates", received=105.0, step=told[0], steps_total=told[1])
    run = SimpleNamespace(
        name="gpt-0",
        steps=[(100.0 + number / 10.0, number, 100 + number) for number in range(100)],
        folder=SimpleNamespace(inbox=SimpleNamespace(waiting=lambda: [command])),
    )
    assert (list(parity.wrong_commands(run, QUICK)) == []) == right

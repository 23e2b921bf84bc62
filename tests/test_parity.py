"""Detectors and rules agree: the same steps in the job and through real Prometheus give the same verdicts in time."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import parity
import parity_scenes as scenes
import pytest
from parity_scenes import SCENES, Pace
from simulated_run import SimulatedRun, play
from test_loop import wait_for

ALERT_RULES = Path(__file__).resolve().parents[1] / "alert_rules"
QUICK = Pace(scrape_seconds=1.0, evaluation_seconds=1.0)
RARE = Pace(scrape_seconds=15.0, evaluation_seconds=1.0)
# Rules that are off by a little: the words in training.yml, what stands there instead, and what must be said of it.
WRONG_RULES = (
    (
        '{above="3"} and on (job, instance) up == 1) >= 200',
        '{above="3"} and on (job, instance) up == 1) >= 199',
        "one_short-50: TrainLossSpikeSustained fired, and no detector said so",
    ),
    (
        "(train_steps_withheld and on (job, instance) up == 1) >= 10\n          unless",
        "(train_steps_withheld and on (job, instance) up == 1) >= 9\n          unless",
        "one_short-50: TrainNoUpdates fired, and no detector said so",
    ),
    (
        "(train_loss_unrecovered_steps and on (job, instance) up == 1) >= 200",
        "(train_loss_unrecovered_steps and on (job, instance) up == 1) >= 500",
        "just_enough-50: TrainLossNotRecovering fired after inf s, not within 2.5 s",
    ),
    (
        'increase(train_grad_norm_ema_ratio_bucket{le=~"10|10[.]0"}[1m])',
        'increase(train_grad_norm_ema_ratio_bucket{le=~"50|50[.]0"}[1m])',
        "events-50: TrainGradNormSurge did not fire within 2.5 s",
    ),
    (
        'increase(train_nonfinite_total{where=~"loss|grad"}[1m])',
        'increase(train_nonfinite_total{where=~"loss|grad"}[1m] offset 5s)',
        "events-50: TrainNonFinite did not fire within 2.5 s",
    ),
)


def one_step(run, pace):
    """One bad step of many between two scrapes."""
    yield from run.calm(scenes.steps(run, 2.0))
    yield run.next(loss=1.5)
    yield from run.calm(scenes.steps(run, pace.scrape_seconds))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenes under two Prometheus servers at once, one in a hurry and one not; what is wrong, and a seldom seen run."""
    parts = [
        (scenes.events, 5.0),
        (scenes.slight, 5.0),
        (scenes.sustained, 20.0),
        (scenes.interrupted, 50.0),
        (scenes.rolled_back, 50.0),
        (scenes.started_in_place, 50.0),
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
    since = played.asked - RARE.scrape_seconds - RARE.evaluation_seconds - scenes.SLACK_SECONDS
    assert played.told in [step[1:] for step in played.seldom.steps if step[0] >= since] + [played.seldom.steps[-1][1:]]


@pytest.mark.live
@pytest.mark.timeout(120)
def test_rules_that_are_off_by_one_are_found(tmp_path):
    """Real servers with rules that are one step early, blind or late: each is found, and what is right in them is not.

    A comparison that agrees with any rules would prove nothing.
    """
    rules = tmp_path / "rules"
    rules.mkdir()
    for path in ALERT_RULES.iterdir():
        if path.is_file():
            (rules / path.name).write_bytes(path.read_bytes())
    text = (rules / "training.yml").read_text()
    for right, wrong, _ in WRONG_RULES:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    (rules / "training.yml").write_text(text)
    parts = [(scenes.events, 50.0), (scenes.one_short, 50.0), (scenes.just_enough, 50.0)]
    found = parity.compared(tmp_path, QUICK, parts, rules)
    for _, _, said in WRONG_RULES:
        assert said in found
    named = {said.split()[1] for _, _, said in WRONG_RULES}
    assert not [said for said in found if said.split()[1] not in named]


@pytest.fixture
def of_scene(tmp_path, clock):
    """A function that plays a scene without servers and returns its run."""

    def of_scene(scene, pace, steps_per_second=20.0):
        run = SimulatedRun(tmp_path / "runs", scene.__name__, steps_per_second=steps_per_second, clock=clock)
        try:
            play([(run, scene(run, pace))], clock=clock, wait=clock.wait)
        finally:
            run.close()
        return run

    return of_scene


def faithful(run, pace, phase):
    """The evaluations at which each alert fires under right rules; `phase` is that of the scrapes in their interval.

    What the last scrape has seen: an event for 5 minutes from then on, a state for as long as it lasts.
    """
    last = begin = run.steps[0][0] + 1.0
    alerts = {}
    number = 0
    while last < run.steps[-1][0]:
        last = begin + number * pace.evaluation_seconds
        number += 1
        scrape = begin + phase + math.floor((last - begin - phase) / pace.scrape_seconds) * pace.scrape_seconds
        if any(dark <= scrape < light for dark, light in run.dark):
            continue
        for alert, verdicts in run.events.items():
            if any(verdict <= scrape <= verdict + 300.0 for verdict in verdicts):
                alerts.setdefault(alert, []).append(last)
        for alert, spans in run.states.items():
            if any(since <= scrape < end for since, end in spans):
                alerts.setdefault(alert, []).append(last)
    return alerts


PACES = [QUICK, Pace(scrape_seconds=5.0, evaluation_seconds=15.0)]


@pytest.mark.parametrize("pace", PACES, ids=lambda pace: f"{pace.scrape_seconds:g}-{pace.evaluation_seconds:g}")
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_alerts_of_rules_that_are_right_agree_and_others_do_not(of_scene, scene, pace):
    """Whenever the scrapes come, right alerts agree. None at all, a late one, an early one, another scene's do not."""
    run = of_scene(scene, pace)
    for phase in (0.0, 0.3 * pace.scrape_seconds, 0.9 * pace.scrape_seconds):
        right = faithful(run, pace, phase)
        assert parity.disagreements(run, right, pace) == []
        step = 1.0 / run.steps_per_second
        begins = {alert: verdicts[0] for alert, verdicts in run.events.items()}
        begins |= {alert: spans[0][0] for alert, spans in run.states.items() if alert in right}
        for alert, begin in begins.items():
            early = right | {alert: [begin - step, *right[alert]]}
            assert any(f": {alert} fired" in said for said in parity.disagreements(run, early, pace))
            late = right | {alert: [when for when in right[alert] if when > begin + 3.0 * pace.latest_seconds]}
            if alert in run.events:
                assert any(f": {alert} did not fire" in said for said in parity.disagreements(run, late, pace))
        other = right | {"TrainAmpScaleRunaway": [run.steps[-1][0]]}
        assert any("TrainAmpScaleRunaway fired, and no" in said for said in parity.disagreements(run, other, pace))
    assert bool(parity.disagreements(run, {}, pace)) == bool(begins)


def test_the_alerts_of_another_series_are_found(of_scene):
    """Prometheus is told a spike that the detectors did not see, or is not told of one that they saw."""
    spiked, calm = (of_scene(scene, QUICK) for scene in (scenes.sustained, scenes.calm))
    assert parity.disagreements(calm, faithful(spiked, QUICK, 0.0), QUICK) == [
        f"calm: {alert} fired, and no detector said so"
        for alert in ("TrainLossNotRecovering", "TrainLossSpike", "TrainLossSpikeSustained")
    ]
    assert set(parity.disagreements(spiked, faithful(calm, QUICK, 0.0), QUICK)) == {
        "sustained: TrainLossSpike did not fire within 2.5 s",
        "sustained: TrainLossSpikeSustained fired after inf s, not within 2.5 s",
        "sustained: TrainLossNotRecovering fired after inf s, not within 2.5 s",
    }


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


def test_the_evaluations_of_an_alert_are_those_of_all_its_series():
    """One alert under several label sets, which may fire at the same time, is one list of evaluations, in order."""
    found = [
        {"metric": {"alertname": "TrainNonFinite", "where": "loss"}, "values": [[3.0, "1"], [5.0, "1"]]},
        {"metric": {"alertname": "TrainNonFinite", "where": "grad"}, "values": [[4.0, "1"], [5.0, "1"]]},
        {"metric": {"alertname": "TrainLossSpike"}, "values": [[1.0, "1"]]},
    ]
    asked = []
    stack = SimpleNamespace(query=lambda promql: asked.append(promql) or found)
    told = parity.fired(stack, SimpleNamespace(name="gpt-0"))
    assert told == {"TrainNonFinite": [3.0, 4.0, 5.0], "TrainLossSpike": [1.0]}
    assert 'run="gpt-0"' in asked[0]


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

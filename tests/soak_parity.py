"""Detectors and rules agree, at length (`make soak`): every scene, pace of steps and pace of scrapes, and restarts."""

import time

import pytest
from parity import compared, judged, watched
from parity_scenes import SCENES, Pace, steps
from simulated_run import DISCOVERY_SECONDS, play

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

CALM_SECONDS, DOWN_SECONDS, STATE_SECONDS = 10.0, 5.0, 30.0


@pytest.mark.parametrize(("scrape_seconds", "evaluation_seconds"), [(1.0, 1.0), (5.0, 5.0), (5.0, 15.0)])
def test_every_scene_at_5_20_and_50_steps_a_second(tmp_path, scrape_seconds, evaluation_seconds):
    """All runs at once: every verdict is an alert in time, and no alert is without one; the last pace is as shipped."""
    pace = Pace(scrape_seconds=scrape_seconds, evaluation_seconds=evaluation_seconds)
    parts = [(scene, steps_per_second) for scene in SCENES for steps_per_second in (5.0, 20.0, 50.0)]
    assert compared(tmp_path, pace, parts) == []


def unseen_spike(run, _pace):
    """Prometheus is dead at the spike."""
    yield from run.calm(steps(run, CALM_SECONDS + DOWN_SECONDS / 2))
    yield run.next(loss=1.5)
    yield from run.calm(steps(run, STATE_SECONDS))


def unseen_200th_step(run, pace):
    """Prometheus is dead at the 200th step of a state that lasts."""
    yield from run.calm(steps(run, CALM_SECONDS + DOWN_SECONDS / 2) - 200)
    yield from run.calm(200 + steps(run, STATE_SECONDS), loss=3.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def lasting(run, pace):
    """A state that begins before Prometheus dies and ends after it is back."""
    yield from run.calm(200 + steps(run, STATE_SECONDS), loss=3.5)
    yield from run.calm(10 + steps(run, pace.seen_seconds))


def test_prometheus_killed_and_started_again(tmp_path):
    """A spike and a 200th step that a dead Prometheus missed are alerted once it is back; no state has two commands."""
    pace = Pace(scrape_seconds=1.0, evaluation_seconds=1.0)
    parts = [(unseen_spike, 50.0), (unseen_200th_step, 50.0), (lasting, 50.0)]
    with watched(tmp_path, pace, parts) as (stack, runs):

        def kill():
            """Dead for all runs, until it is up and has found them again."""
            stack.kill("prometheus")
            for run in runs:
                run.dark.append([time.time(), time.time() + DOWN_SECONDS + 2.0 * DISCOVERY_SECONDS])

        def conducted(series):
            """The first run's series, at whose pace Prometheus dies and comes back."""
            for number, told in enumerate(series):
                if number == steps(runs[0], CALM_SECONDS):
                    yield kill
                if number == steps(runs[0], CALM_SECONDS + DOWN_SECONDS):
                    yield lambda: stack.start_again("prometheus")
                yield told

        first, *others = [(run, scene(run, pace)) for run, (scene, _) in zip(runs, parts, strict=True)]
        play([(first[0], conducted(first[1])), *others])
        assert [said for run in runs for said in judged(stack, run, pace)] == []
        for run in runs[1:]:
            commands = sorted(command.alert for command in run.folder.inbox.waiting())
            assert commands == ["TrainLossNotRecovering", "TrainLossSpikeSustained"]

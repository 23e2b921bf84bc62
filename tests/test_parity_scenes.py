"""The scenes are what their names say: each leads to its verdicts and to no others, at every pace."""

import parity_scenes as scenes
import pytest
from parity_scenes import SCENES, Pace
from simulated_run import SimulatedRun, play

SPIKE, SURGE, NAN = "TrainLossSpike", "TrainGradNormSurge", "TrainNonFinite"
SUSTAINED, NOT_BACK, NO_UPDATES = "TrainLossSpikeSustained", "TrainLossNotRecovering", "TrainNoUpdates"
WITHHELD = "TrainUpdatesWithheld"
# What each scene must lead to, events and states together; what it may lead to besides is in the second set.
VERDICTS = {
    "calm": (set(), set()),
    "events": ({SPIKE, SURGE, NAN, NO_UPDATES, WITHHELD}, set()),
    "collapse": ({"TrainAmpScaleCollapse"}, set()),
    "slow_signs": ({"TrainLossOscillating", "TrainLossDrift"}, set()),
    "slight": (set(), set()),
    "planned": (set(), set()),
    "sustained": ({SPIKE, SUSTAINED, NOT_BACK}, set()),
    "not_recovering": ({SPIKE, NOT_BACK}, set()),
    # The loss has been away for more than 200 steps when it is taken for back, one good step in between or not.
    "interrupted": ({SPIKE, NOT_BACK}, set()),
    "one_short": ({SPIKE, NAN}, {NOT_BACK}),
    "just_enough": ({SPIKE, NAN, SUSTAINED, NOT_BACK, NO_UPDATES, WITHHELD}, set()),
    "rolled_back": ({SPIKE, SUSTAINED, NOT_BACK}, set()),
    "gap": ({SPIKE, SUSTAINED, NOT_BACK}, set()),
    "started_again": ({SPIKE, SURGE, SUSTAINED, NOT_BACK}, set()),
    "started_in_place": ({SPIKE, SURGE, SUSTAINED, NOT_BACK}, set()),
}


def test_every_scene_has_its_verdicts_written_down():
    """No scene is played whose end nobody has thought about."""
    assert set(VERDICTS) == {scene.__name__ for scene in SCENES}


@pytest.mark.parametrize("steps_per_second", [5.0, 50.0])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_leads_to_its_verdicts_and_to_no_others(tmp_path, clock, scene, steps_per_second):
    """A scene in which nothing happened, or something else than meant, would agree with any rules."""
    run = SimulatedRun(tmp_path / "runs", "gpt-0", steps_per_second=steps_per_second, clock=clock)
    try:
        play([(run, scene(run, Pace(scrape_seconds=1.0, evaluation_seconds=1.0)))], clock=clock, wait=clock.wait)
    finally:
        run.close()
    must, may = VERDICTS[scene.__name__]
    assert must <= set(run.events) | set(run.states) <= must | may
    assert all(end < clock.now for spans in run.states.values() for _, end in spans)


def test_a_state_that_must_be_seen_lasts_long_enough(tmp_path, clock):
    """At the slowest pace, steps and scrapes, what `just_enough` leads to lasts for longer than an alert may take."""
    pace = Pace(scrape_seconds=5.0, evaluation_seconds=15.0)
    run = SimulatedRun(tmp_path / "runs", "gpt-0", steps_per_second=5.0, clock=clock)
    try:
        play([(run, scenes.just_enough(run, pace))], clock=clock, wait=clock.wait)
    finally:
        run.close()
    for alert in (SUSTAINED, NO_UPDATES):
        ((begin, end),) = run.states[alert]
        assert end - begin > pace.latest_seconds

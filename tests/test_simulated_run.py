"""The run without a model: verdicts at the step that makes them, states from end to end, a page that tells the same."""

import math
import urllib.error
import urllib.request

import pytest
from simulated_run import DISCOVERY_SECONDS, LOSS, WARM_STEPS, SimulatedRun, play


@pytest.fixture
def run(tmp_path, clock):
    """A warm run of 20 steps a second on a clock turned by hand."""
    run = SimulatedRun(tmp_path / "runs", "gpt-0", steps_per_second=20.0, clock=clock)
    yield run
    run.close()


@pytest.fixture
def played(run, clock):
    """Plays series of the run in no time: waiting turns the clock."""
    return lambda series, *others: play([(run, series), *others], clock=clock, wait=clock.wait)


def read(run):
    """The page as a scrape gets it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{run.endpoint.port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def tail(run):
    """How many steps had a loss above 8 robust deviations, by the page."""
    value = run.endpoint.page.render().decode()
    counts = dict(line.rsplit(" ", 1) for line in value.splitlines() if line.startswith("train_loss_robust_score_"))
    every = next(float(count) for name, count in counts.items() if "_count" in name)
    return every - next(float(count) for name, count in counts.items() if 'le="8' in name)


def test_a_fresh_run_is_warm_and_has_said_nothing(run):
    """The steps of warm-up are behind it, all at one moment, and none of them was a verdict."""
    assert (run.step, run.steps_total, len(run.steps)) == (WARM_STEPS, WARM_STEPS, WARM_STEPS)
    assert (run.events, run.states, run.dark) == ({}, {}, [])
    assert run.monitor.warm


def test_an_event_is_noted_at_its_step_and_shown_by_the_page_of_that_step(run, clock):
    """A spike is noted at the moment in which the page has it, and not for the steps around it."""
    run.hurry(5)
    clock.now += 1.0
    run.take(run.next(loss=1.5))
    assert (run.events, tail(run)) == ({"TrainLossSpike": [clock.now]}, 1)
    clock.now += 1.0
    run.hurry(5)
    assert (run.events, tail(run)) == ({"TrainLossSpike": [clock.now - 1.0]}, 1)


@pytest.mark.parametrize(
    ("told", "steps", "alert"),
    [
        ({"loss": 3.5}, 200, "TrainLossSpikeSustained"),
        ({"loss": 1.5}, 200, "TrainLossNotRecovering"),
        ({"grad_norm": math.nan, "withheld": "nonfinite"}, 10, "TrainNoUpdates"),
    ],
)
def test_a_state_begins_with_its_last_step_and_ends_with_the_first_that_is_well(run, played, told, steps, alert):
    """One step short there is no state; it begins and ends at the moments of the steps that make and end it."""
    began = run.steps[-1][0]
    played(run.calm(steps - 1, **told))
    assert alert not in run.states
    played(run.calm(5, **told))
    ((begin, end),) = run.states[alert]
    assert begin == pytest.approx(began + (steps - 1) / 20.0)
    assert math.isinf(end)
    played(run.calm(20))
    ((_, end),) = run.states[alert]
    assert begin + 4 / 20.0 < end < run.steps[-1][0]


def test_noise_is_of_calm_steps_alone_and_told_values_are_exact(run):
    """A calm loss has a little noise about its usual value, a told one has none."""
    losses = [run.next().loss for _ in range(200)]
    assert len(set(losses)) == 200
    assert sum(losses) / 200 == pytest.approx(LOSS, rel=0.01)
    assert run.next(loss=1.5).loss == 1.5 * LOSS


def test_two_runs_of_the_same_scene_are_the_same(tmp_path, run):
    """The noise is drawn anew from the same seed: what is found once can be found again."""
    other = SimulatedRun(tmp_path / "runs", "gpt-1")
    try:
        assert [run.next().loss for _ in range(5)] == [other.next().loss for _ in range(5)]
    finally:
        other.close()


def test_a_rollback_takes_step_and_detectors_back_and_not_the_count_of_steps(run):
    """After it the steps come again, `steps_total` goes on, and the state is over with the first good step."""
    run.save()
    for told in run.calm(210, loss=3.5):
        run.take(told)
    assert math.isinf(run.states["TrainLossSpikeSustained"][0][1])
    run.roll_back()
    assert (run.step, run.steps_total) == (WARM_STEPS, WARM_STEPS + 210)
    assert run.steps[-1][1:] == (WARM_STEPS, WARM_STEPS + 210)
    run.hurry(1)
    assert run.step == WARM_STEPS + 1
    assert math.isfinite(run.states["TrainLossSpikeSustained"][0][1])


def test_a_page_that_went_dark_does_not_answer_until_it_does_again(run, clock):
    """While it is dark a scrape gets nothing; then it answers on its old port, and the time in between is known."""
    port = run.endpoint.port
    assert "train_loss " in read(run).replace("{", " {")
    run.go_dark()
    with pytest.raises(urllib.error.URLError):
        read(run)
    clock.now += 3.0
    run.answer()
    assert read(run)
    assert run.endpoint.port == port
    assert run.dark == [[clock.now - 3.0, clock.now]]


@pytest.mark.parametrize("same_port", [True, False])
def test_a_job_that_starts_again_has_counters_from_0_and_its_states_behind_it(run, clock, same_port):
    """Killed in a state and started again: the state is over, counters begin anew, the count of steps goes on."""
    run.save()
    for told in run.calm(210, loss=3.5):
        run.take(told)
    assert tail(run) > 0
    port = run.endpoint.port
    run.die_and_start_again(port=port if same_port else 0)
    assert (run.endpoint.port == port) == same_port
    assert run.states["TrainLossSpikeSustained"][0][1] == clock.now
    assert run.dark == [[clock.now, clock.now + DISCOVERY_SECONDS]]
    assert tail(run) == 0
    assert (run.step, run.steps_total) == (WARM_STEPS, WARM_STEPS + 210)
    assert run.endpoint.page.value("train_steps_total") == WARM_STEPS + 210


def test_runs_are_stepped_on_their_own_schedules(tmp_path, run, clock, played):
    """Two runs of 20 and 5 steps a second go side by side; a pause delays its own alone, and a call costs no time."""
    other = SimulatedRun(tmp_path / "runs", "gpt-1", steps_per_second=5.0, clock=clock)
    began, called = clock.now, []

    def series():
        yield from run.calm(10)
        yield lambda: called.append(clock.now - began)
        yield 1.0
        yield from run.calm(10)

    try:
        played(series(), (other, other.calm(5)))
        ours = [when - began for when, *_ in run.steps[WARM_STEPS:]]
        theirs = [when - began for when, *_ in other.steps[WARM_STEPS:]]
    finally:
        other.close()
    assert ours == pytest.approx(
        [0.05 * number for number in range(10)] + [1.5 + 0.05 * number for number in range(10)]
    )
    assert theirs == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert called == pytest.approx([0.5])

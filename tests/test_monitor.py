"""The monitor: what is read, said and learnt of each step of a run."""

import json
import math

import numpy as np
import pytest
from curves import CURVES, FAULT, STEPS, decay, signals

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.spikes import Spikes
from trainer_plugin.signals import LayerReading

WARM = 200
# The default settings, but for a warm-up that tests need not sit through.
CONFIG = DetectionConfig(warmup_steps=WARM)
PLAIN_SCORES = (
    "loss_ema_ratio", "grad_norm_ema_ratio", "loss_zscore", "loss_robust_score", "grad_norm_robust_score",
)  # fmt: skip


class Run:
    """A monitor that is shown one step after another; all that it said is kept."""

    def __init__(self, config=CONFIG):
        self.monitor = Monitor(config)
        self.noise = np.random.default_rng(0)
        self.step = 0
        self.said = []
        self.readings = None

    def show(self, *losses, grad_norm=None, **changes):
        """Show steps with these losses; a gradient norm around 1 where none is given."""
        for loss in losses:
            self.step += 1
            norm = 1.0 + self.noise.normal(0.0, 0.05) if grad_norm is None else grad_norm
            self.readings, verdicts = self.monitor.update(signals(self.step, loss, grad_norm=norm, **changes))
            self.said += [(v.step, v.detector, v.signal) for v in verdicts]
        return self

    def calm(self, steps, level=2.0):
        """Show uneventful steps."""
        return self.show(*(level * (1.0 + self.noise.normal(0.0, 0.02)) for _ in range(steps)))

    def spike_limit(self, step):
        """The loss above which this step is a spike of a row."""
        return self.monitor.spike_limits(step, all_spikes=False)[0]

    def acting(self):
        """What the acting detectors said."""
        return [said for said in self.said if said[1:] in Monitor.ACTING]

    def baselines(self):
        """What the outlier-free detectors have learnt."""
        state = self.monitor.state_dict()
        return [
            state["loss_ema"]["ema"], state["grad_norm_ema"]["ema"],
            state["loss_robust"]["values"], state["grad_norm_robust"]["values"],
        ]  # fmt: skip


@pytest.fixture
def run():
    """A run that is just past its warm-up."""
    return Run().calm(WARM)


def test_warmup_says_nothing_finite_and_reads_nan():
    """In warm-up no finite value is a verdict, a ratio, a score, a count or a surge (R1)."""
    run = Run()
    for step in range(WARM):
        run.show(1e6 if step in (30, 150) else 2.0 + run.noise.normal(0.0, 0.05), grad_norm=1e4 if step == 30 else None)
        assert all(math.isnan(getattr(run.readings, name)) for name in PLAIN_SCORES)
        assert set(run.readings.loss_high_steps.values()) == set(run.readings.grad_norm_high_steps.values()) == {0}
        assert run.readings.loss_unrecovered_steps == 0
        if step < WARM - 1:
            assert run.monitor.surge_above == math.inf
    assert run.said == []
    run.show(2.0)
    assert all(math.isfinite(getattr(run.readings, name)) for name in PLAIN_SCORES)
    assert math.isfinite(run.monitor.surge_above)


def test_nothing_is_known_before_the_first_step():
    """Without a step there is no baseline: nothing is a surge, and nothing is clipped to it."""
    monitor = Monitor(CONFIG)
    assert monitor.surge_above == monitor.grad_norm_baseline == math.inf
    readings, verdicts = monitor.update(signals(1, math.nan, grad_norm=None))
    assert [(v.detector, v.signal) for v in verdicts] == [("nonfinite", "loss")]
    assert math.isnan(readings.loss_ema)
    assert math.isnan(readings.grad_norm_ema)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("curve", ["decay", "plateau", "frozen"])
def test_healthy_runs_are_left_alone(curve, seed):
    """No acting detector speaks on a healthy run, and nothing is ever unrecovered."""
    monitor, rng = Monitor(CONFIG), np.random.default_rng(seed)
    for step, loss in enumerate(CURVES[curve](seed)[:700], 1):
        readings, verdicts = monitor.update(signals(step, loss, grad_norm=float(rng.lognormal(0.0, 0.25))))
        assert [v for v in verdicts if (v.detector, v.signal) in Monitor.ACTING] == []
        assert readings.loss_unrecovered_steps == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_said_at_once_and_never_learnt(bad):
    """NaN and Inf are verdicts from the first step on, and leave the baselines as they were (R5)."""
    early = Run().show(bad)
    assert early.said == [(1, "nonfinite", "loss")]
    run = Run().calm(WARM + 10)
    before = run.baselines()
    run.show(bad, grad_norm=bad)
    assert run.said == [(WARM + 11, "nonfinite", "loss"), (WARM + 11, "nonfinite", "grad_norm")]
    assert run.baselines() == before
    json.dumps(before, allow_nan=False)
    assert math.isnan(run.readings.loss_zscore) or not math.isfinite(run.readings.loss_zscore)
    run.calm(300)
    assert len(run.acting()) == 2  # Nothing echoes.


def test_a_spike_right_behind_nan_is_found(run):
    """A NaN does not blind the detectors for what comes after it."""
    run.show(math.nan, 6.0)
    assert run.acting() == [(WARM + 1, "nonfinite", "loss"), (WARM + 2, "robust", "loss")]


def test_without_a_gradient_there_is_nothing_to_say_of_it(run):
    """A step with no gradient norm is no verdict and teaches the gradient's baselines nothing."""
    before = run.baselines()
    readings, verdicts = run.monitor.update(signals(WARM + 1, 2.0, grad_norm=None))
    assert verdicts == []
    assert math.isnan(readings.grad_norm_ema_ratio)
    after = run.baselines()
    assert after[1] == before[1]
    assert after[3] == before[3]


def test_an_overflow_of_the_scaler_is_no_verdict_and_teaches_nothing(run):
    """AMP's own overflow says nothing, counts as nothing withheld, and moves no outlier-free baseline."""
    run.show(2.0, withheld="nonfinite", grad_norm=1.0)
    assert run.readings.withheld_steps == 1
    before = run.baselines()
    run.show(2.1, grad_norm=math.inf, withheld="amp_overflow")
    assert run.said == []
    assert run.baselines() == before
    assert run.readings.withheld_steps == 0


def test_updates_withheld_in_a_row_are_counted(run):
    """The count of withheld updates goes on while every other one is withheld, and ends with two that are applied."""
    for expected, withheld in enumerate(("nonfinite", "spike", "nonfinite"), 1):
        assert run.show(math.nan, withheld=withheld).readings.withheld_steps == expected
    assert run.calm(1).readings.withheld_steps == 3
    assert run.show(math.nan, withheld="nonfinite").readings.withheld_steps == 4
    assert run.calm(2).readings.withheld_steps == 0


def test_a_spike_is_beyond_its_band_and_three_times_its_average(run):
    """The limit is R1's, or that of the band where it is the wider one; there is none for a loss below zero."""
    loss_limit, norm_limit = run.monitor.band_limits
    run.show(loss_limit * 0.999)
    assert run.acting() == []
    assert norm_limit >= 3.0 * 0.9
    assert run.spike_limit(run.step + 1) == pytest.approx(3.0 * 2.0, rel=0.02)
    wild = Run()
    wild.show(*(2.0 * math.exp(wild.noise.normal(0.0, 0.5)) for _ in range(WARM)))
    assert wild.spike_limit(WARM + 1) == wild.monitor.band_limits[0] > 3.0 * wild.readings.loss_ema
    negative = Run().calm(WARM, level=-2.0)
    assert math.isfinite(negative.monitor.band_limits[0])
    assert negative.spike_limit(WARM + 1) == math.inf


def test_of_spikes_in_a_row_the_second_to_the_fourth_are_repeated(run):
    """The first, what comes behind the fourth, and what is out of its band without being a spike are not."""
    told = [run.show(loss).readings.repeated_spike for loss in (9.0, 9.0, 9.0, 9.0, 9.0, 2.0, 9.0, 4.0, 9.0, 2.0)]
    assert told == [False, True, True, True, False, False, False, False, False, False]
    run.calm(20)
    assert not run.readings.repeated_spike


def test_a_row_of_spikes_soon_after_another_is_trained_on(run):
    """Within 5,000 steps of a row there is no limit and nothing repeated; single ones in between count for nothing."""
    run.show(9.0, 9.0)
    assert math.isfinite(run.spike_limit(run.step + 1))
    run.calm(1)
    ended = run.step
    assert run.spike_limit(ended + 5000) == math.inf
    assert math.isfinite(run.spike_limit(ended + 5001))
    run.calm(40).show(9.0).calm(40).show(9.0, 9.0)
    assert not run.readings.repeated_spike
    run.calm(1)
    assert run.spike_limit(ended + 5001) == math.inf


def test_a_row_is_alone_or_not_from_its_beginning():
    """One that begins within 5,000 steps of another is trained on to its end, though that may be beyond."""
    spikes = Spikes()
    spikes.update(1, 9.0, spike=True)
    spikes.update(2, 9.0, spike=True)
    assert spikes.repeated
    assert spikes.alone(3)
    spikes.update(3, 2.0, spike=False)
    for step in (5001, 5002, 5003, 5004):
        spikes.update(step, 9.0, spike=True)
        assert not spikes.repeated
        assert not spikes.alone(step + 1)
    spikes.update(5005, 2.0, spike=False)
    assert not spikes.alone(10005)
    assert spikes.alone(10006)


def test_a_row_does_not_outlast_a_restart(run):
    """What the device counted is gone: the rest of the row is trained on, and so is all within 5,000 steps of it."""
    run.show(9.0)
    single = json.loads(json.dumps(run.monitor.state_dict()))
    run.show(9.0)
    assert run.readings.repeated_spike
    row = json.loads(json.dumps(run.monitor.state_dict()))
    run.monitor.load_state_dict(row)
    assert run.spike_limit(run.step + 1) == math.inf
    assert not run.show(9.0, 9.0).readings.repeated_spike
    run.monitor.load_state_dict(single)
    assert math.isfinite(run.spike_limit(run.step + 1))


@pytest.mark.parametrize("block", [2, 3, 4, 5, 8])
def test_harder_data_in_blocks_are_learnt(run, block):
    """Of a healthy run whose batches come from a harder source now and then, nothing is left out."""
    for _ in range(20):
        run.calm(60).show(*[3.0] * block)
        assert not run.readings.repeated_spike


def test_not_finite_losses_leave_a_row_as_it_is(run):
    """A NaN says nothing of whether the spike is over."""
    run.show(9.0, 9.0).show(math.nan, withheld="nonfinite")
    assert not run.readings.repeated_spike
    run.show(9.0)
    assert run.readings.repeated_spike


def test_a_norm_that_is_not_finite_leaves_a_row_as_it_is(run):
    """An overflow of the scaler, or an infinite norm over a finite loss, neither counts for a row nor ends it."""
    run.show(9.0).show(9.0, grad_norm=math.inf, withheld="amp_overflow", amp_loss_scale=1024.0)
    run.show(2.0, grad_norm=math.inf, withheld="nonfinite")
    assert not run.readings.repeated_spike
    run.show(9.0)
    assert run.readings.repeated_spike


def test_a_step_that_is_evaluated_again_counts_once(run):
    """A closure's later evaluations neither go on with a row nor end it."""
    for losses in ([9.0, 9.0, 2.0], [9.0, 2.0]):
        told = []
        for place, loss in enumerate(losses):
            run.step -= place > 0
            told.append(run.show(loss, again=place > 0).readings.repeated_spike)
    assert told == [True, False]


@pytest.mark.parametrize("all_spikes", [False, True])
def test_what_is_planned_is_no_spike(all_spikes):
    """For the first step of other data, and for all until it has been taken in, there is no limit; then a new one."""
    run = Run(DetectionConfig(warmup_steps=WARM, planned_change_steps=(WARM + 3,))).calm(WARM)
    limits = [run.monitor.spike_limits(step, all_spikes=all_spikes) for step in range(WARM + 1, WARM + 6)]
    assert [math.isfinite(loss) for loss, _ in limits] == [True, True, False, False, False]
    run.calm(2)
    for _ in range(3):
        assert not run.calm(1, level=9.0).readings.repeated_spike
    run.calm(WARM, level=9.0)
    assert math.isfinite(run.monitor.spike_limits(run.step + 1, all_spikes=all_spikes)[0])


def test_in_warm_up_there_is_no_spike_limit():
    """Nothing finite is withheld before the robust detectors are warm."""
    run = Run().calm(WARM - 1)
    assert run.monitor.band_limits == (math.inf, math.inf)
    assert run.spike_limit(WARM) == math.inf


def test_the_rows_rewind_with_the_weights(run):
    """What is known of rows of spikes is in the state; an older state has none."""
    before = run.monitor.state_dict()
    run.show(9.0, 9.0).calm(1)
    assert run.spike_limit(run.step + 1) == math.inf
    after = json.loads(json.dumps(run.monitor.state_dict()))
    run.monitor.load_state_dict(before)
    assert math.isfinite(run.spike_limit(run.step + 1))
    run.show(9.0, 9.0)
    assert run.readings.repeated_spike
    run.monitor.load_state_dict(before)
    assert not run.calm(1).readings.repeated_spike
    run.monitor.load_state_dict(after)
    assert run.spike_limit(run.step + 1) == math.inf
    del after["spikes"]
    run.monitor.load_state_dict(after)
    assert math.isfinite(run.spike_limit(run.step + 1))


def test_a_loss_scale_out_of_its_range_acts(run):
    """A collapse is a verdict that acts, and a reading; without a scaler there is none."""
    run.calm(5)
    run.show(2.0, amp_loss_scale=1024.0)
    assert not run.readings.amp_scale_collapsed
    run.show(2.0, amp_loss_scale=0.5)
    assert run.readings.amp_scale_collapsed
    assert run.acting()[-1][1:] == ("drift", "amp_loss_scale")
    run.show(2.0, amp_loss_scale=1024.0)
    assert not run.readings.amp_scale_collapsed


def test_baselines_are_frozen_while_the_loss_is_unrecovered(run):
    """From the first bad step to the recovery, no baseline learns from the loss or from the gradient (R7)."""
    before = run.baselines()
    run.calm(150, level=3.0)
    assert run.readings.loss_unrecovered_steps == 150
    assert run.baselines() == before
    run.calm(9)
    assert run.readings.loss_unrecovered_steps == 0
    assert run.baselines() != before


def test_a_gradient_outlier_teaches_neither_baseline(run):
    """A gradient that surges leaves both averages where they were, also the one of its calm loss."""
    before = run.baselines()
    run.show(2.0, grad_norm=50.0)
    assert {said[1:] for said in run.said} == {("robust", "grad_norm"), ("ema_ratio", "grad_norm")}
    assert run.baselines()[:2] == before[:2]
    assert run.baselines()[3] == before[3]


def test_a_surge_is_ten_times_the_baseline(run):
    """The limit told to the probe is `grad_norm_ratio` times the baseline that it may clip to (R10)."""
    assert run.monitor.surge_above == pytest.approx(10.0 * run.monitor.grad_norm_baseline)
    limit = run.monitor.surge_above
    run.show(2.0, grad_norm=limit * 0.999)
    assert ("ema_ratio", "grad_norm") not in {said[1:] for said in run.said}
    assert run.monitor.surge_above == limit
    run.show(2.0, grad_norm=limit * 1.001)
    assert ("ema_ratio", "grad_norm") in {said[1:] for said in run.said}


def test_the_unrecovered_count_begins_at_the_onset(run):
    """Steps that were suspicious before the verdict belong to the count."""
    center, scale = run.readings.loss_robust_center, run.readings.loss_robust_scale
    counts = []
    for score in (4.1, 12.0):
        run.show(center + score * scale)
        counts.append(run.readings.loss_unrecovered_steps)
    assert counts == [0, 2]


def test_the_unrecovered_count_survives_batch_noise(run):
    """Good steps among the bad ones do not begin the count anew; eight good ones of ten end it."""
    run.show(*([3.0, 3.0, 2.0] * 60))
    assert run.readings.loss_unrecovered_steps == 180
    run.show(*[2.0] * 5)
    assert run.readings.loss_unrecovered_steps == 185
    run.show(2.0)
    assert run.readings.loss_unrecovered_steps == 0


def test_a_loss_that_stays_higher_than_it_was_in_a_wide_band_is_not_back():
    """Damaged weights that train on, a third above the level for good: each step alone is noise, and the count goes on.

    A step's noise is a tenth of the loss, so the band reaches far beyond a third. Back at the level, it ends.
    """
    run = Run()

    def noisy(level, steps):
        run.show(*(level * (1.0 + run.noise.normal(0.0, 0.1)) for _ in range(steps)))
        return run.readings.loss_unrecovered_steps

    assert noisy(2.0, WARM) == 0
    assert noisy(6.0, 10) == 10
    assert noisy(2.7, 200) == 210
    assert noisy(2.0, 20) == 0


def test_one_bad_step_is_recovered_after_eight_good_ones(run):
    """A single spike is unrecovered for as long as it takes to see that it was single."""
    run.show(6.0)
    counts = [run.calm(1).readings.loss_unrecovered_steps for _ in range(8)]
    assert counts == [2, 3, 4, 5, 6, 7, 8, 0]


def test_a_level_that_lasts_is_accepted_after_the_limit():
    """After `relearn_steps` the new level becomes the normal one, all counts end, and it can be left again (R7)."""
    run = Run(DetectionConfig(warmup_steps=WARM, relearn_steps=300)).calm(WARM)
    run.calm(299, level=8.0)
    assert run.readings.loss_unrecovered_steps == 299
    assert run.readings.loss_high_steps[3.0] == 299
    run.calm(1, level=8.0)
    assert run.readings.loss_unrecovered_steps == 0
    for _ in range(30):
        run.calm(1, level=8.0)
        assert run.readings.loss_unrecovered_steps == 0
        assert set(run.readings.loss_high_steps.values()) == {0}
    run.calm(200, level=8.0)
    assert run.readings.loss_ema == pytest.approx(8.0, rel=0.02)
    said = len(run.acting())
    run.show(20.0)
    assert run.acting()[said:] == [(run.step, "robust", "loss")]


def test_high_steps_reach_200_at_exactly_200_bad_steps(run):
    """A loss at 3.5 x its baseline is above 3 x for 200 consecutive steps after exactly 200 of them (R1 + R4)."""
    level = run.readings.loss_ema
    run.show(*[3.5 * level] * 199)
    assert run.readings.loss_high_steps == {1.2: 199, 1.5: 199, 2.0: 199, 3.0: 199}
    run.show(3.5 * level)
    assert run.readings.loss_high_steps[3.0] == 200
    run.show(2.5 * level)
    assert run.readings.loss_high_steps == {1.2: 201, 1.5: 201, 2.0: 201, 3.0: 0}
    run.calm(1)
    assert set(run.readings.loss_high_steps.values()) == {0}


def test_a_value_that_is_not_finite_ends_no_count_and_begins_none(run):
    """NaN in the middle of a bad stretch is no good step; out of the blue it is none above a level."""
    run.show(math.nan)
    assert set(run.readings.loss_high_steps.values()) == {0}
    run.calm(20)
    run.show(*[7.0] * 5, math.nan, math.inf, *[7.0] * 5)
    assert run.readings.loss_high_steps[3.0] == 12


def test_gradient_high_steps_are_counted_by_level(run):
    """Consecutive steps above 3 x and 10 x the gradient's baseline are counted apart."""
    level = run.readings.grad_norm_ema
    run.show(2.0, 2.0, grad_norm=20 * level)
    run.show(2.0, grad_norm=5 * level)
    assert run.readings.grad_norm_high_steps == {3.0: 3, 10.0: 0}


def test_readings_are_of_the_steps_before(run):
    """A step's ratio and scores are to the baselines that it has not touched yet."""
    before = run.readings
    run.show(2.05, grad_norm=1.05)
    assert run.readings.loss_ema_ratio == pytest.approx(2.05 / before.loss_ema)
    assert run.readings.grad_norm_ema_ratio == pytest.approx(1.05 / before.grad_norm_ema)
    score = (2.05 - before.loss_robust_center) / before.loss_robust_scale
    assert run.readings.loss_robust_score == pytest.approx(score)
    assert run.readings.loss_zscore == pytest.approx((2.05 - run.readings.loss_mean) / run.readings.loss_stddev)


def test_comparison_detectors_do_not_act(run):
    """`rolling_sigma` and the loss's `ema_ratio` are said and shown, but open no incident (R7)."""
    run.show(20.0)
    assert {said[1:] for said in run.said} == {("rolling_sigma", "loss"), ("ema_ratio", "loss"), ("robust", "loss")}
    assert {said[1:] for said in run.acting()} == {("robust", "loss")}


@pytest.mark.parametrize("cut", [FAULT - 300, FAULT - 40, FAULT + 5])
def test_a_state_put_back_goes_on_the_same(cut):
    """A new monitor with the state of another, through JSON, reads and says the same from then on."""
    values, first = CURVES["jump"](1)[400:], Monitor(CONFIG)
    cut -= 400
    for step, loss in enumerate(values[:cut]):
        first.update(signals(step, loss))
    second = Monitor(CONFIG)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step, loss in enumerate(values[cut : cut + 100], cut):
        assert repr(second.update(signals(step, loss))) == repr(first.update(signals(step, loss)))


def test_every_count_goes_back(run):
    """Counts of withheld, high and unrecovered steps are part of the state."""
    run.show(7.0, math.nan, 7.0, withheld="nonfinite", grad_norm=20.0)
    other = Monitor(CONFIG)
    other.load_state_dict(run.monitor.state_dict())
    seen = signals(run.step + 1, 7.0, withheld="nonfinite", grad_norm=20.0)
    readings, _ = other.update(seen)
    assert readings.withheld_steps == readings.loss_unrecovered_steps == 4
    assert readings.loss_high_steps[3.0] == readings.grad_norm_high_steps[10.0] == 4


def test_weights_that_jump_are_read_as_of_the_step_before(run):
    """What a step's signals say of the layers is what the step before has made of them; a rollback undoes it."""
    other, stored = Monitor(CONFIG), run.monitor.state_dict()
    other.load_state_dict(stored)
    last = run.step
    for norm in (10.0, 10.1, 10.2, 10.3, 10.4, 20.8):
        layers = {"wte": LayerReading(
            weight_norm=norm, update_ratio=None, first_moment_norm=None, second_moment_norm=None, activation_max=None,
            elements=1000,
        )}  # fmt: skip
        for number in range(50):
            last += 1
            readings, _ = other.update(signals(last, 2.0, layers={} if number else layers))
            assert (readings.weight_jump is not None) == (norm > 20.0)
    assert readings.weight_jump == (last - 100, last - 50, "wte", pytest.approx(2.0))
    other.load_state_dict(stored)
    assert other.readings().weight_jump is None


def test_a_state_of_before_a_part_was_there_is_read(run):
    """The youngest parts begin anew where an older checkpoint knows nothing of them."""
    stored = {name: part for name, part in run.monitor.state_dict().items() if name not in ("layers", "weight_jumps")}
    Monitor(CONFIG).load_state_dict(stored)


def test_a10_after_a_rollback_old_steps_raise_no_alarm():
    """With the state of step 450 put back, the repeated steps are judged as if nothing had been (case A10)."""
    monitor, values = Monitor(CONFIG), decay(2)
    for step in range(1, 451):
        monitor.update(signals(step, values[step]))
    stored = monitor.state_dict()
    for step in range(451, 503):
        monitor.update(signals(step, values[step] * (4.0 if step >= 500 else 1.0)))
    assert monitor.update(signals(503, 8.0))[0].loss_unrecovered_steps == 4
    monitor.load_state_dict(stored)
    assert monitor.state_dict() == stored
    for step in range(451, 520):
        readings, verdicts = monitor.update(signals(step, values[step]))
        assert [v for v in verdicts if (v.detector, v.signal) in Monitor.ACTING] == []
        assert readings.loss_unrecovered_steps == 0


def test_repeats_within_a_window_are_each_found():
    """Three spikes within one window are three detections (masking)."""
    monitor, said = Monitor(CONFIG), []
    for step, loss in enumerate(CURVES["repeats"](0)):
        said += [v.step for v in monitor.update(signals(step, loss))[1] if v.detector == "robust"]
    assert said == [FAULT, FAULT + 10, FAULT + 20]
    assert step == STEPS - 1


def test_readings_may_be_asked_for_later(run):
    """`judge` is `update` without the readings, which can be had afterwards: old logs do without most of them."""
    other = Monitor(CONFIG)
    other.load_state_dict(run.monitor.state_dict())
    for loss in (2.0, 6.0, math.nan, 2.0):
        run.step += 1
        seen = signals(run.step, loss)
        readings, verdicts = run.monitor.update(seen)
        assert other.judge(seen) == verdicts or not math.isfinite(loss)
        assert repr(other.readings()) == repr(readings)


def test_the_state_stays_small():
    """However long a run, the windows are all there is: no more numbers after 6,000 steps than their sizes allow."""
    run = Run().calm(6000)
    state = json.dumps(run.monitor.state_dict())
    assert len(state.split(",")) < 1000


@pytest.mark.parametrize("level", [2.2, 3.0, 1.6])
def test_a_planned_change_of_the_data_is_no_incident_and_a_spike_after_it_is(level):
    """From a step that the user has named the level is another one, for good; without his word it is a fault."""
    planned = Run(DetectionConfig(warmup_steps=WARM, planned_change_steps=(WARM + 301,))).calm(WARM + 300)
    planned.calm(1500, level=level)
    assert planned.acting() == []
    planned.show(1.5 * level)
    assert planned.acting() == [(planned.step, "robust", "loss")]
    unplanned = Run().calm(WARM + 300).calm(300, level=level)
    assert bool(unplanned.acting()) is (level > 2.0)

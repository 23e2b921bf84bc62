"""The detectors: which of them speaks about which curve, at which step, and what they remember."""

import json
import math

import numpy as np
import pytest
from curves import CURVES, FAULT, HEALTHY, STEPS, WARMUP_FAULT, decay, signals, worked_example

from trainer_plugin.detection.detectors import DetectionConfig, EmaRatio, RollingSigma
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.recovery import Recovery
from trainer_plugin.detection.robust import Robust

DEFAULT = DetectionConfig()
DETECTORS = {
    "textbook": lambda warmup=DEFAULT.warmup_steps: EmaRatio(
        "loss", alpha=DEFAULT.ema_alpha, ratio=DEFAULT.loss_ratio, warmup_steps=warmup, textbook=True
    ),
    "ema_ratio": lambda warmup=DEFAULT.warmup_steps: EmaRatio(
        "loss", alpha=DEFAULT.ema_alpha, ratio=DEFAULT.loss_ratio, warmup_steps=warmup
    ),
    "rolling_sigma": lambda warmup=DEFAULT.warmup_steps: RollingSigma(
        "loss", window=DEFAULT.window, sigma=DEFAULT.sigma, warmup_steps=warmup
    ),
    "robust": lambda warmup=DEFAULT.warmup_steps: Robust(
        "loss", window=DEFAULT.robust_window, score=DEFAULT.robust_score, warmup_steps=warmup
    ),
    "robust_log": lambda warmup=DEFAULT.warmup_steps: Robust(
        "grad_norm", window=DEFAULT.robust_window, score=DEFAULT.robust_score, warmup_steps=warmup, log=True
    ),
}
SPIKE = [FAULT]
JUMP = list(range(FAULT, STEPS))
AFTER_NAN = [FAULT + 1]
REPEATS = [FAULT, FAULT + 10, FAULT + 20]
# Curve -> the steps at which (textbook, rolling_sigma, robust) speak.
SPEAKS = {
    "spike": (SPIKE, SPIKE, SPIKE),
    "small_spike": ([], SPIKE, SPIKE),  # A ratio of 3 is blind to half as much again.
    "jump": ([], JUMP[:4], JUMP),  # The window of R2 swallows a new level in four steps.
    "repeats": (SPIKE, SPIKE, REPEATS),  # Masking: the first spike widens the window of R2 for the others.
    "not_finite": ([], [], []),
    "after_nan": (AFTER_NAN, AFTER_NAN, AFTER_NAN),
    "warmup_spike": (SPIKE, SPIKE, SPIKE),
    **dict.fromkeys(HEALTHY, ([], [], [])),
}


def verdicts(detector, values, first_step=0):
    """Every verdict over a curve."""
    said = (detector.update(first_step + i, float(value)) for i, value in enumerate(values))
    return [verdict for verdict in said if verdict is not None]


def steps(detector, values):
    """The steps at which a detector speaks over a curve."""
    return [verdict.step for verdict in verdicts(detector, values)]


def numbers(state):
    """Every number in a state."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list):
        return [number for part in state for number in numbers(part)]
    return [] if state is None else [state]


@pytest.mark.parametrize("curve", SPEAKS)
def test_each_detector_speaks_at_these_steps_and_at_no_other(curve):
    """Every detector finds in every curve the steps that the table gives it, and nothing else."""
    values = CURVES[curve](0)
    said = tuple(steps(DETECTORS[name](), values) for name in ("textbook", "rolling_sigma", "robust"))
    assert said == SPEAKS[curve]


@pytest.mark.parametrize("curve", HEALTHY)
def test_acting_detectors_are_silent_on_healthy_runs(curve):
    """The detectors that act by default say nothing about a healthy run, whatever the noise."""
    for seed in range(1, 4):
        for name in ("ema_ratio", "robust", "robust_log"):
            assert steps(DETECTORS[name](), CURVES[curve](seed)) == [], (name, seed)


def test_a_large_jump_is_swallowed_by_all_but_robust():
    """A lasting jump to 4 x is soon normal to the EMA and to the window, but never to the robust detector."""
    values = CURVES["large_jump"](0)
    said = {name: steps(DETECTORS[name](), values) for name in ("textbook", "rolling_sigma", "robust")}
    assert said["robust"] == JUMP
    assert said["rolling_sigma"] == JUMP[:4]
    assert said["textbook"] == JUMP[: len(said["textbook"])]
    assert 5 <= len(said["textbook"]) <= 15


def test_a_climb_is_no_matter_for_a_ratio():
    """A climb of 1 % a step over 30 steps is never found by a ratio of 3 (by `drift` it is: see there)."""
    for seed in range(3):
        assert steps(DETECTORS["textbook"](), CURVES["climb"](seed)) == []


def test_heavy_tails_make_robust_speak_less_than_a_plain_deviation():
    """Over noise with heavy tails the robust detector cries wolf in no more than 2 of 1,000 steps, R2 in more."""
    said = {name: sum(len(steps(DETECTORS[name](), CURVES["heavy_tails"](seed))) for seed in range(5))
            for name in ("rolling_sigma", "robust", "ema_ratio")}  # fmt: skip
    judged = 5 * (STEPS - DEFAULT.warmup_steps)
    assert said["ema_ratio"] == 0
    assert said["robust"] <= 2 * judged / 1000 < said["rolling_sigma"]


@pytest.mark.parametrize("name", DETECTORS)
def test_no_finite_value_is_a_spike_in_warmup(name):
    """In warm-up nothing finite is found, at its last step neither; at the step after it is."""
    values = decay(0)
    values[WARMUP_FAULT] = 1e6
    values[DEFAULT.warmup_steps - 1] = 1e9
    assert steps(DETECTORS[name](), values[: DEFAULT.warmup_steps]) == []
    values = decay(0)
    values[DEFAULT.warmup_steps] = 1e9
    assert steps(DETECTORS[name](), values[: DEFAULT.warmup_steps + 1]) == [DEFAULT.warmup_steps]


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("curve", ["jump", "repeats", "after_nan"])
def test_a_state_put_back_gives_the_same_verdicts(name, curve):
    """A detector that takes over a state in the middle of a deviation, through JSON, says what the first one says."""
    values = CURVES[curve](3)
    for cut in (FAULT - 1, FAULT + 1, FAULT + 15):
        first, second = DETECTORS[name](), DETECTORS[name]()
        verdicts(first, values[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = verdicts(first, values[cut : FAULT + 60], cut)
        assert verdicts(second, values[cut : FAULT + 60], cut) == rest
        assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("name", DETECTORS)
def test_a10_going_back_forgets_what_came_after(name):
    """A state put back into the same detector holds nothing of the steps that were undone (case A10)."""
    detector, values = DETECTORS[name](), CURVES["jump"](0)
    verdicts(detector, values[: FAULT - 50])
    before = detector.state_dict()
    verdicts(detector, values[FAULT - 50 :], FAULT - 50)
    detector.load_state_dict(before)
    assert detector.state_dict() == before
    assert verdicts(detector, decay(0)[FAULT - 50 :], FAULT - 50) == []


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_but_numbers_enters_a_state(name, bad):
    """A value that is not finite changes no state and is no verdict, in warm-up and after it (R5)."""
    detector = DETECTORS[name](100)
    for step, value in enumerate(decay(0)[:300]):
        detector.update(step, float(value))
        if step in (0, 50, 120, 299):
            before = detector.state_dict()
            assert detector.update(step, bad) is None
            assert repr(detector.state_dict()) == repr(before)
    assert all(math.isfinite(number) for number in numbers(detector.state_dict()))


@pytest.mark.parametrize("name", DETECTORS)
def test_the_largest_loss_of_single_precision_is_survived(name):
    """A loss at the end of float32's range is judged without an overflow, and the state stays finite."""
    detector = DETECTORS[name](100)
    values = decay(0)[:300]
    values[200:203] = 3.4e38
    assert steps(detector, values)[0] == 200
    assert all(math.isfinite(number) for number in numbers(detector.state_dict()))


def test_worked_example_of_the_rolling_deviation_to_the_digit():
    """The published example comes out digit by digit, aftershocks hidden by masking included."""
    detector = RollingSigma("loss", window=50, sigma=3.5, warmup_steps=0)
    found = [(v.step, round(v.value, 3), round(v.baseline, 3)) for v in verdicts(detector, worked_example())]
    assert found == [(100, 3.369, 1.258), (180, 1.848, 0.734), (240, 1.805, 0.541)]


@pytest.mark.parametrize("textbook", [True, False])
def test_worked_example_is_invisible_to_the_ratio_of_three(textbook):
    """`ema_ratio` at 3.0 finds none of the three spikes of that example."""
    detector = EmaRatio("loss", alpha=0.99, ratio=3.0, warmup_steps=0, textbook=textbook)
    assert steps(detector, worked_example()) == []


@pytest.mark.parametrize("size", [1e3, 1e12, 1e300])
def test_textbook_ema_hides_any_jump_within_40_steps(size):
    """The trap: updated first and compared then, at alpha 0.99 no jump is above 3 x EMA for more than 40 steps."""
    detector = EmaRatio("loss", alpha=0.99, ratio=3.0, warmup_steps=0, textbook=True)
    said = steps(detector, [1.0] * 1000 + [size] * 1000)
    assert said == list(range(1000, 1000 + len(said)))
    assert len(said) <= 40
    assert len(said) == 40 or size < 1e12  # The bound is reached.


def test_textbook_compares_after_the_update_and_the_other_form_before_it():
    """The textbook form takes any value in and compares then; the other compares first and takes in a limited one."""
    textbook = EmaRatio("loss", alpha=0.5, ratio=1.5, warmup_steps=0, textbook=True)
    free = EmaRatio("loss", alpha=0.5, ratio=1.5, warmup_steps=0)
    said = [detector.update(step, value) for detector in (textbook, free) for step, value in enumerate((1.0, 4.0))]
    assert [verdict.baseline for verdict in said if verdict] == [2.5, 1.0]
    assert textbook.ema == 2.5
    assert free.ema == 0.5 * 1.0 + 0.5 * 1.5


def test_a_wild_value_in_warmup_does_not_blind_the_average():
    """A norm a million times too large, met before anything is judged, moves the average by a tenth at most."""
    free = EmaRatio("grad_norm", alpha=0.99, ratio=10.0, warmup_steps=500)
    for step in range(100):
        free.update(step, 1.0)
    free.update(100, 1e6)

    assert free.ema == pytest.approx(1.09)


def test_ema_does_not_learn_when_told_so():
    """With `learn` off a value is judged and leaves no trace in the average."""
    detector = EmaRatio("loss", alpha=0.99, ratio=3.0, warmup_steps=0)
    detector.update(0, 1.0)
    assert all(detector.update(step, 3.5, learn=False) for step in range(1, 500))
    assert detector.ema == 1.0
    assert detector.update(500, 3.0, learn=False) is None  # Strictly above.


def test_a_ratio_needs_a_positive_average():
    """No average yet, or one that is not above zero, gives no ratio and no verdict."""
    detector = EmaRatio("loss", alpha=0.99, ratio=3.0, warmup_steps=0)
    assert math.isnan(detector.ratio(1.0))
    detector.update(0, 0.0)
    assert math.isnan(detector.ratio(1.0))
    assert detector.update(1, 5.0, learn=False) is None


def test_a_deviation_is_around_the_mean():
    """Of losses with mean 2 and deviation 0.05, 2.29 is within 6 deviations and 2.31 is not (case P17)."""
    for value, expected in ((2.29, []), (2.31, [100])):
        detector = RollingSigma("loss", window=100, sigma=6.0, warmup_steps=0)
        assert steps(detector, [1.95, 2.05] * 50 + [value]) == expected
        assert detector.mean == pytest.approx(2.0)
        assert detector.stddev == pytest.approx(0.05)
        assert detector.zscore(value) == pytest.approx((value - 2.0) / 0.05)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_p17_what_is_not_finite_never_enters_the_history(spoilt):
    """With a NaN or infinity after every tenth of 100 losses, mean, deviation and the edge at 2.30 are the same."""
    for value, expected in ((2.29, []), (2.31, [110])):
        detector = RollingSigma("loss", window=100, sigma=6.0, warmup_steps=0)
        losses = [loss for _ in range(10) for loss in [*[1.95, 2.05] * 5, spoilt]]
        assert steps(detector, [*losses, value]) == expected
        assert (detector.mean, detector.stddev) == (pytest.approx(2.0), pytest.approx(0.05))
        assert len(detector.state_dict()["values"]) == 100
        assert all(map(math.isfinite, detector.state_dict()["values"]))


@pytest.mark.parametrize("count", [0, 1, 2, 19, 99])
def test_p17_too_short_a_history_flags_no_finite_value(count):
    """After fewer values than the window even 1e9 is no verdict, and none of R1, R2 and R7 speaks in a young run."""
    detector = RollingSigma("loss", window=100, sigma=6.0, warmup_steps=0)
    assert steps(detector, [*([1.95, 2.05] * 50)[:count], 1e9]) == []
    if count < 20:
        monitor = Monitor(DetectionConfig(window=100, warmup_steps=20, robust_window=20))
        for step, loss in enumerate([*([1.95, 2.05] * 50)[:count], 1e9]):
            assert monitor.update(signals(step, loss, grad_norm=1.0))[1] == []


def test_a_spike_is_not_part_of_its_own_window():
    """A huge spike reaches any threshold, since it is not in the window that it is held against (case R04)."""
    rng = np.random.default_rng(0)
    values = [*rng.normal(2.0, 0.08, 20), 20.0]
    detector = RollingSigma("loss", window=20, sigma=50.0, warmup_steps=0)
    assert steps(detector, values) == [20]
    assert detector.zscore(20.0) > 100


def test_too_short_a_history_judges_nothing():
    """With fewer values than the window (or than 20, for the robust one) no finite value is found (case P17)."""
    assert steps(RollingSigma("loss", window=50, sigma=3.5, warmup_steps=0), [1.0, 1.1] * 24 + [1e6]) == []
    assert steps(DETECTORS["robust"](0), [1.0, 1.1] * 9 + [1e6]) == []
    assert steps(DETECTORS["robust"](0), [1.0, 1.1] * 10 + [1e6]) == [20]


def test_a_constant_window_has_no_score():
    """A loss that never changes has no deviations to count in: NaN, not infinity (case R03)."""
    detector = DETECTORS["rolling_sigma"](0)
    steps(detector, CURVES["frozen"](0)[:100])
    assert detector.stddev == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(RollingSigma("loss", window=50, sigma=3.5, warmup_steps=0).zscore(1.0))


def test_rounding_on_a_constant_loss_is_no_outlier():
    """Over a constant window the robust scale is a per mille of the level, so that rounding is no spike."""
    detector = DETECTORS["robust"](0)
    assert steps(detector, [2.0] * 100 + [2.001, 2.0]) == []
    assert detector.scale == pytest.approx(0.002)
    assert steps(detector, [2.1]) == [0]


def test_outliers_are_kept_out_of_the_robust_window():
    """The window holds the accepted values only: the center moves no step during a spike of any length."""
    detector = DETECTORS["robust"]()
    steps(detector, decay(0)[:FAULT])
    center, scale = detector.center, detector.scale
    verdicts(detector, [50.0] * 300, FAULT)
    assert (detector.center, detector.scale) == (center, scale)


def test_a_verdict_says_where_its_deviation_began():
    """The first of the unbroken suspicious steps up to a verdict is its first step."""
    detector = Robust("loss", window=128, score=8.0, warmup_steps=100)
    steps(detector, [1.9, 2.0, 2.1] * 50)
    center, scale = detector.center, detector.scale
    values = [center + scale * score for score in (5.0, 3.9, 4.1, 6.0, 9.0, 10.0, 3.9, 20.0)]
    found = [(v.step, v.first_step) for v in verdicts(detector, values, 200)]
    assert found == [(204, 202), (205, 202), (207, 207)]


def test_log_and_least_ratio_suit_a_skewed_signal():
    """In logarithms a fall is no outlier, zero is survived, and what does not reach the least ratio is no verdict."""

    def detector():
        return Robust("grad_norm", window=128, score=8.0, warmup_steps=0, log=True, least_ratio=3.0)

    calm = [0.99, 1.0, 1.01] * 20
    assert steps(detector(), [*calm, 2.5, 2.9]) == []
    assert steps(detector(), [*calm, 3.1]) == [60]
    assert steps(detector(), [*calm, 1e-9, 0.0, 1.0]) == []
    judge = detector()
    steps(judge, calm)
    assert judge.center == pytest.approx(1.0)


def test_a_new_level_is_learnt_when_told_so():
    """After `relearn` nothing is found until the window has values again, and then by the new level."""
    detector = DETECTORS["robust"](0)
    steps(detector, [1.9, 2.0, 2.1] * 40)
    detector.relearn()
    assert not detector.warm
    assert steps(detector, [3.9, 4.0, 4.1] * 40) == []
    assert detector.center == pytest.approx(4.0)
    assert steps(detector, [8.0]) == [0]


def test_recovery_counts_from_the_onset():
    """The count begins at the step where the deviation began, not where it was found."""
    recovery = Recovery()
    assert recovery.update(10, left_at=None, inside=True) == 0
    assert recovery.update(11, left_at=9, inside=False) == 3
    assert recovery.update(12, left_at=12, inside=False) == 4  # A verdict in between begins no new count.


@pytest.mark.parametrize(
    ("inside", "ends"),
    [
        ("1" * 8, 8),
        ("0" * 5 + "1" * 8, 13),
        ("11110" + "1111", 9),  # One bad step does not undo the others...
        ("1111100" + "111", 10),
        ("1110001110001110001" + "1" * 7, 26),  # ...but noise is no recovery: 8 of the last 10.
        ("1" * 7 + "0" * 3 + "1" * 8, 18),
    ],
)
def test_recovery_is_eight_of_the_last_ten(inside, ends):
    """The count ends at the step that makes eight of the last ten good, and not before."""
    recovery = Recovery()
    recovery.update(0, left_at=0, inside=False)
    counts = [recovery.update(1 + i, left_at=None, inside=good == "1") for i, good in enumerate(inside)]
    assert next((i + 1 for i, count in enumerate(counts) if not count), None) == ends


@pytest.mark.parametrize("half_life", [10.0, 40.0])
def test_when_a_falling_loss_will_be_back_is_told(half_life):
    """What halves in so many steps is at one deviation when its logarithm says; half the steps are known by then."""
    recovery, steps = Recovery(), 40
    for step in range(steps):
        recovery.update(step, left_at=0, inside=False, distance=64.0 * 0.5 ** (step / half_life))
    assert recovery.back_in_steps == pytest.approx(6.0 * half_life - steps, abs=25.0)


def test_a_loss_that_stays_is_never_back():
    """Nor is one of which too little is known; one that is not away is back."""
    recovery = Recovery()
    assert recovery.back_in_steps == 0.0
    for step in range(60):
        recovery.update(step, left_at=0, inside=False, distance=8.0 + 0.01 * step)
        assert recovery.back_in_steps == math.inf
    recovery.clear()
    assert recovery.back_in_steps == 0.0


def test_the_way_back_is_part_of_the_state():
    """It goes on the same from a state, through JSON."""
    first, second = Recovery(), Recovery()
    for step in range(30):
        first.update(step, left_at=0, inside=False, distance=30.0 - step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.back_in_steps == first.back_in_steps < 60.0


@pytest.mark.parametrize(("above", "ends"), [(0.0, 8), (0.9, 8), (1.1, None), (3.5, None)])
def test_ten_steps_that_are_all_a_little_high_are_no_recovery(above, ends):
    """Steps inside the band that are above the level by a deviation in the mean do not end the count."""
    recovery = Recovery()
    recovery.update(0, left_at=0, inside=False, distance=20.0, far=True)
    counts = [recovery.update(1 + i, left_at=None, inside=True, distance=above, far=True) for i in range(30)]
    assert next((i + 1 for i, count in enumerate(counts) if not count), None) == ends


def test_recovery_state_round_trip():
    """A count put back goes on where it was, the last steps included."""
    first, second = Recovery(), Recovery()
    first.update(5, left_at=3, inside=False)
    for step in range(6, 13):
        first.update(step, left_at=None, inside=True, distance=0.5, far=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.unrecovered_steps == 10
    assert second.update(13, left_at=None, inside=True, distance=5.0, far=True) == 10  # 8.5 deviations in 8 steps.
    assert second.update(14, left_at=None, inside=True) == 0

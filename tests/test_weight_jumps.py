"""Weight jumps: a layer that is thrown further than updates take it, and none that only grows."""

import json
import math

import pytest

from trainer_plugin.detection.weight_jumps import WeightJump, WeightJumps
from trainer_plugin.signals import LayerReading


def reading(weight_norm):
    """A layer with this norm of its weights."""
    return LayerReading(
        weight_norm=weight_norm,
        update_ratio=None,
        first_moment_norm=None,
        second_moment_norm=None,
        activation_max=None,
    )


def grown(*norms, every=50, jumps=None, learn=True):
    """What has seen these norms of one layer, one every 50 steps, from step 50 on."""
    jumps = WeightJumps() if jumps is None else jumps
    for number, norm in enumerate(norms, 1):
        jumps.update(number * every, {"wte": reading(norm)}, learn=learn)
    return jumps


GROWING = [10.0 * 1.03**number for number in range(8)]


@pytest.mark.parametrize("times", [30.0, 1.4, 0.6])
def test_a_layer_that_is_thrown_is_named_with_where(times):
    """Up or down: between which steps, and how far."""
    jumps = grown(*GROWING, times * GROWING[-1])
    assert jumps.last == WeightJump(400, 450, "wte", pytest.approx(times))


@pytest.mark.parametrize(
    "norms",
    [
        [*GROWING, 1.09 * GROWING[-1]],  # Three times the usual, yet a tenth at most.
        [1.0, 1.8, 1.5, 1.9, 2.4, 2.2, 2.9],  # A small layer of a young run.
        [10.0, 10.0, 10.0, 10.0, 30.0],  # Three changes are no habit yet.
        [0.0, 0.0, 1.0, 2.0, 3.0],  # What begins at 0 has no ratio.
        [*GROWING, math.inf, math.nan, GROWING[-1]],  # The business of others.
    ],
)
def test_growth_is_no_jump(norms):
    """Healthy layers change by much, early on and where they are small."""
    assert grown(*norms).last is None


def test_a_jump_is_told_once_and_is_nothing_to_get_used_to():
    """The next reading is held against the new norm, and by the old habit."""
    jumps = grown(*GROWING, 30.0)
    jumps.update(500, {"wte": reading(30.9)}, learn=True)
    assert jumps.last.last_step == 450
    jumps.update(550, {"wte": reading(60.0)}, learn=True)
    assert jumps.last.last_step == 550


def test_an_incident_teaches_nothing():
    """What is only judged moves the norm to compare with, and not what is usual."""
    jumps = grown(*GROWING)
    usual = jumps.state_dict()["wte"][2]
    jumps.update(450, {"wte": reading(1.09 * GROWING[-1])}, learn=False)
    assert jumps.last is None
    assert jumps.state_dict()["wte"][2] == usual


def test_it_goes_back_with_the_weights():
    """After a rollback the jump is undone, and the layer is held against what it was at the checkpoint."""
    jumps = grown(*GROWING)
    kept = json.loads(json.dumps(jumps.state_dict()))
    jumps.update(450, {"wte": reading(99.0)}, learn=True)
    jumps.load_state_dict(kept)
    assert jumps.last is None
    jumps.update(450, {"wte": reading(1.03 * GROWING[-1])}, learn=True)
    assert jumps.last is None
    jumps.update(500, {"wte": reading(99.0)}, learn=True)
    assert jumps.last.after_step == 450


def test_steps_that_come_again_are_not_held_against_those_before():
    """A loop that counts on while the weights went back: the same or an earlier step is a new beginning."""
    jumps = grown(*GROWING)
    jumps.update(400, {"wte": reading(99.0)}, learn=True)
    assert jumps.last is None


def test_a_norm_beyond_all_numbers_is_told_as_far_as_json_knows_them():
    """From the least to the largest number there is, the ratio stays finite."""
    assert math.isfinite(grown(*[1e-300 * 1.03**number for number in range(8)], 1.7e308).last.ratio)

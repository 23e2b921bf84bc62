"""Weight jumps: a layer that is thrown further than updates take it, and none that only grows."""

import json
import math

import pytest

from trainer_plugin.detection.weight_jumps import WeightJump, WeightJumps
from trainer_plugin.signals import LayerReading


def reading(weight_norm, elements=1000):
    """A layer with this norm of its weights."""
    return LayerReading(
        elements=elements,
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
        [*GROWING, 1.09 * GROWING[-1]],  # Less than a tenth.
        [1.0, 1.8, 1.5, 1.9, 2.4, 2.2, 2.9],  # A small layer of a young run.
        [10.0, 10.0, 10.0, 10.0, 30.0],  # Three changes are no habit yet.
        [0.0, 0.0, 1.0, 2.0, 3.0],  # What begins at 0 has no ratio.
        [*GROWING, math.nan, GROWING[-1]],  # The business of others.
    ],
)
def test_growth_is_no_jump(norms):
    """Healthy layers change by much, early on and where they are small."""
    assert grown(*norms).last is None


@pytest.mark.parametrize(("norm", "least", "most"), [(math.inf, 1e300, 1e305), (0.0, 0.0, 1e-300)])
def test_what_is_beyond_the_norms_of_floats_is_a_jump_and_no_level(norm, least, most):
    """One bit makes 6e35 of a weight: it is finite, its square is not. Back from there, the layer is as it was."""
    jumps = grown(*GROWING, norm)
    assert jumps.last.layer == "wte"
    assert least <= jumps.last.ratio <= most
    told = jumps.last
    jumps.update(500, {"wte": reading(GROWING[-1])}, learn=True)
    assert jumps.last is told


def test_a_layer_of_which_other_weights_are_read_begins_anew():
    """Some were set free or frozen, or a rank could not read its part: another norm, and no weight has moved."""
    jumps = grown(*GROWING)
    jumps.update(450, {"wte": reading(3.0 * GROWING[-1], elements=2000)}, learn=True)
    jumps.update(500, {"wte": reading(GROWING[-1])}, learn=True)
    assert jumps.last is None


def test_a_gate_of_a_few_numbers_may_go_through_zero():
    """Its norm says nothing of damage."""
    jumps = WeightJumps()
    for number, norm in enumerate([*GROWING, 0.01, 3.0]):
        jumps.update(50 * number, {"gate": reading(norm, elements=16)}, learn=True)
    assert jumps.last is None


def test_a_layer_read_in_every_step_is_held_against_fifty_steps_ago():
    """Ten steps of five per cent each are a jump, seen as soon as they are enough."""
    jumps, norm = WeightJumps(), 10.0
    for step in range(1, 311):
        norm *= 1.05 if step > 300 else 1.0001
        jumps.update(step, {"wte": reading(norm)}, learn=True)
    assert jumps.last.last_step in range(302, 311)
    assert jumps.last.ratio > 1.1


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
    usual = jumps.state_dict()["wte"][3]
    jumps.update(450, {"wte": reading(1.09 * GROWING[-1])}, learn=False)
    assert jumps.last is None
    assert jumps.state_dict()["wte"][3] == usual


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

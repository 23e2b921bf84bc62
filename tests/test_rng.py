"""Random generators: all of them draw the same numbers again, from a state that is plain values."""

import random

import numpy as np
import torch

from trainer_plugin.checkpoints.plain import decode_plain, encode_plain
from trainer_plugin.checkpoints.rng import RNG_PARTS, rng_state, set_rng_state


def draw():
    """Numbers of every kind."""
    return random.random(), np.random.rand(3).tolist(), np.random.normal(), torch.rand(3).tolist()  # noqa: NPY002


def test_c14_random_numbers_come_again_through_a_safe_file():
    """Python, numpy and torch draw the same numbers again from bytes that load without running code."""
    draw()
    content = encode_plain(rng_state())
    first = draw()
    set_rng_state(decode_plain(content))
    assert draw() == first


def test_c14_the_parts_are_those_that_a_restore_asks_for():
    """A state has every part by the name under which a restore misses it."""
    assert tuple(rng_state()) == RNG_PARTS

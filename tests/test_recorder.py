"""The flight recorder: the last steps' signals, and what the last three steps began with."""

import enum
import random

import numpy as np
import pytest
import torch
from curves import signals

from trainer_plugin.checkpoints.rng import set_rng_state
from trainer_plugin.scenes.recorder import KEPT_STEPS, Recorder


def recorder_after(step: int, *batches, **options) -> Recorder:
    """A recorder that has seen one step with these batches, from position 7 on."""
    recorder = Recorder(**{"starts": True, **options})
    recorder.begin_step()
    for position, batch in enumerate(batches, start=7):
        recorder.hand_out(batch, position)
        torch.rand(1)  # The forward pass draws.
    recorder.end_step(step)
    recorder.begin_step()
    return recorder


def test_the_last_steps_are_kept_in_order():
    """So many and no more, the newest last."""
    recorder = Recorder(starts=True)
    for step in range(100):
        recorder.add(signals(step, 2.0))
    assert [one.step for one in recorder.signals] == list(range(100 - KEPT_STEPS, 100))


def test_a_step_begins_with_its_batches_and_the_random_state_after_each_was_drawn():
    """From each state the same numbers are drawn as by the forward pass on that batch (case A18)."""
    torch.manual_seed(3)
    recorder = Recorder(starts=True)
    drawn = []
    for position in (7, 8):
        torch.rand(5)  # A collate function draws too, before the batch is handed out.
        recorder.hand_out(torch.full((2,), float(position)), position)
        drawn.append((torch.rand(3).tolist(), random.random()))
    recorder.end_step(1)
    start = recorder.start_of(1)
    assert start.positions == [7, 8]
    assert [batch[0].item() for batch in start.batches] == [7.0, 8.0]
    again = []
    for state in start.rng:
        set_rng_state(state)
        again.append((torch.rand(3).tolist(), random.random()))
    assert again == drawn


def test_only_the_last_three_steps_are_known():
    """An older step's beginning is empty; a step that was run again is the newer one."""
    recorder = Recorder(starts=True)
    for step, position in ((1, 10), (2, 11), (1, 12)):
        recorder.hand_out([position], position)
        recorder.end_step(step)
        recorder.begin_step()
    assert recorder.start_of(1).positions == [12]
    assert recorder.start_of(2).positions == [11]
    for step in (3, 4):
        recorder.end_step(step)
        recorder.begin_step()
    assert recorder.start_of(2).positions == []


def test_a_loop_that_draws_its_own_batches_has_the_random_state_of_the_boundary():
    """Without `next_batch` there are no batches, and one random state: that at the end of the step before."""
    recorder = Recorder(starts=True)
    recorder.end_step(1)
    torch.manual_seed(5)
    recorder.begin_step()
    drawn = torch.rand(3)
    recorder.end_step(2)
    start = recorder.start_of(2)
    assert (len(start.rng), start.batches, start.positions) == (1, [], [])
    set_rng_state(start.rng[0])
    assert torch.equal(torch.rand(3), drawn)


class Odd:
    """What no file of plain values can hold."""


class Source(enum.StrEnum):
    """A text, and of a class that a reader does not have."""

    WEB = "web"


class OwnTensor(torch.Tensor):
    """A tensor of a class that a reader does not have."""


ITSELF: list[object] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([Odd()], "a batch is or holds a Odd, no plain value"),
        ([{"tokens": torch.ones(2)}, (torch.ones(2), [Odd()])], "a batch is or holds a Odd, no plain value"),
        ([torch.empty(1 << 25, dtype=torch.int8), torch.empty((1 << 25) + 1, dtype=torch.int8)], "more than 64 MiB"),
        ([{"weight": np.float64(1.0)}], "a batch is or holds a float64, no plain value"),
        ([{"source": Source.WEB}], "a batch is or holds a Source, no plain value"),
        ([{Source.WEB: 1}], "a batch is or holds a Source, no plain value"),
        ([torch.ones(2).as_subclass(OwnTensor)], "a batch is or holds a OwnTensor, no plain value"),
        ([torch.eye(2).to_sparse()], "a batch is or holds a tensor that is sparse, no plain value"),
        ([torch.empty(2, device="meta")], "a batch is or holds a tensor that is without data, no plain value"),
        ([ITSELF], "a batch is nested too deeply"),
        ([["x" * (1 << 26), b"y"]], "more than 64 MiB"),
    ],
    ids=["odd", "odd inside", "large", "number", "text", "key", "tensor", "sparse", "meta", "itself", "book"],
)
def test_batches_that_cannot_be_stored_are_not_held(batches, why):
    """None of a step's batches is kept, and it is said why; position and random state are."""
    start = recorder_after(1, *batches).start_of(1)
    assert (start.batches, start.left_out) == ([], why)
    assert len(start.rng) == len(start.positions) == len(batches)


def test_nothing_is_held_where_no_scene_is_wanted():
    """Without `starts` no batch and no random state is taken."""
    start = recorder_after(1, torch.ones(2), starts=False).start_of(1)
    assert (start.rng, start.batches) == ([], [])

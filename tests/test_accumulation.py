"""Tests of gradient accumulation: the loss of a step is the mean that was asked for, never a sum."""

import pytest
import torch

from trainer_plugin.step.accumulation import Accumulation


def mean(*micro_batches):
    """The loss, tokens and kind of mean of a step made of `(loss, tokens)`."""
    accumulation = Accumulation()
    for loss, tokens in micro_batches:
        accumulation.add(torch.tensor(loss), tokens=tokens, sample_ids=["a"])
    loss, tokens, ids = accumulation.finish()
    assert ids == ["a"] * len(micro_batches)
    return loss.item(), tokens, accumulation.mean


def test_p12_the_loss_does_not_grow_with_the_micro_batches():
    """Four micro-batches of loss 2.0 make a step of 2.0, not of 8.0."""
    assert mean(*[(2.0, None)] * 4) == (2.0, None, "micro_batch")


def test_p12_the_mean_is_by_token_where_tokens_are_told():
    """100 tokens at 4 and 300 tokens at 2 are 2.5 by token and 3.0 by micro-batch."""
    assert mean((4.0, 100), (2.0, 300)) == (2.5, 400, "token")
    assert mean((4.0, None), (2.0, None)) == (3.0, None, "micro_batch")


def test_tokens_of_some_micro_batches_only_are_not_used():
    """A mean by token needs the tokens of all; without them every micro-batch counts the same."""
    assert mean((4.0, 100), (2.0, None)) == (3.0, None, "micro_batch")


def test_no_tokens_at_all_do_not_divide_by_zero():
    """A step whose micro-batches are all padding has the plain mean."""
    assert mean((4.0, 0), (2.0, 0)) == (3.0, None, "micro_batch")


@pytest.mark.parametrize("end", ["finish", "clear"])
def test_a_new_step_begins_empty(end):
    """What was collected belongs to one step: neither a finished nor a dropped one leaves anything behind."""
    accumulation = Accumulation()
    accumulation.add(torch.tensor(9.0), tokens=5, sample_ids=["old"])
    getattr(accumulation, end)()
    assert accumulation.finish() is None


def test_collecting_keeps_no_graph_and_reads_nothing_on_the_host():
    """Losses on the meta device, where any host read raises, are collected without their graph."""
    accumulation = Accumulation()
    loss = torch.ones((), device="meta", requires_grad=True) * 2
    for tokens in (1, 3):
        accumulation.add(loss, tokens=tokens, sample_ids=[])
    assert not accumulation.finish()[0].requires_grad

"""The weights with which a step began: one copy, of the right moment, handed over for good."""

import pytest
import torch
from torch import nn
from training import tiny_model

from trainer_plugin.scenes.weights import StepWeights, wants_weights


class Tied(nn.Module):
    """Two names for one weight, a buffer that is stored and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("mask", torch.zeros(2), persistent=False)


def test_the_copy_is_of_the_moment_and_made_once_a_step():
    """What changes after it, in this step or later ones, does not change it."""
    model = tiny_model()
    kept = StepWeights(model)
    before = {f"model/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    kept.keep()
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    kept.keep()
    kept.settle()
    kept.end_step(7)
    taken = kept.take(7)
    kept.keep()
    kept.end_step(8)
    assert taken.keys() == before.keys()
    assert all(torch.equal(taken[name], before[name]) for name in before)


def test_a_step_is_known_until_the_next_one_has_begun_and_taken_once():
    """Steps of which nothing was kept, or of long ago, are not known; a step that comes again is the newer one."""
    model = tiny_model()
    kept = StepWeights(model)
    kept.end_step(1)
    assert kept.take(1) is None
    kept.keep()
    kept.end_step(2)
    model[0].bias.data.fill_(5.0)
    kept.keep()
    kept.end_step(2)
    assert kept.take(2)["model/0.bias"][0] == 5.0
    assert kept.take(2) is None
    kept.keep()
    kept.end_step(3)
    kept.keep()
    assert kept.take(3) is None


def test_memory_is_used_again():
    """Step after step the same memory holds the copy, unless it was handed over."""
    model = tiny_model()
    kept = StepWeights(model)
    places = []
    for step in range(4):
        kept.keep()
        kept.end_step(step)
        places.append(kept._past[-1][1]["model/0.weight"].data_ptr())
    assert len(set(places)) == 1


def test_it_holds_what_a_snapshot_holds():
    """Each stored name, tied weights once in memory; buffers that no state_dict has are left out."""
    model = Tied()
    kept = StepWeights(model)
    kept.keep()
    kept.end_step(1)
    taken = kept.take(1)
    assert set(taken) == {f"model/{name}" for name in model.state_dict()}
    assert taken["model/first.weight"] is taken["model/second.weight"]


def test_without_memory_it_gives_up_and_says_so_once(caplog):
    """A copy that cannot be made costs the copies, not the run."""
    model = tiny_model()
    kept = StepWeights(model)

    def fail(_memory):
        raise RuntimeError("no memory")

    kept._copied = fail
    for step in range(3):
        kept.keep()
        kept.settle()
        kept.end_step(step)
        assert kept.take(step) is None
    assert caplog.text.count("no memory") == 1


@pytest.mark.parametrize(
    ("option", "device", "wanted"),
    [("auto", "cpu", True), ("auto", "meta", False), ("before", "meta", True), ("after", "cpu", False)],
)
def test_by_itself_only_weights_on_the_host_are_kept(option, device, wanted):
    """On any other device the copy would take the bus in every step: it is made where it was asked for."""
    assert wants_weights(option, nn.Linear(2, 2, device=device)) == wanted

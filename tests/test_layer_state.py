"""The state of single layers: taken back by name, each weight once, all of it or none."""

import random

import pytest
import torch
from torch import nn
from training import Batches, equal

from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.data.batches import Data


class Block(nn.Module):
    """A layer with weights and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        """[B, 6] to [B, 6]."""
        return x + torch.tanh(self.norm(self.linear(x)))


class Tied(nn.Module):
    """Three blocks, the last with the first one's weight matrix, and an output tied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        """[B, 6] to [B, 6]."""
        x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Loop:
    """A loop with everything that must stay where it is when some layers go back."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = Tied() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.data = Data(Batches())
        self.state = TrainingState(
            model=self.model, optimizers=[self.optimizer], scheduler=self.scheduler, data=self.data
        )
        self.layers = LayerState(self.model, [self.optimizer])

    def run(self, steps: int) -> None:
        """Train some steps."""
        for step in range(steps):
            self.data.next_batch(step)
            self.model(torch.randn(8, 6) * random.random()).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of weights, buffers and moments, by name."""
        snapshot = self.state.capture({})
        return snapshot.tensors


@pytest.fixture
def gone_on():
    """A loop of nine steps and its snapshot of the fifth."""
    loop = Loop()
    loop.run(5)
    snapshot = loop.state.capture({})
    loop.run(4)
    return loop, snapshot


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that differ."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_weights_buffers_and_moments_of_the_layers_go_back(gone_on):
    """Everything that the snapshot has of two layers is there again, bit for bit, and no other tensor has changed."""
    loop, snapshot = gone_on
    before = loop.tensors()
    loop.layers.restore(snapshot, ["blocks.1", "wte"])
    after = loop.tensors()
    theirs = {name for name in before if "blocks.1." in name or "wte." in name} | {"model/head.weight"}
    assert changed(before, after) == theirs
    assert changed(snapshot.tensors, after) == set(before) - theirs


def test_all_else_stays(gone_on):
    """Schedule, rates, data position and every random generator are where they were."""
    loop, snapshot = gone_on
    plain = loop.state.capture({}).plain
    schedule, data, groups = plain["scheduler"], plain["data"], plain["optimizers"][0]["groups"]
    drawn = random.getstate(), torch.get_rng_state()
    loop.layers.restore(snapshot, ["blocks.1"])
    plain = loop.state.capture({}).plain
    assert (plain["scheduler"], plain["data"], plain["optimizers"][0]["groups"]) == (schedule, data, groups)
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.get_rng_state(), drawn[1])


def test_a_tied_weight_goes_back_with_the_layer_that_names_it_first(gone_on):
    """A matrix that two blocks share goes back, and its moments with it, once, by the first; the ties still hold."""
    loop, snapshot = gone_on
    shared = loop.model.blocks[0].linear.weight
    before = loop.tensors()
    loop.layers.restore(snapshot, ["blocks.2"])
    assert "model/blocks.2.linear.weight" not in changed(before, loop.tensors())
    loop.layers.restore(snapshot, ["blocks.0"])
    assert torch.equal(shared, snapshot.tensors["model/blocks.0.linear.weight"])
    moment = snapshot.tensors["optimizer/0/blocks.0.linear.weight/exp_avg"]
    assert torch.equal(loop.optimizer.state[shared]["exp_avg"], moment)
    assert loop.model.blocks[2].linear.weight is shared
    loop.run(1)


def test_no_gradient_of_the_old_weights_is_left(gone_on):
    """Gradients of the layers that went back are gone, those of the others are not."""
    loop, snapshot = gone_on
    loop.model(torch.randn(8, 6)).square().mean().backward()
    loop.layers.restore(snapshot, ["blocks.1"])
    assert all(parameter.grad is None for parameter in loop.model.blocks[1].parameters())
    assert loop.model.blocks[0].linear.weight.grad is not None


def test_a_snapshot_can_be_used_again(gone_on):
    """Restored, trained on and restored again, a layer has the same bits twice."""
    loop, snapshot = gone_on
    found = []
    for _ in range(2):
        loop.layers.restore(snapshot, ["blocks.1"])
        found.append([loop.tensors()[name] for name in snapshot.tensors if "blocks.1." in name])
        loop.run(3)
    assert equal(*found)


def test_what_does_not_fit_changes_nothing(gone_on):
    """A layer of another shape, a moment of another dtype, an unknown layer: all are named, and no bit has changed."""
    loop, snapshot = gone_on
    tensors = dict(snapshot.tensors)
    tensors["model/blocks.1.linear.weight"] = torch.zeros(6, 7)
    tensors["optimizer/0/blocks.1.norm.weight/exp_avg_sq"] = torch.zeros(6, dtype=torch.float64)
    del tensors["model/wte.weight"]
    before = loop.tensors()
    with pytest.raises(ValueError, match="does not fit") as caught:
        loop.layers.restore(
            Snapshot(tensors=tensors, plain=snapshot.plain), ["blocks.0", "blocks.1", "wte", "blocks.7"]
        )
    message = str(caught.value)
    for part in (
        "model/blocks.1.linear.weight is [6, 7] torch.float32 in the checkpoint, [6, 6] torch.float32 here",
        "exp_avg_sq is [6] torch.float64 in the checkpoint",
        "model/wte.weight is missing in the checkpoint",
        "this model has no layer blocks.7",
    ):
        assert part in message
    assert changed(before, loop.tensors()) == set()


def test_only_the_layers_that_go_back_have_to_fit(gone_on):
    """A head that was given another shape since does not keep a block from going back."""
    loop, snapshot = gone_on
    tensors = {**snapshot.tensors, "model/wte.weight": torch.zeros(9, 9)}
    loop.layers.restore(Snapshot(tensors=tensors, plain=snapshot.plain), ["blocks.1"])
    assert torch.equal(loop.model.blocks[1].linear.weight, tensors["model/blocks.1.linear.weight"])


def test_another_optimizers_moments_are_refused():
    """A layer that another of the optimizers trained when the state was saved is not given that one's moments."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
    snapshot = TrainingState(model=model, optimizers=first).capture({})
    layers = LayerState(model, first[::-1])
    with pytest.raises(ValueError, match=r"0\.weight is not in optimizer 1 of the checkpoint"):
        layers.restore(snapshot, ["0"])
    layers.restore(snapshot, ["0"], moments="keep")


def test_a_layer_without_moments_then_begins_anew(gone_on):
    """Where the snapshot is from before the first step, the layer's optimizer state is empty again, the others' not."""
    loop, _ = gone_on
    early = Loop().state.capture({})
    loop.layers.restore(early, ["blocks.1"])
    states = loop.optimizer.state
    assert not any(parameter in states for parameter in loop.model.blocks[1].parameters())
    assert states[loop.model.wte.weight]["step"].item() == 9
    loop.run(1)
    assert states[loop.model.blocks[1].linear.bias]["step"].item() == 1


def test_a_compiled_models_layers_have_their_plain_names():
    """Under torch.compile the layers are named as in the norms, and go back all the same."""
    loop = Loop(torch.compile(Tied(), backend="eager"))
    snapshot = loop.state.capture({})
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.add_(1.0)
    loop.layers.restore(snapshot, ["blocks.1"])
    name = "model/_orig_mod.blocks.1.linear.weight"
    assert torch.equal(loop.model.state_dict()[name.removeprefix("model/")], snapshot.tensors[name])

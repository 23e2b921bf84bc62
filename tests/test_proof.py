"""Proof of a restore: the probe's loss comes again from the same state, from no other, and disturbs nothing."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from training import equal

from trainer_plugin.checkpoints.plain import decode_plain, encode_plain
from trainer_plugin.checkpoints.proof import Proof, ProofError
from trainer_plugin.checkpoints.rng import rng_state
from trainer_plugin.checkpoints.state import TrainingState

BATCH = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))


class Model(nn.Module):
    """A model with everything that a forward pass may change: dropout, batch norm, a counter, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Dropout(0.5)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8), persistent=False)
        self.frozen.eval()

    def forward(self, batch):
        """Change buffers in place and by exchange, and draw random numbers whatever the mode."""
        self.calls += 1
        hidden = self.norm(self.first(batch))
        self.seen = self.seen + hidden.detach().mean(0)
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 - the global generator is the point
        return self.last(self.frozen(nn.functional.dropout(hidden, 0.3, training=True))) + noise


def loss_fn(model, batch):
    """The loss of each sample."""
    return (model(batch) - batch.sum(1, keepdim=True)).square().squeeze(1)


def everything(model) -> tuple:
    """All that a probe could disturb."""
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    modes = [module.training for module in model.modules()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return tensors, modes, gradients, encode_plain(rng_state())


@pytest.fixture
def model():
    """A model in training."""
    return Model()


@pytest.fixture
def proof(model):
    """A proof that has its batch."""
    proof = Proof(model, loss_fn)
    proof.offer(BATCH)
    return proof


def test_the_loss_comes_again(proof, model):
    """The same state gives the same loss, whatever has been drawn and trained in between; through bytes as well."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    taken = decode_plain(encode_plain(proof.take()))
    torch.rand(3)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    model.load_state_dict(weights)
    proof.check(taken)
    assert proof.outcomes == {"equal": 1, "different": 0}


@pytest.mark.parametrize("name", ["first.weight", "norm.running_mean", "last.bias"])
def test_c25_one_changed_tensor_is_no_proof(proof, model, name):
    """A weight or buffer that is off by 0.1 is seen, and both losses are told."""
    taken = proof.take()
    model.state_dict()[name].add_(0.1)
    with pytest.raises(ProofError, match=f"had {taken['loss']:.9g} when it was saved"):
        proof.check(taken)
    assert proof.outcomes == {"equal": 0, "different": 1}


def test_a_weight_that_became_nan_is_no_proof(proof, model):
    """A NaN is equal to nothing."""
    taken = proof.take()
    model.last.bias.data.fill_(torch.nan)
    with pytest.raises(ProofError, match="loss nan"):
        proof.check(taken)
    assert proof.take() is None


def test_probing_disturbs_nothing(proof, model):
    """Weights, buffers (also one that is exchanged), modes, gradients and random generators are as they were."""
    model(BATCH).sum().backward()
    before, buffer = everything(model), model.seen
    taken = proof.take()
    proof.check(taken)
    after = everything(model)
    assert equal(before[0], after[0])
    assert model.seen is buffer
    assert before[1] == after[1]
    assert all(a is b for a, b in zip(before[2], after[2], strict=True))
    assert before[3] == after[3]


def test_probing_leaves_a_graph_alive(proof, model):
    """A backward pass after a probe finds the tensors that its forward pass has kept."""
    model.calls.zero_()
    loss = model(BATCH).sum()
    proof.take()
    loss.backward()
    assert model.first.weight.grad is not None


def test_the_first_batch_is_kept_as_a_copy(model):
    """Later batches are not looked at, and what a loader does to its tensors does not reach the probe's."""
    proof = Proof(model, loss_fn)
    assert proof.take() is None
    batch = BATCH.clone()
    proof.offer(batch)
    first = proof.take()
    batch.zero_()
    proof.offer(torch.ones(16, 4))
    assert proof.take()["loss"] == first["loss"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda _model, _batch: 1 / 0, "ZeroDivisionError"),
        (lambda _model, _batch: None, "AttributeError"),
        (lambda model, batch, calls=[]: calls.append(1) or model(batch) * len(calls), "for one batch it gives"),
    ],
    ids=["raises", "no tensor", "never the same"],
)
def test_a_loss_fn_that_proves_nothing_is_given_up(model, caplog, function, told):
    """One that fails, or does not agree with itself, is told once and asked no more; no step fails by it."""
    proof = Proof(model, function)
    proof.offer(BATCH)
    before = everything(model)
    assert proof.take() is proof.take() is None
    proof.check({"batch": BATCH, "loss": 1.0, "machine": proof._machine(), "era": 0})
    assert [told in record.message for record in caplog.records] == [True]
    assert equal(before[0], everything(model)[0])
    assert proof.outcomes == {"equal": 0, "different": 0}


def test_a_batch_that_cannot_be_stored_is_told(model, caplog):
    """A batch of some class of the user's own is no plain value: hash and finiteness have to do."""

    class Batch:
        pass

    proof = Proof(model, loss_fn)
    proof.offer(Batch())
    assert "the batch cannot be stored" in caplog.text
    assert proof.take() is None


def test_a_loss_of_another_machine_proves_nothing(proof, caplog):
    """Another torch or another GPU has other last digits: neither equal nor different."""
    caplog.set_level(logging.INFO)
    taken = {**proof.take(), "machine": "torch 1.0, abacus", "loss": 7.0}
    proof.check(taken)
    assert proof.outcomes == {"equal": 0, "different": 0}
    assert "taken on torch 1.0, abacus" in caplog.text


def test_what_is_taken_up_unproven_begins_an_era(model):
    """After a change of loss_fn the losses of before are held against nothing, and those from then on are."""
    old = Proof(model, loss_fn)
    old.offer(BATCH)
    taken = old.take()
    new = Proof(model, lambda model, batch: 2 * loss_fn(model, batch))
    with pytest.raises(ProofError):
        new.check(taken)
    new.check(taken, unproven=True)
    new.check(taken)
    fresh = new.take()
    assert fresh["loss"] == pytest.approx(2 * taken["loss"])
    assert torch.equal(fresh["batch"], BATCH)
    new.check(fresh)
    assert new.outcomes == {"equal": 1, "different": 1}
    third = Proof(model, lambda model, batch: 2 * loss_fn(model, batch))
    third.check(fresh)  # The next job goes on in the era of what it takes up.
    third.check(taken)
    assert third.outcomes == {"equal": 1, "different": 0}


def test_a_restore_proves_itself(model):
    """A state is taken with the probe's loss; restored it is held against it, after everything is back."""
    proof = Proof(model, loss_fn)
    state = TrainingState(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], proof=proof)
    assert state.capture({}).plain["probe"] is None
    proof.offer(BATCH)
    snapshot = state.capture({})
    model.last.bias.data.add_(1.0)
    state.restore(snapshot)
    assert proof.outcomes == {"equal": 1, "different": 0}
    snapshot.tensors["model/last.bias"].add_(0.1)
    with pytest.raises(ProofError):
        state.restore(snapshot)
    state.restore(snapshot, unproven=True)
    assert proof.outcomes == {"equal": 1, "different": 1}

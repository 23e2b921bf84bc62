"""The demo's model: sizes, losses, causality, and that measuring leaves no trace."""

import math

import pytest
import torch

from trainer_plugin.demo.gpt import GPT, held_out_loss, loss, sample_losses


@pytest.fixture
def model():
    """An untrained model."""
    torch.manual_seed(0)
    return GPT()


@pytest.fixture
def tokens():
    """Eight rows of random bytes."""
    return torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(1))


def test_size_is_as_told(model):
    """The model has 0.44 million parameters, the embedding being counted once."""
    assert sum(parameter.numel() for parameter in model.parameters()) == 437_760


def test_names_are_the_familiar_ones(model):
    """Parameters carry the names that people look for in a per-layer chart."""
    names = {name for name, _ in model.named_parameters()}
    assert {"wte.weight", "wpe.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.down.weight", "ln_f.bias"} <= names


def test_untrained_loss_is_that_of_guessing(model, tokens):
    """Before training, the loss is about ln 256."""
    assert loss(model, tokens).item() == pytest.approx(math.log(256), rel=0.02)


def test_seed_of_the_caller_decides_the_weights(model):
    """The same global seed gives the same weights, another one others."""
    torch.manual_seed(0)
    assert torch.equal(model.wte.weight, GPT().wte.weight)
    assert not torch.equal(model.wte.weight, GPT().wte.weight)


def test_sample_losses_average_to_the_loss(model, tokens):
    """There is one loss a row, and their mean is the loss."""
    each = sample_losses(model, tokens)
    assert each.shape == (8,)
    assert each.mean().item() == pytest.approx(loss(model, tokens).item(), rel=1e-6)


def test_prediction_sees_no_later_token(model, tokens):
    """Changing a token changes no logits before it."""
    changed = tokens[:, :64].clone()
    changed[:, 40] = (changed[:, 40] + 1) % 256
    before, after = model(tokens[:, :64]), model(changed)
    assert torch.allclose(before[:, :40], after[:, :40], atol=1e-6)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-6)


def test_every_parameter_gets_a_gradient(model, tokens):
    """One backward pass reaches every parameter."""
    loss(model, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_held_out_loss_leaves_no_trace(model, tokens, training):
    """Measuring keeps the mode, the gradients and the random generator, and weighs rows alike whatever the batches."""
    model.train(training)
    before = torch.get_rng_state()
    measured = held_out_loss(model, [tokens[:6], tokens[6:]])
    assert measured == pytest.approx(loss(model, tokens).item(), rel=1e-6)
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())

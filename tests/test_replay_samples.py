"""Leave one out: what is told of a sample is what the step without it really gives."""

import math

import pytest
import torch
from torch import nn
from training import tiny_model

from trainer_plugin.checkpoints.rng import rng_state
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.replay.factory import Built
from trainer_plugin.replay.layers import nonfinite_layers, walk, weight_changes
from trainer_plugin.replay.material import Begin
from trainer_plugin.replay.normal import Normal
from trainer_plugin.replay.samples import leave_one_out
from trainer_plugin.replay.stage import Stage

NORMAL = Normal(loss=1.0, loss_scale=0.1, grad_norm=1.0, grad_norm_log_scale=0.1)
IDS = ("a", "b", "c", "d", "e")


def losses(model, batch):
    """The loss of each sample, times its weight."""
    return (model(batch["x"]).squeeze(1) - batch["y"]).square() * batch["weight"]


def batch_of(seed: int, size: int):
    """A batch of plain values."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=drawn)
    return {"x": x, "y": torch.randn(size, generator=drawn), "weight": torch.ones(size), "note": ["n"] * size}


def begin_of(*batches) -> Begin:
    """A step of these batches."""
    return Begin(rng=[rng_state() for _ in batches], batches=list(batches))


def stage_of(model: nn.Module, loss_fn=losses) -> tuple[Stage, Snapshot]:
    """A stage and the weights on it."""
    weights = Snapshot(tensors={f"model/{name}": value.clone() for name, value in model.state_dict().items()})
    return Stage(Built(model=model, loss_fn=loss_fn), weights, "a:b"), weights


def left_out(begin: Begin, number: int, place: int) -> Begin:
    """The step without one sample of one batch."""
    batches = list(begin.batches)
    kept = [other for other in range(len(batches[number]["y"])) if other != place]
    batches[number] = {
        key: value[kept] if isinstance(value, torch.Tensor) else value for key, value in batches[number].items()
    }
    return Begin(rng=begin.rng, batches=batches)


def ranked(stage: Stage, begin: Begin, weights: Snapshot, ids=IDS):
    """The step and its samples."""
    ran = stage.run(begin, weights)
    return ran, leave_one_out(stage, begin, weights, ran=ran, normal=NORMAL, ids=ids)


def test_a_sample_left_out_is_the_step_without_it():
    """Loss and gradient norm are those of a run on the others alone, also where one sample is nearly all of it."""
    stage, weights = stage_of(tiny_model())
    batch = batch_of(1, 5)
    batch["y"][3] += 1e3
    begin = begin_of(batch)
    ran, samples = ranked(stage, begin, weights)
    assert samples[0].id == "d"
    assert sum(sample.loss for sample in samples) / 5 == pytest.approx(ran.loss, rel=1e-6)
    for sample in samples:
        without = stage.run(left_out(begin, 0, sample.index), weights)
        assert sample.loss_without == pytest.approx(without.loss, rel=1e-4)
        assert sample.grad_norm_without == pytest.approx(without.grad_norm, rel=1e-3)
    assert samples[0].adds > 100.0 > samples[1].adds


def test_places_go_on_over_micro_batches():
    """The second batch's samples come after the first's; each batch counts the same, whatever its size."""
    stage, weights = stage_of(tiny_model())
    first, second = batch_of(1, 3), batch_of(2, 2)
    second["y"][1] += 50.0
    ran, samples = ranked(stage, begin_of(first, second), weights)
    assert (samples[0].index, samples[0].id) == (4, "e")
    expected = (losses(stage.model, first).mean() + losses(stage.model, second).mean()) / 2
    assert ran.loss == pytest.approx(expected.item(), rel=1e-6)
    assert ran.sample_shares == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4])


def test_a_gradient_that_is_not_finite_is_its_samples_alone():
    """The loss is finite and its gradient is not: each is run alone, since 0 x NaN would accuse them all."""

    def roots(model, batch):
        return losses(model, batch) + (batch["x"][:, 0] * model[0].weight[0, 0] - 1.0).clamp(min=0.0).sqrt() * 0.0

    stage, weights = stage_of(tiny_model(), roots)
    with torch.no_grad():
        weights.tensors["model/0.weight"][0, 0] = 1.0
    batch = batch_of(1, 5)
    batch["x"][:, 0] = torch.tensor([5.0, 6.0, 1.0, 7.0, 8.0])
    ran, samples = ranked(stage, begin_of(batch), weights)
    assert math.isfinite(ran.loss)
    assert not math.isfinite(ran.grad_norm)
    assert (samples[0].id, samples[0].adds) == ("c", math.inf)
    assert math.isfinite(samples[0].grad_norm_without)


def test_ids_that_do_not_fit_are_left_out():
    """As many ids as samples, or none: a wrong name is worse than no name."""
    stage, weights = stage_of(tiny_model())
    _, samples = ranked(stage, begin_of(batch_of(1, 4)), weights)
    assert {sample.id for sample in samples} == {None}


def test_the_walk_finds_the_first_module_that_is_not_finite():
    """From finite inputs and weights to an output that is not; layers are told in the order in which they ran."""
    model = tiny_model()
    stage, weights = stage_of(model)
    begin = begin_of(batch_of(1, 3))
    assert (walk(stage, begin, weights).order, walk(stage, begin, weights).module) == (["0", "3"], None)
    weights.tensors["model/3.weight"].fill_(3e38)
    assert walk(stage, begin, weights).module == "3"
    assert nonfinite_layers(stage, weights) == []
    assert not any(module._forward_hooks for module in model.modules())


def test_a_compiled_models_names_are_those_of_the_plain_one():
    """What torch.compile puts before them is no other model."""
    model = tiny_model()
    tensors = {f"model/_orig_mod.{name}": value + 1.0 for name, value in model.state_dict().items()}
    weights = Snapshot(tensors=tensors)
    stage = Stage(Built(model=model, loss_fn=losses), weights, "a:b")
    with stage.prepared(weights):
        assert torch.equal(model[3].bias, tensors["model/_orig_mod.3.bias"])
    assert nonfinite_layers(stage, weights) == []


def test_layers_are_told_how_far_they_have_moved():
    """Norm of the difference over the norm before, layer by layer."""
    stage, weights = stage_of(tiny_model())
    later = Snapshot(tensors={name: value.clone() for name, value in weights.tensors.items()})
    for name in ("weight", "bias"):
        later.tensors[f"model/3.{name}"].mul_(3.0)
    assert weight_changes(stage, later, weights) == pytest.approx({"0": 0.0, "3": 2.0})
    later.tensors["model/0.bias"][1] = math.nan
    assert nonfinite_layers(stage, later) == ["0"]

"""The probe: true norms, torch's own clip bit for bit, no host read, and hands off a bad step."""

import copy
import math

import pytest
import torch
from torch import nn

from trainer_plugin.step.probe import Limits, Probe, layer_of
from trainer_plugin.step.row import HUGE_NORM, Withhold


class Stack(nn.Module):
    """An embedding tied to the head, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.wte.weight


def give_gradients(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every gradient with numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (number % 4 - 2)
    return model


def two_parameters(first: list[float], second: list[float], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of two named parameters with these gradients."""
    model = nn.Module()
    for name, gradient in (("first", first), ("second", second)):
        parameter = nn.Parameter(torch.ones(len(gradient), dtype=dtype))
        parameter.grad = torch.tensor(gradient, dtype=dtype)
        model.register_parameter(name, parameter)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_norms_equal_a_float64_reference(seed):
    """Total and layer norms are those of the same gradients in float64, to 1e-5."""
    model = give_gradients(nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 40), nn.LayerNorm(40)), seed)
    exact = {name: p.grad.double().square().sum() for name, p in model.named_parameters()}
    row, bad = Probe(model).measure(torch.tensor(2.5), Limits())
    values = row.read()
    assert values.loss == 2.5
    assert bad.item() == 0.0
    assert values.grad_norm == pytest.approx(sum(exact.values()).sqrt().item(), rel=1e-5)
    for layer, norm in values.layer_grad_norms.items():
        squares = sum(square for name, square in exact.items() if layer_of(name) == layer)
        assert norm == pytest.approx(squares.sqrt().item(), rel=1e-5)


def test_large_tensors_are_as_exact():
    """A tensor of a million elements, summed by rows, is nearer to float64 than torch's own pass has to be."""
    model = give_gradients(nn.Linear(1024, 1024, bias=False))
    exact = model.weight.grad.double().norm().item()
    assert Probe(model).measure(torch.tensor(1.0), Limits())[0].read().grad_norm == pytest.approx(exact, rel=2e-6)


def test_torchs_clip_is_torchs_for_large_tensors_too():
    """In `observe` the clip of a large model is that of the loop without a guard, to the last bit."""
    ours = give_gradients(nn.Linear(1024, 1024))
    torchs = copy.deepcopy(ours)
    for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        other.grad = mine.grad.clone()
    nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
    Probe(ours, torchs_clip=True).measure(torch.tensor(1.0), Limits(max_norm=1.0))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), torchs.parameters(), strict=True))


def test_p02_a_norm_beyond_float32s_squares_is_huge_not_infinite():
    """100 elements of 1e20 have a norm of 1e21: clipped to 1 each is 0.1, and the step is withheld as huge (P02)."""
    model = nn.Linear(100, 1, bias=False)
    model.weight.grad = torch.full((1, 100), 1e20)
    row, bad = Probe(model).measure(torch.tensor(1.0), Limits(max_norm=1.0))
    values = row.read()
    assert values.grad_norm == pytest.approx(1e21, rel=1e-6)
    assert values.layer_grad_norms == {"weight": pytest.approx(1e21, rel=1e-6)}
    assert values.withhold == Withhold.HUGE
    assert row.bad()
    assert bad.item() == 1.0
    assert row.nonfinite_parameters() == []
    assert model.weight.grad.tolist() == [pytest.approx([0.1] * 100)]


def test_elements_near_float32s_end_are_huge_as_well():
    """Where even the norm is beyond float32, finite gradients are huge, left as they are, and not called infinite."""
    model = nn.Linear(100, 1, bias=False)
    model.weight.grad = torch.full((1, 100), 1e38)
    row, bad = Probe(model).measure(torch.tensor(1.0), Limits(max_norm=1.0))
    assert row.read().withhold == Withhold.HUGE
    assert row.read().grad_norm == HUGE_NORM
    assert bad.item() == 1.0
    assert bool(torch.isfinite(model.weight.grad).all())


def test_a_half_precision_norm_does_not_overflow():
    """Four fp16 elements of 60000 have a norm of 120000, and clipped to 1 each is 0.5 (the fp16 half of P02)."""
    model = two_parameters([6e4, 6e4], [6e4, 6e4], torch.float16)
    values = Probe(model).measure(torch.tensor(1.0), Limits(max_norm=1.0))[0].read()
    assert values.grad_norm == pytest.approx(120_000, rel=0.01)
    assert [p.grad.tolist() for p in model.parameters()] == [[0.5, 0.5]] * 2


def test_measuring_reads_nothing_on_the_host():
    """On the meta device, where any host read raises, a step is measured, clipped and flagged."""
    model = Stack().to("meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    loss = torch.empty((), device="meta")
    limits = Limits(max_norm=1.0, surge_above=3.0, surge_clip=0.5, spike_loss=5.0, spike_norm=2.0)
    beside = [torch.empty(7, device="meta")]
    row, bad = Probe(model).measure(loss, limits, scale=torch.empty((), device="meta"), beside=beside)
    assert bad.is_meta
    with pytest.raises(NotImplementedError, match="meta tensor"):
        row.read()


def test_a_tied_weight_counts_once():
    """A weight that two modules share is one parameter, under the name of the first."""
    model = give_gradients(Stack())
    probe = Probe(model)
    assert "head.weight" not in probe.parameters
    wanted = torch.cat([p.grad.double().flatten() for p in set(model.parameters())]).norm().item()
    assert probe.measure(torch.tensor(0.0), Limits())[0].read().grad_norm == pytest.approx(wanted, rel=1e-5)


def test_layers_are_named_after_modules():
    """A block of a stack is one layer; any other parameter belongs to its module, a bare one to itself."""
    assert list(Probe(Stack()).layers) == ["wte", "blocks.0", "blocks.1"]
    assert list(Probe(two_parameters([1.0], [1.0])).layers) == ["first", "second"]
    assert layer_of("model.layers.12.mlp.up.weight") == "model.layers.12"


def test_a_compiled_model_has_the_names_of_the_plain_one():
    """The wrapper of torch.compile does not show in the names."""
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", Stack())
    assert list(Probe(wrapped).parameters) == list(Probe(Stack()).parameters)


def test_parameters_without_a_gradient_are_left_out():
    """A parameter without a gradient adds nothing to any norm, and gets none."""
    model = two_parameters([3.0, 4.0], [1.0])
    model.second.grad = None
    probe = Probe(model)
    values = probe.measure(torch.tensor(1.0), Limits(max_norm=1.0))[0].read()
    assert (values.grad_norm, values.layer_grad_norms) == (5.0, {"first": 5.0})
    assert model.second.grad is None
    model.second.grad = torch.tensor([12.0])  # Back again: the index of layers must not be the old one.
    model.first.grad = torch.tensor([3.0, 4.0])
    assert probe.measure(torch.tensor(1.0), Limits())[0].read().grad_norm == 13.0


@pytest.mark.parametrize(("loss", "bad"), [(1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_a_step_without_any_gradient_has_no_norm(loss, bad):
    """Where nothing was there to measure the norm is None, never 0; the loss still decides about the step."""
    model = nn.Linear(2, 2)
    row, flag = Probe(model).measure(torch.tensor(loss), Limits(max_norm=1.0))
    values = row.read()
    assert (values.grad_norm, values.layer_grad_norms) == (None, {})
    assert values.loss == pytest.approx(loss, nan_ok=True)
    assert flag.item() == bad


def test_a_model_with_nothing_to_train_is_refused():
    """A model without a trainable parameter is told at the start."""
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        Probe(nn.Linear(2, 2).requires_grad_(requires_grad=False))


@pytest.mark.parametrize("max_norm", [1.0, 0.3, 7.7, 1e6])
def test_the_clip_is_torchs_bit_for_bit(max_norm):
    """Clipped gradients are exactly those of `clip_grad_norm_`, whatever the limit."""
    for seed in range(20):
        ours = give_gradients(Stack(), seed)
        torchs = copy.deepcopy(ours)
        for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
            other.grad = mine.grad.clone()
        norm = nn.utils.clip_grad_norm_(torchs.parameters(), max_norm)
        values = Probe(ours).measure(torch.tensor(1.0), Limits(max_norm=max_norm))[0].read()
        assert values.grad_norm == norm.item()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), torchs.parameters(), strict=True))


def test_without_limits_no_bit_changes():
    """A probe that only watches leaves the gradients as they were."""
    model = give_gradients(Stack())
    before = [p.grad.clone() for p in model.parameters()]
    assert Probe(model).measure(torch.tensor(1.0), Limits())[0].read().clip_coefficient == 1.0
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("poison", "norm"), [(math.nan, math.nan), (math.inf, math.inf)])
def test_p01_a_bad_step_leaves_healthy_gradients_alone(poison, norm):
    """With [3, 4] and [NaN or Inf, 0] clipped to 1, nothing is scaled, the norm says so, and the parameter is named."""
    model = two_parameters([3.0, 4.0], [poison, 0.0])
    row, bad = Probe(model).measure(torch.tensor(1.0), Limits(max_norm=1.0))
    values = row.read()
    assert bad.item() == 1.0
    assert values.grad_norm == pytest.approx(norm, nan_ok=True)
    assert model.first.grad.tolist() == [3.0, 4.0]
    assert model.second.grad.tolist() == pytest.approx([poison, 0.0], nan_ok=True)
    model.second.grad = None  # As a loop does before the boundary.
    assert row.nonfinite_parameters() == ["second"]


def test_a_bad_loss_alone_makes_a_bad_step():
    """A loss that is not finite over finite gradients is flagged, and nothing is clipped."""
    model = two_parameters([3.0, 4.0], [0.0])
    row, bad = Probe(model).measure(torch.tensor(math.nan), Limits(max_norm=1.0))
    assert bad.item() == 1.0
    assert row.nonfinite_parameters() == []
    assert model.first.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("above", "clipped_to"), [(4.9, 0.5), (5.1, 1.0)])
def test_a_surge_has_a_limit_of_its_own(above, clipped_to):
    """A norm above the surge level is clipped to the surge's limit, any other to the recipe's."""
    model = two_parameters([3.0, 4.0], [0.0])
    Probe(model).measure(torch.tensor(1.0), Limits(max_norm=1.0, surge_above=above, surge_clip=0.5))
    assert model.first.grad.norm().item() == pytest.approx(clipped_to, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "norm", "withhold"),
    [(6.0, 5.0, Withhold.SPIKE), (4.0, 5.0, Withhold.NO), (6.0, 3.0, Withhold.NO), (math.nan, 5.0, Withhold.NONFINITE)],
)
def test_the_first_spike_passes_two_gates(loss, norm, withhold):
    """Only a finite step with its loss and its norm both above their limits is a spike; it is bad, and clipped."""
    model = two_parameters([norm, 0.0], [0.0])
    limits = Limits(max_norm=1.0, spike_loss=5.0, spike_norm=4.0)
    row, bad = Probe(model).measure(torch.tensor(loss), limits)
    assert row.read().withhold is withhold
    assert bad.item() == float(withhold is not Withhold.NO)


def spikes(probe, losses, limits, *, again=False):
    """For each loss whether the probe withholds a step with it."""
    told = []
    for loss in losses:
        row, _ = probe.measure(None if loss is None else torch.tensor(loss), limits, again=again)
        told.append(row.read().withhold is Withhold.SPIKE)
    return told


def test_behind_a_spike_the_loss_alone_decides():
    """The second to the fourth of a row are withheld whatever their norm; a good step ends the row, a NaN does not."""
    model = two_parameters([3.0, 4.0], [0.0])
    limits = Limits(spike_loss=5.0)
    told = spikes(Probe(model), [6.0] * 6 + [1.0, 6.0, math.nan, 6.0, 1.0, 6.0, 1.0, 6.0], limits)
    assert told == [False, True, True, True, False, False, False, False, False, True, False, False, False, False]


def test_a_loss_that_could_not_be_read_is_no_spike():
    """Also where losses are below zero, and behind a spike."""
    model = two_parameters([3.0, 4.0], [0.0])
    assert spikes(Probe(model), [None, None, -9.0], Limits(spike_loss=-5.0)) == [False] * 3
    told = spikes(Probe(model), [-1.0, None, None, -1.0, -9.0, None, -1.0], Limits(spike_loss=-5.0))
    assert told == [False, False, False, True, False, False, False]


def test_a_step_that_is_evaluated_again_counts_for_no_row():
    """It neither begins a row nor goes on with one nor ends it, and is no spike by itself."""
    model = two_parameters([3.0, 4.0], [0.0])
    probe, limits = Probe(model), Limits(spike_loss=5.0)
    assert spikes(probe, [1.0], limits) == [False]
    assert spikes(probe, [6.0, 6.0], limits, again=True) == [False, False]
    assert spikes(probe, [6.0], limits) == [False]
    assert spikes(probe, [6.0, 1.0], limits, again=True) == [False, False]
    assert spikes(probe, [6.0], limits) == [True]


def test_a_step_without_a_gradient_counts_for_its_row():
    """Its loss is as high; there is nothing to withhold."""
    model = two_parameters([3.0, 4.0], [0.0])
    probe, limits = Probe(model), Limits(spike_loss=5.0)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert spikes(probe, [6.0], limits) == [False]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert spikes(probe, [6.0], limits) == [True]


def test_a_row_of_spikes_does_not_outlast_a_rollback():
    """After `forget` the next spike is the first of a row."""
    model = two_parameters([3.0, 4.0], [0.0])
    probe, limits = Probe(model), Limits(spike_loss=5.0)
    assert spikes(probe, [6.0], limits) == [False]
    probe.forget()
    assert spikes(probe, [6.0, 6.0], limits) == [False, True]


def test_in_observe_a_bad_step_is_torchs_own():
    """With `torchs_clip`, what torch's clip does to NaN, Inf and huge gradients is done here as well, bit for bit."""
    for poison in (math.nan, math.inf, 1e25):
        ours, torchs = (two_parameters([3.0, 4.0], [poison, 1.0]) for _ in range(2))
        nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
        Probe(ours, torchs_clip=True).measure(torch.tensor(1.0), Limits(max_norm=1.0))
        for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(mine.grad.nan_to_num(7.0), theirs.grad.nan_to_num(7.0))


def test_what_is_handed_over_travels_beside_the_row():
    """Other vectors come out of the same row, in their order, with gradients or without."""
    model = two_parameters([3.0, 4.0], [0.0])
    beside = [torch.tensor([7.0]), torch.tensor([8.0, 9.0])]
    assert Probe(model).measure(torch.tensor(1.0), Limits(), beside=beside)[0].read().beside == (7.0, 8.0, 9.0)
    model.zero_grad()
    assert Probe(model).measure(torch.tensor(1.0), Limits(), beside=beside)[0].read().beside == (7.0, 8.0, 9.0)


def test_weights_finite_finds_one_bad_element():
    """One NaN among the weights is found."""
    model = Stack()
    probe = Probe(model)
    assert probe.nonfinite_weights() == []
    with torch.no_grad():
        model.blocks[1][0].bias[3] = math.nan
    assert len(probe.nonfinite_weights()) == 1

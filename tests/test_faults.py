"""The fault injector: faults begin when told, end for good, and leave nothing behind."""

import math
import subprocess
import sys
from typing import get_args

import pytest
import torch
from torch import nn

from exporter.catalog import CLASSES
from trainer_plugin.faults import Faults
from trainer_plugin.faults.links import FakeLinks
from trainer_plugin.faults.table import RIGHT, Kind


@pytest.fixture
def model():
    """Two small layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def step(faults, model, optimizer):
    """Run one step of training; return the gradients that the optimizer saw and the learning rates it used."""
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    faults.on_gradients(model)
    faults.before_step(optimizer)
    used = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    faults.after_step(optimizer)
    return [parameter.grad.clone() for parameter in model.parameters()], used


def test_lr_jump_lasts_its_steps_and_is_put_back_exactly(model):
    """The learning rate jumps after `at` clean steps, for `steps` steps, and is the same number afterwards."""
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.3}]
    )
    faults = Faults().lr_jump(at=2, times=7, steps=2)
    used = [step(faults, model, optimizer)[1] for _ in range(6)]
    assert used == [[0.1, 0.3]] * 2 + [[0.1 * 7, 0.3 * 7]] * 2 + [[0.1, 0.3]] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert (faults.first_step("lr_jump"), faults.last_step("lr_jump")) == (3, 4)


def test_lr_held_in_a_tensor_is_not_written_to(model):
    """A learning rate in a tensor is replaced for the step, and the very tensor comes back with its value."""
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    used = step(Faults().lr_jump(at=0, times=2), model, optimizer)[1]
    assert used == [1.0]
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_lr_jump_nests_around_hooks_that_scale_the_rate(model):
    """Hooks of the optimizer that scale the rate for the step see the faulty one, and both are put back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    group = optimizer.param_groups[0]
    seen = []

    def halve(*_):
        seen.append(group["lr"])
        group["lr"] *= 0.5

    def put_back(*_):
        seen.append(group["lr"])
        group["lr"] = seen[0]

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(put_back)
    step(Faults().lr_jump(at=0, times=4), model, optimizer)
    assert seen == [1.0, 0.5]
    assert group["lr"] == 0.25


def test_scheduler_that_chains_on_the_rate_never_sees_the_jump(model):
    """A scheduler that multiplies the current rate comes to the same rate with the fault as without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    faults = Faults().lr_jump(at=1, times=100)
    for _ in range(3):
        step(faults, model, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_grad_scale_scales_every_gradient(model):
    """In the faulty step every gradient is so many times what it would be, in the next it is not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = Faults().grad_scale(at=1, times=1e6)
    clean, faulty, after = (step(faults, model, optimizer)[0] for _ in range(3))
    for one, other, last in zip(clean, faulty, after, strict=True):
        assert torch.equal(one * 1e6, other)
        assert torch.equal(one, last)


def test_nan_gradient_hits_one_element_of_the_named_parameter(model):
    """The named parameter gets one NaN, the others none; without a name it is the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for name, index in [("1.bias", 3), (None, 0)]:
        gradients, _ = step(Faults().nan_gradient(at=0, parameter=name), model, optimizer)
        assert [int(gradient.isnan().sum()) for gradient in gradients] == [int(n == index) for n in range(4)]


def test_nan_gradient_of_an_unknown_parameter_is_refused(model):
    """A parameter that has no gradient is named in the error, with those that have one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"found head.weight among 0.weight, 0.bias, "):
        step(Faults().nan_gradient(at=0, parameter="head.weight"), model, optimizer)


def test_fault_does_not_come_again_after_a_rollback(model):
    """A run that goes back and repeats its steps meets the fault once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = Faults().lr_jump(at=3, times=2, steps=2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        step(faults, model, optimizer)
    model.load_state_dict(saved)
    assert [step(faults, model, optimizer)[1] for _ in range(5)] == [[0.1]] * 5
    assert faults.fired == {"lr_jump": 2}
    assert faults.steps_run == 10


def test_faults_are_counted_by_kind(model):
    """Faults of several kinds, or two of one kind, fire each in its time and are counted by kind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = Faults().grad_scale(at=0, times=2).grad_scale(at=4, times=2).nan_gradient(at=2, steps=3)
    assert faults.fired == {"grad_scale": 0, "nan_gradient": 0}
    assert faults.first_step("grad_scale") is None
    for _ in range(6):
        step(faults, model, optimizer)
    assert faults.fired == {"grad_scale": 2, "nan_gradient": 3}
    assert (faults.first_step("grad_scale"), faults.last_step("grad_scale")) == (1, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": -1, "times": 2.0},
        {"at": 0, "times": 2.0, "steps": 0},
        {"at": 0, "times": 0.0},
        {"at": 0, "times": math.inf},
        {"at": 0, "times": "2"},
        {"at": 1.5, "times": 2.0},
        {"at": "1", "times": 2.0},
        {"at": True, "times": 2.0},
        {"at": math.nan, "times": 2.0},
    ],
)
def test_nonsense_is_refused(wrong):
    """A fault before the start, of no length, or with a factor that is no positive number is refused."""
    with pytest.raises(ValueError, match="lr_jump: "):
        Faults().lr_jump(**wrong)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (lambda: Faults().bit_flip(at=0, bit=32), "bit_flip: bit must be 0 to 31, found 32"),
        (lambda: Faults().nan_gradient(at=0, parameter=3), "nan_gradient: parameter must be a name, found 3"),
        (lambda: Faults().xid(at=0, driver=None), "xid: something with a method `fail` wanted, found NoneType"),
        (lambda: Faults().ecc(at=0, driver=None), "ecc: something with a method `count_ecc` wanted"),
        (lambda: Faults().network_errors(at=0, links=None), "network_errors: something with a method `fail` wanted"),
    ],
)
def test_what_could_not_fire_is_refused_when_it_is_planned(plan, told):
    """A drill of the night must not end at its step for a bit or a driver that was never there."""
    with pytest.raises(ValueError, match=told):
        plan()


def test_a_fault_fires_once_a_step_however_often_it_is_asked():
    """Of a step with micro-batches only the first call is hit, and `steps` counts steps."""
    faults = Faults().huge_sample(at=1, times=10.0, steps=2)
    seen = []
    for _ in range(4):
        seen += [faults.on_losses(torch.ones(2))[0].item() for _ in range(2)]
        faults.before_step()
        faults.after_step()
    assert seen == [1, 1, 10, 1, 10, 1, 1, 1]
    assert (faults.fired, faults.first_step("huge_sample"), faults.last_step("huge_sample")) == (
        {"huge_sample": 2}, 2, 3,
    )  # fmt: skip


def test_the_rates_of_several_optimizers_jump_together_and_come_back(model):
    """Each gets its own rate back, the step counts once, and a step begun twice is refused with the rates as before."""
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters(), lr=0.01)]
    faults = Faults().lr_jump(at=1, times=10.0, steps=2)
    used = []
    for _ in range(3):
        faults.before_step(*both)
        used.append([one.param_groups[0]["lr"] for one in both])
        faults.after_step(*both)
    assert used == [[0.1, 0.01], [1.0, 0.1], [1.0, 0.1]]
    assert [one.param_groups[0]["lr"] for one in both] == [0.1, 0.01]
    assert (faults.steps_run, faults.fired) == (3, {"lr_jump": 2})
    again = Faults().lr_jump(at=0, times=10.0)
    again.before_step(both[0])
    with pytest.raises(RuntimeError, match="before_step wanted once a step, with all its optimizers"):
        again.before_step(both[1])
    assert [one.param_groups[0]["lr"] for one in both] == [0.1, 0.01]


def batch():
    """Inputs and labels of six samples."""
    inputs = torch.arange(24).view(6, 4)
    return inputs, inputs + 1


def test_what_lies_in_the_data_comes_again():
    """A damaged batch is so by its position alone: the same damage after a rollback, and none beside it."""
    faults = Faults(seed=3).garbage_text(at=2, steps=2)
    first = [faults.on_data(position, *batch()) for position in range(5)]
    again = faults.on_data(2, *batch())
    clean = [torch.equal(inputs, batch()[0]) for inputs, _ in first]
    assert clean == [True, True, False, False, True]
    assert torch.equal(first[2][0], again[0])
    assert first[2][0].min() >= 0
    assert first[2][0].max() <= 23
    assert first[2][0].dtype == torch.int64
    assert faults.fired == {"garbage_text": 3}


def test_garbage_of_floats_is_noise_over_their_range():
    """Inputs that are no tokens become noise between the least and the greatest of them."""
    (noise,) = Faults().garbage_text(at=0).on_data(0, torch.tensor([[-1.0, 3.0]] * 50))
    assert -1.0 <= noise.min() < 0.0
    assert 2.0 < noise.max() <= 3.0


@pytest.mark.parametrize("values", [torch.arange(256, dtype=torch.uint8), torch.arange(256) % 2 == 0])
def test_garbage_of_bytes_is_noise_too(values):
    """One more than the greatest byte is no byte: pixels become noise, and not all the same."""
    [noise] = Faults().garbage_text(at=0).on_data(0, values)
    assert noise.dtype == values.dtype
    wanted = values.float().std()
    assert abs(noise.float().std() - wanted) < 0.2 * wanted


def test_labels_are_shuffled_and_inputs_are_not():
    """The same labels in another order; the inputs stay."""
    inputs, labels = Faults().shuffled_labels(at=0).on_data(0, *batch())
    assert torch.equal(inputs, batch()[0])
    assert not torch.equal(labels, batch()[1])
    assert torch.equal(labels.flatten().sort().values, batch()[1].flatten())


def test_a_document_is_there_many_times():
    """Every row is the first one, and none shares its memory."""
    inputs, _ = Faults().duplicated_document(at=0).on_data(0, *batch())
    assert torch.equal(inputs, batch()[0][:1].expand(6, 4))
    inputs[0, 0] = 99
    assert inputs[1, 0] == 0


def test_one_sample_is_huge():
    """The first sample's loss counts so many times, in that step alone."""
    faults = Faults().huge_sample(at=0, times=10.0)
    assert faults.on_losses(torch.ones(3)).tolist() == [10.0, 1.0, 1.0]
    assert faults.on_losses(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_a_peak_of_the_rate_lasts_from_the_first_step_on(model):
    """The rate is so many times as high in every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    faults = Faults().lr_peak(times=4)
    assert [step(faults, model, optimizer)[1] for _ in range(5)] == [[2.0]] * 5


def test_one_layer_explodes(model):
    """The gradients of the parameters so called grow, the others do not; a name that is not there is refused."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = Faults().exploding_layer(at=1, times=100.0, parameter="1.")
    (clean, _), (faulty, _) = step(faults, model, optimizer), step(faults, model, optimizer)
    for one, other, factor in zip(clean, faulty, (1.0, 1.0, 100.0, 100.0), strict=True):
        assert torch.equal(one * factor, other)
    with pytest.raises(ValueError, match="found head among"):
        step(Faults().exploding_layer(at=0, times=2.0, parameter="head"), model, optimizer)


@pytest.mark.parametrize("plan", [lambda f: f.fp16_overflow(at=1), lambda f: f.amp_collapse(at=1, steps=1)])
def test_gradients_overflow(model, plan):
    """What half precision cannot hold is Inf, and not before its step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults = plan(Faults())
    (clean, _), (faulty, _) = step(faults, model, optimizer), step(faults, model, optimizer)
    assert all(gradient.isinf().any() for gradient in faulty)
    assert all(gradient.isfinite().all() for gradient in clean)


def test_padding_meets_a_layer_norm_without_eps():
    """The forward pass gives NaN in the faulty step; afterwards `eps` and hooks are as they were."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    faults, seen = Faults().layer_norm_eps(at=1), []
    for _ in range(3):
        faults.on_forward(model)
        out = model(torch.randn(2, 4))
        seen.append(bool(out.isnan().any()))
        out.sum().backward()
        faults.on_gradients(model)
        faults.before_step(optimizer)
        faults.after_step(optimizer)
    assert seen == [False, True, False]
    assert (model[0].eps, len(model[0]._forward_pre_hooks)) == (1e-5, 0)


def test_one_bit_of_one_weight_flips(model):
    """The highest bit of the exponent makes a small weight huge; flipped again it is as before."""
    before = model[0].weight.detach().clone()
    Faults().bit_flip(at=0, parameter="0.weight").on_forward(model)
    changed = (model[0].weight != before).nonzero()
    assert len(changed) == 1
    assert model[0].weight.abs().max() > 1e30
    Faults().bit_flip(at=0, parameter="0.weight").on_forward(model)
    assert torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match="bit 0 to 31 of float32"):
        Faults().bit_flip(at=0).on_forward(nn.Linear(2, 2).half())


def test_a_bit_of_weights_that_lie_across_flips_too():
    """Memory that is not in the order of the rows."""
    model = nn.Linear(4, 6, bias=False)
    model.weight.data = torch.ones(4, 6).t()
    Faults().bit_flip(at=0, bit=31).on_forward(model)
    assert int((model.weight == -1.0).sum()) == 1


def test_weights_get_noise_of_their_own_size(model):
    """Only those so called, once, and the same for the same seed."""
    before = [p.detach().clone() for p in model.parameters()]
    faults = Faults(seed=1).weight_noise(at=0, times=4.0, parameter="0.weight")
    faults.on_forward(model)
    faults.on_forward(model)
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, False, False]
    assert faults.fired == {"weight_noise": 1}


def test_slowness_and_the_machines_word(model):
    """A slow step and a late batch wait by the clock that was given; driver and links are told, and counted."""
    slept, links = [], FakeLinks("node-1")
    driver = Told()
    faults = Faults(sleep=slept.append).slow_rank(at=0, seconds=2.0).stalled_loader(at=1, seconds=3.0)
    faults.xid(at=0, driver=driver, gpu=1).xid(at=0, driver=driver, xid=48).ecc(at=0, driver=driver, gpu=2, steps=2)
    faults.network_errors(at=0, links=links)
    faults.on_data(0, *batch())
    for _ in range(3):
        faults.on_forward(model)
        faults.on_forward(model)  # A micro-batch more: the same step.
        faults.before_step()
        faults.after_step()
    faults.on_data(1, *batch())
    assert slept == [2.0, 3.0]
    assert driver.told == [("xid", 1, 79), ("xid", 0, 48), ("ecc", 2), ("ecc", 2)]
    assert b"} 1\n" in links.render(frozenset({"node_infiniband_link_downed_total"}))
    assert faults.fired == {"slow_rank": 1, "stalled_loader": 1, "xid": 2, "ecc": 2, "network_errors": 1}


class Told:
    """A driver that keeps what it is told."""

    def __init__(self) -> None:
        self.told = []

    def fail(self, gpu, xid):
        """An XID."""
        self.told.append(("xid", gpu, xid))

    def count_ecc(self, gpu):
        """An ECC error."""
        self.told.append(("ecc", gpu))


def test_links_show_what_the_rule_joins():
    """The page has the host's name and a counter that is 0 from the beginning; a scrape may ask for one family."""
    links = FakeLinks("node-1")
    name = "node_infiniband_link_downed_total"
    downed = f'# TYPE {name} counter\n{name}{{device="mlx5_0",port="1"}} '
    host = '# TYPE node_uname_info gauge\nnode_uname_info{nodename="node-1"} 1\n'
    assert links.render().decode() == f"{host}{downed}0\n"
    links.fail()
    assert links.render(frozenset({name})).decode() == f"{downed}1\n"


def test_every_kind_of_fault_has_a_right_class_and_a_method():
    """The table is whole, its classes are the catalog's, and each kind is a method of the plan."""
    assert set(RIGHT) == set(get_args(Kind))
    for kind, right in RIGHT.items():
        assert callable(getattr(Faults, kind))
        assert set(right.classes) <= {*CLASSES, "none"}
        assert right.why


def test_the_plan_needs_no_torch():
    """The command line lists its scenarios without waiting for torch."""
    code = "import sys, trainer_plugin.demo.scenarios; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The guard in every set-up of training on one process: true norms, no bit changed in `observe`, no bad step taken."""

import math

import pytest
import torch
from setups import SETUPS, Loop
from training import Job, equal

# Where other work is going on too, 200 steps may take long, and so does all that the first torch.compile imports.
SLOW = [name for name, setup in SETUPS.items() if setup.compiled or setup.steps > 20]
NAMES = [pytest.param(name, marks=pytest.mark.timeout(60)) if name in SLOW else name for name in SETUPS]


@pytest.fixture
def guarded(make_guard):
    """A function that makes the loop of a set-up with a guard in it."""

    def make(name: str, **options) -> Loop:
        loop = Loop(SETUPS[name])
        job = Job(model=loop.model, optimizer=loop.optimizers[0])
        options = {"checkpoints": {"every": 150}, "actions": {"clip_max_norm": loop.setup.clip}, **options}
        make_guard(job, optimizer=loop.optimizers, scaler=loop.scaler, data=None, **options)
        loop.guard = job.guard
        return loop

    return make


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two states have the same tensors, bit for bit."""
    return first.keys() == second.keys() and equal(list(first.values()), [second[name] for name in first])


@pytest.mark.parametrize("mode", ["observe", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_norms_are_those_of_the_true_gradients(guarded, name, mode):
    """Each step's norm and layer norms on the page equal those of the unscaled gradients in float64, to 1e-5."""
    # Listening to activations breaks a compiled graph, of which torch itself warns in passing.
    layers = {"layers_every": 1, "activations": not SETUPS[name].compiled}
    loop = guarded(name, mode=mode, metrics=layers)
    loop.measuring = True
    page = loop.guard.page
    for number in range(5):
        loop.step(number)
        shown = {layer: page.value("train_layer_grad_norm", layer) for layer in loop.guard._parts.probe.layers}
        shown = {layer: norm for layer, norm in shown.items() if norm is not None}
        assert {**shown, "": page.value("train_grad_norm")} == pytest.approx(loop.norms, rel=1e-5, abs=0.0)
        assert page.value("train_loss") == pytest.approx(math.log(256), rel=0.3)
    assert page.value("train_guard_errors_total") == 0
    assert page.value("train_steps_applied_total") == 5


@pytest.mark.parametrize("name", NAMES)
def test_observe_changes_no_bit(guarded, name):
    """Weights, moments and step counts are those of the same loop with torch's own clip and no guard."""
    loop, twin = guarded(name, mode="observe"), Loop(SETUPS[name])
    for number in range(loop.setup.steps):
        loop.step(number)
    for number in range(loop.setup.steps):
        twin.step(number)
    assert same(loop.state(), twin.state())
    assert loop.guard.page.value("train_guard_errors_total") == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize(
    "name", ["AdamW-foreach", "bf16-weights", "float64", "scaler-fused", "unclipped", "sparse-sgd"]
)
def test_observe_changes_no_bit_of_a_ruined_run(guarded, name, value):
    """A NaN, an Inf or a gradient of 1e25 at step 30 does what it would have done, also where torch ruins all."""
    loop, twin = guarded(name, mode="observe"), Loop(SETUPS[name])
    for number in range(35):
        damage = (lambda gradient: gradient.view(-1)[:3].fill_(value)) if number == 30 else None
        loop.step(number, damage)
        twin.step(number, damage)
        if number >= 29:
            assert same(loop.state(), twin.state())
    assert loop.guard.page.value("train_guard_errors_total") == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_step_is_no_step(guarded, name):
    """A NaN or Inf gradient leaves weights, moments and step counts as they were, and is counted as what it is."""
    loop = guarded(name)
    for number in range(4):
        loop.step(number)
    before = loop.state()
    page, reason = loop.guard.page, "nonfinite" if loop.scaler is None else "amp_overflow"
    for skipped, bad in enumerate((math.nan, math.inf), 1):
        loop.step(3 + skipped, lambda gradient, bad=bad: gradient.view(-1)[0].fill_(bad))
        assert same(before, loop.state())
        assert page.value("train_steps_skipped_total", reason) == skipped
        assert page.value("train_steps_applied_total") == 4
        assert page.value("train_grad_norm") == pytest.approx(bad, nan_ok=True)
    loop.step(6)
    assert not same(before, loop.state())
    assert page.value("train_steps_applied_total") == 5
    assert page.value("train_guard_errors_total") == 0
    assert all(tensor.isfinite().all() for tensor in loop.state().values())

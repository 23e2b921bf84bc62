"""Compiled training loops: their steps are shielded and lowered, and their models measured, as the plain ones are."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from training import Job, equal, kick, spoil_gradient, spoil_weights, tiny_model

from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.step.probe import Limits, Probe
from trainer_plugin.step.shield import Shield

# Torch's own warnings while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

OPTIMIZERS = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Training:
    """A model and its optimizer, under a scaler perhaps, and the guard's hooks once they are put on."""

    def __init__(self, name, *, scaled) -> None:
        self.model = tiny_model()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        self.shield = None

    def hook(self) -> None:
        """Put the hooks on; the learning rate is halved from now on."""
        self.shield = Shield([self.optimizer])
        LrFactor([self.optimizer]).factor = 0.5

    def step(self, *, bad=False) -> None:
        """One step, with a NaN in its gradient perhaps."""
        self.model.zero_grad()
        self.scaler.scale(self.model(torch.ones(8, 4)).square().mean()).backward()
        self.scaler.unscale_(self.optimizer)
        if bad:
            spoil_gradient(self.model)
        if self.shield is not None:
            self.shield.arm(torch.tensor(float(bad)), lambda: bad)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> list[torch.Tensor]:
        """Copies of weights, moments and step counts."""
        kept = [list(self.model.parameters()), *(list(state.values()) for state in self.optimizer.state.values())]
        return [value.detach().clone() for values in kept for value in values]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """No test finds what an earlier one has compiled."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """How many graphs have been compiled in this test."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("backend", "name", "hooked", "scaled"),
    [
        ("eager", "fused AdamW", "before", False),
        ("eager", "AdamW", "between", False),
        ("eager", "SGD", "after", False),
        ("aot_eager", "fused AdamW", "after", True),
        ("aot_eager", "SGD", "before", True),
    ],
)
def test_a_bad_step_changes_nothing(backend, name, hooked, scaled):
    """Long after the trace a NaN leaves all as it was, also where the hooks came after `torch.compile` or the trace."""
    training = Training(name, scaled=scaled)
    if hooked == "before":
        training.hook()
    training.optimizer.step = torch.compile(training.optimizer.step, backend=backend)
    if hooked == "between":
        training.hook()
    training.step()
    if hooked == "after":
        training.hook()
    for number in range(6):
        before, bad = training.state(), number in {3, 5}
        training.step(bad=bad)
        assert equal(before, training.state()) == bad
    assert training.optimizer.param_groups[0]["lr"] == 0.1
    assert not hasattr(training.optimizer, "found_inf")


@pytest.mark.parametrize(
    ("rate", "options", "scheduled"),
    [(0.5, {}, False), (0.5, {"fused": True}, False), (torch.tensor(0.5), {}, True)],
    ids=["float", "fused", "tensor"],
)
def test_each_step_runs_at_its_own_factor(rate, options, scheduled):
    """A factor that changes each step is in every step as it is then, gone after it, and soon compiles no more."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=rate, **options)
    factor = LrFactor([optimizer])
    scheduler = ExponentialLR(optimizer, 0.75 if scheduled else 1.0)
    traced = []

    def look(module, _inputs):
        traced.extend(node.stack_trace or "" for node in module.graph.nodes)
        return module.forward

    @torch.compile(backend=look)
    def step() -> None:
        optimizer.step()
        scheduler.step()

    compiled = []
    for number in range(10):
        factor.factor = 1.0 - number / 16
        schedule, before = float(optimizer.param_groups[0]["lr"]), weight.detach().clone()
        weight.grad = torch.ones(2)
        step()
        assert (before - weight.detach()).tolist() == pytest.approx([schedule * factor.factor] * 2)
        compiled.append(graphs())
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5 * 0.75**10 if scheduled else 0.5)
    assert compiled[4] == compiled[-1]
    assert not any("trainer_plugin" in place for place in traced)


class Loop(Job):
    """The plain loop, with the part of a step from the guard's first call to its last as one function."""

    def finish(self, loss) -> None:
        """What is done with the gradients."""
        self.guard.before_optimizer(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.end_step()

    def step(self, damage=None) -> None:
        """One step of it; `damage` is done to the model once its gradients are there."""
        loss = self.model(self.guard.next_batch()).square().mean()
        loss.backward()
        if damage is not None:
            damage(self.model)
        self.finish(loss)
        self.guard._parts.checkpoints.wait()


def test_the_guards_own_calls_may_be_in_the_compiled_part(make_guard):
    """A NaN, a surge and a rollback then end as in the plain loop, bit for bit."""
    ends = []
    for run in ("plain", "compiled"):
        model, losses = tiny_model(), []
        job = Loop(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        make_guard(job, run=run, on_signals=lambda signals, losses=losses: losses.append(str(signals.loss)))
        if run == "compiled":
            job.finish = torch.compile(job.finish, backend="eager")
        job.run(24)
        job.step(spoil_gradient)
        job.run(34)
        kick(job)
        job.run(60)
        ends.append((job.weights(), losses, len(job.guard._parts.policy.state.rollbacks)))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert ends[0][2] == ends[1][2] == 1


def test_hooks_that_cannot_run_are_told():
    """Where torch may break no graph (`fullgraph=True`), the first step says that it cannot run the hooks."""
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = torch.optim.Adafactor([weight])
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    step()
    Shield([optimizer])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Shield\._before_step"):
        step()


class Stack(nn.Module):
    """Two blocks in a list, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """One block after the other."""
        for block in self.blocks:
            batch = block(batch).tanh()
        return batch


@pytest.mark.parametrize("how", ["wrapped", "in place", "one block"])
def test_a_compiled_model_is_measured_as_a_plain_one(how):
    """Compiled as a whole or in part, a model has the plain one's names and norms, and is clipped as it is."""
    plain, model = Stack(), Stack()
    if how == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    rows = []
    for trained in (plain, model):
        probe = Probe(trained)
        loss = trained(torch.ones(8, 4)).square().mean()
        loss.backward()
        row, _ = probe.measure(loss, Limits(max_norm=0.01))
        rows.append((row.read(), probe.parameters))
    assert graphs() == 1
    assert (
        list(rows[0][1]) == list(rows[1][1]) == ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    )
    assert rows[1][0].layer_grad_norms == pytest.approx(rows[0][0].layer_grad_norms)
    for name, parameter in rows[0][1].items():
        torch.testing.assert_close(rows[1][1][name].grad, parameter.grad)


def test_a_probe_compiles_nothing_and_is_proven_in_a_compiled_loop(make_guard, caplog):
    """With the model compiled, and the guard's calls in a compiled part, a rollback finds the loss that was saved."""
    model = tiny_model()
    job = Loop(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    make_guard(job, loss_fn=lambda model, batch: model(batch).square().squeeze(1))
    model.compile(backend="eager")
    job.finish = torch.compile(job.finish, backend="eager")
    job.run(9)
    before = graphs()
    job.run(25)
    spoil_weights(model)
    job.step()
    assert job.guard.step == 20
    assert graphs() == before
    assert job.guard.page.value("train_restore_proofs_total", "equal") == 1
    assert "loss_fn is not used any more" not in caplog.text

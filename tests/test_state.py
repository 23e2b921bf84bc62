"""The state that rewinds: all of it comes back, by name and in its own dtype, or nothing is touched."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from training import Batches, equal, tiny_model

from trainer_plugin.checkpoints.plain import decode_plain, encode_plain
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.data.batches import Data


class Loop:
    """A training loop with everything that can rewind."""

    def __init__(self, *, dropout: float = 0.3, milestones: tuple[int, ...] = (3, 9)) -> None:
        self.model = nn.Sequential(tiny_model(dropout=dropout), nn.BatchNorm1d(1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.data = Data(Batches())
        self.state = TrainingState(
            model=self.model,
            optimizers=[self.optimizer],
            scheduler=self.scheduler,
            scaler=self.scaler,
            data=self.data,
        )

    def run(self, steps: int) -> list[float]:
        """Train some steps; their losses depend on every kind of random number."""
        losses = []
        for _ in range(steps):
            batch, _ = self.data.next_batch(0)
            loss = self.model(batch * random.choice((1, 2)) * float(np.random.rand())).square().mean()  # noqa: NPY002
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def everything(self) -> list[torch.Tensor]:
        """Copies of weights, buffers and moments."""
        moments = [t for state in self.optimizer.state_dict()["state"].values() for t in state.values()]
        return [tensor.clone() for tensor in [*self.model.state_dict().values(), *moments]]


def two_weights(
    order: tuple[str, str], gradients: dict[str, float] | None = None
) -> tuple[dict, torch.optim.Optimizer]:
    """A model of two weights of one shape, and Adam over them in this order, after a step if there are gradients."""
    model = nn.Module()
    for name in "ab":
        model.register_parameter(name, nn.Parameter(torch.ones(1)))
    named = dict(model.named_parameters())
    optimizer = torch.optim.Adam([named[name] for name in order])
    if gradients:
        for name, gradient in gradients.items():
            named[name].grad = torch.tensor([gradient])
        optimizer.step()
    return model, optimizer


def test_a_restored_run_repeats_itself():
    """After a restore, losses with dropout and three kinds of random numbers come again exactly."""
    loop = Loop()
    loop.run(4)
    snapshot = loop.state.capture({"step": 4})
    first = loop.run(6), loop.everything(), loop.scheduler.state_dict(), loop.scaler.state_dict()
    loop.state.restore(snapshot)
    second = loop.run(6), loop.everything(), loop.scheduler.state_dict(), loop.scaler.state_dict()
    assert first[0] == second[0]
    assert equal(first[1], second[1])
    assert first[2:] == second[2:]


def test_a_fresh_loop_takes_the_state_up():
    """A loop built anew goes on exactly where the captured one went on."""
    loop = Loop()
    loop.run(4)
    snapshot = loop.state.capture({})
    losses = loop.run(5)
    fresh = Loop()
    fresh.state.restore(Snapshot(tensors=snapshot.tensors, plain=decode_plain(encode_plain(snapshot.plain))))
    assert fresh.run(5) == losses
    assert isinstance(fresh.scheduler.milestones, Counter)  # torch's closed forms ask it for its elements.
    assert equal(fresh.everything(), loop.everything())


def test_c06_a_snapshot_can_be_restored_again():
    """Restored, trained on and restored again, one snapshot gives the same bits twice."""
    loop = Loop(milestones=(102, 104))
    loop.run(100)
    snapshot = loop.state.capture({})
    results = []
    for _ in range(2):
        loop.state.restore(snapshot)
        results.append((loop.everything(), loop.scheduler.state_dict(), loop.data.state_dict()))
        assert {state["step"].item() for state in loop.optimizer.state.values()} == {100}
        loop.run(5)
    assert equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def test_a_snapshot_holds_copies_only():
    """No training after a capture changes the snapshot, in its tensors or in its plain half."""
    loop = Loop()
    loop.run(2)
    snapshot = loop.state.capture({"list": [1]})
    tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    plain = encode_plain(snapshot.plain)
    loop.run(3)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in snapshot.tensors.items())
    assert encode_plain(snapshot.plain) == plain


def test_objects_that_keep_what_they_are_given_do_not_share_it():
    """A scheduler that hands out its own list, and keeps the one it loads, changes no snapshot by writing to it."""

    class Keeper:
        def __init__(self) -> None:
            self.seen = [1]

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    keeper, model = Keeper(), tiny_model()
    state = TrainingState(model=model, optimizers=[torch.optim.SGD(model.parameters())], scheduler=keeper)
    snapshot = state.capture({})
    keeper.seen.append(2)
    assert snapshot.plain["scheduler"] == {"seen": [1]}
    state.restore(snapshot)
    keeper.seen.append(3)
    assert snapshot.plain["scheduler"] == {"seen": [1]}


def test_c09_moments_go_to_their_parameters_by_name():
    """With the parameters in the other order, a still gets 0.1 and b 10.0."""
    model, optimizer = two_weights(("a", "b"), {"a": 1.0, "b": 100.0})
    snapshot = TrainingState(model=model, optimizers=[optimizer]).capture({})
    model, optimizer = two_weights(("b", "a"))
    TrainingState(model=model, optimizers=[optimizer]).restore(snapshot)
    assert optimizer.state[model.a]["exp_avg"].item() == pytest.approx(0.1)
    assert optimizer.state[model.b]["exp_avg"].item() == pytest.approx(10.0)


def test_c09_a_name_that_begins_like_another_keeps_to_itself():
    """The moments of `a/b` are not taken for some of `a`, in whatever order a set gives the two."""
    model = nn.Module()
    for name in ("a", "a/b"):
        model.register_parameter(name, nn.Parameter(torch.ones(1)))
    optimizer = torch.optim.Adam(list(set(model.parameters())))
    for parameter, gradient in zip(model.parameters(), (1.0, 100.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    optimizer.step()
    state = TrainingState(model=model, optimizers=[optimizer])
    snapshot = state.capture({})
    state.restore(snapshot)
    kept = [optimizer.state[parameter] for parameter in model.parameters()]
    assert [set(moments) for moments in kept] == [{"step", "exp_avg", "exp_avg_sq"}] * 2
    assert [moments["exp_avg"].item() for moments in kept] == pytest.approx([0.1, 10.0])


def test_data_that_come_later_or_no_more_are_told(caplog):
    """A checkpoint without a place in the data, or a loop without data, goes on and says that these do not go back."""

    def loop(data):
        model = nn.Linear(4, 1)
        return TrainingState(model=model, optimizers=[torch.optim.SGD(model.parameters())], data=data)

    for data in (None, Data(Batches())):
        loop(data).restore(loop(data).capture({}))
    assert caplog.text == ""
    loop(Data(Batches())).restore(loop(None).capture({}))
    assert caplog.messages == ["the checkpoint has no place in the data: they go on with batch 0"]
    caplog.clear()
    loop(None).restore(loop(Data(Batches())).capture({}))
    assert caplog.messages == ["the checkpoint has a place in the data, this loop has given none: they do not go back"]


@pytest.mark.parametrize("part", ["model", "optimizers", "scheduler", "scaler", "data", "rng", "guard"])
def test_a_state_without_one_of_its_parts_is_refused(part):
    """What other code has saved is told by the part that it lacks, and nothing has been changed."""
    loop = Loop()
    snapshot = loop.state.capture({})
    del snapshot.plain[part]
    loop.run(1)
    before = loop.everything()
    with pytest.raises(ValueError, match=f"does not fit: its part `{part}` is missing in the checkpoint"):
        loop.state.restore(snapshot)
    assert equal(loop.everything(), before)


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_c10_moments_keep_their_dtype(moment):
    """An fp32 moment of a bf16 weight stays fp32 with the same bits, and a bf16 moment of an fp32 weight bf16."""
    weight_dtype = torch.bfloat16 if moment is torch.float32 else torch.float32
    model = nn.Linear(1, 1, bias=False, dtype=weight_dtype)
    optimizer = torch.optim.Adam(model.parameters())
    value = torch.tensor([[0.12345678]], dtype=moment)
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": value.clone(), "exp_avg_sq": value.clone()}
    state = TrainingState(model=model, optimizers=[optimizer])
    snapshot = state.capture({})
    optimizer.state.clear()
    state.restore(snapshot)
    assert optimizer.state[model.weight]["exp_avg"].dtype == moment
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], value)


@pytest.mark.parametrize("part", ["python", "numpy", "torch", "cuda"])
def test_c14_a_missing_part_of_the_random_state_is_told(part):
    """A snapshot without one of the generators is refused by its name, and nothing has been changed."""
    loop = Loop()
    loop.run(2)
    snapshot = loop.state.capture({})
    del snapshot.plain["rng"][part]
    loop.run(1)
    before = loop.everything()
    with pytest.raises(ValueError, match=f"the random state of {part} is missing in the checkpoint"):
        loop.state.restore(snapshot)
    assert equal(loop.everything(), before)


def test_c14_numbers_come_again_after_a_restore():
    """Python, numpy and torch draw the same numbers after a restore as after the capture."""

    def draw():
        return random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()  # noqa: NPY002

    loop = Loop()
    snapshot = loop.state.capture({})
    first = draw()
    loop.state.restore(snapshot)
    assert draw() == first


def test_c23_an_optimizer_that_never_stepped_has_an_empty_state():
    """Before the first applied step, capture and restore work, and that step then is Adam's first."""
    loop = Loop()
    snapshot = loop.state.capture({})
    assert not loop.optimizer.state
    assert not any(name.startswith("optimizer/") for name in snapshot.tensors)
    loop.run(3)
    loop.state.restore(snapshot)
    assert not loop.optimizer.state
    loop.run(1)
    assert {state["step"].item() for state in loop.optimizer.state.values()} == {1}


def test_c23_twenty_overflows_leave_an_optimizer_without_a_state():
    """A run whose steps were all withheld by overflow is saved and restored; its next applied step is Adam's first."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    state = TrainingState(model=model, optimizers=[optimizer], scaler=scaler)

    def step(*, overflow: bool) -> None:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if overflow:
            model.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(20):
        step(overflow=True)
    snapshot = state.capture({})
    assert not any(name.startswith("optimizer/") for name in snapshot.tensors)
    step(overflow=False)
    state.restore(snapshot)
    assert not optimizer.state
    assert scaler.get_scale() == 2.0**20
    step(overflow=False)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}


def test_c24_taking_a_state_before_the_first_step_changes_no_bit():
    """Captured and looked at before the first of five steps, a run ends in the same bits as one that was not.

    Not even a random number is drawn: dropout and all three generators go on as they would have.
    """

    def end(*, looked_at):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        loop = Loop()
        if looked_at:
            snapshot = loop.state.capture({})
            assert loop.state.live({}).plain["optimizers"] == snapshot.plain["optimizers"]
            assert loop.state.tensors().keys() == snapshot.tensors.keys()
        return loop.run(5), loop.everything()

    (losses, wanted), (others, found) = end(looked_at=False), end(looked_at=True)
    assert losses == others
    assert equal(wanted, found)


@pytest.mark.parametrize("given", ["none", "disabled"])
def test_c13_a_run_may_turn_its_scaler_on_or_off(caplog, given):
    """A checkpoint of a run without a GradScaler is restored in one with it, and the other way round.

    The scale is the one that was configured, one line says so, and everything else is back.
    """

    def loop(*, scaled: bool) -> tuple[nn.Module, torch.amp.GradScaler, TrainingState]:
        model = nn.Linear(4, 1)
        off = None if given == "none" else torch.amp.GradScaler("cpu", enabled=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0) if scaled else off
        return (
            model,
            scaler,
            TrainingState(model=model, optimizers=[torch.optim.SGD(model.parameters())], scaler=scaler),
        )

    for scaled_before in (True, False):
        model, _, before = loop(scaled=scaled_before)
        snapshot = before.capture({})
        other, scaler, after = loop(scaled=not scaled_before)
        assert after.mismatches(snapshot) == []
        caplog.clear()
        after.restore(snapshot)
        assert equal(list(model.parameters()), list(other.parameters()))
        assert scaler is None or scaler.get_scale() == (1.0 if scaled_before else 512.0)
        assert [record.message.count("no scale is restored") for record in caplog.records] == [1]


def test_a_run_that_keeps_its_scaler_hears_nothing(caplog):
    """With a scaler on both sides, or on neither, nothing is said."""
    for scaler in (None, torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        model = nn.Linear(4, 1)
        state = TrainingState(model=model, optimizers=[torch.optim.SGD(model.parameters())], scaler=scaler)
        state.restore(state.capture({}))
    assert caplog.text == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_c22_what_is_not_finite_is_seen(dtype):
    """One NaN among many is seen in every dtype; numbers whose squares are beyond their dtype are finite."""
    values = torch.ones(1000).to(dtype)
    assert Snapshot(tensors={"model/weight": values, "count": torch.tensor(3)}).finite
    large = torch.full((1000,), torch.finfo(dtype).max / 2, dtype=torch.float64).to(dtype)
    assert Snapshot(tensors={"model/weight": large}).finite
    assert Snapshot(tensors={"model/empty": torch.zeros(0, dtype=dtype)}).finite
    bad = values.float()
    bad[500] = torch.nan
    assert not Snapshot(tensors={"optimizer/0/weight/exp_avg_sq": bad.to(dtype)}).finite
    mask = torch.full((3,), -torch.inf)
    assert Snapshot(tensors={"model/mask": mask}, unjudged=frozenset({"model/mask"})).finite
    assert not Snapshot(tensors={"model/mask": mask}).finite


def test_every_mismatch_is_named_and_nothing_is_changed():
    """A snapshot of another loop is refused in one line that names all that differs; no bit has changed."""
    snapshot = Loop().state.capture({})
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="does not fit") as caught:
        TrainingState(model=model, optimizers=[optimizer]).restore(snapshot)
    message = str(caught.value)
    for part in (
        "model/2.weight is missing in the checkpoint",
        "model/0.3.weight is not in this model",
        "optimizer 0 has other parameters",
        "the checkpoint has a scheduler, this loop has none",
    ):
        assert part in message
    assert "\n" not in message
    assert equal(before, list(model.parameters()))


@pytest.mark.parametrize("other", [nn.Linear(2, 3), nn.Linear(2, 2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_another_shape_or_dtype_is_a_mismatch(other):
    """Shapes and dtypes are compared, and both sides are told."""
    states = [TrainingState(model=m, optimizers=[torch.optim.SGD(m.parameters())]) for m in (nn.Linear(2, 2), other)]
    problems = states[1].mismatches(states[0].capture({}))
    assert any("model/weight is [2, 2] torch.float32 in the checkpoint" in problem for problem in problems)


def test_another_number_of_optimizers_is_a_mismatch():
    """One optimizer's state is not given to two."""
    model = nn.Linear(2, 2)
    one = TrainingState(model=model, optimizers=[torch.optim.SGD(model.parameters())]).capture({})
    both = [torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])]
    assert TrainingState(model=model, optimizers=both).mismatches(one) == [
        "the checkpoint has 1 optimizers, this loop 2"
    ]


def test_a_parameter_without_a_name_is_refused():
    """An optimizer over a tensor that the model does not own is told at the start."""
    with pytest.raises(ValueError, match=r"optimizer 0, group 0, parameter 0 \(shape \[3\]\) is not a parameter"):
        TrainingState(model=nn.Linear(2, 2), optimizers=[torch.optim.SGD([nn.Parameter(torch.ones(3))])])


@pytest.mark.parametrize("moments", ["restore", "reset", "keep"])
def test_moments_are_restored_reset_or_kept(moments):
    """R12: with the weights back, the moments are the old ones, none, or today's."""
    loop = Loop()
    loop.run(3)
    snapshot = loop.state.capture({})
    old = loop.everything()
    loop.run(4)
    late = loop.everything()
    loop.state.restore(snapshot, moments=moments)
    weights = len(loop.model.state_dict())
    now = loop.everything()
    assert equal(now[:weights], old[:weights])
    wanted = {"restore": old[weights:], "reset": [], "keep": late[weights:]}[moments]
    assert equal(now[weights:], wanted)
    loop.run(2)


def test_a16_no_gradient_survives_a_restore():
    """What had been accumulated when the run went back is gone, and the next step is that of fresh micro-batches."""

    def accumulate(loop, micro_steps):
        for _ in range(micro_steps):
            (loop.model(loop.data.next_batch(0)[0]).square().mean() / 4).backward()

    loop = Loop()
    loop.run(3)
    snapshot = loop.state.capture({})
    accumulate(loop, 2)
    loop.state.restore(snapshot)
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    accumulate(loop, 4)
    loop.optimizer.step()
    fresh = Loop()
    fresh.state.restore(snapshot)
    accumulate(fresh, 4)
    fresh.optimizer.step()
    assert equal(loop.everything(), fresh.everything())


class Forgetful(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler that takes up nothing of what it is given."""

    def load_state_dict(self, state_dict):
        """Stay where it is."""


def test_c07_a_schedule_that_disagrees_after_a_restore_is_an_error():
    """Schedule and optimizer agreed when they were saved; a restore after which they do not is refused."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = Forgetful(optimizer, lambda step: min(1.0, (step + 1) / 10))
    state = TrainingState(model=model, optimizers=[optimizer], scheduler=scheduler)
    early = state.capture({})
    for _ in range(5):
        optimizer.step()
        scheduler.step()

    with pytest.raises(ValueError, match=r"optimizer \[0\.1\], schedule \[0\.6\], saved \[0\.1\]"):
        state.restore(early)

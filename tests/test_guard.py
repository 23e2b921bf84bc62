"""The Guard in a plain loop: it heals what it should, at a boundary, and changes nothing of a healthy run."""

import math
import time

import msgspec
import pytest
import torch
from torch import nn
from training import adamw_job, equal, kick, settings, spoil_gradient, spoil_weights, tiny_model
from waiting import wait_for

from exporter.catalog import CATALOG
from exporter.commands import Command
from trainer_plugin.guard import Guard

INFO_LABELS = next(metric.labels for metric in CATALOG if metric.name == "train_info")


def actions(job, action: str, outcome: str = "done", source: str = "local") -> float:
    """How often this has come of that."""
    return job.guard.page.value("train_actions_total", action, source, outcome)


def trail(job, kind: str) -> list[dict]:
    """The lines of one kind in the run's trail."""
    job.guard._parts.loop.flush(5.0)
    lines = (job.guard._parts.folder.path / "incidents.jsonl").read_bytes().splitlines()
    return [line for line in map(msgspec.json.decode, lines) if line["kind"] == kind]


def test_a_ruined_run_goes_back_before_the_damage(make_guard):
    """A rate kick opens an incident; the run goes back whole, lowers its rate for a while, and skips what it saw."""
    job = make_guard()
    job.watch_rates()
    job.run(60)
    good = job.weights()
    kick(job)
    while not actions(job, "rollback"):
        job.step()
        assert job.guard.step < 80
    page = job.guard.page
    assert job.guard.step == 60
    assert equal(job.weights(), good)
    (remedy,) = [line for line in trail(job, "action") if line["action"] == "rollback"]
    assert remedy["tiers"] == {"local": "whole", "shared": "whole"}
    assert page.value("train_step") == 60
    assert page.value("train_rollback_lost_steps_total") == remedy["step"] - 60
    assert page.value("train_steps_total") == remedy["steps_total"] == len(job.used)
    assert page.value("train_incident_open") == 1.0
    (entry,) = job.guard._parts.data.quarantine
    assert entry.first <= 60 < entry.last

    used, rates = len(job.used), len(job.rates)
    job.run(85)
    assert not [position for position in job.used[used:] if entry.first <= position <= entry.last]
    assert page.value("train_steps_skipped_total", "quarantined") == entry.last - 59
    assert job.rates[rates : rates + 10] == [0.005] * 10
    assert job.rates[rates + 10 : rates + 15] == pytest.approx([0.006, 0.007, 0.008, 0.009, 0.01])
    assert page.value("train_lr_factor") == 1.0


def test_quarantine_and_lowered_rate_outlive_a_restart(make_guard):
    """A new process on the same run leaves the same data out, and its very first step is at the lowered rate."""
    job = make_guard()
    job.run(30)
    job.step(spoil_weights)
    job.step()
    assert actions(job, "rollback") == 1
    (entry,) = job.guard._parts.data.quarantine
    steps_total = len(job.used)
    job.guard.close()

    job = make_guard(adamw_job(seed=9))
    job.watch_rates()
    assert job.guard.step == 20
    assert job.guard._parts.data.quarantine == [entry]
    job.run(24)
    assert job.rates == [0.005] * 4
    assert not [position for position in job.used if entry.first <= position <= entry.last]
    assert job.guard.page.value("train_steps_total") == steps_total + 4


def test_a_nan_gradient_costs_no_step(make_guard, caplog):
    """One bad gradient is withheld: weights stay, nothing is rolled back, and the parameter is named."""
    job = make_guard()
    job.run(25)
    before = job.weights()
    job.step(spoil_gradient)
    page = job.guard.page
    assert equal(before, job.weights())
    assert {state["step"].item() for state in job.optimizer.state.values()} == {25}
    assert math.isnan(page.value("train_grad_norm"))
    assert page.value("train_steps_skipped_total", "nonfinite") == 1
    assert page.value("train_nonfinite_total", "grad") == 1
    assert page.value("train_nonfinite_total", "weight") == 0
    assert page.value("train_layer_nonfinite_total", "3") == 1
    assert [line["parameters"] for line in trail(job, "nonfinite")] == [["3.weight"]]
    assert "gradient not finite in 3.weight" in caplog.text
    job.run(60)
    assert not equal(before, job.weights())
    assert not trail(job, "action")
    assert page.value("train_incident_open") == 0.0


@pytest.mark.parametrize(("poison", "norm"), [(math.nan, math.nan), (math.inf, math.inf)])
def test_p01_a_bad_gradient_never_reaches_the_weights(make_guard, caplog, poison, norm):
    """[3, 4] beside [NaN or Inf, 0] at max_norm 1: no step at all, and the next clean batch trains."""
    job = make_guard(adamw_job())
    job.step()

    def damage(model):
        for parameter in model.parameters():
            parameter.grad.zero_()
        model[0].bias.grad[:2] = torch.tensor([3.0, 4.0])
        model[3].weight.grad[0, 0] = poison

    before = job.weights(), [{k: v.clone() for k, v in state.items()} for state in job.optimizer.state.values()]
    job.step(damage)
    assert equal(before[0], job.weights())
    for old, new in zip(before[1], job.optimizer.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in new)
    assert job.guard.page.value("train_grad_norm") == pytest.approx(norm, nan_ok=True)
    assert job.guard.page.value("train_nonfinite_total", "grad") == 1
    assert "gradient not finite in 3.weight" in caplog.text
    job.step()
    assert not equal(before[0], job.weights())
    assert all(weight.isfinite().all() for weight in job.weights())


def test_weights_that_are_not_finite_go_back_at_once(make_guard):
    """NaN weights are rolled back at the end of the very step that shows them."""
    job = make_guard()
    job.run(20)
    good, baselines = job.weights(), repr(job.guard._parts.monitor.state_dict())
    job.run(25)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20
    assert equal(job.weights(), good)
    assert repr(job.guard._parts.monitor.state_dict()) == baselines
    assert job.guard.page.value("train_nonfinite_total", "weight") == 1
    assert actions(job, "rollback") == 1
    newest = job.guard._parts.checkpoints.targets(1 << 62, proven_only=False)[0]
    assert (newest.step, newest.branch) == (20, 1)  # The boundary that went back has not saved as well.
    job.run(50)
    assert all(weight.isfinite().all() for weight in job.weights())


@pytest.mark.parametrize(("stacking", "second"), [(True, 1e-5), (False, 1e-4)])
def test_a06_a_rollback_does_not_undo_the_lowered_rate(make_guard, stacking, second):
    """At 1e-3 with factor 0.1 the first step after a rollback uses 1e-4; after another one 1e-5, or 1e-4 unstacked."""
    job = make_guard(
        adamw_job(lr=1e-3),
        actions={"lr_factor": 0.1, "lr_stacking": stacking, "lr_hold_steps": 50},
        budget={"lr_floor": 0.001},
    )
    job.watch_rates()
    job.run(35)
    gauge = []
    for _ in range(2):
        spoil_weights(job.model)
        job.step()
        job.step()
        gauge.append(job.guard.page.value("train_learning_rate", "0"))
        assert job.rates[-1] == gauge[-1]
    assert gauge == pytest.approx([1e-4, second])
    assert actions(job, "rollback") == 2
    assert len(job.guard._parts.policy.state.incidents) == 1
    assert job.guard.step == 21


def test_a09_a_fault_before_the_first_checkpoint_has_no_target(make_guard):
    """NaN at step 7 with the first save due at 100: counted as no target, once, and the weights are left alone."""
    job = make_guard(checkpoints={"every": 100})
    job.run(6)
    spoil_weights(job.model)
    for _ in range(5):
        job.step()
    assert actions(job, "rollback", "no_target") == 1
    assert actions(job, "rollback", "done") == 0
    assert all(weight.isnan().all() for weight in job.weights())
    assert job.guard.page.value("train_steps_skipped_total", "nonfinite") == 5
    assert job.guard.page.value("train_guard_errors_total") == 0


def test_c22_checkpoints_of_a_dead_run_are_never_gone_back_to(make_guard):
    """With rollbacks forbidden, NaN weights are saved again and again, and still the target is the last good one."""
    job = make_guard(budget={"rollbacks_per_day": 0})
    job.run(20)
    spoil_weights(job.model)
    job.run(52)
    assert actions(job, "rollback", "refused_budget") == 1
    assert [target.step for target in job.guard._parts.checkpoints.targets(1 << 62, proven_only=False)] == [20, 10]
    assert job.guard.page.value("train_rollback_target_step") in {10, 20}


@pytest.mark.parametrize(
    ("action", "outcome"), [("lower_lr", "done"), ("clip", "done"), ("rollback", "done"), ("stop", "done")]
)
def test_a_command_is_obeyed_at_a_boundary(make_guard, action, outcome):
    """A command from the inbox is taken at the end of a step, once, and has its record."""
    job = make_guard()
    job.run(25)
    inbox = job.guard._parts.folder.inbox
    inbox.put(Command(id="a1", run="tiny", action=action, source="operator", received=time.time()))
    wait_for(job.guard._parts.loop.commands)
    assert actions(job, action, outcome, "operator") == 0
    job.step()
    job.run(30)
    job.guard._parts.loop.flush(5.0)
    (record,) = inbox.records()
    assert (record.outcome, record.at_step) == (outcome, 26)
    assert actions(job, action, outcome, "operator") == 1
    assert inbox.waiting() == []


@pytest.mark.parametrize("mode", ["observe", "assist", "auto"])
def test_c24_a_guard_changes_no_bit_of_a_healthy_run(make_guard, mode):
    """In every mode, weights after 200 steps with dropout equal those of the same loop with torch's own clip."""
    plain = adamw_job(seed=3, dropout=0.2, scheduled=True)
    torch.manual_seed(7)
    every = []
    batches = iter(plain.data)
    for _ in range(200):
        batch = next(batches)
        nn.functional.mse_loss(plain.model(batch), batch.sum(1, keepdim=True)).backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 0.3)
        plain.optimizer.step()
        plain.scheduler.step()
        plain.optimizer.zero_grad()
        every.append(plain.weights())
    job = make_guard(
        adamw_job(seed=3, dropout=0.2, scheduled=True),
        mode=mode,
        actions={"clip_max_norm": 0.3},
        detection={"warmup_steps": 500},
    )
    torch.manual_seed(7)
    for step in range(200):
        job.step()
        if step < 5:
            assert equal(job.weights(), every[step])
    assert equal(job.weights(), every[-1])


def test_observe_withholds_nothing_and_says_what_it_would_do(make_guard):
    """In mode observe a NaN reaches the weights as without a guard, and the rollback is only observed."""
    job = make_guard(mode="observe")
    job.run(25)
    job.step(spoil_gradient)
    assert job.model[3].weight.isnan().any()
    assert job.guard.page.value("train_steps_skipped_total", "nonfinite") == 0
    job.step()
    assert actions(job, "rollback", "observed") == 1
    assert actions(job, "rollback", "done") == 0
    assert job.guard.step == 27


@pytest.mark.parametrize("mode", ["observe", "assist"])
@pytest.mark.parametrize(("steps", "stops"), [(25, 0), (5, 1)])
def test_no_way_back_is_said_only_where_there_is_none(make_guard, mode, steps, stops):
    """A rollback that was only observed leaves its target there: stopping is what would come without one."""
    job = make_guard(mode=mode, detection={"warmup_steps": 3})
    job.run(steps)
    job.step(spoil_gradient)
    job.run(steps + 10)
    assert (actions(job, "rollback", "observed"), actions(job, "stop", "observed")) == (1, stops)


@pytest.mark.parametrize("mode", ["observe", "assist"])
def test_weights_that_stay_bad_are_told_once(make_guard, caplog, mode):
    """Where nothing is healed every later step is as bad: log and trail name the parameters once, the page counts."""
    job = make_guard(mode=mode)
    job.run(25)
    job.step(spoil_gradient)
    job.run(60)
    assert len(trail(job, "nonfinite")) == 1
    assert caplog.text.count("weights not finite") == 1
    assert job.guard.page.value("train_nonfinite_total", "weight") >= 30


def test_the_page_shows_the_step(make_guard):
    """Step, loss, norms, learning rate, checkpoints and counters are on the page after each step."""
    job = make_guard(adamw_job(scheduled=True))
    job.run(21)
    loss = job.step()
    page = job.guard.page.render().decode()
    assert 'train_step{run="tiny",rank="0"} 22.0\n' in page
    assert f'train_loss{{run="tiny",rank="0"}} {loss!r}\n' in page
    assert 'train_steps_total{run="tiny",rank="0"} 22.0\n' in page
    assert 'train_layer_grad_norm{run="tiny",rank="0",layer="0"} ' in page
    assert 'train_learning_rate{run="tiny",rank="0",group="0"} 0.01\n' in page
    assert 'train_checkpoint_step{run="tiny",rank="0",tier="shared",kind="periodic"} 20.0\n' in page
    assert 'train_step_seconds_count{run="tiny",rank="0"} 22\n' in page


def test_a_list_of_two_optimizers_is_one_run(tmp_path):
    """Two optimizers are shielded, lowered, saved and brought back together."""
    model = tiny_model()
    optimizers = [
        torch.optim.AdamW(model[0].parameters(), lr=0.01),
        torch.optim.SGD(model[3].parameters(), lr=0.01, momentum=0.9),
    ]
    guard = Guard(settings(tmp_path), model=model, optimizer=optimizers, local_only=True)

    def step(*, spoil: bool = False) -> None:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(guard.step))
        loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        if spoil:
            spoil_gradient(model)
        guard.before_optimizer(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        guard.end_step()
        guard._parts.checkpoints.wait()

    def moments() -> list[torch.Tensor]:
        return [
            t.clone() for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)
        ]

    for _ in range(20):
        step()
    good = [parameter.detach().clone() for parameter in model.parameters()], moments()
    for _ in range(4):
        step()
    spoil_weights(model)
    step()
    assert guard.step == 20
    assert equal(good[0], list(model.parameters()))
    assert equal(good[1], moments())
    step(spoil=True)
    assert equal(good[0], list(model.parameters()))
    assert equal(good[1], moments())
    step()
    assert guard._parts.learning_rate.effective() == [0.005, 0.005]
    assert not equal(good[1], moments())
    guard.close()


def test_p12_accumulation_trains_and_shows_the_mean_that_was_asked_for(make_guard):
    """Micro-batches of 2.0 are a step of 2.0; told their tokens, the loss is by token, and train_info says so."""
    job = make_guard()
    guard, page = job.guard, job.guard.page
    facts = {label: place for place, (label, _) in enumerate(INFO_LABELS)}

    def step(*micro_batches):
        for loss, tokens in micro_batches:
            guard.micro_step(torch.tensor(loss), tokens=tokens, sample_ids=["id"])
        guard.before_optimizer()
        job.optimizer.step()
        guard.end_step()
        (info,) = page._values["train_info"]
        return page.value("train_loss"), info[facts["loss_mean"]]

    assert step(*[(2.0, None)] * 4) == (2.0, "micro_batch")
    assert step((4.0, 100), (2.0, 300)) == (2.5, "token")
    assert page.value("train_tokens_total") == 400
    assert page.value("train_samples_total") == 6
    assert page.value("train_guard_errors_total") == 0

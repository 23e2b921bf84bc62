"""The benchmark of recovery: what its results come to, what its strategies do, and that a run cut off goes on."""

import json
import math
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from waiting import wait_for

from trainer_plugin.faults.table import Kind

# Last: the folder has modules named as some of the tests'.
sys.path.append(str(Path(__file__).parent / "bench"))
from recovery import Results, all_of
from recovery_plan import CLEAN, FAULTS, FULL, LEFT_OUT, LOOK_STEPS, PROMETHEUS, QUICK, Plan, Trial
from recovery_sums import by_strategy, measure, step_ratio, sum_up
from recovery_table import RESULTS, plot, read_results, table
from strategies import Human, SkippingSteps, Spam, ZClipping
from trial import run_trial
from twins import SCHEDULED_STEPS, Fork, Twins

COMMAND = [sys.executable, Path(__file__).parent / "bench" / "recovery.py", "--quick"]


def result(ratios, *, applied=700, rollbacks=(), actions=None, stopped=False, run=100, **named):
    """A result of 100 steps from 600 on, the fault at 620; `ratios` by steps run, with the steps applied by then."""
    looks = [[run, applied, run / 10, ratio] for (run, applied), ratio in ratios.items()]
    return {
        "seed": 0, "fault": "some", "moment": 620, "strategy": "clip 1.0", "fork": 600, "planned": 100, "run": run,
        "applied": applied, "looks": looks, "rollbacks": [list(one) for one in rollbacks], "actions": actions or {},
        "stopped": stopped, "step_ms": 10.0, **named,
    }  # fmt: skip


def straight(ratios):
    """Looks every ten steps of a run that applies every step."""
    return {(run, 600 + run): ratio for run, ratio in zip(range(10, 101, 10), ratios, strict=True)}


def test_a_run_that_never_leaves_the_twin_has_lost_nothing():
    """All looks within 2 %: no step lost, recovered at once, healed."""
    one = measure(result(straight([1.0, 1.0, 1.01, 1.02, 0.98, 1.0, 1.0, 1.0, 1.0, 1.0])))

    assert (one.steps_lost, one.recovery_steps, one.recovery_seconds, one.healed) == (0, 0, 0.0, True)
    assert one.final_ratio == pytest.approx(1.0)


def test_a_withheld_step_is_lost_and_no_other():
    """One of 100 steps was not applied: one step lost."""
    ratios = {(run, 600 + run - (run > 20)): 1.0 for run in range(10, 101, 10)}

    assert measure(result(ratios, applied=699)).steps_lost == 1


def test_steps_until_the_loss_is_the_twins_are_lost():
    """Away at 30 and 40 steps, back from 50 on: the 30 steps since the fault at 20, 3 s of training, 5 min of 10 s."""
    one = measure(result(straight([1.0, 1.0, 2.0, 1.5, 1.01, 1.0, 1.0, 1.0, 1.0, 1.0])))

    assert (one.steps_lost, one.recovery_steps, one.recovery_minutes) == (30, 30, pytest.approx(5.0))
    assert one.recovery_seconds == pytest.approx(3.0)
    assert one.healed


def test_one_close_look_is_no_recovery():
    """Close once, then away again: recovered where three looks in a row are close."""
    one = measure(result(straight([1.0, 1.0, 2.0, 1.0, 1.5, 1.0, 1.0, 1.5, 1.0, 1.0])))
    later = measure(result(straight([1.0, 1.0, 2.0, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0])))

    assert one.recovery_steps is None
    assert one.steps_lost == 80
    assert (later.recovery_steps, later.steps_lost) == (40, 40)


def test_a_look_just_beyond_the_limit_is_not_away():
    """One or two at 3 % are noise, three are not, and neither is one at 5 %."""
    steps = [
        measure(result(straight([1.0, 1.0, *looks]))).steps_lost
        for looks in (
            [1.03, 1.0, 1.0, 1.03, 1.03, 1.0, 1.0, 1.0],
            [1.0, 1.03, 1.03, 1.03, 1.0, 1.0, 1.0, 1.0],
            [1.0, 1.0, 1.0, 1.05, 1.0, 1.0, 1.0, 1.0],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.03],
        )
    ]
    assert steps == [0, 50, 50, 0]


def test_what_is_rolled_back_counts_once():
    """Back from 660 to 600 after 60 steps, and at once the twin: 60 steps lost, those before the fault too."""
    ratios = {(10, 610): 1.0, (20, 620): 1.0, (30, 630): 3.0, (40, 640): 3.0, (50, 650): 3.0}
    ratios |= {(run, 600 + run - 60): 1.0 for run in (70, 80, 90, 100)}
    one = measure(result(ratios, applied=640, rollbacks=[(60, 600, 6.0)], actions={"rollback": 1}))

    assert (one.steps_lost, one.recovery_steps, one.healed, one.actions) == (60, 40, True, 1)
    assert one.recovery_seconds == pytest.approx(4.0)


def test_what_goes_wrong_after_a_rollback_counts_too():
    """Back after 40 steps, away for 20 more, and back: 40 rolled back and 30 until the loss was the twin's."""
    ratios = {(10, 610): 1.0, (20, 620): 1.0, (30, 630): 3.0, (50, 610): 1.1, (60, 620): 1.1}
    ratios |= {(run, 560 + run): 1.0 for run in (70, 80, 90, 100)}

    assert measure(result(ratios, applied=660, rollbacks=[(40, 600, 4.0)])).steps_lost == 40 + 30


def test_a_run_that_is_not_finite_never_recovers():
    """A loss that is None stands for NaN: all steps since the fault are lost, not healed."""
    one = measure(result(straight([1.0, 1.0, *[None] * 8])))

    assert (one.steps_lost, one.recovery_steps, one.recovery_minutes, one.healed) == (80, None, None, False)
    assert one.final_ratio == math.inf


def test_a_run_that_stopped_is_not_healed():
    """What it did not run any more is lost, and what it looked like then does not count."""
    ratios = {(run, 600 + run): 1.0 for run in (10, 20, 30, 40, 50)}
    one = measure(result(ratios, applied=650, run=50, stopped=True))

    assert (one.steps_lost, one.healed) == (50, False)


def test_a_humans_restart_takes_its_minutes():
    """Of a large run: 40 steps of 10 s and one restart of 10 minutes."""
    ratios = {(10, 610): 1.0, (20, 620): 1.0, (30, 630): 3.0} | {(run, 540 + run): 1.0 for run in (70, 80, 90, 100)}
    one = measure(result(ratios, applied=640, rollbacks=[(60, 600, 6.0)], actions={"restart": 1}))

    assert one.recovery_minutes == pytest.approx(40 * 10 / 60 + 10)


def test_sums_are_medians_and_shares():
    """Three trials, one of which never recovers: two of three healed, median and extremes of what was lost."""
    fine = straight([1.0] * 10)
    late = straight([1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    never = straight([1.0, 1.0, *[None] * 8])
    sums = sum_up([measure(result(ratios)) for ratios in (fine, late, never)])

    assert (sums.trials, sums.healed, sums.recovered, sums.lost) == (3, 2, 2, (20, 0, 80))
    assert sums.mean_lost == pytest.approx(100 / 3)
    assert sums.final == (1.0, 1.0, math.inf)
    assert sums.minutes == pytest.approx(20 * 10 / 60)
    assert sum_up([measure(result(never))] * 2).seconds == math.inf


def test_trials_without_a_fault_stand_apart():
    """They are in no sum of faults, and give the ratio of the steps' times, pair by pair."""
    clean = [
        result(straight([1.0] * 10), fault=CLEAN, strategy=strategy, seed=seed, step_ms=ms)
        for strategy, times in (("clip 1.0", (10.0, 20.0, 30.0)), ("ZClip", (11.0, 24.0, 33.0)))
        for seed, ms in enumerate(times)
    ]
    results = [*clean, result(straight([1.0] * 10), strategy="ZClip")]

    assert {name: len(measured) for name, measured in by_strategy(results).items()} == {"ZClip": 1}
    assert {name: len(measured) for name, measured in by_strategy(results, clean=True).items()} == {
        "clip 1.0": 3,
        "ZClip": 3,
    }
    assert step_ratio(results, "ZClip", "clip 1.0") == pytest.approx(1.1)
    assert math.isnan(step_ratio(results, "SPAM", "clip 1.0"))


def test_the_table_shows_what_never_came(tmp_path):
    """Table and plot are made of any results, also of a strategy that healed nothing."""
    fault = next(name for name in FAULTS if name != CLEAN)
    results = [
        result(straight([1.0] * 10), fault=CLEAN, strategy="ZClip", actions={"clip": 3}),
        result(straight([1.0, 1.0, *[None] * 8]), fault=fault, strategy="ZClip"),
    ]

    text = table(results)
    plot(results, tmp_path / "lost.png")

    assert "| ZClip | 0% of 1 | ≥ 80 | ≥ 80 | NaN | 1 of 1 | 1.000 | - |" in text
    assert "| ZClip | 0 of 1 | ≥ 80 | NaN | never | never |" in text
    assert (tmp_path / "lost.png").read_bytes().startswith(b"\x89PNG")


def test_every_kind_of_fault_is_in_the_plan():
    """Whatever can be injected is measured, at every moment and seed, and each trial has its own key."""
    measured = {kind for inject in FAULTS.values() for kind in inject(1, 1).fired}
    assert measured | set(LEFT_OUT) == set(get_args(Kind))
    assert not measured & set(LEFT_OUT)
    for plan in (FULL, QUICK):
        trials = plan.trials()
        assert len(trials) == len(set(trials))
        assert {(trial.seed, trial.fault, trial.moment) for trial in trials} == {
            (seed, fault, moment) for seed in plan.seeds for fault in plan.faults for moment in plan.moments
        }
        assert all(0 < moment - plan.fork_of(moment) < plan.every for moment in plan.moments)
        assert plan.twin_steps <= 0.8 * SCHEDULED_STEPS
    assert len(FULL.seeds) >= 3
    assert not set(FULL.seeds) & set(QUICK.seeds)


def test_results_outlive_an_interruption(tmp_path):
    """What is in the file is done, a line that was cut off is not, and results of other settings are refused."""
    path, settings = tmp_path / RESULTS, QUICK.settings()
    trial, other = QUICK.trials()[:2]
    Results(path, settings).add({**result({}), **trial._asdict()})
    with path.open("a") as file:
        file.write(json.dumps({**result({}), **other._asdict()})[:40])

    again = Results(path, settings)
    again.add({**result({}), **other._asdict()})

    assert again.done == {trial}
    assert len(read_results(path)[1]) == 2
    with pytest.raises(ValueError, match="other settings"):
        Results(path, FULL.settings())


def test_a_job_that_fails_does_not_end_the_others():
    """In processes of their own: each job's outcome or how it failed, as they come."""
    outcomes = sorted(all_of([(divmod, 7, 2), (divmod, 7, 0), (divmod, 9, 2)], 2), key=str)

    assert outcomes[:2] == [((3, 1), None), ((4, 1), None)]
    assert outcomes[2][0] is None
    assert "ZeroDivisionError" in outcomes[2][1]


# --- The strategies, on a model of two weights ------------------------------------------------------------------------


@pytest.fixture
def bench():
    """A linear model on AdamW that has made one step, with numbers for data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    data = SimpleNamespace(position=0)
    data.state_dict, data.load_state_dict = lambda: data.position, lambda state: setattr(data, "position", state)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        data=data,
    )


def fork_of(bench, tmp_path):
    """A fork at step 600 after a calm history: loss 2 and gradient norm 0.5, a little of noise."""
    names = ("model", "optimizer", "scheduler", "data")
    torch.save({name: getattr(bench, name).state_dict() for name in names}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    return Fork(600, tmp_path, state, [(2.0 + 0.01 * (n % 3), 0.5 + 0.01 * (n % 5)) for n in range(300)])


def step(bench, strategy, *, loss=2.0, gradient=(0.3, 0.4)):
    """One step with this loss and gradient; whether the weights changed."""
    before = bench.model.weight.detach().clone()
    bench.model.weight.grad = torch.tensor([gradient])
    if strategy.before_optimizer(torch.tensor(loss)):
        bench.optimizer.step()
    strategy.end_step()
    return not torch.equal(before, bench.model.weight)


def test_skip_step_withholds_a_spike_and_lets_a_nan_through(bench, tmp_path):
    """A finite outlier changes no weight; a NaN times a factor of 0 is NaN, as it is there."""
    strategy = SkippingSteps(bench, fork_of(bench, tmp_path))

    assert step(bench, strategy)
    assert not step(bench, strategy, loss=9.0)
    assert (strategy.step, strategy.applied, strategy.actions) == (602, 601, ["skip"])
    assert step(bench, strategy, gradient=(math.nan, 0.4))
    assert bench.model.weight.isnan().any()


def test_zclip_clips_below_one(bench, tmp_path):
    """A norm of 5 after norms of 0.5 is clipped to little more than these."""
    strategy = ZClipping(bench, fork_of(bench, tmp_path))
    bench.model.weight.grad = torch.tensor([[3.0, 4.0]])

    assert strategy.before_optimizer(torch.tensor(2.0))
    assert 0.5 < bench.model.weight.grad.norm() < 0.6
    assert strategy.actions == ["clip"]


def test_spam_clips_elements_and_resets_moments(bench, tmp_path):
    """An element far above its own moment is clipped alone; at step 1000 moments are new and the rate starts low."""
    strategy = Spam(bench, fork_of(bench, tmp_path))
    limit = (5000.0 * bench.optimizer.state[bench.model.weight]["exp_avg_sq"]).sqrt()[0, 0].item()
    bench.model.weight.grad = torch.tensor([[-1e6, 0.4]])

    assert strategy.before_optimizer(torch.tensor(2.0))
    assert bench.model.weight.grad[0].tolist() == pytest.approx([-limit, 0.4])
    strategy.end_step()
    for _ in range(398):
        step(bench, strategy)
    assert strategy.actions == []
    bench.model.weight.grad = torch.tensor([[0.3, 0.4]])
    strategy.before_optimizer(torch.tensor(2.0))
    assert strategy.actions == ["reset"]
    assert bench.optimizer.state[bench.model.weight] == {}
    assert bench.optimizer.param_groups[0]["lr"] < 1e-4
    strategy.end_step()
    assert (strategy.step, bench.optimizer.param_groups[0]["lr"]) == (1000, 0.1)


def test_the_human_restarts_at_a_look_and_leaves_the_data_out(bench, tmp_path):
    """Nothing happens between looks; a loss that is off takes weights and moments back, and the data go on forward."""
    fork = fork_of(bench, tmp_path)
    moment = fork.state["optimizer"]["state"][0]["exp_avg"].clone()
    strategy = Human(bench, fork, seed="any")
    looked = 0
    for number in range(1, 3 * LOOK_STEPS + 1):
        bench.data.position = number
        step(bench, strategy, loss=2.0 if number <= LOOK_STEPS else math.nan)
        if strategy.actions:
            looked = number
            break

    assert LOOK_STEPS < looked <= 2 * LOOK_STEPS
    assert (strategy.step, strategy.applied, strategy.actions) == (600, 600, ["restart"])
    assert torch.equal(bench.model.weight, fork.state["model"]["weight"])
    assert torch.equal(bench.optimizer.state[bench.model.weight]["exp_avg"], moment)
    assert bench.data.position == looked


@pytest.mark.live
@pytest.mark.timeout(200)
def test_a_trial_runs_under_real_servers(tmp_path):
    """It begins once the outer loop is up, which it waits for, forks where the twin was, and ends when it is to end."""
    fault = "NaN in a gradient, 20 steps"
    plan = Plan(seeds=(7,), faults=(fault,), moments=(60,), after=20, every=50, look_every=5)
    twins = Twins(tmp_path, plan)
    twins.train(7)

    one = run_trial(Trial(7, fault, 60, PROMETHEUS), plan, twins, tmp_path)

    assert (one["fork"], one["run"], one["planned"], one["stopped"]) == (50, 30, 30, False)
    assert one["looks"][0][:2] == [5, 55]
    assert [ratio for run, _, _, ratio in one["looks"] if run <= 10] == pytest.approx([1.0, 1.0], abs=1e-4)
    # What is not applied is either withheld or rolled back, and 20 steps were NaN.
    assert one["applied"] <= 60


@pytest.mark.live
@pytest.mark.timeout(600)
def test_the_quick_run_is_killed_and_goes_on(tmp_path):
    """Killed in the middle, it runs what is left and nothing twice; the trials are whole, and so is the table."""
    command = [*COMMAND, "--workers", "1", "--out", tmp_path]
    folder = tmp_path / "recovery-quick"

    def lines():
        return (folder / RESULTS).read_text().splitlines() if (folder / RESULTS).exists() else []

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        wait_for(lambda: len(lines()) >= 4 or first.poll() is not None, 300.0, pause_seconds=0.1)
        first.send_signal(signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    kept = lines()
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    settings, results = read_results(folder / RESULTS)
    assert set(kept) <= set(lines())
    assert settings == QUICK.settings()
    keys = Counter((one["seed"], one["fault"], one["moment"], one["strategy"]) for one in results)
    assert keys == Counter(dict.fromkeys(QUICK.trials(), 1))
    assert f"/{len(QUICK.trials()) - len(kept) + 1 + 1}]" in done.stdout
    for one in results:
        assert one["run"] == one["planned"] or one["stopped"]
        told = measure(one)
        assert told.steps_lost >= one["fork"] + one["planned"] - one["applied"] >= 0
        assert told.step_ms > 0.0
    # Where nothing is broken, what only clips at 1 is the twin's own training, to the last bits.
    plain = next(one for one in results if one["fault"] == CLEAN and one["strategy"] == "clip 1.0")
    assert [ratio for *_, ratio in plain["looks"]] == pytest.approx([1.0] * len(plain["looks"]), abs=1e-4)
    guarded = next(one for one in results if one["fault"] == CLEAN and one["strategy"] == "full ladder, local")
    assert guarded["looks"][-1][1] == guarded["applied"]
    assert table(results) == (folder / "table.md").read_text()
    assert (folder / "lost.png").stat().st_size > 0

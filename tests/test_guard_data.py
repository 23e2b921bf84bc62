"""The Guard and its data: what is suspect after a rollback never comes again, or counts less; nothing else changes."""

import copy
import json
import time

import pytest
import torch
from loaders import LoaderJob
from torch import nn
from training import adamw_job, equal, spoil_weights
from waiting import wait_for

from exporter.commands import Command

POISON = 120
# Nothing finite is a sign in these runs: their data are too few to be calm.
QUIET = {"detection": {"warmup_steps": 1000}}
EVERY_50 = {"checkpoints": {"every": 50}, **QUIET}


def run(job, until, *, poison=()):
    """Train on, whereby the batches at these positions meet ruined weights; stop early where the run goes back."""
    while job.guard.step < until:
        step = job.guard.step
        if job.guard._parts.data.position in poison:
            spoil_weights(job.model)
        job.step()
        if job.guard.step <= step:
            return


def ask_for_rollback(guard):
    """Put an operator's command into the inbox, and see it arrive."""
    guard._parts.folder.inbox.put(
        Command(id="a1", run="tiny", action="rollback", source="operator", received=time.time())
    )
    wait_for(guard._parts.loop.commands)


def lines(guard):
    """The quarantine as a data pipeline reads it."""
    guard._parts.loop.flush(5.0)
    return [json.loads(line) for line in (guard._parts.folder.path / "quarantine.jsonl").read_text().splitlines()]


def test_a07_a_poisoned_batch_does_not_come_again(make_guard):
    """Poison at 120, checkpoint at 100: back at 100 the window from 115 to 140 is not used, nor by a new process."""
    job = make_guard(**EVERY_50)
    run(job, 200, poison=[POISON])
    assert (job.guard.step, job.used[-1]) == (100, POISON)
    run(job, 130, poison=[POISON])
    assert job.used[121:] == [*range(100, 115), *range(141, 156)]
    assert len(job.guard._parts.policy.state.incidents) == 1
    (line,) = lines(job.guard)
    assert line == {
        "first": 115, "last": 140, "incident": 1, "reason": "numerical at step 121", "sample_ids": [], "schema": 1,
    }  # fmt: skip
    job.guard.close()

    again = make_guard(adamw_job(seed=5), **EVERY_50)
    assert again.guard.step == 100
    run(again, 130, poison=[POISON])
    assert again.used == [*range(100, 115), *range(141, 156)]
    assert again.guard.page.value("train_steps_skipped_total", "quarantined") == 26


def test_a07_a_bad_sample_costs_its_own_batch_only(make_guard):
    """In an incident of class bad_sample exactly batch 120 is left out: applied are 100 to 119, then 121 and on."""
    job = make_guard(**EVERY_50)
    run(job, 121)
    incident = job.guard._parts.policy.state.open(121, 121, 121)
    incident.class_ = "bad_sample"
    ask_for_rollback(job.guard)
    run(job, 130)
    assert job.guard.step == 100
    used = len(job.used)
    run(job, 130)
    assert job.used[used:] == [*range(100, 120), *range(121, 131)]


def test_a07_a_second_rollback_takes_an_older_target_and_twice_the_window(make_guard):
    """What spikes again just behind the window costs steps 110 to 160: R11's 5 and 20 steps, doubled."""
    job = make_guard(**EVERY_50)
    for _ in range(2):
        run(job, 200, poison=[POISON, 145])
    assert (job.guard.step, job.used[-1]) == (50, 145)
    # Step 110 had position 109; step 120, the last one run, had 145; the 40 steps after it would have had 40 more.
    assert [(line["first"], line["last"]) for line in lines(job.guard)] == [(115, 140), (109, 185)]
    used = len(job.used)
    run(job, 130, poison=[POISON, 145])
    assert job.used[used:] == [*range(50, 109), *range(186, 207)]
    assert len(job.guard._parts.policy.state.incidents) == 1


class Accumulated:
    """A loop with so many micro-batches a step; ids are those of step and micro-batch."""

    def __init__(self, job, micro_batches):
        self.job, self.guard, self.micro_batches = job, job.guard, micro_batches

    def micro_steps(self, number):
        """Some micro-batches."""
        for micro in range(number):
            batch = self.guard.next_batch()
            loss = nn.functional.mse_loss(self.job.model(batch), batch.sum(1, keepdim=True))
            (loss / self.micro_batches).backward()
            self.guard.micro_step(loss, tokens=10 + micro, sample_ids=[f"{self.guard.step + 1}-{micro}"])

    def step(self):
        """A whole step."""
        self.micro_steps(self.micro_batches)
        self.guard.before_optimizer(sample_ids=[f"{self.guard.step + 1}-all"])
        self.job.optimizer.step()
        self.job.optimizer.zero_grad()
        self.guard.end_step()
        self.guard._parts.checkpoints.wait()


def test_the_ids_that_the_loop_tells_are_in_the_quarantine(make_guard):
    """Told to micro_step or before_optimizer, the ids of the suspect steps stand in quarantine.jsonl."""
    loop = Accumulated(make_guard(), 2)
    for _ in range(25):
        loop.step()
    spoil_weights(loop.job.model)
    loop.step()
    assert loop.guard.step == 20
    (line,) = lines(loop.guard)
    assert (line["first"], line["last"]) == (40, 91)  # Steps 21 to 46, of which 20 are still to come.
    assert line["sample_ids"] == [f"{step}-{part}" for step in range(21, 27) for part in (0, 1, "all")]


def test_a16_a_rollback_amid_accumulation_leaves_nothing_of_it(make_guard):
    """Back after two of four micro-batches, the next step is bit for bit that of a new process: four fresh ones.

    No gradient is left, and loss and tokens of the step are those of the four.
    """
    loop = Accumulated(make_guard(), 4)
    for _ in range(23):
        loop.step()
    loop.micro_steps(2)
    ask_for_rollback(loop.guard)
    loop.guard.end_step()
    assert loop.guard.step == 20
    assert all(parameter.grad is None for parameter in loop.job.model.parameters())
    tokens = loop.guard.page.value("train_tokens_total")
    loop.step()
    loss = loop.guard.page.value("train_loss")
    assert loop.guard.page.value("train_tokens_total") - tokens == 10 + 11 + 12 + 13
    loop.guard.close()

    fresh = Accumulated(make_guard(adamw_job(seed=7)), 4)
    assert fresh.guard.step == 20
    fresh.step()
    assert fresh.guard.page.value("train_loss") == loss
    assert equal(loop.job.weights(), fresh.job.weights())
    moments = [
        [value for state in one.job.optimizer.state.values() for value in state.values()] for one in (loop, fresh)
    ]
    assert equal(*moments)


def test_suspect_samples_are_left_out_one_by_one(tmp_path):
    """With the index sampler a window is left out by its samples, also those still to come, and by a new process."""
    job = LoaderJob(tmp_path, "index", size=2400)
    job.run(25)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20
    (line,) = lines(job.guard)
    assert len(line["sample_ids"]) == 26 * 2 * 4
    used = len(job.used)
    job.run(60)
    assert job.guard.page.value("train_steps_skipped_total", "quarantined") == 0
    job.guard.close()
    again = LoaderJob(tmp_path, "index", size=2400)
    assert again.guard.step == 60
    again.run(65)
    again.guard.close()
    whole = LoaderJob(tmp_path / "whole", "index", size=2400)
    whole.run(100)
    whole.guard.close()
    samples = [index for batch in [*job.used[used:], *again.used] for index in batch]
    wanted = [index for batch in whole.used[40:] for index in batch if str(index) not in line["sample_ids"]]
    assert samples == wanted[: len(samples)]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("weight", [0.1, 0.25])
def test_reweighted_data_train_like_a_loop_that_scales_by_hand(make_guard, clip, weight):
    """The suspect steps' gradients, clipped, times the weight: bit for bit, in the job that went back and in a new one.

    Baselines are those of the gradients as they were.
    """
    options = {"actions": {"suspect_data": "reweight", "suspect_weight": weight, "clip_max_norm": clip}, **QUIET}
    job = make_guard(**options)
    run(job, 25)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20
    (line,) = lines(job.guard)
    job.guard.close()
    job = make_guard(adamw_job(seed=5), **options)
    hand = adamw_job(seed=6)
    hand.model.load_state_dict(job.model.state_dict())
    hand.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    batches = iter(hand.data)
    for _ in range(20):
        next(batches)
    for position in range(20, 60):
        job.step()
        batch = next(batches)
        loss = nn.functional.mse_loss(hand.model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        gradients = [parameter.grad for parameter in hand.model.parameters()]
        norm = nn.utils.get_total_norm(gradients)
        coefficient = torch.ones(()) if clip is None else torch.clamp(clip / (norm + 1e-6), max=1.0)
        if line["first"] <= position <= line["last"]:
            coefficient = coefficient * weight
        for gradient in gradients:
            gradient.mul_(coefficient)
        for group in hand.optimizer.param_groups:
            group["lr"] = job.guard.page.value("train_learning_rate", "0")
        hand.optimizer.step()
        hand.optimizer.zero_grad()
        assert equal(job.weights(), hand.weights()), position
        assert job.guard.page.value("train_grad_norm") == pytest.approx(norm.item(), rel=1e-6)
    assert job.used == list(range(20, 60))
    suspect = min(line["last"], 59) - line["first"] + 1
    assert job.guard.page.value("train_batches_reweighted_total") == suspect
    assert job.guard.page.value("train_steps_skipped_total", "quarantined") == 0


def test_a_weight_that_is_a_power_of_two_is_that_of_the_loss(make_guard):
    """Without a clip a weight of 1/4 gives bit for bit the weights of a loop that multiplies its loss with it."""
    options = {"actions": {"suspect_data": "reweight", "suspect_weight": 0.25, "clip_max_norm": None}, **QUIET}
    job = make_guard(**options)
    run(job, 25)
    spoil_weights(job.model)
    job.step()
    (line,) = lines(job.guard)
    hand = adamw_job(seed=6)
    hand.model.load_state_dict(job.model.state_dict())
    hand.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    for position in range(20, 30):
        job.step()
        batch = job.data.batch(position)
        loss = nn.functional.mse_loss(hand.model(batch), batch.sum(1, keepdim=True))
        (loss * (0.25 if line["first"] <= position <= line["last"] else 1.0)).backward()
        for group in hand.optimizer.param_groups:
            group["lr"] = job.guard.page.value("train_learning_rate", "0")
        hand.optimizer.step()
        hand.optimizer.zero_grad()
        assert equal(job.weights(), hand.weights()), position


def test_observe_gives_suspect_data_their_full_weight(make_guard):
    """Where the guard only observes, an earlier quarantine changes no gradient."""
    options = {"actions": {"suspect_data": "reweight", "clip_max_norm": None}, **QUIET}
    job = make_guard(**options)
    run(job, 25)
    spoil_weights(job.model)
    job.step()
    (line,) = lines(job.guard)
    job.guard.close()
    weights = []
    for mode in ("observe", "auto"):
        job = make_guard(adamw_job(seed=5), mode=mode, run="tiny", checkpoints={"every": 1000}, **options)
        job.run(22)
        assert line["first"] <= job.used[0] <= line["last"]
        assert (job.guard.page.value("train_batches_reweighted_total") > 0) == (mode == "auto")
        weights.append(job.weights())
        job.guard.close()
    assert not equal(*weights)


@pytest.mark.parametrize(("data", "told"), [("list", "forward"), ("loader", "exact")])
def test_train_info_tells_whether_data_go_back(make_guard, tmp_path, data, told):
    """`data_rewind` is `exact` for a loader with the index sampler, and `forward` for a list."""
    guard = LoaderJob(tmp_path, "index").guard if data == "loader" else make_guard(data=[torch.ones(2, 4)]).guard
    assert f'data_rewind="{told}"' in guard.page.render().decode()
    guard.close()


def test_data_that_go_on_forward_say_so_once(make_guard, caplog):
    """A list keeps its place on a rollback, and at a restart begins anew: one line each time, with the places."""
    batches = [torch.full((4, 4), 0.01 * number) for number in range(1000)]
    job = make_guard(data=batches, **QUIET)
    for round_ in range(2):
        job.run(25)
        spoil_weights(job.model)
        job.step()
        assert job.guard.step == (20, 10)[round_]
    assert caplog.text.count("data cannot go back: it goes on with its batch 26, the weights were at batch 20") == 1
    assert caplog.text.count("data cannot go back") == 1
    job.guard.close()
    make_guard(adamw_job(seed=5), data=batches, **QUIET)
    assert "data cannot go back: it goes on with its batch 0, the weights were at batch 10" in caplog.text

"""Ranks that are not alike: data on some only, a save that one left out, odd values, other arguments, a hung one."""

import os
import shutil
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import RanksJob, model_of, run_ranks, start_ranks, wait_for_end
from torch.distributed.fsdp import fully_shard
from training import settings
from waiting import wait_for

from exporter.commands import Command
from trainer_plugin.guard import Guard
from trainer_plugin.lines import Lines
from trainer_plugin.ranks import Ranks, RanksError

RUN_SECONDS = 50.0


def ask(guard, action, number=1):
    """Have a command wait in the first rank's inbox."""
    if guard._parts.ranks.first:
        guard._parts.folder.inbox.put(
            Command(id=f"a{number}", run="tiny", action=action, source="operator", received=time.time())
        )
        wait_for(guard._parts.loop.commands)


class SomeHaveData(RanksJob):
    """The first rank has data, as the first stage of a pipeline; the others take what comes."""

    def __init__(self, folder, rank):
        super().__init__(folder, "ddp", rank=rank, size=2)
        self.guard.close()
        dist.barrier()
        self.guard = Guard(
            settings(folder), model=self.model, optimizer=self.optimizer, resume="never", local_only=True,
            data=self.data if rank == 0 else None,
        )  # fmt: skip

    def step(self, damage=None):
        """As of any job."""
        del damage
        loss = self.loss(self.guard.next_batch() if self.rank == 0 else [self.guard.step])
        loss.backward()
        self.guard.before_optimizer(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.end_step()


def some_have_data(folder, rank):
    """A batch is left out by command, then the run goes back."""
    job = SomeHaveData(folder, rank).run(12)
    ask(job.guard, "skip_batch")
    job.run(21)
    job.guard._parts.checkpoints.wait()
    steps = []
    ask(job.guard, "rollback", 2)
    for _ in range(2):
        job.step()
        steps.append(job.guard.step)
    left_out = len(job.data.left_out)
    job.guard.close()
    return steps, left_out


def test_not_every_rank_needs_data(tmp_path):
    """What is suspect is known on one rank alone: all of them take part in asking, and none waits for ever."""
    (first, left_out), (second, _) = run_ranks(2, partial(some_have_data, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    assert first == second
    assert min(first) < 21
    assert left_out


def one_leaves_saves_out(folder, rank):
    """After step 10 the second rank's memory is never free again, as where a disk hangs under the writer."""
    job = RanksJob(folder, "ddp", rank=rank, size=2).run(10)
    job.guard._parts.checkpoints.wait()
    if rank == 1:
        job.guard._parts.checkpoints._slots._slots[0].hold()
    job.run(25)
    job.guard._parts.checkpoints.wait()
    ask(job.guard, "rollback")
    steps = []
    for _ in range(2):
        job.step()
        steps.append(job.guard.step)
    weights = job.weights()
    job.guard.close()
    return steps, weights


def test_a_rank_that_left_a_save_out_goes_back_with_the_others(tmp_path):
    """Its memory still holds what the others have to read from disk."""
    (first, weights), (second, others) = run_ranks(
        2, partial(one_leaves_saves_out, tmp_path), tmp_path / "ranks", RUN_SECONDS
    )
    assert first == second
    assert first[-1] in (10, 11)
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def odd_values(folder, _rank):
    """Sharded layers beside a whole one in mode observe; once a loss that is none, once ids that are no texts."""
    model = model_of()
    fully_shard(model[0])
    fully_shard(model[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    signals = []
    guard = Guard(settings(folder, mode="observe"), model=model, optimizer=optimizer, on_signals=signals.append)
    clipped = []
    for number in range(4):
        loss = 100.0 * model(torch.ones(4, 6)).square().mean()
        loss.backward()
        odd_loss = torch.ones(2) if number == 1 else loss
        guard.before_optimizer(odd_loss, sample_ids=torch.tensor([1, 2]) if number == 2 else None)
        clipped.append(model[4].weight.grad.norm().item())
        optimizer.step()
        optimizer.zero_grad()
        guard.end_step()
    guard.close()
    return [one.step for one in signals], [one.grad_norm for one in signals], clipped


def test_what_is_odd_is_held_back_on_all_ranks(tmp_path):
    """As of one process, nothing of ours raises; and where torch refuses to clip, the guard does."""
    told = run_ranks(2, partial(odd_values, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    for steps, norms, clipped in told:
        assert steps == [1, 3, 4]
        assert min(norms) > 1.0
        assert max(clipped) <= 1.0
        assert len(set(clipped)) == 1


def other_arguments(folder, rank):
    """The first rank finds a checkpoint folder and goes on; the other one does not, and begins anew."""
    with pytest.raises(ValueError, match=r"has another version, resume or start_step than rank"):
        RanksJob(folder, "ddp", rank=rank, size=2, resume="auto" if rank == 0 else "never")


def test_ranks_that_start_otherwise_are_refused(tmp_path):
    """Some would load what the others do not: at the start that can be said, later they would wait for ever."""
    run_ranks(2, partial(other_arguments, tmp_path), tmp_path / "ranks", RUN_SECONDS)


def hang_with_a_long_message(folder, hung, rank):
    """One rank is stopped while the other one's writer has much to tell it."""
    job = RanksJob(folder, "ddp", rank=rank, size=2, ranks={"timeout_seconds": 3.0}).run(3)
    dist.barrier()
    if rank == hung:
        os.kill(os.getpid(), signal.SIGSTOP)
    long_one = partial(job.guard._parts.lines.send, "report", ["key", "x" * 30_000_000])
    threading.Thread(target=long_one, daemon=True).start()
    job.run(1000)


@pytest.mark.live
@pytest.mark.parametrize("hung", [0, 1])
def test_a_rank_that_hangs_in_a_long_message_is_missed(tmp_path, hung):
    """The roll call waits for no line that is not free."""
    started = start_ranks(2, partial(hang_with_a_long_message, tmp_path, hung), tmp_path / "ranks")
    started[1 - hung].process.join(40.0)
    code = started[1 - hung].code
    started[hung].process.kill()
    wait_for_end(started, 1.0)
    assert code == 1
    assert f"rank {hung} on " in started[1 - hung].log


def test_a_smaller_job_forgets_the_ranks_of_a_larger_one(make_guard, tmp_path):
    """Four ranks were killed and one goes on: nobody would ever answer where the others were, and an alert would fire.

    Entries of other runs stay.
    """
    targets = tmp_path / "runs" / "targets"
    targets.mkdir(parents=True)
    for name in ("tiny-0", "tiny-1", "tiny-3", "tiny-2-1", "tin-1"):
        (targets / f"{name}.json").write_text("[]")
    make_guard()
    assert {path.stem for path in targets.iterdir()} == {"tiny-0", "tiny-2-1", "tin-1"}


def one_does_not_come(rank):
    """The second rank is killed on its way, or cannot get through to the first one's port."""
    ranks = Ranks(rank=rank, size=2, alone=False)
    if rank == 1:
        ranks.from_first(None)
        return
    with pytest.raises(RanksError, match=r"rank 1 on .* has not come to rank 0 at port .* within 1 s"):
        Lines(ranks, meeting_seconds=1.0)


def test_a_rank_that_does_not_come_to_the_lines_is_named(tmp_path):
    """Before there are lines there is no roll call: the first rank would wait for ever."""
    run_ranks(2, one_does_not_come, tmp_path / "ranks", RUN_SECONDS)


def bad_disk(folder, until, rank):
    """Two hosts, each with its local tier."""
    tiers = {"local": str(folder / f"local-{rank}"), "shared": str(folder / "shared"), "every": 5}
    job = RanksJob(folder, "fsdp2", rank=rank, size=2, checkpoints=tiers)
    begun = job.guard.step
    job.run(until)
    job.guard._parts.checkpoints.wait()
    job.guard.close()
    return begun


def test_a_disk_that_is_broken_at_the_start_costs_one_tier(tmp_path):
    """In the place of the second host's folder is something else: all go on from the shared tier.

    Where there is nothing to go on from, all are refused with the name of the rank.
    """
    run_ranks(2, partial(bad_disk, tmp_path, 5), tmp_path / "a", RUN_SECONDS)
    shutil.rmtree(tmp_path / "local-1" / "tiny")
    (tmp_path / "local-1" / "tiny").touch()
    assert run_ranks(2, partial(bad_disk, tmp_path, 7), tmp_path / "b", RUN_SECONDS) == [5, 5]
    shutil.rmtree(tmp_path / "shared" / "tiny")
    shutil.rmtree(tmp_path / "local-0" / "tiny")
    started = start_ranks(2, partial(bad_disk, tmp_path, 7), tmp_path / "c")
    wait_for_end(started, RUN_SECONDS)
    with pytest.raises(AssertionError, match=r"rank 1: checkpoints.local: folder .* cannot be written"):
        assert started[0].result

"""Checkpoints of several ranks: each writes its part, all are there or none is, and all go back to the same state."""

import json
import math
import os
import shutil
import signal
import time
from functools import partial

import pytest
import torch
from ranks import RanksJob, assert_equal, run_ranks, start_ranks, wait_for_end
from ranks_kills import kill_one_again_and_again
from waiting import wait_for

from exporter.commands import Command
from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.inventory import take_inventory
from trainer_plugin.checkpoints.retention import CheckpointsConfig
from trainer_plugin.scenes import scene

pytestmark = pytest.mark.timeout(400)
RUN_SECONDS = 150.0


def loss_fn(model, batch):
    """The loss of each sample, for the proof of a restore."""
    inputs = torch.ones(len(batch), 6)
    return (model(inputs) - 1.0).square().squeeze(1)


def options_of(folder, rank, hosts):
    """The local tier of a host: each rank has its own with `hosts`."""
    return {"checkpoints": {"local": str(folder / f"host-{rank}"), "every": 5}} if hosts else {}


def run_unhurried(job, until):
    """Train to a step and leave no checkpoint out: a step here is quicker than a disk."""
    while job.guard.step < until and not job.guard.stopping:
        job.step()
        job.guard._parts.checkpoints.wait()
    return job


def train(folder, kind, size, until, rank, *, hosts=False):
    """Train to a step and end in order."""
    job = RanksJob(folder, kind, rank=rank, size=size, loss_fn=loss_fn, **options_of(folder, rank, hosts))
    return run_unhurried(job, until).finish()


def train_and_die(folder, kind, size, until, rank):
    """Train to a step, and be killed as by the kernel once the last checkpoint is written."""
    run_unhurried(RanksJob(folder, kind, rank=rank, size=size, loss_fn=loss_fn), until)
    os.kill(os.getpid(), signal.SIGKILL)


def whole(folder):
    """The checkpoints below a tier's folder, and what is wrong with each."""
    found = {}
    for path in sorted((folder / "tiny").glob("step-*")):
        known = manifest.read(path)
        found[known.step if known else path.name] = ["no manifest"] if known is None else manifest.faults(path, known)
    return found


def test_a_killed_job_of_two_ranks_goes_on_bit_for_bit(tmp_path):
    """FSDP2: 25 steps, all ranks killed, the rest in new processes: as 35 straight ones.

    Weights, moments, schedule, what each rank draws, and the order of its samples.
    """
    straight = run_ranks(2, partial(train, tmp_path / "straight", "fsdp2", 2, 35), tmp_path / "a", RUN_SECONDS)
    killed = start_ranks(2, partial(train_and_die, tmp_path / "run", "fsdp2", 2, 25), tmp_path / "b")
    wait_for_end(killed, RUN_SECONDS)
    assert [one.code for one in killed] == [-signal.SIGKILL] * 2
    assert whole(tmp_path / "run/local") == whole(tmp_path / "run/shared") == {10: [], 20: []}
    resumed = run_ranks(2, partial(train, tmp_path / "run", "fsdp2", 2, 35), tmp_path / "b", RUN_SECONDS)
    for here, there in zip(resumed, straight, strict=True):
        assert_equal(here, there, steps=20)


@pytest.mark.live
@pytest.mark.parametrize(("before", "after"), [(("fsdp2", 4), ("fsdp2", 2)), (("fsdp2", 4), ("alone", 1)),
                                               (("alone", 1), ("fsdp2", 2)), (("ddp", 2), ("fsdp2", 4))])  # fmt: skip
def test_another_number_of_ranks_goes_on(tmp_path, before, after):
    """The tensors are laid out anew, bit for bit, and no sample that was used comes again."""
    (kind, size), (kind_after, size_after) = before, after
    saved = run_ranks(size, partial(train, tmp_path, kind, size, 20), tmp_path / "a", RUN_SECONDS)
    at_once = run_ranks(size_after, partial(train, tmp_path, kind_after, size_after, 20), tmp_path / "b", RUN_SECONDS)
    for name in ("weights", "moments"):
        assert at_once[0][name].keys() == saved[0][name].keys()
        for key, value in saved[0][name].items():
            assert torch.equal(at_once[0][name][key], value)
    assert at_once[0]["scheduler"] == saved[0]["scheduler"]
    assert at_once[0]["step"] == 20
    assert len({told["draws"][0] for told in at_once}) == size_after  # Each rank has numbers of its own.
    log = (tmp_path / "b" / "rank-0.log").read_text()
    assert f"saved by {size} ranks, gone on with by {size_after}" in log
    assert f"data: split over {size_after} ranks, before it was {size}: from sample 320 of epoch 0 on" in log
    later = run_ranks(size_after, partial(train, tmp_path, kind_after, size_after, 24), tmp_path / "b", RUN_SECONDS)
    used = [sample for told in (*saved, *later) for batch in told["used"] for sample in batch]
    assert len(used) == len(set(used)) == 24 * 16


def spoil(job, loss):
    """The last rank's weights are not finite any more."""
    if job.rank == job.size - 1:
        with torch.no_grad():
            for parameter in job.model.parameters():
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(math.nan)
    return loss


def roll_back(folder, kind, size, rank):
    """A rank's weights are ruined in step 24; a command takes back a layer after step 35."""
    job = RanksJob(folder, kind, rank=rank, size=size, loss_fn=loss_fn)
    guard = job.guard
    while guard.step < 45:
        if guard.step == 35 and rank == 0:
            command = Command(
                id="a1", run="tiny", action="partial_rollback", source="operator", received=time.time(), layers=("2",)
            )
            guard._parts.folder.inbox.put(command)
            wait_for(guard._parts.loop.commands)
        job.step(spoil if guard._parts.history.steps_total == 23 else None)
        guard._parts.checkpoints.wait()
    told = {
        "remedies": [
            (one.action, one.step, one.outcome, one.detail)
            for incident in guard._parts.policy.state.incidents
            for one in incident.remedies
        ],
        "quarantine": guard._parts.data.quarantine,
        "lineage": guard._parts.checkpoints.lineage.began_at,
        "proofs": guard._parts.proof.outcomes,
    }
    guard._parts.scenes.wait()
    return {**job.finish(), **told}


def check_rollback(tmp_path, kind, size):
    """Several ranks against one process."""
    alone = roll_back(tmp_path / "alone", "alone", 1, 0)
    ranks = run_ranks(size, partial(roll_back, tmp_path / "run", kind, size), tmp_path / "ranks", RUN_SECONDS)
    assert [one[:3] for one in alone["remedies"]] == [
        ("rollback", 25, "done"), ("partial_rollback", 36, "done")
    ]  # fmt: skip
    assert ranks[0]["remedies"] == alone["remedies"]
    for told in ranks:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(told["weights"][name], weight, rtol=0.0, atol=1e-4)
        assert told["quarantine"] == alone["quarantine"] != []
        assert told["lineage"] == alone["lineage"]
        assert told["proofs"]["equal"] == 1
        assert told["step"] == 45
    used = zip(*(told["used"] for told in ranks), strict=True)
    together = [sorted(sample for batch in batches for sample in batch) for batches in used]
    assert together == [sorted(batch) for batch in alone["used"]]  # The same samples in each step, and left out.


def test_two_ranks_go_back_as_one_process(tmp_path):
    """NaN weights on one rank: all go back at the same boundary to the same state, and prove it; so does one layer.

    What is suspect is the same on all ranks, and nobody sees it again.
    """
    check_rollback(tmp_path, "fsdp2", 2)


@pytest.mark.live
@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp2", 4), ("ddp", 4)])
def test_ranks_of_every_kind_go_back_as_one_process(tmp_path, kind, size):
    """As above."""
    check_rollback(tmp_path, kind, size)


def stop(folder, rank):
    """Weights are ruined before there is a checkpoint to go back to: the run can only be stopped."""
    job = RanksJob(folder, "fsdp2", rank=rank, size=2, loss_fn=loss_fn, checkpoints={"every": 10_000})
    while not job.guard.stopping and job.guard.step < 200:
        job.step(spoil if job.guard._parts.history.steps_total == 23 else None)
    stopped_at = job.guard.step
    job.guard.close()
    return {"stopped_at": stopped_at}


def test_the_state_of_a_stopped_run_is_set_aside_by_all_ranks(tmp_path):
    """What two ranks were stopped with lies in `stopped/` as one whole checkpoint, and no tier has it."""
    first, second = run_ranks(2, partial(stop, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    assert first["stopped_at"] == second["stopped_at"] < 200
    (path,) = (tmp_path / "runs" / "tiny" / "stopped").iterdir()
    found = manifest.read(path)
    assert (found.step, found.ranks, found.finite) == (first["stopped_at"], 2, False)
    assert manifest.faults(path, found) == []
    assert {rank for holders in found.holders.values() for rank in holders} == {0, 1}


def lose_a_disk(folder, rank):
    """On two hosts: the second one's local disk goes away after step 7 and comes back after step 13."""
    job = RanksJob(folder, "fsdp2", rank=rank, size=2, **options_of(folder, rank, hosts=True))
    mine, away = folder / f"host-{rank}" / "tiny", folder / f"away-{rank}"
    while job.guard.step < 20:
        job.step()
        job.guard._parts.checkpoints.wait()
        if rank == 1 and job.guard.step == 7:
            mine.rename(away)
        if rank == 1 and job.guard.step == 13:
            away.rename(mine)
    failures = job.guard.page.value("train_checkpoint_failures_total", "local")
    return {"failures": failures, **job.finish()}


def test_a_disk_of_one_host_costs_its_own_copies_only(tmp_path):
    """Two hosts, each with its local tier: while one is gone, checkpoints fail there on both; the shared tier has them.

    Afterwards one host comes back with an empty disk: its part is taken from the shared tier, bit for bit.
    """
    told = run_ranks(2, partial(lose_a_disk, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    assert [one["failures"] for one in told] == [1.0, None]
    assert whole(tmp_path / "shared") == {5: [], 10: [], 15: [], 20: []}
    assert list(whole(tmp_path / "host-0")) == list(whole(tmp_path / "host-1")) == [5, 15, 20]
    name = "tiny/step-000000020-001"
    parts = [{path.name for path in (tmp_path / f"host-{rank}" / name).iterdir()} for rank in (0, 1)]
    assert parts[0] == {".metadata", "manifest.json", "plain.pt", "__0_0.distcp", "__0_w0.distcp"}
    assert parts[1] == {".metadata", "manifest.json", "plain-1.pt", "__1_0.distcp", "__0_w0.distcp"}

    shutil.rmtree(tmp_path / "host-1")
    damaged = tmp_path / "shared/tiny/step-000000020-001/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    again = run_ranks(2, partial(train, tmp_path, "fsdp2", 2, 20, hosts=True), tmp_path / "ranks", RUN_SECONDS)
    assert whole(tmp_path / "host-1") == {20: []}  # Mended, each tier from the other.
    assert whole(tmp_path / "shared")[20] == []
    for here, there in zip(again, told, strict=True):
        assert here["step"] == 20
        for name, tensor in there["weights"].items():
            assert torch.equal(here["weights"][name], tensor)
    options = CheckpointsConfig(local=str(tmp_path / "host-1"), shared=str(tmp_path / "shared"))
    seen = take_inventory(tmp_path / "runs/tiny", "tiny", options, verify=True)
    assert seen.problems == []
    assert seen.checkpoints[0].tiers == {"local": "whole", "shared": "whole"}
    assert list(tmp_path.rglob("part-*")) == []  # Nothing of an attempt is left, good or bad.


def keep_a_scene(folder, rank):
    """The second rank's loss is NaN at step 23."""
    job = RanksJob(folder, "fsdp2", rank=rank, size=2)
    job.run(26, {23: lambda job, loss: loss * math.nan if job.rank == 1 else loss})
    job.guard._parts.scenes.wait()
    return job.finish()


def test_a_scene_has_every_ranks_part(tmp_path):
    """What each rank's step began with lies in one scene: batches, random state, and who it began on."""
    told = run_ranks(2, partial(keep_a_scene, tmp_path), tmp_path / "ranks", RUN_SECONDS)
    (folder,) = (tmp_path / "runs/tiny/scenes").iterdir()
    kept = scene.read(folder)
    assert (kept.step, kept.weights_step, kept.batches) == (23, 22, 1)
    assert kept.steps[-1]["loss_ranks"] == [1]
    assert any("the loss is not finite on rank 1" in line for line in kept.evidence)
    for rank, file in enumerate(("plain.pt", "plain-1.pt")):
        plain = torch.load(folder / file, weights_only=True)
        assert plain["scene"]["batches"] == [told[rank]["used"][22]]
    assert manifest.faults(folder, manifest.read(folder)) == []
    assert json.loads((folder / "manifest.json").read_text())["ranks"] == 2


@pytest.mark.live
def test_c01_one_rank_of_four_killed_leaves_a_way_on(tmp_path):
    """Killed at any moment, one rank takes the others along; a proven checkpoint is there (`make soak`: 20 kills)."""
    proven, _ = kill_one_again_and_again(tmp_path, 2, seed=1)
    assert proven >= 1

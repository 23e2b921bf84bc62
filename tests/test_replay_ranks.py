"""Replay of what several ranks have run: one process gives the recorded loss again, and names the sample of a rank."""

from functools import partial

import pytest
import torch
from ranks import GLOBAL_BATCH, SAMPLES, RanksJob, model_of, run_ranks

from trainer_plugin.data.sampler import IndexSampler
from trainer_plugin.replay import factory
from trainer_plugin.replay.investigate import investigate
from trainer_plugin.replay.material import read_material

STEP, SIZE = 40, 2
# The third sample of the second rank's batch in that step.
RANK, PLACE = 1, 2


def bad_sample() -> int:
    """The one that is far off, in the data themselves."""
    sampler = IndexSampler(SAMPLES, batch_size=GLOBAL_BATCH // SIZE, seed=0, rank=RANK, world_size=SIZE)
    return [batch for _, batch in zip(range(STEP), sampler, strict=False)][-1][PLACE]


def build():
    """The factory: the plain model, and the samples by their numbers."""
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    inputs[bad_sample()] *= 100.0
    return (
        model_of(),
        lambda model, batch: (model(inputs[batch]) - inputs[batch].square().mean(1, keepdim=True)).square().squeeze(1),
    )


def keep_a_scene(folder, kind, rank):
    """A rank's job, until the step after the bad one."""
    job = RanksJob(folder, kind, rank=rank, size=SIZE)
    job.inputs[bad_sample()] *= 100.0
    job.run(STEP + 2)
    job.guard._parts.scenes.wait()
    return job.finish()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_process_runs_the_step_of_two_ranks_again(tmp_path, kind):
    """Loss and norms are the recorded ones to 1e-6, and the second rank's sample is the culprit."""
    told = run_ranks(SIZE, partial(keep_a_scene, tmp_path, kind), tmp_path / "ranks", 100.0)
    assert told[RANK]["used"][STEP - 1][PLACE] == bad_sample()
    (folder,) = (tmp_path / "runs/tiny/scenes").glob(f"step-{STEP:09d}-*")

    finding = investigate(read_material(folder), factory.build("test_replay_ranks:build"), "test_replay_ranks:build")

    assert finding.reproduced, (finding.errors, finding.replayed, finding.recorded, finding.notes, finding.samples[0])
    assert finding.errors["loss"] <= 1e-6
    assert (finding.weights_step, finding.recorded.loss > 100.0) == (STEP - 1, True)
    top = finding.samples[0]
    assert (finding.verdict.kind, top.index) == ("sample", RANK * GLOBAL_BATCH // SIZE + PLACE)

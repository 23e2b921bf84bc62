"""Scenes to be replayed: a tiny job with dropout, micro-batches and a collate that draws, broken at one step."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader
from training import settings, tiny_model

from trainer_plugin import Guard, IndexSampler
from trainer_plugin.replay import factory
from trainer_plugin.replay.investigate import investigate
from trainer_plugin.replay.material import read_material

BATCH_SIZE = 6
SPIKE_STEP = 30
# The sample that is broken, in the second micro-batch of the step: the eleventh of twelve.
BAD_PLACE = 4
BAD_ID = f"{SPIKE_STEP}-1-{BAD_PLACE}"


def build():
    """The factory: another seed than the job's, for whatever comes out must come from the scene."""
    return tiny_model(seed=9, dropout=0.5), sample_losses


def build_larger():
    """A factory of another model."""
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 1)), sample_losses


def build_nothing():
    """A factory that gives no model."""


def build_scalar():
    """A factory whose loss function gives one number for all."""
    return tiny_model(), lambda model, batch: sample_losses(model, batch).mean()


def build_broken():
    """A factory that fails."""
    raise RuntimeError("no such weights")


def build_meta():
    """A factory whose model has no memory."""
    return tiny_model(dropout=0.5).to("meta"), sample_losses


def build_extra():
    """A factory whose model wants more than the scene's has."""

    class Model(nn.Sequential):
        def get_extra_state(self):
            return 1

        def set_extra_state(self, state):
            del state

    return Model(*tiny_model(dropout=0.5)), sample_losses


class OneWay(torch.autograd.Function):
    """Has a forward pass."""

    @staticmethod
    def forward(_ctx, x):
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        """Fails."""
        raise RuntimeError("no way back,\nnot at all")


def build_one_way():
    """A factory whose losses cannot be gone back from."""
    return tiny_model(dropout=0.5), lambda model, batch: OneWay.apply(sample_losses(model, batch))


def build_ending():
    """A factory whose loss function ends the process."""

    def losses(_model, _batch):
        raise SystemExit(3)

    return tiny_model(dropout=0.5), losses


class WordlessError(Exception):
    """An error that fails to tell itself."""

    def __str__(self) -> str:
        """Fails."""
        raise ValueError("no words")


def build_wordless():
    """A factory that fails, and so does its error."""
    raise WordlessError


def sample_losses(model, batch):
    """The loss of each sample."""
    return (model(batch["x"]) - batch["y"]).square().squeeze(1)


def collate(samples):
    """A batch; draws from torch's generator, as augmentations do."""
    x = torch.stack([x for x, _ in samples])
    return {"x": x + 0.01 * torch.randn(x.shape), "y": torch.stack([y for _, y in samples])}


def make_scene(folder, *, batch=None, weights=None, gradients=None, name="replays:build", **options):
    """A job of 30 steps of two micro-batches, of which the last one is broken; the folder of its scene.

    `weights` is called with the model before that step, `batch` with its second micro-batch, `gradients` with the model
    after its backward passes.
    """
    model = tiny_model(seed=3, dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(600, 4)
    samples = list(zip(x, x.sum(1, keepdim=True), strict=True))
    sampler = IndexSampler(len(samples), batch_size=BATCH_SIZE, seed=0)
    loader = DataLoader(samples, batch_sampler=sampler, collate_fn=collate)
    guard = Guard(
        settings(folder, **options), model=model, optimizer=optimizer, data=loader, local_only=True, factory=name
    )
    for step in range(1, SPIKE_STEP + 1):
        is_last = step == SPIKE_STEP
        if is_last and weights is not None:
            weights(model)
        for number in range(2):
            drawn = guard.next_batch()
            if is_last and number == 1 and batch is not None:
                batch(drawn)
            loss = sample_losses(model, drawn).mean()
            (loss / 2).backward()
            guard.micro_step(loss, sample_ids=[f"{step}-{number}-{place}" for place in range(BATCH_SIZE)])
        if is_last and gradients is not None:
            gradients(model)
        guard.before_optimizer()
        optimizer.step()
        optimizer.zero_grad()
        guard.end_step()
        guard._parts.checkpoints.wait()
    assert guard._parts.scenes.wait(8.0)
    guard.close()
    return next(
        path for path in (folder / "runs" / "tiny" / "scenes").iterdir() if path.name.startswith("step-000000030")
    )


def far_off(batch) -> None:
    """One sample's target is far off."""
    batch["y"][BAD_PLACE] += 300.0


def not_a_number(batch) -> None:
    """One sample is NaN."""
    batch["x"][BAD_PLACE, 2] = math.nan


def replayed(folder, name: str = "replays:build"):
    """What a replay finds."""
    return investigate(read_material(folder), factory.build(name), name)

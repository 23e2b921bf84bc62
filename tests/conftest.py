"""Fixtures that more than one test module uses."""

import pytest
import torch
from training import Clock, Job, adamw_job, settings

from trainer_plugin.guard import Guard

# Other threads would change the last bits, and bits are compared here.
torch.set_num_threads(1)


@pytest.fixture
def clock():
    """Unix seconds, turned by hand."""
    return Clock()


@pytest.fixture
def make_guard(tmp_path):
    """A function that puts a guard with its folders below `tmp_path` on a job; what is left open is closed at the end.

    Keywords are the Guard's own, or sections of guard.yaml.
    """
    guards = []

    def make(job: Job | None = None, **options) -> Job:
        job = job or adamw_job()
        arguments = ("local_only", "on_signals", "clock", "resume", "optimizer", "scaler", "data", "loss_fn")
        given = {name: options.pop(name) for name in arguments if name in options}
        given = {"optimizer": job.optimizer, "scheduler": job.scheduler, "data": job.data, "local_only": True, **given}
        job.guard = Guard(settings(tmp_path, **options), model=job.model, **given)
        guards.append(job.guard)
        return job

    yield make
    for guard in guards:
        guard.close()

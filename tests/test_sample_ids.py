"""Sample ids of any kind: texts, short, that every file of a run can hold."""

import numpy as np
import pytest
import torch
from training import adamw_job

from trainer_plugin.sample_ids import as_texts
from trainer_plugin.scenes import scene
from trainer_plugin.scenes.step_line import read_steps


class Nameless:
    """An id that has no text."""

    def __str__(self) -> str:
        """Fails."""
        raise RuntimeError("no name")


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (None, ()),
        ([], ()),
        (["a", "b"], ("a", "b")),
        ([3, 10**30, None], ("3", str(10**30), "None")),
        (range(2), ("0", "1")),
        ((str(n) for n in range(2)), ("0", "1")),
        (torch.tensor([[1, 2], [3, 4]]), ("1", "2", "3", "4")),
        ([torch.tensor(5), np.int64(6)], ("5", "6")),
        (np.array(["x", "y"]), ("x", "y")),
        ("one", ("one",)),
        ([b"\xff.txt", "\udcff.txt"], ("\\xff.txt", "\\udcff.txt")),
        ([("shard", 1)], ("('shard', 1)",)),
        (["x" * 5000], ("x" * 1000,)),
    ],
)
def test_ids_of_any_kind_are_texts(ids, texts):
    """Numbers, arrays, tensors, pairs and bytes; half a surrogate pair is written out, and a book is cut."""
    assert as_texts(ids) == texts


@pytest.mark.parametrize(("ids", "told"), [(5, "a list of ids wanted, found int"), ([Nameless()], "RuntimeError")])
def test_what_is_no_id_is_told(ids, told):
    """In one line."""
    with pytest.raises(ValueError, match=told):
        as_texts(ids)


@pytest.mark.parametrize("micro", [False, True])
@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([7, 8], ("7", "8")),
        (torch.tensor([7, 8]), ("7", "8")),
        (["\udcff"], ("\\udcff",)),
        (["x" * 3_000_000], ("x" * 1000,)),
        ([Nameless()], ()),
        (5, ()),
    ],
    ids=["numbers", "tensor", "surrogate", "huge", "nameless", "no list"],
)
def test_no_id_costs_a_step_its_lines_its_scene_or_its_measure(make_guard, ids, kept, micro):
    """Every step is measured, its line and the scene of a NaN can be read, whatever the loop calls its samples."""
    job = make_guard(adamw_job(seed=3), mode="observe")
    folder = job.guard._parts.folder.path
    for step in range(1, 9):
        loss = job.model(torch.ones(2, 4)).square().mean() * (float("nan") if step == 8 else 1.0)
        loss.backward()
        if micro:
            job.guard.micro_step(loss, sample_ids=ids)
            job.guard.before_optimizer()
        else:
            job.guard.before_optimizer(loss, sample_ids=ids)
        job.optimizer.zero_grad()
        job.guard.end_step()
    assert job.guard._parts.scenes.wait(8.0)
    job.guard.close()
    lines = read_steps(folder)
    assert [line.step for line in lines] == list(range(1, 9))
    assert {line.sample_ids for line in lines} == {kept}
    [told] = [scene.read(path) for path in (folder / "scenes").iterdir()]
    assert told.sample_ids == kept
    assert sum(path.stat().st_size for path in folder.glob("recorder.?.jsonl")) < 1 << 16

"""The Guard's scenes of its incidents, its layers that go back by command, and its options in the run folder."""

import math
import shutil
import threading
import time

import msgspec
import pytest
import torch
from torch import nn
from training import adamw_job, equal, hooks, spoil_gradient, spoil_weights
from waiting import wait_for

from exporter.commands import Command
from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.plain import decode_plain
from trainer_plugin.checkpoints.rng import set_rng_state
from trainer_plugin.checkpoints.tensor_files import read_tensors
from trainer_plugin.config import Config, read_config
from trainer_plugin.scenes import scene
from trainer_plugin.scenes.overview import read_overview
from trainer_plugin.scenes.step_line import read_steps


def scenes(job) -> list:
    """The folders of the scenes, oldest first, once all is written."""
    assert job.guard._parts.scenes.wait(8.0)
    return sorted((job.guard._parts.folder.path / "scenes").iterdir())


def test_an_incident_leaves_its_scene_and_training_does_not_notice(make_guard):
    """A NaN gradient is stored with the weights of before it, told and shown; the run goes on as without a scene."""
    outcomes = []
    for keep, name in ((3, "with"), (0, "without")):
        job = make_guard(adamw_job(seed=3, dropout=0.2), run=name, checkpoints={"scenes": keep})
        torch.manual_seed(7)
        job.run(25)
        job.step(spoil_gradient)
        job.run(40)
        outcomes.append(job.weights())
        if keep:
            told = scene.read(scenes(job)[0])
            page = job.guard.page
            job.step()
            assert page.value("train_checkpoint_step", "shared", "scene") == 26
            assert page.value("train_scene_failures_total") == 0
            job.guard._parts.loop.flush(5.0)
            trail = (job.guard._parts.folder.path / "incidents.jsonl").read_text()
            assert '"kind": "scene", "step": 26, "incident": 1' in trail
        else:
            assert not (job.guard._parts.folder.path / "scenes").exists()
        job.guard.close()
    assert equal(*outcomes)
    assert (told.step, told.weights_step, told.class_, told.positions) == (26, 25, "numerical", [25])
    assert [one["step"] for one in told.steps] == list(range(1, 27))
    assert told.steps[-1]["grad_norm"] == "nan"
    assert set(told.steps[-2]["layer_grad_norms"]) == {"0", "3"}


def test_a18_the_step_can_be_run_again_from_its_scene_alone(make_guard):
    """Weights, batch and random state give the recorded loss again, with dropout, three times in a row (case A18)."""
    job = make_guard(adamw_job(seed=3, dropout=0.5))
    job.run(29)
    job.step(spoil_gradient)
    (folder,) = scenes(job)
    told = scene.read(folder)
    plain = decode_plain((folder / "plain.pt").read_bytes())["scene"]
    fresh = adamw_job(seed=9, dropout=0.5).model
    tensors = read_tensors(folder)
    fresh.load_state_dict({name: tensors[f"model/{name}"] for name in fresh.state_dict()})
    (batch,), (rng,) = plain["batches"], plain["rng"]
    for _ in range(3):
        set_rng_state(rng)
        loss = nn.functional.mse_loss(fresh(batch), batch.sum(1, keepdim=True)).item()
        assert loss == pytest.approx(told.steps[-1]["loss"], rel=1e-6)


def test_a_step_that_was_applied_can_be_run_again_too(make_guard):
    """The scene has the weights and buffers with which its step began, and the ids of its samples (case A18)."""
    job = make_guard(adamw_job(seed=3, dropout=0.5))
    job.run(29)
    begun = job.weights()
    job.step(lambda model: model[3].weight.grad.mul_(1e6))
    (folder,) = scenes(job)
    told = scene.read(folder)
    tensors = read_tensors(folder)
    assert (told.step, told.weights_step, told.steps[-1]["withheld"]) == (30, 29, None)
    assert equal([tensors[f"model/{name}"] for name, _ in job.model.named_parameters()], begun)
    assert not equal(job.weights(), begun)


def test_a_scene_is_taken_before_the_run_goes_back_and_is_no_target(make_guard):
    """NaN weights are stored as they were, in an incident that rolls back at once; no rollback ever takes them."""
    job = make_guard()
    job.run(25)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20
    (folder,) = scenes(job)
    assert read_tensors(folder)["model/0.weight"].isnan().all()
    assert not manifest.read(folder).finite
    assert all(m.kind == "periodic" for m in job.guard._parts.checkpoints.targets(1 << 62, proven_only=False))
    job.run(60)
    assert scenes(job) == [folder]  # Retention of checkpoints does not touch it.


def test_a_run_folder_that_cannot_hold_a_scene_costs_nothing_else(make_guard):
    """A file where the scenes should be: counted, nothing raised, the incident is handled and checkpoints go on."""
    job = make_guard()
    job.run(25)
    folder = job.guard._parts.folder.path / "scenes"
    shutil.rmtree(folder)
    folder.touch()
    job.step(spoil_gradient)
    assert job.guard._parts.scenes.wait(8.0)
    job.run(45)
    page = job.guard.page
    assert page.value("train_scene_failures_total") == 1
    assert page.value("train_guard_errors_total") == 0
    assert page.value("train_checkpoint_step", "shared", "periodic") == 40
    assert page.value("train_checkpoint_step", "shared", "scene") == -1


def test_a_start_that_finds_no_room_for_scenes_takes_everything_back(make_guard, tmp_path):
    """A file in the folder's place is told at the start; hooks, lock and threads are gone again."""
    job = adamw_job()
    folder = tmp_path / "runs" / "tiny" / "scenes"
    folder.parent.mkdir(parents=True)
    folder.touch()
    with pytest.raises(OSError, match="scenes"):
        make_guard(job)
    assert hooks(job.optimizer) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "control-loop"]
    folder.unlink()
    make_guard(job)


def test_layers_go_back_by_a_persons_command(make_guard):
    """Named layers are those of the newest target, the other weights, the step and the data stay; it is all told."""
    job = make_guard()
    job.run(35)
    tensors = read_tensors(next((job.guard._parts.checkpoints._local.folder).glob("step-000000030-*")))
    inbox = job.guard._parts.folder.inbox
    inbox.put(
        Command(id="a1", run="tiny", action="partial_rollback", source="operator", received=time.time(), layers=("3",))
    )  # fmt: skip
    wait_for(job.guard._parts.loop.commands)
    job.step()
    job.guard._parts.loop.flush(5.0)
    (record,) = inbox.records()
    assert (record.outcome, record.at_step) == ("done", 36)
    assert (job.guard.step, job.guard._parts.data.position) == (36, 36)
    assert torch.equal(job.model[3].weight, tensors["model/3.weight"])
    assert not torch.equal(job.model[0].weight, tensors["model/0.weight"])
    assert job.optimizer.state[job.model[3].weight]["step"].item() == 30
    assert job.optimizer.state[job.model[0].weight]["step"].item() == 36
    page = job.guard.page
    assert page.value("train_actions_total", "partial_rollback", "operator", "done") == 1
    assert page.value("train_rollback_lost_steps_total") == 0
    trail = (job.guard._parts.folder.path / "incidents.jsonl").read_bytes().splitlines()
    (entry,) = [line for line in map(msgspec.json.decode, trail) if line["kind"] == "action"]
    assert (entry["layers"], entry["layers_step"], "to_step" in entry) == (["3"], 30, False)
    job.run(60)
    assert page.value("train_incident_open") == 0.0
    assert all(math.isfinite(weight.sum()) for weight in job.weights())


def test_every_step_of_late_is_on_disk_also_after_the_run_has_gone_back(make_guard):
    """The recorder's lines and the overview tell of the bad step, of its undoing, and of the steps that came again."""
    job = make_guard(adamw_job(seed=3, dropout=0.2), checkpoints={"every": 5}, detection={"sustained_steps": 5})
    job.run(20)
    job.step(spoil_weights)
    job.run(24)
    folder = job.guard._parts.folder.path
    job.guard.close()
    lines, stretches = read_steps(folder), read_overview(folder)
    assert [line.steps_total for line in lines] == list(range(1, lines[-1].steps_total + 1))
    assert lines[0].branch < lines[-1].branch
    assert any("nonfinite" in verdict for line in lines for verdict in line.verdicts)
    assert set(lines[5].layer_grad_norms) == {"0", "3"}
    assert [line.position for line in lines[:5]] == [0, 1, 2, 3, 4]
    assert len({line.rng for line in lines[:5]}) == 5
    assert stretches[-1].steps_total == lines[-1].steps_total
    assert {one.branch for one in stretches} == {line.branch for line in lines}


def test_the_options_in_effect_lie_in_the_run_folder(make_guard, tmp_path):
    """guard.yaml is written at the start, with folders that hold from anywhere, and is read as the same options."""
    job = make_guard(detection={"warmup_steps": 33})
    path = tmp_path / "runs" / "tiny" / "guard.yaml"
    assert read_config(path) == job.guard.config
    job.guard.close()
    job = make_guard(detection={"warmup_steps": 44})
    assert read_config(path).detection.warmup_steps == 44
    job.guard.close()
    path.write_text("run: tiny  # my own\n")
    make_guard()
    assert path.read_text() == "run: tiny  # my own\n"
    assert isinstance(read_config(path), Config)

"""Replay: a scene gives its recorded numbers again in a fresh process, and the culprit; what cannot be used is told."""

import dataclasses
import hashlib
import json
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from replays import BAD_ID, far_off, make_scene, not_a_number, replayed
from training import settings

from trainer_plugin import Guard
from trainer_plugin.__main__ import cli
from trainer_plugin.checkpoints import manifest
from trainer_plugin.replay import factory
from trainer_plugin.replay.investigate import investigate
from trainer_plugin.replay.material import read_material
from trainer_plugin.scenes import scene

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def spike(tmp_path_factory):
    """The scene of a step that one sample broke; the step was applied."""
    return make_scene(tmp_path_factory.mktemp("spike"), batch=far_off)


def content(folder) -> dict[str, str]:
    """A hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.timeout(120)
def test_a18_fresh_processes_give_the_recorded_loss_three_times_in_a_row(spike, tmp_path):
    """Dropout, a collate that draws, micro-batches in their order, an applied step: 1e-6, and the sample (case A18)."""
    before = content(spike.parent.parent)
    for number in range(3):
        out = tmp_path / f"{number}.json"
        done = subprocess.run(
            [sys.executable, "-m", "trainer_plugin", "replay", spike, "--json", out],
            cwd=TESTS, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"sample 11 of 12 (id {BAD_ID}): ")
        told = json.loads(out.read_text(), parse_constant=pytest.fail)
        recorded = scene.read(spike).steps[-1]
        assert told["replayed"]["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
        assert told["replayed"]["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-6)
        assert told["replayed"]["layer_grad_norms"] == pytest.approx(recorded["layer_grad_norms"], rel=1e-6)
    assert content(spike.parent.parent) == before


def test_a_sample_that_is_far_off_is_named(spike):
    """It leads the ranking, what the step would have been without it is near normal, and the weights are cleared."""
    finding = replayed(spike)
    top = finding.samples[0]
    assert (finding.verdict.kind, finding.verdict.name, top.id, top.index) == ("sample", BAD_ID, BAD_ID, 10)
    assert (finding.weights_step, finding.reproduced) == (29, True)
    assert top.loss_without < 5.0
    assert finding.recorded.loss > 1000.0
    assert top.grad_norm_without < 10.0
    assert (finding.other_batch.step, finding.same_batch.step) == (29, 20)
    assert finding.other_batch.measured.loss < 10.0
    assert finding.same_batch.measured.loss > 1000.0


def test_a_batch_that_could_not_be_stored_is_made_anew_of_its_ids(tmp_path):
    """Without `batch_of` replay says what is missing; with it the step is run, on what it gives."""
    folder = make_scene(tmp_path, batch=far_off)
    material = read_material(folder)
    bare = dataclasses.replace(
        material,
        scene=msgspec.structs.replace(material.scene, batches=0, batches_left_out="a batch is or holds a Thing"),
        begin=dataclasses.replace(material.begin, rng=material.begin.rng[:1], batches=[]),
    )
    built = factory.build("replays:build")
    finding = investigate(bare, built, "replays:build")
    assert finding.verdict.line.endswith("run again: the scene has no batch: a batch is or holds a Thing")
    asked = []

    def batch_of(ids):
        asked.extend(ids)
        return {key: torch.cat([one[key] for one in material.begin.batches]) for key in ("x", "y")}

    finding = investigate(bare, dataclasses.replace(built, batch_of=batch_of), "replays:build")
    assert asked == [f"30-{number}-{place}" for number in range(2) for place in range(6)]
    assert finding.verdict.name == BAD_ID


def test_a_sample_that_is_not_finite_is_named(tmp_path):
    """NaN in one sample: the step would have been finite without it, and no layer is accused."""
    finding = replayed(make_scene(tmp_path, batch=not_a_number))
    assert (finding.verdict.kind, finding.verdict.name) == ("sample", BAD_ID)
    assert math.isnan(finding.recorded.loss)
    assert finding.reproduced
    assert finding.samples[0].adds == math.inf
    assert math.isfinite(finding.samples[0].grad_norm_without)
    assert math.isnan(finding.samples[1].loss_without)


def test_a_layer_whose_weights_are_not_finite_is_named(tmp_path):
    """A NaN in one weight before the step, in whatever it ended."""

    def spoil(model):
        model[3].weight.data[0, 1] = math.nan

    finding = replayed(make_scene(tmp_path, weights=spoil))
    assert (finding.verdict.kind, finding.verdict.name) == ("layer", "3")
    assert finding.first_nonfinite == "3"


def test_a_layer_that_was_blown_up_is_named(tmp_path):
    """Any batch is bad on such weights, and this layer alone has moved since the checkpoint before."""

    def spoil(model):
        model[3].weight.data.mul_(40.0)

    finding = replayed(make_scene(tmp_path, weights=spoil))
    assert (finding.verdict.kind, finding.verdict.name) == ("layer", "3")
    assert finding.weight_changes["3"] > 30.0 * finding.weight_changes["0"]


def test_weights_that_are_bad_in_all_layers_are_told_as_such(tmp_path):
    """No sample and no layer: the weights of the step before, on any batch."""

    def spoil(model):
        for parameter in model.parameters():
            parameter.data.mul_(40.0)

    verdict = replayed(make_scene(tmp_path, weights=spoil)).verdict
    assert verdict.kind == "weights"
    assert verdict.line.startswith("neither: the weights of step 29 are bad on any batch")


def test_a_gradient_that_batch_and_weights_do_not_give_is_the_layers(tmp_path):
    """What happened after the backward pass does not come again: the recorded norms tell the layer, and that."""

    def spoil(model):
        model[3].weight.grad.mul_(1e5)

    finding = replayed(make_scene(tmp_path, gradients=spoil))
    assert (finding.verdict.kind, finding.verdict.name) == ("layer", "3")
    assert "what comes again" in finding.verdict.line
    assert finding.errors["loss"] <= 1e-6
    assert not finding.reproduced


def test_a_whole_batch_that_is_hard_accuses_nobody(tmp_path):
    """All samples of the step far off in the same way: the batch as a whole, as it is on earlier weights too."""

    def spoil(batch):
        batch["y"] += 300.0

    finding = replayed(make_scene(tmp_path, batch=spoil))
    assert finding.verdict.kind == "batch"
    assert finding.verdict.line.startswith("neither: the batch as a whole")


def test_without_the_copies_an_applied_step_is_told_not_to_come_again(tmp_path, monkeypatch, capsys):
    """`scene_weights: after`: the scene has the weights after its step, replay says so, and exits with 1."""
    folder = make_scene(tmp_path, batch=far_off, checkpoints={"scene_weights": "after"})
    monkeypatch.chdir(TESTS)
    assert scene.read(folder).weights_step == 30
    assert cli(["replay", str(folder)]) == 1
    told = capsys.readouterr().out
    assert f"sample 11 of 12 (id {BAD_ID})" in told
    assert "not the same" in told
    assert "the scene has the weights after step 30" in told


def test_the_picture_is_drawn(spike, tmp_path, monkeypatch):
    """As SVG, with the verdict over it."""
    monkeypatch.chdir(TESTS)
    out = tmp_path / "why.svg"
    assert cli(["replay", str(spike), "--plot", str(out)]) == 0
    assert "<svg" in out.read_text()[:1000]


def test_another_factory_may_be_named(spike, monkeypatch, capsys):
    """`--factory` goes before the scene's own."""
    monkeypatch.chdir(TESTS)
    assert cli(["replay", str(spike), "--factory", "replays:build_larger"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "factory replays:build_larger does not fit the scene: 0.bias is [8] torch.float32 in the scene, [9]" in told


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("replays:nothing", "replays has no function nothing"),
        ("no.such:build", "no.such cannot be imported: ModuleNotFoundError"),
        ("replays", "`module:function` wanted"),
        ("replays:build_nothing", "`(model, loss_fn)` or `(model, loss_fn, batch_of)` wanted, found NoneType"),
        ("replays:build_broken", "failed: RuntimeError: no such weights"),
        ("replays:build_meta", "0.bias is on the meta device in its model"),
        (
            "replays:build_extra",
            "does not take the scene's state: RuntimeError: Error(s) in loading state_dict for Model",
        ),
        ("replays:build_one_way", "the backward pass of its loss_fn failed: RuntimeError: no way back, not at all"),
        ("replays:build_ending", "loss_fn failed on the scene's batch: SystemExit: 3"),
        ("replays:build_wordless", "failed: WordlessError"),
        ("replays:build_scalar", "loss_fn must give the loss of each sample, shape [B], found shape []"),
    ],
)
def test_a_factory_that_cannot_be_used_is_told_in_one_line(spike, monkeypatch, capsys, factory, told):
    """Not there, failing, or giving something else: exit code 2."""
    monkeypatch.chdir(TESTS)
    assert cli(["replay", str(spike), "--factory", factory]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        """What unpickling calls."""
        return (Path.touch, (self.path,))


def another_scenes(folder, _trap) -> None:
    """The scene.json of another step."""
    path = folder / scene.NAME
    path.write_bytes(path.read_bytes().replace(b'"step":30,', b'"step":31,'))


def flip_a_bit(folder, _trap) -> None:
    """One byte is another."""
    path = folder / "plain.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


# What is done to a scene; a folder in place of it, where there is one.
DAMAGES = {
    "no manifest": lambda folder, _: (folder / manifest.NAME).unlink(),
    "another version": lambda folder, _: set_bytes(folder / manifest.NAME, b'{"schema": 7, "writer": "guard 9"}'),
    "no scene.json": lambda folder, _: (folder / scene.NAME).unlink(),
    "another version's scene.json": lambda folder, _: set_bytes(folder / scene.NAME, b'{"schema": 9}'),
    "another scene's": another_scenes,
    "a bit": flip_a_bit,
    "metadata with code": lambda folder, trap: set_bytes(folder / ".metadata", pickle.dumps(Trap(trap))),
    "plain values with code": lambda folder, trap: torch.save(Trap(trap), folder / "plain.pt"),
    "renamed": lambda folder, _: folder.rename(folder.with_name("step-000000099-000")),
    "open to all": lambda folder, _: folder.chmod(0o777),
    "none": lambda folder, _: folder.with_name("nothing"),
}


def set_bytes(path, new: bytes) -> None:
    """Replace a file's content."""
    path.write_bytes(new)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("no manifest", "a scene's folder wanted, found no manifest.json in it"),
        ("another version", "schema 7, written by guard 9; this reads 1"),
        ("no scene.json", "scene.json: missing or damaged"),
        ("another version's scene.json", "scene.json: schema 9; this reads 1"),
        ("another scene's", "scene.json is another scene's than manifest.json"),
        ("a bit", "plain.pt: content is not what was written"),
        ("metadata with code", ".metadata: content is not what was written"),
        ("plain values with code", "plain.pt: content is not what was written"),
        ("renamed", "another checkpoint's"),
        ("open to all", "anybody may write in"),
        ("none", "no such folder"),
        ("a checkpoint", "a scene wanted, found a periodic checkpoint"),
    ],
)
def test_a_scene_that_cannot_be_trusted_is_told_in_one_line(spike, tmp_path, capsys, how, told):
    """Damaged, foreign, another version's: exit code 2, nothing is unpickled, nothing changes."""
    run, trap = tmp_path / "run", tmp_path / "trap"
    shutil.copytree(spike.parent.parent, run)
    if how == "a checkpoint":
        folder = next((spike.parents[3] / "local" / "tiny").iterdir())
    else:
        folder = DAMAGES[how](run / "scenes" / spike.name, trap) or run / "scenes" / spike.name
    before = content(run)
    assert cli(["replay", str(folder), "--factory", "replays:build"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error
    assert not trap.exists()
    assert content(run) == before


def hashed_anew(folder, name: str, content: bytes) -> None:
    """Replace a file of a scene, and have its manifest say so."""
    set_bytes(folder / name, content)
    found = manifest.read(folder)
    entry = manifest.File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    manifest.seal(folder, msgspec.structs.replace(found, files={**found.files, name: entry}))


def leading_out(folder) -> bytes:
    """Metadata that are whole, but for a file that lies elsewhere."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    for info in metadata.storage_data.values():
        info.relative_path = "../../outside"
    return pickle.dumps(metadata)


@pytest.mark.parametrize("how", ["code", "code in plain values", "no metadata", "leads out"])
def test_a_scene_made_to_be_run_runs_nothing(spike, tmp_path, capsys, how):
    """Every hash is right, since who made the scene made them too: no code in it runs, no file elsewhere is read."""
    run, trap = tmp_path / "run", tmp_path / "trap"
    shutil.copytree(spike.parent.parent, run)
    folder = run / "scenes" / spike.name
    if how == "code in plain values":
        torch.save(Trap(trap), tmp_path / "plain.pt")
        hashed_anew(folder, "plain.pt", (tmp_path / "plain.pt").read_bytes())
    else:
        contents = {"code": pickle.dumps(Trap(trap)), "no metadata": pickle.dumps(3), "leads out": leading_out(folder)}
        hashed_anew(folder, ".metadata", contents[how])
    assert cli(["replay", str(folder), "--factory", "replays:build"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not a state that can be read" in error
    assert not trap.exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": "high"}, "steps[29]: loss: a number wanted, found 'high'"),
        ({"grad_norm": [1]}, "steps[29]: grad_norm: a number wanted, found [1]"),
        ({"layer_grad_norms": [1]}, "steps[29]: layer_grad_norms: a number for each layer wanted, found [1]"),
        ({"layer_grad_norms": {"0": {}}}, "steps[29]: 0: a number wanted, found {}"),
    ],
)
def test_steps_that_are_no_steps_are_told_in_one_line(spike, tmp_path, capsys, changes, told):
    """scene.json has no hash: whatever somebody has made of it, where and what is told."""
    run = tmp_path / "run"
    shutil.copytree(spike.parent.parent, run)
    path = run / "scenes" / spike.name / scene.NAME
    content = json.loads(path.read_text())
    content["steps"][-1].update(changes)
    path.write_text(json.dumps(content))
    assert cli(["replay", str(path.parent), "--factory", "replays:build"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{scene.NAME}: {told}" in error


def test_an_embedding_with_a_sparse_gradient_is_replayed(tmp_path):
    """The samples are left out one by one all the same."""
    drawn = [{"x": torch.randint(9, (6, 2)), "y": torch.randn(6, 1)} for _ in range(30)]
    drawn[-1]["y"][3] += 300.0
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(9, 1, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    guard = Guard(settings(tmp_path), model=model, optimizer=optimizer, data=drawn, local_only=True)
    for _ in drawn:
        loss = sample_losses_of(model, guard.next_batch()).mean()
        loss.backward()
        guard.before_optimizer(loss)
        optimizer.step()
        optimizer.zero_grad()
        guard.end_step()
    assert guard._parts.scenes.wait(8.0)
    guard.close()
    [folder] = (tmp_path / "runs" / "tiny" / "scenes").glob("step-000000030-*")
    built = factory.Built(model=torch.nn.EmbeddingBag(9, 1, sparse=True), loss_fn=sample_losses_of)
    found = investigate(read_material(folder), built, "none")
    assert found.reproduced
    assert (found.verdict.kind, found.verdict.name) == ("sample", "4")


def sample_losses_of(model, batch):
    """The loss of each sample."""
    return (model(batch["x"]) - batch["y"]).square().squeeze(1)

"""Spike scenes: one for each incident, the newest few, whole or not there, and in nobody's way."""

import multiprocessing
import shutil
import signal
import threading

import pytest
import torch
from curves import signals
from last_operation import be_killed_at
from training import equal, tiny_model

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.plain import decode_plain
from trainer_plugin.checkpoints.retention import CheckpointsConfig
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.checkpoints.tensor_files import read_tensors
from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.history import History
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.replay.material import read_material
from trainer_plugin.scenes import scene
from trainer_plugin.scenes.recorder import Recorder
from trainer_plugin.scenes.store import Scenes
from trainer_plugin.scenes.weights import StepWeights

SPACING_STEPS = 100


class Rig:
    """A job that does not train, with its scenes; weights hold the step. `saved` and `failures` are what was told."""

    def __init__(
        self, folder, *, keep: int = 3, most_bytes: int = 1 << 30, copies=False, wait_for_checkpoints=lambda _: True
    ) -> None:
        self.model = tiny_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = TrainingState(model=self.model, optimizers=[self.optimizer])
        config = CheckpointsConfig(local=str(folder / "local"), shared=str(folder / "shared"), scenes=keep)
        self.checkpoints = Checkpoints(config, "tiny", on_failure=lambda _: None)
        self.history = History(self.checkpoints, state, Monitor(DetectionConfig()), steps_total=0)
        self.recorder = Recorder(starts=True, weights=StepWeights(self.model) if copies else None)
        self.failures = 0
        self.saved = []
        self.folder = folder / "runs" / "tiny"
        self.scenes = Scenes(
            self.folder,
            keep=keep,
            most_bytes=most_bytes,
            spacing_steps=SPACING_STEPS,
            state=state,
            history=self.history,
            recorder=self.recorder,
            wait_for_checkpoints=wait_for_checkpoints,
            on_failure=self.fail,
            on_saved=lambda saved, _: self.saved.append(saved.step),
        )
        self.scenes.open()

    def fail(self) -> None:
        """A scene could not be kept."""
        self.failures += 1

    def step(self, step: int, *, withheld: str | None = None):
        """Run a step."""
        self.history.step = self.history.steps_total = step
        self.recorder.hand_out(torch.full((2,), float(step)), step - 1)
        self.recorder.end_step(step)
        self.recorder.begin_step()
        for parameter in self.model.parameters():
            parameter.data.fill_(float(step))
        seen = signals(step, 9.0, withheld=withheld)
        self.recorder.add(seen)
        return seen

    def keep(self, step: int, incident: int, **options) -> bool:
        """Run a step that opens an incident; whether a scene of it was taken. It is written when this returns."""
        kept = self.begin(step, incident, **options)
        assert self.scenes.wait(8.0)
        return kept

    def begin(self, step: int, incident: int, **options) -> bool:
        """The same, without waiting."""
        seen = self.step(step, **options)
        opened = Incident(id=incident, first_step=step, detected_step=step, last_step=step, evidence=["loss is up"])
        return self.scenes.keep(opened, seen)

    def names(self) -> list[str]:
        """The folders of the scenes that are there."""
        return sorted(path.name for path in (self.folder / "scenes").iterdir())


@pytest.fixture
def rig(tmp_path):
    """A job with three scenes at most."""
    return Rig(tmp_path)


def name(step: int) -> str:
    """The folder of a scene."""
    return f"step-{step:09d}-000"


def test_a_scene_holds_what_the_step_began_with(rig):
    """Weights and all else of a checkpoint, the step's batch, position and random state, and the steps before."""
    for step in range(1, 50):
        rig.step(step)
    assert rig.keep(50, 7)
    folder = rig.folder / "scenes" / name(50)
    told = scene.read(folder)
    assert (told.step, told.weights_step, told.incident, told.evidence) == (50, 50, 7, ["loss is up"])
    assert [one["step"] for one in told.steps] == list(range(1, 51))
    assert (told.positions, told.batches, told.batches_left_out) == ([49], 1, "")
    tensors = read_tensors(folder)
    assert equal([tensors["model/0.bias"]], [torch.full((8,), 50.0)])
    plain = decode_plain((folder / "plain.pt").read_bytes())
    assert plain["guard"]["step"] == 50
    assert torch.equal(plain["scene"]["batches"][0], torch.full((2,), 50.0))
    assert plain["scene"]["rng"][0].keys() == plain["rng"].keys()
    known = manifest.read(folder)
    assert (known.kind, known.step, known.finite) == ("scene", 50, True)
    assert manifest.faults(folder, known) == []
    assert (rig.saved, rig.failures, rig.scenes.newest_step) == ([50], 0, 50)


def test_weights_are_those_of_before_where_the_update_was_withheld(rig):
    """A step that was not applied can be run again from its scene; the scene says so."""
    rig.keep(50, 1, withheld="nonfinite")
    assert scene.read(rig.folder / "scenes" / name(50)).weights_step == 49


def test_what_is_stored_is_of_its_own_step(rig, tmp_path):
    """Weights and batch that change while the writer waits do not change the scene (as case C03)."""
    free = threading.Event()
    rig = Rig(tmp_path, wait_for_checkpoints=free.wait)
    rig.begin(50, 1)
    batch = rig.recorder.start_of(50).batches[0]
    batch.fill_(-1.0)
    rig.step(51)
    free.set()
    assert rig.scenes.wait(8.0)
    folder = rig.folder / "scenes" / name(50)
    assert read_tensors(folder)["model/0.bias"][0] == 50.0
    assert decode_plain((folder / "plain.pt").read_bytes())["scene"]["batches"][0][0] == 50.0


def test_weights_are_those_with_which_the_step_began_where_they_are_kept(tmp_path):
    """An applied step too can then be run again; moments and all else stay those of after it."""
    rig = Rig(tmp_path, copies=True)
    for step in (48, 49):
        rig.step(step)
    rig.keep(50, 1)
    folder = rig.folder / "scenes" / name(50)
    assert scene.read(folder).weights_step == 49
    tensors = read_tensors(folder)
    assert all(bool((tensors[f"model/{name}"] == 49.0).all()) for name, _ in rig.model.named_parameters())
    before = decode_plain((folder / "plain.pt").read_bytes())["scene"]["before"]
    assert before["batches"][0][0] == 49.0
    assert len(before["rng"]) == 1


def test_scenes_are_bounded_in_bytes(rig, tmp_path):
    """The oldest go where the newest needs their room; one that is larger by itself is counted and not kept."""
    rig.keep(50, 1)
    size = sum(path.stat().st_size for path in (rig.folder / "scenes" / name(50)).iterdir())
    tight = Rig(tmp_path / "tight", most_bytes=int(size * 2.5))
    for number, step in enumerate((100, 200, 300)):
        assert tight.keep(step, number)
    assert tight.names() == [name(200), name(300)]
    tiny = Rig(tmp_path / "tiny", most_bytes=100)
    with pytest.raises(ValueError, match="`scenes_bytes` is 100"):
        tiny.begin(50, 1)
    assert (tiny.names(), tiny.failures) == ([], 1)


def test_batches_count_as_bytes_of_a_scene(tmp_path):
    """Weights that would have room, and a batch of texts beside them that has not."""
    rig = Rig(tmp_path / "texts", most_bytes=1 << 20)
    rig.recorder.hand_out(["x" * (1 << 20)], 0)
    rig.recorder.end_step(49)
    rig.recorder.begin_step()
    with pytest.raises(ValueError, match="`scenes_bytes` is 1048576"):
        rig.begin(50, 1)
    assert (rig.names(), rig.failures) == ([], 1)


def one_life(folder, end: int) -> None:
    """Find a scene, keep another, and be killed at the file operation with this number."""
    be_killed_at(folder, end)
    Rig(folder, keep=1).keep(200, 2)


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_each_file_operation_a_scene_can_be_read(tmp_path):
    """Whichever is the last: a scene that was whole is still there and whole until the next one is, and no half one."""
    Rig(tmp_path / "first").keep(50, 1)
    end, ended, seen = 0, False, set()
    while not ended:
        end += 1
        folder = tmp_path / str(end)
        shutil.copytree(tmp_path / "first", folder)
        life = multiprocessing.get_context("fork").Process(target=one_life, args=(folder, end), daemon=True)
        life.start()
        life.join()
        assert life.exitcode in (0, -signal.SIGKILL)
        ended = life.exitcode == 0
        again = Rig(folder)
        assert again.names()
        for path in (again.folder / "scenes").iterdir():
            assert read_material(path).scene.step in (50, 200)
        seen.add(tuple(again.names()))
        shutil.rmtree(folder)
    assert seen == {(name(50),), (name(50), name(200)), (name(200),)}
    assert end > 20


def test_the_first_scene_of_an_incident_stays(rig):
    """Of one incident there is one scene: the first."""
    assert rig.keep(50, 1)
    assert not rig.keep(51, 1)
    assert rig.names() == [name(50)]


def test_the_newest_few_incidents_are_kept(rig):
    """A fourth scene takes the place of the oldest, also in a job that finds the first three."""
    for number in range(3):
        rig.keep(50 + number * SPACING_STEPS, number)
    again = Rig(rig.folder.parent.parent)
    assert again.scenes.newest_step == 250
    assert again.keep(350, 9)
    assert again.names() == [name(150), name(250), name(350)]


def test_an_unquiet_run_pays_no_more_for_scenes_than_agreed(rig):
    """No fresh scene is given up for a new one: in so many steps there are three at most."""
    assert [rig.keep(50 + number * 10, number) for number in range(5)] == [True, True, True, False, False]
    assert rig.keep(50 + SPACING_STEPS, 6)
    assert rig.names() == [name(60), name(70), name(150)]


def test_one_scene_at_a_time_and_only_while_no_checkpoint_is_written(tmp_path):
    """The writer waits for the checkpoints'; another incident meanwhile has none, and nobody waits for anything."""
    asked, free = threading.Event(), threading.Event()

    def wait_for_checkpoints(_seconds):
        asked.set()
        return free.wait(8.0)

    rig = Rig(tmp_path, wait_for_checkpoints=wait_for_checkpoints)
    assert rig.begin(50, 1)
    assert asked.wait(8.0)
    assert not rig.begin(51, 2)
    assert not rig.scenes.wait(0.0)
    assert rig.names() == []
    free.set()
    assert rig.scenes.wait(8.0)
    assert rig.names() == [name(50)]


def test_a_disk_that_fails_is_counted_and_costs_no_other_scene(rig):
    """A file in the folder's place: nothing is raised, it is counted once, and the next incident has its scene."""
    scenes = rig.folder / "scenes"
    rig.keep(50, 1)
    scenes.rename(scenes.with_name("away"))
    scenes.touch()
    assert rig.keep(60, 2)
    assert rig.failures == 1
    scenes.unlink()
    scenes.with_name("away").rename(scenes)
    assert rig.names() == [name(50)]
    assert rig.keep(70, 3)
    assert rig.names() == [name(50), name(70)]
    assert (rig.failures, rig.saved) == (1, [50, 70])


def test_a_state_that_cannot_be_copied_is_counted_and_raised_to_whoever_holds_errors_back(rig):
    """No memory for the copy: counted, and the next incident is tried."""

    class Full:
        def capture(self, _guard):
            raise RuntimeError("no memory")

    good, rig.scenes._state = rig.scenes._state, Full()
    with pytest.raises(RuntimeError, match="no memory"):
        rig.begin(50, 1)
    assert rig.failures == 1
    rig.scenes._state = good
    assert rig.keep(60, 2)


def test_leftovers_go_and_other_versions_scenes_stay(rig):
    """A scene without its manifest or its scene.json is removed at the next start; one of another version is not."""
    for number, step in enumerate((100, 200, 300)):
        rig.keep(step, number)
    scenes = rig.folder / "scenes"
    (scenes / name(100) / "scene.json").unlink()
    (scenes / name(200) / "scene.json").write_text('{"schema": 99}')
    shutil.copytree(scenes / name(300), scenes / name(400))
    (scenes / name(400) / manifest.NAME).unlink()
    again = Rig(rig.folder.parent.parent)
    assert again.names() == [name(200), name(300)]
    assert again.scenes.newest_step == 300


def test_no_scenes_are_kept_where_none_are_wanted(tmp_path):
    """With `scenes: 0` there is no folder, no copy and no failure."""
    rig = Rig(tmp_path, keep=0)
    assert not rig.keep(50, 1)
    assert not (rig.folder / "scenes").exists()
    assert (rig.scenes.newest_step, rig.failures) == (-1, 0)

"""Spike scenes, stored apart (R15): the first of each incident, the newest few incidents, never a rollback target.

A scene is as large as a checkpoint. Its copy of the state is taken at the boundary, in fresh memory: what is kept for
checkpoints stays theirs. Everything else is done in a thread of its own, once the checkpoints' writer is idle.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from trainer_plugin.checkpoints.manifest import WRITER, Manifest
from trainer_plugin.checkpoints.places import pieces_of
from trainer_plugin.checkpoints.retention import SaveEvery
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.tier import Tier
from trainer_plugin.data.batches import Data
from trainer_plugin.history import History
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.ranks import Ranks
from trainer_plugin.scenes import scene
from trainer_plugin.scenes.recorder import Recorder, Start
from trainer_plugin.scenes.scene import Scene, plain_signals
from trainer_plugin.signals import Signals

_log = logging.getLogger(__name__)
# A checkpoint that takes longer than this to be written is not waited for any more.
_IDLE_SECONDS = 60.0


class Scenes:
    """The scenes of one run, `keep` at most, and no more than that in `spacing_steps` optimizer steps.

    Together they have `most_bytes` at most: the oldest go, and one that is larger by itself is not kept. `factory` is
    for whoever replays them. `wait_for_checkpoints` waits so many seconds until no checkpoint is being written.
    `on_failure` and `on_saved` are called in the writer's thread, the latter with the scene and the seconds that it
    took. Of several `ranks` the first one has the wish, and all `store` it together.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        keep: int,
        most_bytes: int,
        spacing_steps: int,
        state: TrainingState,
        history: History,
        recorder: Recorder,
        wait_for_checkpoints: Callable[[float], object],
        on_failure: Callable[[], None],
        on_saved: Callable[[Scene, float], None],
        make_tier: Callable[..., Tier] = Tier,
        ranks: Ranks | None = None,
        data: Data | None = None,
        factory: str = "",
    ) -> None:
        self._data = data
        self._ranks = ranks or Ranks()
        self._factory = factory
        self._most_bytes = most_bytes
        self._run = run_folder.name
        spaced = SaveEvery(every=spacing_steps, keep=keep)
        self._tier = make_tier("scenes", run_folder / "scenes", spaced, run=self._run)
        self._keep = keep
        self._spacing_steps = spacing_steps
        self._state = state
        self._history = history
        self._recorder = recorder
        self._wait_for_checkpoints = wait_for_checkpoints
        self._on_failure = on_failure
        self._on_saved = on_saved
        self._scenes: dict[str, Scene] = {}
        self._written = threading.Event()
        self._written.set()

    def open(self) -> None:
        """Remove what a killed job left half-done, and find the scenes that are whole.

        Raises:
            OSError: the folder cannot be made or written.
        """
        if not self._ranks.from_first(bool(self._keep) or self._tier.folder.exists()):
            return
        self._tier.open()
        folders = {name: self._tier.folder / name for name in self._tier.whole}
        # One that cannot be read may be another version's: it is left alone, and counts for nothing.
        self._tier.rotate({name for name, folder in folders.items() if (folder / scene.NAME).exists()})
        found = {name: scene.read(folder) for name, folder in folders.items()}
        self._scenes = {name: known for name, known in found.items() if known is not None}

    @property
    def newest_step(self) -> int:
        """Step of the newest scene; -1 if there is none."""
        return max(list(self._scenes.values()), key=lambda known: known.steps_total).step if self._scenes else -1

    def keep(self, incident: Incident, signals: Signals) -> bool:
        """Store what an incident began with, in the background; False where no scene of it is wanted (any more).

        `signals` are those of the step that opened it. On return the state has been copied.
        """
        new = self.wish(incident, signals)
        if new is not None:
            self.store(new)
        return new is not None

    def wish(self, incident: Incident, signals: Signals) -> Scene | None:
        """The scene that is wanted of what an incident began with; None where none is (any more)."""
        if not self._wanted(incident.id):
            return None
        history, start = self._history, self._recorder.start_of(signals.step)
        # What is not applied leaves the weights as they were before it.
        withheld = signals.withheld is not None and signals.step == history.step
        return Scene(
            run=self._run,
            step=signals.step,
            weights_step=history.step - 1 if withheld else history.step,
            steps_total=history.steps_total,
            branch=history.branch,
            created=time.time(),
            incident=incident.id,
            class_=incident.class_,
            evidence=incident.evidence.copy(),
            steps=[],  # Put in by the writer: a thousand numbers take their time.
            positions=start.positions,
            batches=len(start.batches),
            batches_left_out=start.left_out,
            torch=str(torch.__version__),
            sample_ids=signals.sample_ids or (tuple(self._data.sample_ids_of(signals.step)) if self._data else ()),
            factory=self._factory,
        )

    def store(self, new: Scene) -> None:
        """Store a scene, in the background. On return the state has been copied."""
        if new.step != self._history.step:  # Several ranks have heard of it at a later boundary.
            new = structs.replace(new, weights_step=self._history.step)
        try:
            ranks = self._ranks
            snapshot, as_begun = ranks.together(self._capture, new.step)
            if as_begun:
                new = structs.replace(new, weights_step=new.step - 1)
            own = sum(tensor.nbytes for tensor in snapshot.tensors.values())
            own += sum(self._recorder.start_of(number).bytes for number in (new.step, new.step - 1))
            self._must_have_room(sum(ranks.gather(own)))
            if not ranks.alone:
                snapshot = replace(snapshot, pieces=pieces_of(snapshot.tensors, snapshot.places, ranks))
            self._begin(new, self._recorder.signals, snapshot)
        except Exception:
            self._on_failure()
            raise

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer."""
        return self._written.wait(timeout_seconds)

    def _wanted(self, incident: int) -> bool:
        """Whether a scene of this incident is to be kept now: the first one, and none while another is being written.

        An unquiet run must not pay more for its scenes than for its checkpoints: none takes the place of a fresh one.
        """
        known = list(self._scenes.values())
        if not self._keep or not self._written.is_set() or any(one.incident == incident for one in known):
            return False
        oldest = min((one.steps_total for one in known), default=0)
        return len(known) < self._keep or self._history.steps_total - oldest >= self._spacing_steps

    def _must_have_room(self, size_bytes: int) -> None:
        if size_bytes > self._most_bytes:
            raise ValueError(f"a scene of {size_bytes} bytes is not kept: `scenes_bytes` is {self._most_bytes}")

    def _capture(self, step: int) -> tuple[Snapshot, bool]:
        """The state, and whether its weights are those with which the step began."""
        snapshot = self._state.capture(self._history.rewinding())
        tensors = snapshot.tensors
        begun = self._recorder.take_weights(step) or {}
        as_begun = bool(begun) and {name for name in tensors if name.startswith("model/")} <= begun.keys()
        if as_begun:
            tensors = {name: begun.get(name, tensor) for name, tensor in tensors.items()}
        start, before = (_stored(self._recorder.start_of(number)) for number in (step, step - 1))
        plain = {**snapshot.plain, "scene": {**start, "before": before}}
        return replace(snapshot, tensors=tensors, plain=plain), as_begun

    def _begin(self, new: Scene, steps: list[Signals], snapshot: Snapshot) -> None:
        def write() -> None:
            began = time.monotonic()
            try:
                self._wait_for_checkpoints(_IDLE_SECONDS)
                self._write(structs.replace(new, steps=[plain_signals(one) for one in steps]), snapshot)
                if self._ranks.first:
                    self._on_saved(new, time.monotonic() - began)
            except Exception as error:  # noqa: BLE001 - whatever the disk says
                _log.warning("the scene of step %d could not be kept: %s", new.step, error)
                self._on_failure()
            finally:
                self._written.set()

        writer = threading.Thread(target=write, name="scene-writer", daemon=True)
        self._written.clear()
        try:
            writer.start()
        except RuntimeError:  # No more threads. An interrupt in here leaves the writer at work, and is not caught.
            self._written.set()
            raise

    def _write(self, new: Scene, snapshot: Snapshot) -> None:
        draft = Manifest(
            run=new.run, step=new.step, branch=new.branch, kind="scene", finite=snapshot.finite, created=new.created,
            files={}, torch=new.torch, writer=WRITER,
        )  # fmt: skip
        name = self._tier.write(snapshot, draft).name
        try:
            if self._ranks.first:
                scene.write(self._tier.folder / name, new)
        except OSError:
            self._tier.rotate(set(self._scenes))
            raise
        # Only now: a disk that fails must not cost the scenes that are there.
        newest_first = sorted(self._scenes, key=lambda known: -self._scenes[known].steps_total)
        kept, bytes_left = {name}, self._most_bytes - self._tier.whole[name].total_bytes
        for known in newest_first[: self._keep - 1]:
            bytes_left -= self._tier.whole[known].total_bytes
            if bytes_left >= 0:
                kept.add(known)
        self._scenes = {known: one for known, one in [*self._scenes.items(), (name, new)] if known in kept}
        self._tier.rotate(kept)


def _stored(start: Start) -> dict[str, Any]:
    """What a step began with, as it is stored; its batches copied, for the loop may fill the same memory again."""
    return {"rng": start.rng, "batches": _host_copy(start.batches)}


def _host_copy(value: Any) -> Any:  # noqa: ANN401 - any tree of plain values
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _host_copy(item) for key, item in value.items()}
    return type(value)(map(_host_copy, value)) if isinstance(value, list | tuple) else value

"""The parts of a guard: made together at the start, or not at all, and closed together."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch import nn
from torch.optim import Optimizer

from trainer_plugin.actions import Actions, ClipLimit
from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.plain import encode_plain
from trainer_plugin.checkpoints.proof import LossFn, Proof
from trainer_plugin.checkpoints.set_aside import SetAside
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.config import Config
from trainer_plugin.control_loop import ControlLoop
from trainer_plugin.data.batches import Data
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.endpoint import Endpoint
from trainer_plugin.errors import Errors
from trainer_plugin.history import History, Resume, lasting_copy
from trainer_plugin.journal import Journal
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.placement import placement_of
from trainer_plugin.policy.ladder import Policy
from trainer_plugin.pull import Puller
from trainer_plugin.run_folder import JobFolder, RunState
from trainer_plugin.scenes.overview import Overview
from trainer_plugin.scenes.recorder import Recorder
from trainer_plugin.scenes.step_log import StepLog
from trainer_plugin.scenes.store import Scenes
from trainer_plugin.schedule import Schedule
from trainer_plugin.step.layer_signals import LayerSignals
from trainer_plugin.step.probe import Probe, plain_name
from trainer_plugin.step.reader import StepReader
from trainer_plugin.stop_signals import StopSignals

_log = logging.getLogger(__name__)
_WRITER_SECONDS = 60.0


class Parts:
    """Everything that works on one run, by name. `take_folder` makes and locks the run's folder.

    Raises:
        ValueError: the model or a state cannot be used; in one line.
        OSError: a folder cannot be made or written.
        RunInUseError: another job runs in the run's folder.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: nn.Module,
        optimizers: list[Optimizer],
        scheduler: Any,  # noqa: ANN401 - anything with state_dict and load_state_dict
        scaler: Any,  # noqa: ANN401 - a GradScaler of any device
        data: Data | None,
        loss_fn: LossFn | None,
        resume: Resume,
        start_step: int,
        framework: str,
        take_folder: Callable[[Config], JobFolder],
    ) -> None:
        self.config = config
        self._framework = framework
        # What is wrong with the training loop is told before anything is made.
        self.probe = Probe(model, torchs_clip=config.mode == "observe")
        self.data = data
        self.proof = Proof(model, loss_fn)
        self.state = TrainingState(
            model=model, optimizers=optimizers, scheduler=scheduler, scaler=scaler, data=data, proof=self.proof
        )
        encode_plain(self.state.live({}).plain)
        if loss_fn is not None and data is None:
            _log.warning("run %s: loss_fn without data: there is no batch to prove a restore by", config.run)

        self.folder = take_folder(config)
        with ExitStack() as undo:
            undo.callback(self.folder.lock.release)
            self.folder.save_config(config)
            self._open_state()
            self._open_reader(model, optimizers, scheduler, scaler, undo)
            self._resume(resume, start_step)
            self._open_endpoint(model, undo)
            self._open_scenes()
            undo.pop_all()
        self.save_state()

    def _open_state(self) -> None:
        """What has to be remembered, and who decides by it."""
        config = self.config
        self.checkpoints = Checkpoints(config.checkpoints, config.run, on_failure=self.count_checkpoint_failure)
        self.checkpoints.open()
        newest_branch = max((checkpoint.branch for checkpoint in self.checkpoints.newest_first()), default=0)
        state = self._run_state = self.folder.last_state(newest_branch, lambda: lasting_copy(self.checkpoints))
        self.checkpoints.lineage, self.checkpoints.proven_step = state.lineage, state.proven_step
        self.monitor = Monitor(config.detection)
        self.history = History(self.checkpoints, self.state, self.monitor, steps_total=state.steps_total)
        self.clip = ClipLimit(config.actions, tight_until=state.clip_until)
        if self.data is not None:
            self.data.quarantine = self.folder.quarantine
        self.policy = Policy(
            mode=config.mode,
            actions=config.actions,
            budget=config.budget,
            sustained_steps=config.detection.sustained_steps,
            state=state.policy,
        )

    def _open_reader(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        scheduler: Any,  # noqa: ANN401
        scaler: Any,  # noqa: ANN401
        undo: ExitStack,
    ) -> None:
        """What stands in the training step, and what acts on it."""
        config = self.config
        self.learning_rate = LrFactor(optimizers, state=self._run_state.learning_rate)
        undo.callback(self.learning_rate.remove)
        self.actions = Actions(
            config.actions,
            lr_floor=config.budget.lr_floor,
            clip=self.clip,
            learning_rate=self.learning_rate,
            checkpoints=self.checkpoints,
            state=self.state,
            layer_state=LayerState(model, optimizers),
            data=self.data,
            save=partial(self.save_checkpoint, everywhere=True),
            set_aside=SetAside(
                self.folder.path,
                capture=lambda: self.state.capture(self.history.rewinding()),
                place=lambda: (self.history.step, self.history.branch),
            ),
        )
        self.reader = StepReader(
            self.probe,
            optimizers,
            self.learning_rate,
            scaler=scaler,
            shielded=config.mode == "auto",
            layer_signals=self._layer_signals(model, optimizers),
        )
        undo.callback(self.reader.remove)
        follows = config.mode == "auto" and config.actions.schedule_follows == "applied_steps"
        self.schedule = Schedule(scheduler if follows else None, optimizers, scaled=scaler is not None)

    def _layer_signals(self, model: nn.Module, optimizers: list[Optimizer]) -> LayerSignals | None:
        metrics = self.config.metrics
        if not metrics.layers_every:
            return None
        modules: dict[str, nn.Module] = {}
        for name, module in model.named_modules() if metrics.activations else ():
            if plain_name(name) in self.probe.layers:
                modules.setdefault(plain_name(name), module)  # torch.compile's wrapper, not what is inside it.
        return LayerSignals(self.probe.layers, optimizers, every=metrics.layers_every, modules=modules)

    def _resume(self, resume: Resume, start_step: int) -> None:
        run, history = self.config.run, self.history
        anew = not history.resume(resume, self.policy.open_incident, run, start_step=start_step)
        self.policy.restarted(history.steps_total, anew=anew)
        history.suspect(self.policy.state.incidents)
        self.learning_rate.advance(history.steps_total)

    def _open_endpoint(self, model: nn.Module, undo: ExitStack) -> None:
        """What faces outwards."""
        self.endpoint = Endpoint(
            self.config,
            layers=self.probe.layers,
            moments=self.reader.moments,
            scaled=self.reader.scaled,
            steps_total=self.history.steps_total,
            info=self._info(),
            placement=placement_of(model),
        )
        undo.callback(self.endpoint.close)
        self.page = self.endpoint.page
        self.errors = Errors(self.config.run, self.page)

        def hold_back(error: Exception) -> None:
            self.errors.hold_back(error, step=self.history.step)

        self.loop = ControlLoop(self.folder, on_error=hold_back)
        self.journal = Journal(self.page, self.loop, self.folder)
        self.loop.start()
        undo.callback(self.loop.stop)
        self.puller = Puller(self.config.pull, self.folder, self.config.run, on_error=hold_back)
        self.puller.start()
        undo.callback(self.puller.stop)
        self.stop_signals = StopSignals()
        self.stop_signals.install()
        undo.callback(self.stop_signals.remove)

    def _open_scenes(self) -> None:
        """What keeps the evidence."""
        keep = self.config.checkpoints.scenes
        self.recorder = Recorder(starts=keep > 0)
        self.step_log = StepLog(self.folder.path, steps=self.config.recorder_steps, write=self.loop.write)
        self.overview = Overview(self.folder.path, write=self.loop.write)
        self.scenes = Scenes(
            self.folder.path,
            keep=keep,
            spacing_steps=self.config.checkpoints.every,
            state=self.state,
            history=self.history,
            recorder=self.recorder,
            wait_for_checkpoints=self.checkpoints.wait,
            on_failure=partial(self.page.add, "train_scene_failures_total"),
            on_saved=self.journal.scene,
        )
        self.scenes.open()

    def close(self) -> None:
        """Finish writing, take the hooks off, and leave the run folder: each of them, even if one fails."""
        with ExitStack() as undo:  # The last one first.
            undo.callback(self.folder.lock.release)
            undo.callback(self.puller.stop)  # After the last state and outcome are in the folder.
            undo.callback(self.loop.stop)
            undo.callback(self.save_state)
            undo.callback(self.overview.save)
            undo.callback(self.endpoint.close)
            undo.callback(self.learning_rate.remove)
            undo.callback(self.reader.remove)
            undo.callback(self.checkpoints.wait, _WRITER_SECONDS)
            undo.callback(self.scenes.wait, _WRITER_SECONDS)
            undo.callback(self.stop_signals.remove)

    def save_state(self) -> None:
        """Write what never rewinds, as it is now, in the background."""
        self._saved_total = self.history.steps_total
        self.loop.write(partial(self.folder.save_state, msgspec.json.encode(self.run_state())))

    def save_proof(self) -> None:
        """Write which checkpoints are proven by now, for whoever asks from outside what a rollback would take.

        The number of steps stays as it was saved last: if the job is killed now, those since then will not have been.
        """
        state = structs.replace(self.run_state(), steps_total=self._saved_total)
        self.loop.write(partial(self.folder.save_state, msgspec.json.encode(state)))

    def run_state(self) -> RunState:
        """What never rewinds, as it is now."""
        return RunState(
            steps_total=self.history.steps_total,
            proven_step=self.checkpoints.proven_step,
            policy=self.policy.state,
            lineage=self.checkpoints.lineage,
            learning_rate=self.learning_rate.state,
            quarantine=self.data.quarantine if self.data is not None else [],
            clip_until=self.clip.tight_until,
        )

    def save_checkpoint(self, *, everywhere: bool = False) -> bool:
        """Save in the background; what fails or has to be left out (False) is counted."""
        try:
            saved = self.history.save(msgspec.to_builtins(self.run_state()), everywhere=everywhere)
        except Exception:
            self.count_checkpoint_failure("local")
            raise
        if not saved:
            _log.warning("step %d: checkpoint left out, the last one is still being written", self.history.step)
            self.count_checkpoint_failure(self.checkpoints.writes_to)
        self.save_state()
        return saved

    def save_last_checkpoint(self) -> None:
        """As above, but never left out, and into both tiers: this host may be gone when the run goes on."""
        self.checkpoints.wait(_WRITER_SECONDS)
        self.save_checkpoint(everywhere=True)

    def count_checkpoint_failure(self, tier: str) -> None:
        """Put it on the page."""
        self.page.add("train_checkpoint_failures_total", 1.0, tier)

    def _info(self) -> dict[str, str]:
        return {
            "framework": self._framework,
            "torch": str(torch.__version__),
            "world_size": "1",
            "mode": self.config.mode,
            "data_rewind": "none" if self.data is None else "exact" if self.data.rewindable else "forward",
            "loss_mean": "none",
            "shield": self.reader.shield_kind,
        }

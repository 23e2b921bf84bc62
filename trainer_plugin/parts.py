"""The parts of a guard: made together at the start, or not at all, and closed together."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer_plugin.actions import Actions, ClipLimit
from trainer_plugin.checkpoints.assembly import Assembly
from trainer_plugin.checkpoints.joint_tier import JointTier
from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.manifest import WRITER
from trainer_plugin.checkpoints.plain import encode_plain
from trainer_plugin.checkpoints.proof import LossFn, Proof
from trainer_plugin.checkpoints.set_aside import SetAside
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.checkpoints.tier import Tier
from trainer_plugin.config import Config, same_everywhere
from trainer_plugin.control_loop import ControlLoop
from trainer_plugin.data.batches import Data
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.endpoint import Endpoint
from trainer_plugin.errors import Errors
from trainer_plugin.history import History, Resume, lasting_copy
from trainer_plugin.journal import Journal
from trainer_plugin.keeper import WRITER_SECONDS, Keeper
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.lines import Lines
from trainer_plugin.placement import placement_of
from trainer_plugin.policy.ladder import Policy
from trainer_plugin.pull import Puller
from trainer_plugin.ranks import Ranks
from trainer_plugin.roll_call import RollCall
from trainer_plugin.run_folder import JobFolder, RunState
from trainer_plugin.scenes.overview import Overview
from trainer_plugin.scenes.recorder import Recorder
from trainer_plugin.scenes.step_log import StepLog
from trainer_plugin.scenes.store import Scenes
from trainer_plugin.scenes.weights import StepWeights, wants_weights
from trainer_plugin.schedule import Schedule
from trainer_plugin.step.instruments import make_probe, make_reader
from trainer_plugin.stop_signals import StopSignals

_log = logging.getLogger(__name__)


class Parts:
    """Everything that works on one run, by name. `take_folder` makes the run's folder, and locks it on the first rank.

    Raises:
        ValueError: the model or a state cannot be used; in one line.
        OSError: a folder cannot be made or written.
        RunInUseError: another job runs in the run's folder.
        RanksError: one of these has come to another rank.
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
        factory: str,
        resume: Resume,
        start_step: int,
        framework: str,
        take_folder: Callable[[Config, Ranks], JobFolder],
    ) -> None:
        self.config = config
        self._framework = framework
        self.ranks = ranks = Ranks.of(model)
        ranks.must_agree("guard.yaml", same_everywhere(config))
        ranks.must_agree("version, resume or start_step", (WRITER, resume, start_step))
        # What is wrong with the training loop is told before anything is made.
        self.probe = make_probe(model, config, ranks)
        self.data = data
        self.proof = Proof(model, loss_fn, ranks)
        self.state = TrainingState(
            model=model, optimizers=optimizers, scheduler=scheduler, scaler=scaler, data=data, proof=self.proof,
            ranks=ranks,
        )  # fmt: skip
        encode_plain(self.state.live({}).plain)
        if loss_fn is not None and data is None:
            _log.warning("run %s: loss_fn without data: there is no batch to prove a restore by", config.run)

        with ExitStack() as undo:
            self._open_folder(take_folder, undo)
            self._open_state()
            self._open_reader(model, optimizers, scheduler, scaler, undo)
            self._resume(resume, start_step)
            self._open_endpoint(model, undo)
            self._open_scenes(model, factory)
            undo.pop_all()
        self.keeper.save_state()

    def _open_folder(self, take_folder: Callable[[Config, Ranks], JobFolder], undo: ExitStack) -> None:
        """The run's folder: the first rank's own, of which it tells the others."""
        ranks, config = self.ranks, self.config

        def take() -> JobFolder:
            folder = take_folder(config, ranks)
            undo.callback(folder.lock.release)
            folder.save_config(config)
            return folder

        self.folder = ranks.first_does(take) or take_folder(config, ranks)
        self.lines = Lines(ranks)
        self.roll_call = RollCall(ranks, self.lines, timeout_seconds=config.ranks.timeout_seconds)
        assembly = Assembly(ranks, self.lines)
        self._make_tier: Callable[..., Tier] = (
            Tier if ranks.alone else partial(JointTier, ranks=ranks, assembly=assembly, wanted=self.state.wanted)
        )
        self.lines.start()
        undo.callback(self.lines.close)

    def _open_state(self) -> None:
        """What has to be remembered, and who decides by it."""
        config = self.config
        self.checkpoints = Checkpoints(
            config.checkpoints, config.run, on_failure=self._count_checkpoint_failure, make_tier=self._make_tier,
            ranks=self.ranks,
        )  # fmt: skip
        self.checkpoints.open()
        state = self._run_state = self._last_state()
        self.folder.quarantine = self.ranks.from_first(self.folder.quarantine)
        self.checkpoints.lineage, self.checkpoints.proven_step = state.lineage, state.proven_step
        self.monitor = Monitor(config.detection)
        self.history = History(
            self.checkpoints, self.state, self.monitor, steps_total=state.steps_total, ranks=self.ranks
        )
        self.clip = ClipLimit(config.actions, tight_until=state.clip_until)
        if self.data is not None:
            self.data.quarantine = self.folder.quarantine
        self.policy = Policy(
            mode=config.mode, actions=config.actions, budget=config.budget,
            sustained_steps=config.detection.sustained_steps, state=state.policy,
        )  # fmt: skip

    def _last_state(self) -> RunState:
        """What never rewinds, as the first rank knows it."""

        def find() -> RunState:
            newest_branch = max((checkpoint.branch for checkpoint in self.checkpoints.newest_first()), default=0)
            return self.folder.last_state(newest_branch, lambda: lasting_copy(self.checkpoints))

        return self.ranks.from_first(self.ranks.first_does(find)) or RunState()

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
            save=lambda: self.keeper.save_checkpoint(everywhere=True),
            set_aside=SetAside(
                self.folder.path,
                capture=lambda: self.state.capture(self.history.rewinding()),
                place=lambda: (self.history.step, self.history.branch),
                make_tier=self._make_tier,
                ranks=self.ranks,
            ),
            ranks=self.ranks,
        )
        self.reader = make_reader(
            self.probe,
            config,
            self.ranks,
            model=model,
            optimizers=optimizers,
            learning_rate=self.learning_rate,
            scaler=scaler,
        )
        undo.callback(self.reader.remove)
        if config.mode != "auto" or config.actions.schedule_follows != "applied_steps":
            scheduler = None
        self.schedule = Schedule(scheduler, optimizers, self.learning_rate.scheduled, scaled=scaler is not None)

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
            placement=placement_of(model, self.config.metrics.gpu_uuid),
            ranks=self.ranks,
        )
        undo.callback(self.endpoint.close)
        self.page = self.endpoint.page
        self.errors = Errors(self.config.run, self.page)

        def hold_back(error: Exception) -> None:
            self.errors.hold_back(error, step=self.history.step)

        self.loop = ControlLoop(self.folder, on_error=hold_back)
        self.journal = Journal(self.page, self.loop, self.folder)
        self.puller = Puller(self.config.pull, self.folder, self.config.run, on_error=hold_back)
        if self.ranks.first:
            self.loop.start()
            undo.callback(self.loop.stop)
            self.puller.start()
            undo.callback(self.puller.stop)
        self.keeper = Keeper(
            self.ranks, folder=self.folder, loop=self.loop, endpoint=self.endpoint, history=self.history,
            checkpoints=self.checkpoints, policy=self.policy, learning_rate=self.learning_rate, clip=self.clip,
            data=self.data,
        )  # fmt: skip
        self.stop_signals = StopSignals()
        self.stop_signals.install()
        undo.callback(self.stop_signals.remove)

    def _open_scenes(self, model: nn.Module, factory: str) -> None:
        options = self.config.checkpoints
        copies = wants_weights(options.scene_weights, model)
        weights = StepWeights(model, late=not self.ranks.alone) if copies else None
        self.recorder = Recorder(starts=options.scenes > 0, weights=weights)
        self.step_log = StepLog(self.folder.path, steps=self.config.recorder_steps, write=self.loop.write)
        self.overview = Overview(self.folder.path, write=self.loop.write)
        self.scenes = Scenes(
            self.folder.path,
            keep=options.scenes,
            most_bytes=options.scenes_bytes,
            spacing_steps=options.every,
            state=self.state,
            history=self.history,
            recorder=self.recorder,
            wait_for_checkpoints=self.checkpoints.wait,
            on_failure=partial(self.page.add, "train_scene_failures_total"),
            on_saved=self.journal.scene,
            make_tier=self._make_tier,
            ranks=self.ranks,
            data=self.data,
            factory=factory,
        )
        self.scenes.open()

    def close(self) -> None:
        """Finish writing, take the hooks off, and leave the run folder: each of them, even if one fails."""
        with ExitStack() as undo:  # The last one first.
            undo.callback(self.lines.close)
            if self.ranks.first:
                undo.callback(self.folder.lock.release)
                undo.callback(self.puller.stop)  # After the last state and outcome are in the folder.
                undo.callback(self.loop.stop)
                undo.callback(self.overview.save)
            undo.callback(self.keeper.save_state)
            undo.callback(self.endpoint.close)
            undo.callback(self.learning_rate.remove)
            undo.callback(self.reader.remove)
            undo.callback(self.checkpoints.wait, WRITER_SECONDS)
            undo.callback(self.scenes.wait, WRITER_SECONDS)
            undo.callback(self.stop_signals.remove)

    def _count_checkpoint_failure(self, tier: str) -> None:
        self.endpoint.count_checkpoint_failure(tier)  # It is opened later than the checkpoints.

    def _info(self) -> dict[str, str]:
        return {
            "framework": self._framework,
            "torch": str(torch.__version__),
            "world_size": str(self.ranks.size),
            "mode": self.config.mode,
            "data_rewind": "none" if self.data is None else "exact" if self.data.rewindable else "forward",
            "loss_mean": "none",
            "shield": self.reader.shield_kind,
        }

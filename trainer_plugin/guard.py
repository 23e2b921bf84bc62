"""The Guard: it stands in a training loop at two places, before the optimizer and at the end of a step."""

import atexit
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_plugin.actions import Actions, ClipLimit
from trainer_plugin.checkpoints import Checkpoints
from trainer_plugin.config import Config, read_config, with_absolute_folders
from trainer_plugin.control_loop import ControlLoop
from trainer_plugin.data import Data
from trainer_plugin.decisions import Moment
from trainer_plugin.endpoint import Endpoint
from trainer_plugin.history import History, Resume, lasting_copy
from trainer_plugin.journal import Journal
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.metrics import Standing
from trainer_plugin.monitor import Monitor
from trainer_plugin.policy import Policy
from trainer_plugin.probe import Limits, Probe
from trainer_plugin.run_folder import JobFolder, RunState
from trainer_plugin.schedule import Schedule
from trainer_plugin.signals import Signals
from trainer_plugin.state import TrainingState, encode_plain
from trainer_plugin.step_reader import StepReader
from trainer_plugin.stop_signals import StopSignals

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 5.0
_SETTLED_STEPS = 3
_WRITER_SECONDS = 60.0
# The guards of this process by run folder: a second one takes the first one's place.
_guards: "weakref.WeakValueDictionary[Path, Guard]" = weakref.WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """A loop that ends without `close` leaves no target and no lock behind."""
    for guard in list(_guards.values()):
        guard.close()


class Guard:
    """Watches one training loop and heals it.

    Args:
        config: guard.yaml's path, a mapping of its keys, or a `Config`.
        model: the module that is trained.
        optimizer: its optimizer, or several.
        scheduler: anything with `state_dict` and `load_state_dict`; stepped by the loop, as ever.
        scaler: AMP's GradScaler, where there is one.
        data: any iterable of batches; one with `state_dict` and `load_state_dict` can go back.
        run: the run's name; replaces the config's.
        resume: `auto` goes on from the run's newest checkpoint, `require` fails without one, `never` starts anew.
        local_only: act without waiting for alerts, as when no Prometheus watches.
        on_signals: called with each step's `Signals`, for other loggers.
        clock: Unix seconds.

    Raises:
        ValueError: an option, the model or a state cannot be used; in one line.
        OSError: a folder cannot be made or written.
        RunInUseError: another job runs in the run's folder.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config,
        *,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,  # noqa: ANN401 - anything with state_dict and load_state_dict
        scaler: Any = None,  # noqa: ANN401 - a GradScaler of any device
        data: Iterable[Any] | None = None,
        run: str | None = None,
        resume: Resume = "auto",
        local_only: bool = False,
        on_signals: Callable[[Signals], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config = with_absolute_folders(read_config(config, run=run))
        self.stopping = False
        self._closed = False
        self._clock = clock
        self._local_only = local_only
        self._on_signals = on_signals
        self._seen_errors: set[str] = set()
        self._shows: list[Callable[[], None]] = []
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None

        # What is wrong with the training loop is told before anything is made.
        self._probe = Probe(model, bitwise=config.mode == "observe")
        self._data = Data(data) if data is not None else None
        self._state = TrainingState(
            model=model, optimizers=optimizers, scheduler=scheduler, scaler=scaler, data=self._data
        )
        encode_plain(self._state.capture({}).plain)

        self._folder = _take_folder(config)
        with ExitStack() as undo:
            undo.callback(self._folder.lock.release)
            self._open(optimizers, scheduler, scaler, resume, undo)
            undo.pop_all()
        self._optimizers, self._scheduled = optimizers, scheduler is not None
        self._first_total = self._history.steps_total
        self._first_position = self._data.position if self._data is not None else 0
        self._data_wait_seconds = 0.0
        self._step_began = time.perf_counter()
        _guards[self._folder.path.absolute()] = self

    def _open(
        self,
        optimizers: list[Optimizer],
        scheduler: Any,  # noqa: ANN401
        scaler: Any,  # noqa: ANN401
        resume: Resume,
        undo: ExitStack,
    ) -> None:
        """Everything of the start-up that needs the run's folder; `undo` hears how to take it back."""
        config = self.config
        self._checkpoints = Checkpoints(config.checkpoints, config.run, on_failure=self._count_checkpoint_failure)
        self._checkpoints.open()
        run_state = self._folder.state or self._recovered_state()
        self._checkpoints.lineage, self._checkpoints.proven_step = run_state.lineage, run_state.proven_step
        self._monitor = Monitor(config.detection)
        self._history = History(self._checkpoints, self._state, self._monitor, steps_total=run_state.steps_total)
        self._learning_rate = LrFactor(optimizers, state=run_state.learning_rate)
        undo.callback(self._learning_rate.remove)
        self._clip = ClipLimit(config.actions, tight_until=run_state.clip_until)
        if self._data is not None:
            self._data.quarantine = list(self._folder.quarantine)  # The folder keeps a list of its own.
        self._policy = Policy(
            mode=config.mode,
            actions=config.actions,
            budget=config.budget,
            sustained_steps=config.detection.sustained_steps,
            state=run_state.policy,
        )
        self._actions = Actions(
            config.actions,
            lr_floor=config.budget.lr_floor,
            clip=self._clip,
            learning_rate=self._learning_rate,
            checkpoints=self._checkpoints,
            state=self._state,
            data=self._data,
        )
        self._reader = StepReader(
            self._probe, optimizers, self._learning_rate, scaler=scaler, shielded=config.mode == "auto"
        )
        undo.callback(self._reader.remove)
        follows = config.mode == "auto" and config.actions.schedule_follows == "applied_steps"
        self._schedule = Schedule(scheduler if follows else None, optimizers)
        anew = not self._history.resume(resume, self._policy.open_incident, config.run)
        self._policy.restarted(self._history.steps_total, anew=anew)
        if not anew and self._data is not None and not self._data.rewindable:
            _log.warning("run %s: data cannot go back: it begins anew, not where the checkpoint was", config.run)
        self._history.suspect(self._policy.state.incidents)
        self._learning_rate.advance(self._history.steps_total)
        self._endpoint = Endpoint(config, layers=self._probe.layers, scaled=scaler is not None, info=self._info())
        undo.callback(self._endpoint.close)
        self.page = self._endpoint.page
        self._loop = ControlLoop(self._folder, on_error=self._hold_back)
        self._journal = Journal(self.page, self._loop, self._folder)
        self._loop.start()
        self._stop_signals = StopSignals()
        self._stop_signals.install()
        self._save_state()

    # --- What the training loop calls -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps in the history of the weights as they are; goes back on a rollback."""
        return self._history.step

    @property
    def metrics_port(self) -> int | None:
        """The port that /metrics is really on; None if none could be had."""
        return self._endpoint.port

    def next_batch(self) -> Any:  # noqa: ANN401 - whatever `data` yields
        """The next batch that is not in quarantine; begins the next epoch by itself, moves with a rollback."""
        if self._data is None:
            raise ValueError("next_batch needs `data`, which this Guard was not given")
        began = time.perf_counter()
        batch, left_out = self._data.next_batch(self.step + 1)
        self._data_wait_seconds = time.perf_counter() - began
        if left_out:
            self.page.add("train_steps_skipped_total", left_out, "quarantined")
        return batch

    def micro_step(self, loss: Tensor, *, tokens: int | None = None, sample_ids: Sequence[str] = ()) -> None:
        """Hear of one micro-batch of a step with gradient accumulation; then call `before_optimizer()` without a loss.

        `loss` is the micro-batch's own mean, not divided by their number. With `tokens` the step's loss is the mean
        over tokens, without it the mean over micro-batches.
        """
        try:
            self._reader.accumulation.add(loss, tokens=tokens, sample_ids=sample_ids)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._hold_back(error)

    def before_optimizer(self, loss: Tensor | None = None, *, sample_ids: Sequence[str] = ()) -> None:
        """Measure, clip and shield the gradients; in the place of `clip_grad_norm_`, and waiting for nothing.

        `loss` is the step's own, not multiplied by AMP's scale. Gradients may have been unscaled already, or not.
        """
        try:
            self._schedule.mark()
            self._reader.take(loss, step=self.step + 1, limits=self._limits(), sample_ids=sample_ids)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._hold_back(error)
            self._attempt(self._clip_plainly, self.config.actions.clip_max_norm)

    def _clip_plainly(self, max_norm: float | None) -> None:
        """The recipe's clip is not lost with the guard."""
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self._probe.parameters.values(), max_norm)

    def end_step(self) -> None:
        """The boundary between two steps, the only place where a run may change: read, judge, obey, else save."""
        history = self._history
        history.step += 1
        history.steps_total += 1
        moment = Moment(
            step=history.step,
            steps_total=history.steps_total,
            now=self._clock(),
            loop_up=self._loop.up and not self._local_only,
            target_step=self._history.target_step(self._policy.open_incident),
        )
        # Each part by itself: a broken logger or page must not keep the run from being healed and saved.
        for part in (self._judge, self._act, self._show):
            self._attempt(part, moment)

    def close(self) -> None:
        """Finish writing, take the hooks off, and leave the run folder. Doing so twice changes nothing."""
        if self._closed:
            return
        self._closed = True
        self._stop_signals.remove()
        self._checkpoints.wait(_WRITER_SECONDS)
        self._reader.remove()
        self._learning_rate.remove()
        self._endpoint.close()
        self._save_state()
        self._loop.stop()
        self._folder.lock.release()

    # --- The boundary -----------------------------------------------------------------------------------------------

    def _judge(self, moment: Moment) -> None:
        """Read the steps that have arrived, let the detectors judge them, and keep what changed."""
        self._shows.clear()
        if moment.steps_total == self._first_total + _SETTLED_STEPS:
            self._warn_of_forgotten()
        now = time.perf_counter()
        step_seconds, self._step_began = now - self._step_began, now
        for signals in self._reader.arrived(
            step_seconds=step_seconds,
            data_wait_seconds=self._data_wait_seconds,
            data_position=self._data.position - 1 if self._data is not None else None,
        ):
            if signals.withheld is not None:
                self._schedule.take_back()
            readings, verdicts = self._monitor.update(signals)
            weights_finite = True
            if any(verdict.detector == "nonfinite" for verdict in verdicts):
                weights_finite = self._inspect(signals.step, first=readings.withheld_steps <= 1)
            for incident in self._policy.observe(
                signals, readings, verdicts, weights_finite=weights_finite, steps_total=moment.steps_total
            ):
                self._journal.incident(incident, signals.step)
                self._history.suspect(self._policy.state.incidents)
                self._save_state()
            self._shows.append(partial(self._endpoint.metrics.show, signals, readings, verdicts, moment.now))
            if signals.surge:
                outcome = "done" if self.config.mode == "auto" else "observed"
                self.page.add("train_actions_total", 1.0, "clip", "local", outcome)
            if self._on_signals is not None:
                self._attempt(self._on_signals, signals)

    def _warn_of_forgotten(self) -> None:
        """What a loop leaves out is silent by nature: said once, a few steps after the start."""
        run = self.config.run
        if self._reader.measured == 0:
            _log.warning("run %s: before_optimizer is not called: nothing is measured, clipped or shielded", run)
        if self._data is not None and self._data.position == self._first_position:
            _log.warning("run %s: next_batch is not called: the data that was given will not go back", run)
        if not self._scheduled and any(
            hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in self._optimizers
        ):
            _log.warning("run %s: a scheduler steps the learning rate and was not given: it will not go back", run)

    def _act(self, moment: Moment) -> None:
        """Obey, else save: a boundary that has just gone back must not save too."""
        if not self._obey(moment):
            self._history.prove(self.config.checkpoints.proof_steps, self._policy.open_incident)
            if self.step % self.config.checkpoints.every == 0:
                self._save_checkpoint()
            elif self._stop_signals.asked is not None and not self.stopping:
                self._checkpoints.wait(_WRITER_SECONDS)  # This one is the last: it is not left out.
                self._save_checkpoint()
        if self._stop_signals.asked is not None and not self.stopping:
            _log.warning("step %d: stopping, as %s asks", moment.step, self._stop_signals.asked)
            self.stopping = True
        self._learning_rate.advance(self._history.steps_total)

    def _show(self, moment: Moment) -> None:
        """Put it all on the page at once. Only now: nothing that acts may wait while the page is held."""
        with self.page.update():
            for show in self._shows:
                show()
            self._endpoint.metrics.stand(self.step, self._standing(moment))

    def _inspect(self, step: int, *, first: bool) -> bool:
        """A step gone bad is worth host reads: which parameters, and whether the weights are still finite."""
        weights = self._probe.nonfinite_weights()
        if first:  # Of a streak: the others say the same.
            self._journal.nonfinite(step, gradients=self._reader.nonfinite_parameters, weights=weights)
        if weights:
            self.page.add("train_nonfinite_total", 1.0, "weight")
        return not weights

    def _obey(self, moment: Moment) -> bool:
        """Ask the policy, do what it says, and keep what came of it; True if the weights were taken back."""
        decision, refusals = self._policy.decide(moment, self._loop.commands())
        for refusal in refusals:
            self._journal.refusal(refusal, moment)
            self._journal.answer(refusal.command, refusal.outcome, refusal.detail, moment)
        if decision is None:
            return False
        result = self._actions.apply(decision, moment)
        to_step = result.loaded.manifest.step if result.loaded is not None else None
        remedy = self._policy.record(decision, moment, result.outcome, detail=result.detail, to_step=to_step)
        self._journal.action(decision, remedy, result.loaded)
        if result.loaded is not None:
            self._history.went_back_to(result.loaded)
            self._reader.forget()
            if result.quarantine is not None:
                self._loop.write(partial(self._folder.add_quarantine, result.quarantine))
            self.page.add("train_rollback_lost_steps_total", moment.step - self.step)
        self._save_state()
        self._journal.answer(decision.command, remedy.outcome, remedy.detail, moment)
        if result.loaded is not None:
            self._loop.flush(_FLUSH_SECONDS)  # On disk before the next step: a crash must not repeat it.
        if result.stop:
            _log.critical("step %d: stopping: %s", moment.step, remedy.detail)
            self.stopping = True
        return result.loaded is not None

    def _save_checkpoint(self) -> None:
        try:
            saved = self._history.save(msgspec.to_builtins(self._run_state()))
        except Exception:
            self._count_checkpoint_failure("local")
            raise
        if not saved:
            _log.warning("step %d: checkpoint left out, the last one is still being written", self.step)
            self._count_checkpoint_failure("local")
        self._save_state()

    # --- State ------------------------------------------------------------------------------------------------------

    def _save_state(self) -> None:
        """Write what never rewinds, as it is now, in the background."""
        self._loop.write(partial(self._folder.save_state, msgspec.json.encode(self._run_state())))

    def _run_state(self) -> RunState:
        return RunState(
            steps_total=self._history.steps_total,
            proven_step=self._checkpoints.proven_step,
            policy=self._policy.state,
            lineage=self._checkpoints.lineage,
            learning_rate=self._learning_rate.state,
            quarantine=self._data.quarantine if self._data is not None else [],
            clip_until=self._clip.tight_until,
        )

    def _recovered_state(self) -> RunState:
        """For a run without its folder's state: the copy in the newest checkpoint, or a new one."""
        copy = lasting_copy(self._checkpoints)
        if copy is None:
            return RunState()
        _log.warning("run %s: state.json is gone: its copy in the newest checkpoint is used", self.config.run)
        state = msgspec.convert(copy, RunState)
        for entry in state.quarantine:
            if entry not in self._folder.quarantine:
                self._folder.add_quarantine(entry)
        return state

    def _info(self) -> dict[str, str]:
        return {
            "framework": "torch",
            "torch": str(torch.__version__),
            "world_size": "1",
            "mode": self.config.mode,
            "data_rewind": "none" if self._data is None else "exact" if self._data.rewindable else "forward",
            "loss_mean": "none",
            "shield": self._reader.shield_kind,
        }

    def _standing(self, moment: Moment) -> Standing:
        incident = self._policy.open_incident
        return Standing(
            steps_total=moment.steps_total,
            lr_factor=self._learning_rate.factor,
            clip_max_norm=self._clip.max_norm(moment.steps_total),
            incident_open=incident is not None,
            loop_up=moment.loop_up,
            rollback_target_step=self._history.target_step(incident),
            checkpoint_steps={tier: self._checkpoints.newest_step(tier) for tier in ("local", "shared")},
            checkpoint_seconds=self._checkpoints.seconds(),
        )

    def _limits(self) -> Limits:
        """How far the coming step's gradient may go: the recipe's clip, and R10's surge where the job may act."""
        max_norm = self._clip.max_norm(self._history.steps_total)
        limit = math.inf if max_norm is None else max_norm
        # Where the job may not act by itself, a surge is told and clipped no further than the recipe does.
        surge_clip = min(limit, self._monitor.grad_norm_baseline) if self.config.mode == "auto" else limit
        return Limits(max_norm=limit, surge_above=self._monitor.surge_above, surge_clip=surge_clip)

    def _count_checkpoint_failure(self, tier: str) -> None:
        self.page.add("train_checkpoint_failures_total", 1.0, tier)

    def _attempt(self, part: Callable[[Any], object], what: object) -> None:
        try:
            part(what)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._hold_back(error)

    def _hold_back(self, error: Exception) -> None:
        """Count an error of our own, and log each kind once: the run goes on without what failed."""
        self.page.add("train_guard_errors_total")
        kind = f"{type(error).__name__}: {error}"
        if kind not in self._seen_errors and len(self._seen_errors) < 100:
            self._seen_errors.add(kind)
            _log.error("run %s, step %d: held back %s", self.config.run, self.step, kind, exc_info=error)


def _take_folder(config: Config) -> JobFolder:
    """The run's folder, locked; an earlier guard of this process in it is closed first."""
    runs = Path(config.runs)
    earlier = _guards.get((runs / config.run).absolute())
    if earlier is not None and not earlier._closed:  # noqa: SLF001 - of the same class
        _log.warning("run %s: the earlier guard of this process is closed", config.run)
        earlier.close()
    return JobFolder(runs, config.run)

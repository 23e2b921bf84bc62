"""The Guard: it stands in a training loop at two places, before the optimizer and at the end of a step."""

import atexit
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from exporter.forks import let_go_in_children
from trainer_plugin.boundary import Boundary
from trainer_plugin.checkpoints.proof import LossFn
from trainer_plugin.config import Config, read_config, with_absolute_folders
from trainer_plugin.data.batches import Data
from trainer_plugin.history import Resume
from trainer_plugin.omissions import Omissions
from trainer_plugin.parts import Parts
from trainer_plugin.ranks import Ranks, RanksError, unwrapped
from trainer_plugin.run_folder import JobFolder
from trainer_plugin.sample_ids import as_texts
from trainer_plugin.scenes.scene import factory_name
from trainer_plugin.signals import Signals
from trainer_plugin.step.probe import Limits
from trainer_plugin.step.shared_probe import Told
from trainer_plugin.step.shared_reader import SharedReader
from trainer_plugin.step.untraced import untraced

_log = logging.getLogger(__name__)
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
        data: any iterable of batches; one with `state_dict` and `load_state_dict` can go back, and so can a loader
            with an `IndexSampler`.
        loss_fn: `loss_fn(model, batch)` gives the loss of each sample; with it a restore proves itself on a batch.
        factory: `module:function`, which builds model and `loss_fn` anew for `python -m trainer_plugin replay`.
        run: the run's name; replaces the config's.
        resume: `auto` goes on from the run's newest checkpoint, `require` fails without one, `never` starts anew.
        start_step: the step that the loop stands at where no checkpoint of the guard's is gone on from.
        framework: whose loop it is, as `train_info` shows it.
        local_only: act without waiting for alerts, as when no Prometheus watches.
        on_signals: called with each step's `Signals`, for other loggers.
        clock: Unix seconds.

    Raises:
        ValueError: an option, the model or a state cannot be used; in one line.
        OSError: a folder cannot be made or written.
        RunInUseError: another job runs in the run's folder.
        RanksError: one of these has come to another rank. Also in a step, when a rank is gone: nothing else is raised.
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
        loss_fn: LossFn | None = None,
        factory: str = "",
        run: str | None = None,
        resume: Resume = "auto",
        start_step: int = 0,
        framework: str = "torch",
        local_only: bool = False,
        on_signals: Callable[[Signals], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config = with_absolute_folders(read_config(config, run=run))
        optimizers = [_own(one) for one in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
        self._data = Data(data, suspect_weight=_suspect_weight(config)) if data is not None else None
        self._parts = Parts(
            config,
            model=unwrapped(model),
            optimizers=optimizers,
            scheduler=scheduler,
            scaler=scaler if scaler is not None and scaler.is_enabled() else None,
            data=self._data,
            loss_fn=loss_fn,
            factory=factory_name(factory),
            resume=resume,
            start_step=start_step,
            framework=framework,
            take_folder=_take_folder,
        )
        self._boundary = Boundary(self._parts, local_only=local_only, on_signals=on_signals, clock=clock)
        self.page = self._parts.page
        self._closed = False
        self._omissions = Omissions(self._parts, optimizers, scheduled=scheduler is not None)
        self._data_wait_seconds = 0.0
        _guards[self._parts.folder.path.absolute()] = self
        let_go_in_children(self)

    @property
    def step(self) -> int:
        """Steps in the history of the weights as they are; goes back on a rollback."""
        return self._parts.history.step

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm measured last, before the clip: a scalar on the device, as `clip_grad_norm_` returns it."""
        return self._parts.reader.grad_norm

    @property
    def stopping(self) -> bool:
        """Whether the loop shall end: the guard stops the run, or a signal asks for it."""
        return self._boundary.stopping

    @property
    def metrics_port(self) -> int | None:
        """The port that /metrics is really on; None if none could be had."""
        return self._parts.endpoint.port

    @untraced
    def next_batch(self) -> Any:  # noqa: ANN401 - whatever `data` yields
        """The next batch that is not in quarantine; begins the next epoch by itself, moves with a rollback."""
        if self._data is None:
            raise ValueError("next_batch needs `data`, which this Guard was not given")
        began = time.perf_counter()
        batch, left_out = self._data.next_batch(self.step + 1)
        self._data_wait_seconds = time.perf_counter() - began
        self._parts.errors.attempt(
            partial(self._parts.recorder.hand_out, batch), self._data.position - 1, step=self.step
        )
        self._parts.proof.offer(batch)
        if left_out:
            self.page.add("train_steps_skipped_total", left_out, "quarantined")
        if self._data.weight(self.step + 1) < 1.0:
            self.page.add("train_batches_reweighted_total")
        return batch

    @untraced
    def micro_step(
        self, loss: Tensor, *, tokens: int | None = None, sample_ids: Iterable[object] | None = None
    ) -> None:
        """Hear of one micro-batch of a step with gradient accumulation; then call `before_optimizer()` without a loss.

        `loss` is the micro-batch's own mean, not divided by their number. With `tokens` the step's loss is the mean
        over tokens, without it the mean over micro-batches.
        """
        try:
            self._parts.reader.accumulation.add(loss, tokens=tokens, sample_ids=self._tell(sample_ids))
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._parts.errors.hold_back(error, step=self.step)

    @untraced
    def before_optimizer(self, loss: Tensor | None = None, *, sample_ids: Iterable[object] | None = None) -> None:
        """Measure, clip and shield the gradients; in the place of `clip_grad_norm_`, and waiting for nothing.

        `loss` is the step's own, not multiplied by AMP's scale. Gradients may have been unscaled already, or not.
        """
        parts = self._parts
        try:
            if isinstance(parts.reader, SharedReader):
                parts.reader.begin(self._told())  # First: whatever fails, the other ranks wait for this one's part.
            parts.errors.attempt(lambda _: parts.schedule.mark(), None, step=self.step)
            ids = self._tell(sample_ids)
            parts.reader.take(loss, step=self.step + 1, limits=self._limits(), sample_ids=ids)
        except RanksError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            parts.errors.hold_back(error, step=self.step)
            self._protect()
        parts.errors.attempt(parts.reader.watch_layers, self.step + 1, step=self.step)
        parts.errors.attempt(lambda _: parts.recorder.before_optimizer(), None, step=self.step)

    @untraced
    def end_step(self) -> None:
        """The boundary between two steps, the only place where a run may change: read, judge, obey, else save."""
        self._boundary.cross(data_wait_seconds=self._data_wait_seconds)
        self._omissions.look()

    def close(self) -> None:
        """Finish writing, take the hooks off, and leave the run folder. Doing so twice changes nothing."""
        if not self._closed:
            self._closed = True
            try:
                self._parts.close()
            finally:
                if self._data is not None:
                    self._data.close()

    def let_go(self) -> None:
        """In a forked child: the run is its parent's to close."""
        self._closed = True

    # --- What they need ---------------------------------------------------------------------------------------------

    def _tell(self, sample_ids: Iterable[object] | None) -> tuple[str, ...]:
        """The ids as texts; those that cannot be read cost the step nothing else."""
        try:
            ids = as_texts(sample_ids)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._parts.errors.hold_back(error, step=self.step)
            return ()
        if self._data is not None and ids:
            self._data.tell(ids)
        return ids

    def _told(self) -> Told:
        """What this rank tells the others with the coming step."""
        parts = self._parts
        asked = parts.stop_signals.asked is not None and not self.stopping
        if not parts.ranks.first:
            return Told(stop_asked=asked)
        loss, norm = parts.monitor.band_limits
        return Told(
            talks=parts.policy.state.may_act or bool(parts.loop.commands()),
            stop_asked=asked,
            heed_loss=loss,
            heed_norm=min(norm, parts.monitor.surge_above),
        )

    def _limits(self) -> Limits:
        """How far the coming step's gradient may go: the recipe's clip, and R10's surge where the job may act."""
        parts = self._parts
        max_norm = parts.clip.max_norm(parts.history.steps_total)
        limit = math.inf if max_norm is None else max_norm
        # Where the job may not act by itself, a surge is told and clipped no further than the recipe does.
        surge_clip = min(limit, parts.monitor.grad_norm_baseline) if self.config.mode == "auto" else limit
        spike_loss, spike_norm = math.inf, math.inf
        if self.config.mode == "auto" and (which := self.config.actions.withhold_spikes) != "never":
            spike_loss, spike_norm = parts.monitor.spike_limits(self.step + 1, all_spikes=which == "all")
        return Limits(
            max_norm=limit,
            surge_above=parts.monitor.surge_above,
            surge_clip=surge_clip,
            spike_loss=spike_loss,
            spike_norm=spike_norm,
            weight=1.0 if self._data is None else self._data.weight(self.step + 1),
        )

    def _protect(self) -> None:
        """Shield and clip are not lost with the reading; where even they fail, the recipe's clip is not."""
        parts = self._parts
        try:
            parts.reader.protect(self._limits(), step=self.step + 1)
        except RanksError:
            raise
        except Exception as error:
            parts.errors.hold_back(error, step=self.step)
            if not parts.ranks.alone:
                raise RanksError(f"step {self.step + 1} cannot be measured together with the other ranks") from error
            parts.errors.attempt(self._clip_plainly, self.config.actions.clip_max_norm, step=self.step)

    def _clip_plainly(self, max_norm: float | None) -> None:
        """What is not finite is not clipped: that would make every gradient NaN. Nor is what cannot be unscaled."""
        self._parts.reader.unscale_again()
        gradients = [p.grad for p in self._parts.probe.parameters.values() if p.grad is not None]
        if max_norm is not None and gradients and math.isfinite(nn.utils.get_total_norm(gradients)):
            nn.utils.clip_grad_norm_(self._parts.probe.parameters.values(), max_norm)


def _own(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps, in the place of accelerate's wrapper, which has no hooks."""
    inner = getattr(optimizer, "optimizer", None)
    has_hooks = hasattr(optimizer, "_optimizer_step_pre_hooks")
    return inner if isinstance(inner, Optimizer) and not has_hooks else optimizer


def _suspect_weight(config: Config) -> float:
    """What suspect data count for: nothing where they are left out, and all where the guard only observes."""
    if config.actions.suspect_data == "skip":
        return 0.0
    return 1.0 if config.mode == "observe" else config.actions.suspect_weight


def _take_folder(config: Config, ranks: Ranks) -> JobFolder:
    """The run's folder, locked on the first rank; an earlier guard of this process in it is closed first."""
    runs = Path(config.runs)
    earlier = _guards.get((runs / config.run).absolute())
    if earlier is not None and not earlier._closed:  # noqa: SLF001 - of the same class
        _log.warning("run %s: the earlier guard of this process is closed", config.run)
        earlier.close()
    return JobFolder(runs, config.run, own=ranks.first)

"""The boundary between two steps, the only place where a run may change: read, judge, obey, else save, and show."""

import logging
import time
from collections.abc import Callable
from functools import partial

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.readings import Readings
from trainer_plugin.metrics import Standing
from trainer_plugin.parts import Parts
from trainer_plugin.policy.decisions import Moment
from trainer_plugin.signals import Signals

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 5.0


class Boundary:
    """Crossed once a step. `stopping` says that the loop shall end.

    `on_signals` hears each step's signals; `local_only` acts without waiting for alerts.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        local_only: bool,
        on_signals: Callable[[Signals], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.stopping = False
        self._parts = parts
        self._local_only = local_only
        self._on_signals = on_signals
        self._clock = clock
        self._shows: list[Callable[[], None]] = []
        self._data_wait_seconds = 0.0
        self._began = time.perf_counter()

    def cross(self, *, data_wait_seconds: float) -> None:
        """One step has been run."""
        parts, history = self._parts, self._parts.history
        self._data_wait_seconds = data_wait_seconds
        history.step += 1
        history.steps_total += 1
        parts.recorder.end_step(history.step)
        moment = Moment(
            step=history.step,
            steps_total=history.steps_total,
            now=self._now(history.step),
            loop_up=parts.loop.up and not self._local_only,
            target_step=history.target_step(parts.policy.open_incident),
        )
        parts.journal.outer_loop(up=moment.loop_up, step=moment.step)
        parts.errors.attempt(parts.reader.settle, history.step, step=history.step)  # Before anything changes.
        # Each part by itself: a broken logger or page must not keep the run from being healed and saved.
        for part in (self._judge, self._act, self._show):
            parts.errors.attempt(part, moment, step=moment.step)
        parts.errors.attempt(lambda _: parts.recorder.begin_step(), None, step=moment.step)

    def _now(self, step: int) -> float:
        try:
            return self._clock()
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._parts.errors.hold_back(error, step=step)
            return time.time()

    def _judge(self, moment: Moment) -> None:
        """Read the steps that have arrived, let the detectors judge them, and keep what changed."""
        parts = self._parts
        self._shows.clear()
        now = time.perf_counter()
        step_seconds, self._began = now - self._began, now
        for signals in parts.reader.arrived(
            step_seconds=step_seconds,
            data_wait_seconds=self._data_wait_seconds,
            data_position=parts.data.position - 1 if parts.data is not None else None,
        ):
            if signals.withheld is not None:
                parts.schedule.take_back()
            parts.recorder.add(signals)
            parts.journal.loss(signals.loss)
            readings, verdicts = parts.monitor.update(signals)
            parts.errors.attempt(partial(self._record, signals, readings, verdicts), moment, step=signals.step)
            weights_finite = True
            if any(verdict.detector == "nonfinite" for verdict in verdicts):
                weights_finite = self._inspect(signals.step, first=readings.withheld_steps <= 1)
            for incident in parts.policy.observe(
                signals, readings, verdicts, weights_finite=weights_finite, steps_total=moment.steps_total
            ):
                parts.journal.incident(incident, signals.step)
                parts.history.suspect(parts.policy.state.incidents)
                parts.save_state()
                if not incident.healed:  # Before anything is done about it.
                    parts.errors.attempt(partial(parts.scenes.keep, incident), signals, step=moment.step)
            self._shows.append(partial(parts.endpoint.metrics.show, signals, readings, verdicts, moment.now))
            if signals.surge:
                outcome = "done" if parts.config.mode == "auto" else "observed"
                parts.page.add("train_actions_total", 1.0, "clip", "local", outcome)
            elif signals.withheld == "spike":
                parts.page.add("train_actions_total", 1.0, "skip_batch", "local", "done")
            if self._on_signals is not None:
                parts.errors.attempt(self._on_signals, signals, step=signals.step)

    def _record(self, signals: Signals, readings: Readings, verdicts: list[Verdict], moment: Moment) -> None:
        """Keep on disk what a step has shown."""
        parts, history = self._parts, self._parts.history
        parts.overview.add(signals, steps_total=history.steps_total, branch=history.branch)
        parts.step_log.add(
            signals,
            readings,
            verdicts,
            parts.recorder.start_of(signals.step),
            steps_total=history.steps_total,
            branch=history.branch,
            now=moment.now,
            lr_factor=parts.learning_rate.factor,
        )

    def _act(self, moment: Moment) -> None:
        """Obey, else save: a boundary that has just gone back must not save too."""
        parts, asked = self._parts, self._parts.stop_signals.asked
        if not self._obey(moment):
            if parts.history.prove(parts.config.checkpoints.proof_steps, parts.policy.open_incident):
                parts.save_proof()
            # Of a run that is stopping already, what has to be kept is kept.
            if asked is not None and not self.stopping:
                parts.save_last_checkpoint()
            elif not self.stopping and parts.history.step % parts.config.checkpoints.every == 0:
                parts.save_checkpoint()
        if asked is not None and not self.stopping:
            _log.warning("step %d: stopping, as %s asks", moment.step, asked)
            self.stopping = True
        parts.learning_rate.advance(parts.history.steps_total)

    def _show(self, moment: Moment) -> None:
        """Put it all on the page at once. Only now: nothing that acts may wait while the page is held."""
        parts = self._parts
        with parts.page.update():
            for show in self._shows:
                show()
            parts.endpoint.metrics.stand(parts.history.step, self._standing(moment))

    def _inspect(self, step: int, *, first: bool) -> bool:
        """A step gone bad is worth host reads: which parameters, and whether the weights are still finite."""
        parts = self._parts
        weights = parts.probe.nonfinite_weights()
        if first:  # Of a streak: the others say the same.
            parts.journal.nonfinite(step, gradients=parts.reader.nonfinite_parameters, weights=weights)
        if weights:
            parts.page.add("train_nonfinite_total", 1.0, "weight")
        return not weights

    def _obey(self, moment: Moment) -> bool:
        """Ask the policy, do what it says, and keep what came of it; True if weights were taken back."""
        parts = self._parts
        decision, refusals = parts.policy.decide(moment, parts.loop.commands())
        for refusal in refusals:
            parts.journal.refusal(refusal, moment)
            parts.journal.answer(refusal.command, refusal.outcome, refusal.detail, moment)
        if decision is None:
            if refusals:  # A budget that is spent outlives the job.
                parts.save_state()
            return False
        result = parts.actions.apply(decision, moment)
        gone_back = result.loaded if not result.layers else None  # Of a partial rollback the run stands where it stood.
        to_step = gone_back.manifest.step if gone_back is not None else None
        remedy = parts.policy.record(decision, moment, result.outcome, detail=result.detail, to_step=to_step)
        parts.journal.action(decision, remedy, result.loaded, result.layers)
        if gone_back is not None:
            parts.history.went_back_to(gone_back)
            parts.reader.forget()
            parts.page.add("train_rollback_lost_steps_total", moment.step - parts.history.step)
        if result.quarantine is not None:
            parts.loop.write(partial(parts.folder.add_quarantine, result.quarantine))
        if result.stop and decision.source != "operator":
            parts.policy.state.stopped_step = moment.step
        parts.save_state()
        parts.journal.answer(decision.command, remedy.outcome, remedy.detail, moment)
        if result.loaded is not None:
            parts.loop.flush(_FLUSH_SECONDS)  # On disk before the next step: a crash must not repeat it.
        if result.stop:
            _log.critical("step %d: stopping: %s", moment.step, remedy.detail)
            self.stopping = True
        return result.loaded is not None

    def _standing(self, moment: Moment) -> Standing:
        parts = self._parts
        incident = parts.policy.open_incident
        return Standing(
            steps_total=moment.steps_total,
            lr_factor=parts.learning_rate.factor,
            clip_max_norm=parts.clip.max_norm(moment.steps_total),
            incident_open=incident is not None,
            loop_up=moment.loop_up,
            rollback_target_step=parts.history.target_step(incident),
            checkpoint_steps={tier: parts.checkpoints.newest_step(tier) for tier in ("local", "shared")},
            checkpoint_seconds=parts.checkpoints.seconds(),
            scene_step=parts.scenes.newest_step,
            restore_proofs=parts.proof.outcomes,
        )

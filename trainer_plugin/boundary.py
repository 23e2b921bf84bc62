"""The boundary between two steps, the only place where a run may change: read, judge, obey, else save, and show."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainer_plugin.actions import Result
from trainer_plugin.damage import Damage, is_bad, together, where
from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.readings import Readings
from trainer_plugin.metrics import Standing
from trainer_plugin.parts import Parts
from trainer_plugin.policy.decisions import Decision, Moment, spike_withheld
from trainer_plugin.signals import Signals
from trainer_plugin.step.shared_reader import SharedReader

if TYPE_CHECKING:
    from trainer_plugin.scenes.scene import Scene

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
        # Of several ranks the first one's wish, until all hear of it.
        self._scene: Scene | None = None
        # Whether gradients and weights held a NaN or Inf in the step before, as it was told; None after a good step.
        self._told: tuple[bool, bool] | None = None
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
            target_step=history.target_step(parts.policy.open_incident) if parts.ranks.first else -1,
        )
        if parts.ranks.first:
            parts.journal.outer_loop(up=moment.loop_up, step=moment.step)
        parts.errors.attempt(parts.reader.settle, history.step, step=history.step)  # Before anything changes.
        # Each part by itself: a broken logger or page must not keep the run from being healed and saved.
        for part in (self._judge, self._act, self._show):
            parts.errors.attempt(part, moment, step=moment.step)
        parts.errors.attempt(lambda _: parts.schedule.leave(), None, step=moment.step)
        parts.errors.attempt(lambda _: parts.recorder.begin_step(), None, step=moment.step)

    def _now(self, step: int) -> float:
        try:
            return self._clock()
        except Exception as error:  # noqa: BLE001 - nothing of ours raises inside a training step
            self._parts.errors.hold_back(error, step=step)
            return time.time()

    def _judge(self, moment: Moment) -> None:
        """Read the steps that have arrived; of several ranks the first one judges them."""
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
                parts.errors.attempt(lambda _: parts.schedule.take_back(), None, step=moment.step)
            parts.recorder.add(signals)
            # Asked of all ranks before anything that could fail on one of them.
            damage = self._damage_of_all(signals)
            if parts.ranks.alone:
                self._take_in(signals, moment, damage)
            elif parts.ranks.first:
                parts.errors.attempt(partial(self._take_in, signals, moment), damage, step=moment.step)
            else:
                self._shows.append(partial(parts.endpoint.metrics.show_own, signals, parts.ranks.rank))
            if self._on_signals is not None:
                parts.errors.attempt(self._on_signals, signals, step=signals.step)

    def _take_in(self, signals: Signals, moment: Moment, damage: Damage | None) -> None:
        """Let the detectors judge a step, and keep what changed."""
        parts = self._parts
        parts.journal.loss(signals.loss)
        readings, verdicts = parts.monitor.update(signals)
        parts.errors.attempt(partial(self._record, signals, readings, verdicts), moment, step=signals.step)
        weights_finite = True
        if any(verdict.detector == "nonfinite" for verdict in verdicts):
            weights_finite = self._tell_damage(signals, damage or self._damage())
        else:
            self._told = None
        changed = parts.policy.observe(
            signals, readings, verdicts, weights_finite=weights_finite, steps_total=moment.steps_total
        )
        if (incident := parts.policy.open_incident) is not None:
            incident.evidence += where(signals, incident.evidence)
        for incident in changed:
            parts.journal.incident(incident, signals.step)
            parts.history.suspect(parts.policy.state.incidents)
            parts.keeper.save_state()
            if not incident.healed and parts.ranks.alone:  # Before anything is done about it.
                parts.errors.attempt(partial(parts.scenes.keep, incident), signals, step=moment.step)
            elif not incident.healed:
                self._scene = parts.scenes.wish(incident, signals) or self._scene
        self._shows.append(partial(parts.endpoint.metrics.show, signals, readings, verdicts, moment.now))
        outcome = "done" if parts.config.mode == "auto" else "observed"
        if spike_withheld(signals, readings, mode=parts.config.mode, actions=parts.config.actions):
            parts.page.add("train_actions_total", 1.0, "skip_batch", "local", outcome)
        elif signals.surge:
            parts.page.add("train_actions_total", 1.0, "clip", "local", outcome)

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
        parts, asked = self._parts, self._asked_to_stop()
        if not self._obey(moment):
            if parts.ranks.first and parts.history.prove(
                parts.config.checkpoints.proof_steps, parts.policy.open_incident
            ):
                parts.keeper.save_proof()
            # Of a run that is stopping already, what has to be kept is kept.
            if asked is not None and not self.stopping:
                parts.keeper.save_last_checkpoint()
            elif not self.stopping and parts.history.step % parts.config.checkpoints.every == 0:
                parts.keeper.save_checkpoint()
        if asked is not None and not self.stopping:
            _log.warning("step %d: stopping, as %s asks", moment.step, asked)
            self.stopping = True
        parts.learning_rate.advance(parts.history.steps_total)
        parts.journal.follow(parts.policy.open_incident, moment.step)

    def _asked_to_stop(self) -> str | None:
        """Who asks the loop to end; a signal that one rank has got is obeyed where all have heard of it."""
        reader, asked = self._parts.reader, self._parts.stop_signals.asked
        if isinstance(reader, SharedReader):
            return (asked or "a signal on another rank") if reader.stop_asked else None
        return asked

    def _show(self, moment: Moment) -> None:
        """Put it all on the page at once. Only now: nothing that acts may wait while the page is held."""
        parts = self._parts
        with parts.page.update():
            for show in self._shows:
                show()
            if parts.ranks.first:
                parts.endpoint.metrics.stand(parts.history.step, self._standing(moment))

    def _damage_of_all(self, signals: Signals) -> Damage | None:
        """Of several ranks, what a step gone bad has left on all of them together; None for any other step."""
        ranks, page = self._parts.ranks, self._parts.page
        if ranks.alone or not is_bad(signals):
            return None
        own = self._damage()
        if own.weights and not ranks.first:
            page.add("train_nonfinite_total", 1.0, "weight")
        return together(ranks.gather(own))

    def _damage(self) -> Damage:
        """A step gone bad is worth host reads: which parameters, and whether the weights are still finite."""
        return Damage(gradients=self._parts.reader.nonfinite_parameters, weights=self._parts.probe.nonfinite_weights())

    def _tell_damage(self, signals: Signals, damage: Damage) -> bool:
        """Whether the weights are still finite."""
        parts, before = self._parts, self._told
        self._told = bool(damage.gradients), bool(damage.weights)
        if self._told != before:  # The others of a streak say the same.
            withheld = signals.withheld is not None
            parts.journal.nonfinite(signals.step, gradients=damage.gradients, weights=damage.weights, withheld=withheld)
        if damage.weights:
            parts.page.add("train_nonfinite_total", 1.0, "weight")
        return not damage.weights

    def _obey(self, moment: Moment) -> bool:
        """Ask the policy and do what it says, on several ranks all at one boundary; True if weights were taken back."""
        parts, reader = self._parts, self._parts.reader
        if isinstance(reader, SharedReader) and not reader.talks:
            return False
        decided: list[Decision | None] = [None]
        if parts.ranks.first:
            # By itself: a policy that fails must keep no run from being saved, or from ending when asked to.
            parts.errors.attempt(lambda _: decided.append(self._decide(moment)), None, step=moment.step)
        decision = decided[-1]
        if isinstance(reader, SharedReader):
            decision, scene = parts.ranks.from_first((decision, self._scene))
            self._scene = None
            if scene is not None:  # Before anything is done about it.
                parts.errors.attempt(parts.scenes.store, scene, step=moment.step)
        return decision is not None and self._carry_out(decision, moment)

    def _decide(self, moment: Moment) -> Decision | None:
        parts = self._parts
        decision, refusals = parts.policy.decide(moment, parts.loop.commands())
        for refusal in refusals:
            parts.journal.refusal(refusal, moment)
            parts.journal.answer(refusal.command, refusal.outcome, refusal.detail, moment)
        if decision is None and refusals:  # A budget that is spent outlives the job.
            parts.keeper.save_state()
        return decision

    def _carry_out(self, decision: Decision, moment: Moment) -> bool:
        """Do what was decided, and keep what came of it; True if weights were taken back."""
        parts = self._parts
        result = parts.actions.apply(decision, moment)
        if result.loaded is not None and not result.layers:
            parts.history.went_back_to(result.loaded)
            parts.reader.forget()
        if parts.ranks.first:
            self._keep(decision, result, moment)
        if result.stop:
            _log.critical("step %d: stopping: %s", moment.step, result.detail)
            self.stopping = True
        return result.loaded is not None

    def _keep(self, decision: Decision, result: Result, moment: Moment) -> None:
        """Keep what came of a decision."""
        parts = self._parts
        gone_back = result.loaded if not result.layers else None  # Of a partial rollback the run stands where it stood.
        to_step = gone_back.manifest.step if gone_back is not None else None
        remedy = parts.policy.record(decision, moment, result.outcome, detail=result.detail, to_step=to_step)
        parts.journal.action(decision, remedy, result.loaded, result.layers)
        if gone_back is not None:
            parts.policy.state.answer(parts.loop.commands())
            parts.page.add("train_rollback_lost_steps_total", moment.step - parts.history.step)
        if result.quarantine is not None:
            parts.loop.write(partial(parts.folder.add_quarantine, result.quarantine))
        if result.stop and decision.source != "operator":
            parts.policy.state.stopped_step = moment.step
        parts.keeper.save_state()
        parts.journal.answer(decision.command, remedy.outcome, remedy.detail, moment)
        if result.loaded is not None:
            parts.loop.flush(_FLUSH_SECONDS)  # On disk before the next step: a crash must not repeat it.

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

"""What each action does to the job. When, and whether at all, is the policy's business."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer_plugin.checkpoints.layer_state import LayerState
from trainer_plugin.checkpoints.set_aside import SetAside
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.store import Checkpoints, Loaded
from trainer_plugin.data.batches import Data, Quarantine, merged
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.policy.decisions import ActionsConfig, Decision, Moment
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.ranks import Ranks, RanksError

_log = logging.getLogger(__name__)
# R11: the data from 5 steps before the first bad step to 20 after it are suspect, run already or not.
SUSPECT_BEFORE_STEPS = 5
SUSPECT_AFTER_STEPS = 20
# A lower rate that is a precaution: as long as an incident takes to count as healed, and as long for its way back.
BRIEF_STEPS = 20
_WRITER_WAIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of an action. A rollback has `loaded`; `stop` says that the job must not go on.

    `quarantine` are data to be left out from now on.

    Of a partial one only `layers` have gone back: the run stands where it stood.
    """

    outcome: str
    detail: str
    loaded: Loaded | None = None
    layers: tuple[str, ...] = ()
    quarantine: Quarantine | None = None
    stop: bool = False


class ClipLimit:
    """The norm to which gradients are clipped: the recipe's own, or tightened until a step count is reached."""

    def __init__(self, config: ActionsConfig, *, tight_until: int = 0) -> None:
        self._config = config
        self.tight_until = tight_until

    def max_norm(self, steps_total: int) -> float | None:
        """The limit for the step after `steps_total` optimizer steps run; None where the recipe does not clip."""
        limit = self._config.clip_max_norm
        return limit * self._config.clip_factor if limit and steps_total < self.tight_until else limit


class Actions:
    """Carries a decision out at a boundary."""

    def __init__(
        self,
        config: ActionsConfig,
        *,
        lr_floor: float,
        clip: ClipLimit,
        learning_rate: LrFactor,
        checkpoints: Checkpoints,
        state: TrainingState,
        layer_state: LayerState,
        data: Data | None,
        save: Callable[[], bool],
        set_aside: SetAside,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._config = config
        self._lr_floor = lr_floor
        self._clip = clip
        self._learning_rate = learning_rate
        self._checkpoints = checkpoints
        self._state = state
        self._layer_state = layer_state
        self._data = data
        self._save = save
        self._set_aside = set_aside

    def apply(self, decision: Decision, moment: Moment) -> Result:
        """Do what was decided. An error becomes an outcome: a wish that has none would come again in every step."""
        try:
            return self._apply(decision, moment)
        except RanksError:
            raise
        except Exception as error:  # noqa: BLE001 - of whatever kind
            _log.error("step %d: %s is not possible", moment.step, decision.action, exc_info=error)
            return Result(outcome="failed", detail=f"{type(error).__name__}: {error}")

    def _apply(self, decision: Decision, moment: Moment) -> Result:
        if decision.action == "clip":
            return self._tighten_clip(moment)
        if decision.action == "lower_lr":
            return self._lower_lr(decision, moment)
        if decision.action in ("rollback", "partial_rollback"):
            go_back = self._rollback if decision.action == "rollback" else self._partial_rollback
            return go_back(decision, moment)
        others = {"skip_batch": self._skip_batch, "checkpoint": self._checkpoint, "stop": self._stop}
        if decision.action in others:
            return others[decision.action](decision, moment)
        return Result(outcome="done", detail=decision.reason)  # A note.

    def _skip_batch(self, decision: Decision, _: Moment) -> Result:
        """Leave the suspect data out from now on; what was trained on them stays."""
        quarantine = self._suspect_data(decision.incident, decision.widen)
        if quarantine is None:
            # Nobody asked, and nothing is broken: no page for data that are the loop's own.
            outcome = "observed" if decision.source == "local" else "failed"
            return Result(outcome=outcome, detail="the data of that step are not known, or come no more")
        if self._data is not None:
            self._data.quarantine = [*self._data.quarantine, quarantine]
        return Result(
            outcome="done",
            detail=f"batches {quarantine.first} to {quarantine.last} are left out",
            quarantine=quarantine,
        )

    def _checkpoint(self, _: Decision, moment: Moment) -> Result:
        if not self._save():
            return Result(outcome="failed", detail="the last one is still being written")
        return Result(outcome="done", detail=f"step {moment.step} is being written into both tiers")

    def _stop(self, decision: Decision, moment: Moment) -> Result:
        """Stop. What is well is saved, to go on from; in an incident the state is evidence, and is set aside."""
        try:
            if decision.incident.id:
                where = f"the state is set aside in {self._set_aside.keep()}"
            else:
                self._checkpoints.wait(_WRITER_WAIT_SECONDS)
                where = f"step {moment.step} is saved" if self._save() else "the last checkpoint is still being written"
        except Exception as error:  # noqa: BLE001 - a disk that is full keeps no run from being stopped
            _log.warning("step %d: the state could not be kept: %s", moment.step, error)
            where = f"the state could not be kept: {error}"
        return Result(outcome="done", detail=f"{decision.reason or 'asked for'}; {where}", stop=True)

    def _tighten_clip(self, moment: Moment) -> Result:
        if self._config.clip_max_norm is None:
            return Result(outcome="failed", detail="clip_max_norm is null: this run does not clip")
        self._clip.tight_until = moment.steps_total + self._config.clip_steps
        limit = self._clip.max_norm(moment.steps_total)
        return Result(outcome="done", detail=f"clip to {limit:g} for {self._config.clip_steps} steps")

    def _lower_lr(self, decision: Decision, moment: Moment, *, stack: bool = True) -> Result:
        hold_steps, return_steps = self._config.lr_hold_steps, self._config.lr_return_steps
        if decision.brief:
            hold_steps, return_steps = min(hold_steps, BRIEF_STEPS), min(return_steps, BRIEF_STEPS)
        factor = self._learning_rate.lower(
            self._config.lr_factor,
            floor=self._lr_floor,
            now=moment.steps_total,
            hold_steps=hold_steps,
            return_steps=return_steps,
            stack=stack and self._config.lr_stacking,
        )
        return Result(outcome="done", detail=f"learning rate x {factor:g} for {hold_steps} steps")

    def _rollback(self, decision: Decision, moment: Moment) -> Result:
        moments = self._config.rollback_optimizer
        quarantine = self._suspect_data(decision.incident, decision.widen)
        known = self._data.quarantine if self._data is not None else []
        if self._data is not None and quarantine is not None:
            self._data.quarantine = [*known, quarantine]  # First: a loader reads ahead as soon as it has gone back.
        result = self._go_back(
            decision, moment, self._state.mismatches, lambda snapshot: self._state.restore(snapshot, moments=moments)
        )
        if result.loaded is not None:
            return replace(result, quarantine=quarantine)
        if self._data is not None:
            self._data.quarantine = known
        return result

    def _partial_rollback(self, decision: Decision, moment: Moment) -> Result:
        layers, moments = decision.layers, self._config.rollback_optimizer
        if not layers:
            return Result(outcome="failed", detail="no layer is named, and none has a past to surge from")
        result = self._go_back(
            decision,
            moment,
            lambda snapshot: self._layer_state.mismatches(snapshot, layers, moments=moments),
            lambda snapshot: self._layer_state.restore(snapshot, layers, moments=moments),
        )
        if result.loaded is None:
            return result
        return replace(result, layers=layers, detail=f"layers {', '.join(layers)} {result.detail}")

    def _go_back(
        self,
        decision: Decision,
        moment: Moment,
        mismatches: Callable[[Snapshot], list[str]],
        restore: Callable[[Snapshot], None],
    ) -> Result:
        """Restore from the nearest target before the decision's step that fits, and lower the learning rate."""
        self._checkpoints.wait(_WRITER_WAIT_SECONDS)  # The newest target may just be on its way to the second tier.
        targets = self._ranks.from_first(self._checkpoints.targets(decision.before_step))
        if not targets:
            return Result(outcome="no_target", detail=f"no proven checkpoint before step {decision.before_step}")
        touched = False
        problems = []
        for target in targets:
            try:
                loaded = self._checkpoints.load(target)
                self._ranks.together(_must_fit, mismatches, loaded.snapshot)
                touched = True
                self._ranks.together(restore, loaded.snapshot)
            except RanksError:
                raise
            except Exception as error:  # noqa: BLE001 - any unusable target leads to the next older one
                problems.append(f"step {target.step}: {error}")
                _log.warning("%s to step %d is not possible: %s", decision.action, target.step, error)
                continue
            if decision.incident.class_ != "hardware":  # A lower rate mends no machine.
                # Of a rate that jumped the cause is known, and was halved for at once: going back undoes the rest.
                self._lower_lr(decision, moment, stack=decision.incident.rate_rise is None)
            detail = f"to step {target.step} from the {loaded.tier} tier"
            if loaded.degraded:
                detail += f", degraded: {', '.join(loaded.degraded)} is out of order"
            return Result(outcome="done", detail=detail, loaded=loaded)
        # Half-restored weights must not be trained on.
        return Result(outcome="failed", detail="; ".join(problems), stop=touched)

    def _suspect_data(self, incident: Incident, widen: int) -> Quarantine | None:
        """The data that are suspect after a rollback; None where no rank knows any: not each of them must have data."""
        first, last = incident.first_step, incident.first_step
        if incident.class_ == "bad_sample":
            last = max(first, incident.withheld_step)
        elif incident.id:
            first, last = first - SUSPECT_BEFORE_STEPS * widen, last + SUSPECT_AFTER_STEPS * widen
        reason = f"{incident.class_} at step {incident.first_step}"

        def suspect() -> Quarantine | None:
            if self._data is None:
                return None
            return self._data.suspect(first, last, incident=incident.id, reason=reason)

        try:
            known = self._ranks.gather(self._ranks.together(suspect))
        except RanksError:
            raise
        except Exception as error:  # noqa: BLE001 - an id that cannot be told keeps no run from going back
            _log.warning("which data are suspect is not known: %r", error)
            return None
        return merged([suspect for suspect in known if suspect is not None])


def _must_fit(mismatches: Callable[[Snapshot], list[str]], snapshot: Snapshot) -> None:
    if misfit := mismatches(snapshot):
        raise ValueError("; ".join(misfit))

"""The history of a run: where it stands, what was saved on the way, and going back to it or on from it."""

import logging
from typing import Any, Literal

from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.proof import ProofError
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.store import Checkpoints, Loaded
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.ranks import Ranks

_log = logging.getLogger(__name__)
Resume = Literal["auto", "require", "never"]
_ANY_STEP = 1 << 62


class History:
    """`step` goes back with the weights, `steps_total` never does."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: TrainingState,
        monitor: Monitor,
        *,
        steps_total: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._checkpoints = checkpoints
        self._state = state
        self._monitor = monitor
        self._fresh_monitor = monitor.state_dict()
        self.step = 0
        self.steps_total = steps_total

    def resume(self, resume: Resume, incident: Incident | None, run: str, *, start_step: int = 0) -> bool:
        """Go on from the newest checkpoint, before the first bad step if the job died in an incident; False if anew.

        Anew is from `start_step` on, where the loop stands by itself.

        Raises:
            ValueError: the checkpoint does not fit this training loop; or there is none and `resume` is `require`; or
                none that lies there can be loaded and `resume` is `auto`: days of training are not begun anew unasked.
        """
        before_step = incident.before_step if incident is not None else _ANY_STEP
        before = self._ranks.from_first(self._checkpoints.targets(before_step, proven_only=False))
        # Better a state that the incident may have touched than none at all: the detectors go on watching it.
        any_step = self._ranks.from_first(self._checkpoints.targets(_ANY_STEP, proven_only=False))
        rest = [target for target in any_step if target not in before]
        loaded = self._load_first([*before, *rest]) if resume != "never" else None
        if loaded is not None:
            self.steps_total = max(self.steps_total, loaded.snapshot.plain["guard"]["steps_total"])
            self.went_back_to(loaded)
            why = "the newest whole one"
            if incident is not None:
                place = "the newest before" if loaded.manifest in before else "none is left from before"
                why = f"{place} incident {incident.id}"
            _log.log(self._ranks.said, "run %s: goes on from step %d (%s tier, %s)", run, self.step, loaded.tier, why)
            return True
        if resume == "require":
            where = "" if incident is None else f" before step {before_step}"
            raise ValueError(f"run {run}: resume is `require`, and there is no checkpoint to go on from{where}")
        left_alone = self._checkpoints.left_alone
        if resume == "auto" and (before or rest or left_alone):
            told = left_alone[0] if left_alone else "whole in no tier"
            raise ValueError(
                f"run {run}: no checkpoint that lies there can be gone on from ({told}; the log says more); `never` as "
                "`resume` begins anew"
            )
        self.step = start_step
        self._checkpoints.lineage.begin(start_step)  # What an earlier job saved here belongs to other weights.
        self._checkpoints.proven_step = -1
        _log.info("run %s: starts at step %d", run, start_step)
        return False

    @property
    def branch(self) -> int:
        """The branch that is being trained."""
        return self._checkpoints.lineage.branch

    def save(self, lasting: dict[str, Any], *, everywhere: bool = False) -> bool:
        """Save a checkpoint of this step in the background; False if it is left out, the last one still being written.

        `lasting` is a copy of what never rewinds, in case the run's folder is lost.
        """
        state = self._ranks.together(self._state.live, {**self.rewinding(), "lasting": lasting})
        return self._checkpoints.save(state, self.step, everywhere=everywhere)

    def _load_first(self, targets: list[Manifest]) -> Loaded | None:
        """Restore the first target that can be loaded and proves itself; None if there is nothing to load.

        What proves itself by its hashes alone is better than nothing: a job that ended here would end so again.
        """
        unproven = []
        for target, proven in [*((target, True) for target in targets), *((target, False) for target in targets)]:
            if not proven and target not in unproven:
                continue
            try:
                loaded = self._checkpoints.load(target)
                _must_be_complete(loaded)
                self._state.restore(loaded.snapshot, unproven=not proven)
            except OSError as error:
                _log.warning("%s", error)
            except ProofError as error:
                unproven.append(target)
                _log.warning("checkpoint of step %d is not taken: %s", target.step, error)
            else:
                if not proven:
                    _log.warning("no checkpoint proves itself by its loss: is loss_fn or the machine another one?")
                return loaded
        return None

    def went_back_to(self, loaded: Loaded) -> None:
        """Take up the guard's own part of a state that was restored; what is trained from here on is a new branch."""
        guard = loaded.snapshot.plain["guard"]
        self.step = guard["step"]
        try:
            self._monitor.load_state_dict(guard["monitor"])
        except Exception as error:  # noqa: BLE001 - another version's: weights are worth more than what was normal
            self._monitor.load_state_dict(self._fresh_monitor)
            _log.warning("the detectors learn anew, what they had is of another version of this: %r", error)
        self._checkpoints.lineage.begin(self.step)
        self._checkpoints.proven_step = min(self._checkpoints.proven_step, self.step)

    def prove(self, proof_steps: int, incident: Incident | None) -> bool:
        """A checkpoint is proven once every verdict about it could have come, and none did; True if one is by now."""
        proven = self.step - proof_steps
        if incident is not None:
            proven = min(proven, incident.before_step - 1)
        before = self._checkpoints.proven_step
        self._checkpoints.proven_step = max(before, proven)
        return any(before < known.step <= proven for known in self._checkpoints.targets(proven + 1))

    def suspect(self, incidents: list[Incident]) -> None:
        """What was saved in an incident is proven by nothing, also when the run has healed since."""
        self._checkpoints.suspect = [
            (incident.before_step, incident.healed_step) for incident in incidents if incident.healed_step is not None
        ]

    def target_step(self, incident: Incident | None) -> int:
        """The step that a rollback would go to now, whole in both tiers as far as known; -1 if there is none."""
        targets = self._checkpoints.targets(incident.before_step if incident is not None else self.step + 1)
        return next((target.step for target in targets if len(self._checkpoints.tiers(target)) > 1), -1)

    def rewinding(self) -> dict[str, Any]:
        """The guard's own part of the state that rewinds."""
        return {"step": self.step, "steps_total": self.steps_total, "monitor": self._monitor.state_dict()}


def _must_be_complete(loaded: Loaded) -> None:
    """A state that the guard's own part is missing from is no checkpoint of this run to go on from."""
    lacks = [key for key in ("step", "steps_total", "monitor") if key not in loaded.snapshot.plain.get("guard", {})]
    if lacks:
        raise OSError(f"checkpoint of step {loaded.manifest.step}: its part `guard` lacks {', '.join(lacks)}")


def lasting_copy(checkpoints: Checkpoints) -> dict[str, Any] | None:
    """What never rewinds, as the checkpoint saved last has it; None if there is none that can be read."""
    for newest in checkpoints.newest_first():
        try:
            copy: dict[str, Any] | None = checkpoints.lasting(newest)
        except OSError as error:
            _log.warning("%s", error)
            continue
        return copy
    return None

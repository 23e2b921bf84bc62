"""The history of a run: where it stands, what was saved on the way, and going back to it or on from it."""

import logging
from typing import Any, Literal

from trainer_plugin.checkpoints import Checkpoints, Loaded
from trainer_plugin.incidents import Incident
from trainer_plugin.monitor import Monitor
from trainer_plugin.state import TrainingState

_log = logging.getLogger(__name__)
Resume = Literal["auto", "require", "never"]
_ANY_STEP = 1 << 62


class History:
    """`step` goes back with the weights, `steps_total` never does."""

    def __init__(self, checkpoints: Checkpoints, state: TrainingState, monitor: Monitor, *, steps_total: int) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._monitor = monitor
        self.step = 0
        self.steps_total = steps_total

    def resume(self, resume: Resume, incident: Incident | None, run: str) -> bool:
        """Go on from the newest checkpoint, before the first bad step if the job died in an incident; False if anew.

        Raises:
            ValueError: the checkpoint does not fit this training loop, or there is none and `resume` is `require`.
        """
        before_step = incident.before_step if incident is not None else _ANY_STEP
        before = self._checkpoints.targets(before_step, proven_only=False)
        # Better a state that the incident may have touched than none at all: the detectors go on watching it.
        rest = [target for target in self._checkpoints.targets(_ANY_STEP, proven_only=False) if target not in before]
        for target in [*before, *rest] if resume != "never" else []:
            try:
                loaded = self._checkpoints.load(target)
            except OSError as error:
                _log.warning("%s", error)
                continue
            self._state.restore(loaded.snapshot)
            self.steps_total = max(self.steps_total, loaded.snapshot.plain["guard"]["steps_total"])
            self.went_back_to(loaded)
            why = "the newest whole one"
            if incident is not None:
                why = (
                    f"{'the newest before' if target in before else 'none is left from before'} incident {incident.id}"
                )
            _log.warning("run %s: goes on from step %d (%s tier, %s)", run, self.step, loaded.tier, why)
            return True
        if resume == "require":
            where = "" if incident is None else f" before step {before_step}"
            raise ValueError(f"run {run}: resume is `require`, and there is no checkpoint to go on from{where}")
        self._checkpoints.lineage.begin(0)  # What an earlier job saved here belongs to other weights.
        self._checkpoints.proven_step = -1
        _log.info("run %s: starts at step 0", run)
        return False

    @property
    def branch(self) -> int:
        """The branch that is being trained."""
        return self._checkpoints.lineage.branch

    def save(self, lasting: dict[str, Any]) -> bool:
        """Save a checkpoint of this step in the background; False if the last one is still being written.

        `lasting` is a copy of what never rewinds, in case the run's folder is lost.
        """
        return self._checkpoints.save(self._state.capture({**self.rewinding(), "lasting": lasting}), self.step)

    def went_back_to(self, loaded: Loaded) -> None:
        """Take up the guard's own part of a state that was restored; what is trained from here on is a new branch."""
        guard = loaded.snapshot.plain["guard"]
        self.step = guard["step"]
        self._monitor.load_state_dict(guard["monitor"])
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


def lasting_copy(checkpoints: Checkpoints) -> dict[str, Any] | None:
    """What never rewinds, as the checkpoint saved last has it; None if there is none that can be read."""
    for newest in checkpoints.newest_first():
        try:
            copy: dict[str, Any] | None = checkpoints.load(newest).snapshot.plain["guard"].get("lasting")
        except OSError as error:
            _log.warning("%s", error)
            continue
        return copy
    return None

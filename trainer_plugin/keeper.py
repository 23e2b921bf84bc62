"""The keeper: what of a run is written down at a boundary, its state that never rewinds and its checkpoints."""

import logging
from functools import partial

import msgspec
from msgspec import structs

from trainer_plugin.actions import ClipLimit
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.control_loop import ControlLoop
from trainer_plugin.data.batches import Data
from trainer_plugin.endpoint import Endpoint
from trainer_plugin.history import History
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.policy.ladder import Policy
from trainer_plugin.ranks import Ranks
from trainer_plugin.run_folder import JobFolder, RunState

_log = logging.getLogger(__name__)
WRITER_SECONDS = 60.0


class Keeper:
    """Writes in the background. Of several ranks each saves its part of a checkpoint; the state is the first one's."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        folder: JobFolder,
        loop: ControlLoop,
        endpoint: Endpoint,
        history: History,
        checkpoints: Checkpoints,
        policy: Policy,
        learning_rate: LrFactor,
        clip: ClipLimit,
        data: Data | None,
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._loop = loop
        self._endpoint = endpoint
        self._history = history
        self._checkpoints = checkpoints
        self._policy = policy
        self._learning_rate = learning_rate
        self._clip = clip
        self._data = data
        self._saved_total = history.steps_total

    def save_state(self) -> None:
        """Write what never rewinds, as it is now."""
        self._saved_total = self._history.steps_total
        self._write(self._run_state())

    def save_proof(self) -> None:
        """Write which checkpoints are proven by now, for whoever asks from outside what a rollback would take.

        The number of steps stays as it was saved last: if the job is killed now, those since then will not have been.
        """
        self._write(structs.replace(self._run_state(), steps_total=self._saved_total))

    def save_checkpoint(self, *, everywhere: bool = False) -> bool:
        """Save in the background; what fails or has to be left out (False) is counted."""
        try:
            saved = self._history.save(msgspec.to_builtins(self._run_state()), everywhere=everywhere)
        except Exception:
            self._endpoint.count_checkpoint_failure("local")
            raise
        if not saved:
            _log.warning("step %d: checkpoint left out, the last one is still being written", self._history.step)
            self._endpoint.count_checkpoint_failure(self._checkpoints.writes_to)
        self.save_state()
        return saved

    def save_last_checkpoint(self) -> None:
        """As above, but never left out, and into both tiers: this host may be gone when the run goes on."""
        self._checkpoints.wait(WRITER_SECONDS)
        self.save_checkpoint(everywhere=True)

    def _write(self, state: RunState) -> None:
        if self._ranks.first:
            self._loop.write(partial(self._folder.save_state, msgspec.json.encode(state)))

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

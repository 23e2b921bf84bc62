"""The state in which a run was stopped, kept as evidence, where no restart and no rollback looks for one."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from trainer_plugin.checkpoints.manifest import WRITER, Manifest
from trainer_plugin.checkpoints.places import pieces_of
from trainer_plugin.checkpoints.retention import SaveEvery
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tier import Tier
from trainer_plugin.checkpoints.time_limit import patience, within
from trainer_plugin.ranks import Ranks

_HANG_SECONDS = 30.0


class SetAside:
    """`stopped/` in the run folder, with the newest such state in the form of a checkpoint.

    `capture` gives a copy of the state, `place` the step and the branch that it belongs to. Several `ranks` keep it
    together.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        capture: Callable[[], Snapshot],
        place: Callable[[], tuple[int, int]],
        make_tier: Callable[..., Tier] = Tier,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._run = run_folder.name
        self._tier = make_tier("stopped", run_folder / "stopped", SaveEvery(every=1, keep=1), run=self._run)
        self._capture = capture
        self._place = place

    def keep(self) -> Path:
        """Write the state as it is now, and say where.

        Raises:
            OSError: it cannot be written; TimeoutError where the disk hangs.
        """
        snapshot, (step, branch) = self._ranks.together(self._capture), self._place()
        if not self._ranks.alone:
            snapshot = replace(snapshot, pieces=pieces_of(snapshot.tensors, snapshot.places, self._ranks))
        draft = Manifest(
            run=self._run, step=step, branch=branch, kind="stopped", finite=snapshot.finite,
            created=self._ranks.from_first(time.time()), files={}, torch=str(torch.__version__), writer=WRITER,
        )  # fmt: skip
        size_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        within(patience(size_bytes, _HANG_SECONDS) * self._tier.slowness, self._write, snapshot, draft)
        return self._tier.folder / draft.name

    def _write(self, snapshot: Snapshot, draft: Manifest) -> None:
        self._tier.open()
        self._tier.write(snapshot, draft)
        self._tier.rotate({draft.name})

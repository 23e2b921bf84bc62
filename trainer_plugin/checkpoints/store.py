"""The checkpoints of a run in two tiers: saved in the background, kept by number, and the one a rollback would take.

Knows retention and lineage, not why a run goes back. A checkpoint is a rollback target when both tiers hold it whole;
where one tier is out of order the other goes on.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_plugin.checkpoints.manifest import WRITER, Manifest
from trainer_plugin.checkpoints.places import pieces_of
from trainer_plugin.checkpoints.plain import plain_copy
from trainer_plugin.checkpoints.retention import CheckpointsConfig, Lineage, kept
from trainer_plugin.checkpoints.slots import Slots
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.state import TrainingState
from trainer_plugin.checkpoints.tier import Tier
from trainer_plugin.checkpoints.time_limit import begin, patience, within
from trainer_plugin.checkpoints.writer import Writer
from trainer_plugin.ranks import Ranks

_log = logging.getLogger(__name__)
_HANG_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint read back: from which tier (or from memory), and which tiers could not be made whole.

    The snapshot is good until the next save.
    """

    manifest: Manifest
    snapshot: Snapshot
    tier: str
    degraded: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run. One background thread writes; every other method may be called from the loop.

    `lineage`, `proven_step` and `suspect` are kept up to date by the guard: a checkpoint is proven when it is live,
    not beyond `proven_step`, and in none of the `suspect` stretches of steps (first and last, both included).
    `clock` tells Unix seconds. A tier that does not answer for `hang_seconds`, more for many bytes, is out of order. Of
    several `ranks` all have to call `open`, `save` and `load` together, and only the first one knows what is proven.
    """

    def __init__(
        self,
        config: CheckpointsConfig,
        run: str,
        *,
        on_failure: Callable[[str], None],
        make_tier: Callable[..., Tier] = Tier,
        clock: Callable[[], float] = time.time,
        hang_seconds: float = _HANG_SECONDS,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._loads = 0
        self._config = config
        self._run = run
        self._clock = clock
        self._hang_seconds = hang_seconds
        self._local = make_tier("local", Path(config.local) / run, config.tiers["local"])
        self._shared = make_tier("shared", Path(config.shared) / run, config.tiers["shared"])
        self._tiers = (self._local, self._shared)
        self._slots = Slots(config.keep_memory)
        self._writer = Writer(
            self._local, self._shared, rotate=self._rotate, on_failure=on_failure, hang_seconds=hang_seconds
        )
        self.lineage = Lineage()
        self.proven_step = -1
        self.suspect: list[tuple[int, int]] = []

    def open(self) -> None:
        """Make the folders, remove what a killed job left half-done, and find the checkpoints that are whole.

        Raises:
            OSError: a tier's folder cannot be made or written; but a run that has checkpoints in the other tier goes
                on with that one.
            ValueError: both tiers are one folder.
        """
        problems: list[OSError] = []
        for tier, opened in [(tier, self._begin_open(tier)) for tier in self._tiers]:
            try:
                opened(self._hang_seconds)
            except TimeoutError as error:
                problems.append(TimeoutError(f"checkpoints.{tier.name}: folder {tier.folder}: {error}"))
            except OSError as error:
                problems.append(error)
        if problems and (len(problems) == len(self._tiers) or not any(tier.whole for tier in self._tiers)):
            raise problems[0]
        for problem in problems:
            _log.warning("%s: going on with the other tier", problem)
        if not problems:
            self._ranks.together(self._tell_tiers_apart)

    def _begin_open(self, tier: Tier) -> Callable[[float], None]:
        """Of several ranks one tier after the other: they tell each other what they see in it."""
        return begin(tier.open) if self._ranks.alone else lambda _: tier.open()

    def _tell_tiers_apart(self) -> None:
        if self._local.folder.samefile(self._shared.folder):
            found = self._local.folder.resolve()
            raise ValueError(f"checkpoints.local and checkpoints.shared must be two folders, found {found} twice")
        if not self._shared.one_folder:
            found = self._shared.folder
            raise ValueError(f"checkpoints.shared must be one folder for all ranks, found {found} apart")

    def save(self, state: Snapshot, step: int, kind: str = "periodic", *, everywhere: bool = False) -> bool:
        """Copy a state and write it in the background; False if it is left out, since no memory is free for it yet.

        `state` may hold live tensors: they are read only until this returns. With `everywhere` it goes into the shared
        tier too, whatever its interval.
        """
        if not self._ranks.alone:
            state = replace(state, pieces=pieces_of(state.tensors, state.places, self._ranks))
        draft = Manifest(
            run=self._run,
            step=step,
            branch=self.lineage.branch,
            kind=kind,
            finite=False,  # Until the writer has looked.
            created=self._ranks.from_first(self._clock()),
            files={},
            torch=str(torch.__version__),
            proven=self._proven(step),
            probe_loss=(state.plain.get("probe") or {}).get("loss"),
            writer=WRITER,
        )
        slot = self._slots.take(state, draft.name)
        if slot is None:
            for tier in self._tiers:
                tier.refuse(draft, "the last checkpoint is still being written")
            return False
        due = step % self._config.every != 0 or step % self._shared.retention.every == 0
        self._writer.start(slot, draft, local_only=not (due or everywhere))
        return True

    def prepare(self, state: TrainingState) -> None:
        """Get memory for states like this one, in the background; best when the optimizer has its moments."""
        self._slots.touch(state.tensors())

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer."""
        return self._writer.wait(timeout_seconds)

    @property
    def writes_to(self) -> str:
        """The tier that is being written to, or comes next."""
        return self._writer.at

    @property
    def left_alone(self) -> list[str]:
        """What lies in the tiers and is not read, in lines that say why."""
        return [line for tier in self._tiers for line in tier.left_alone]

    def newest_step(self, tier_name: str) -> int:
        """Step of the newest whole and finite checkpoint of the live branch in a tier; -1 if there is none."""
        tier = next(tier for tier in self._tiers if tier.name == tier_name)
        return max((m.step for m in list(tier.whole.values()) if m.finite and self.lineage.live(m)), default=-1)

    def seconds(self) -> dict[str, float]:
        """How long the last checkpoint took to be whole in each tier, where one was written."""
        return {tier.name: tier.seconds for tier in self._tiers if tier.seconds is not None}

    def targets(self, before_step: int, *, proven_only: bool = True) -> list[Manifest]:
        """What could be gone back to, best first: live, finite and proven, at a step below `before_step`.

        The nearest step first; at one step, what is whole in more tiers.
        """
        usable = [
            m
            for m in self._known()
            if m.step < before_step and m.finite and self.lineage.live(m) and (self._proven(m.step) or not proven_only)
        ]
        return sorted(usable, key=lambda m: (m.step, len(self.tiers(m)), m.branch), reverse=True)

    def newest_first(self) -> list[Manifest]:
        """Every whole checkpoint of any branch, the one saved last first."""
        return sorted(self._known(), key=lambda m: (m.branch, m.step), reverse=True)

    def tiers(self, checkpoint: Manifest) -> tuple[str, ...]:
        """The tiers that hold a checkpoint whole, as far as known without reading it."""
        return tuple(tier.name for tier in self._tiers if checkpoint.name in tier.whole)

    def load(self, checkpoint: Manifest) -> Loaded:
        """A checkpoint as it was saved, after checking every byte in both tiers, and mending one from the other.

        It comes from memory where that still holds it, which saves the reading and not the checks (R16).

        Raises:
            OSError: no tier holds it whole.
        """
        name, seconds, ranks = checkpoint.name, patience(checkpoint.total_bytes, self._hang_seconds), self._ranks
        good, hung, problems = self._check(name, seconds)
        for problem in problems:
            _log.warning("%s", problem)

        def found() -> Tier:
            if not good:
                raise OSError(f"checkpoint of step {checkpoint.step} is whole in no tier: {'; '.join(problems)}")
            return good[0]

        source = ranks.together(found)
        degraded = self._mend(checkpoint, source, good, hung, seconds)
        held = self._slots.find(name)
        if not all(ranks.gather(held is not None)):  # A rank may have left out a save that others copied.
            held = None
        snapshot, told = held or ranks.together(within, seconds, source.read, name), source.name
        if held is not None:  # Its plain half as a copy: whoever takes it up may keep it, and change it.
            snapshot, told = replace(held, plain=plain_copy(held.plain)), "memory"
        unknown = frozenset.intersection(*ranks.gather(snapshot.unknown))
        snapshot = replace(snapshot, unknown=unknown)
        return Loaded(manifest=checkpoint, snapshot=snapshot, tier=told, degraded=degraded)

    def _mend(
        self, checkpoint: Manifest, source: Tier, good: list[Tier], hung: list[Tier], seconds: float
    ) -> tuple[str, ...]:
        """Mend what is damaged on any rank; the tiers that stay out of order."""
        everyone = self._ranks.gather(([tier.name for tier in good], [tier.name for tier in hung]))
        self._loads += 1
        degraded = []
        for tier in self._tiers:
            if all(tier.name in theirs for theirs, _ in everyone):
                continue
            try:
                if any(tier.name in theirs for _, theirs in everyone):
                    raise TimeoutError("it does not answer")
                take = partial(tier.take, source, checkpoint.name, attempt=f"load-{self._loads}")
                self._ranks.together(within, seconds * tier.slowness, take)
            except OSError as error:
                degraded.append(tier.name)
                _log.warning("checkpoint of step %d stays damaged in tier %s: %s", checkpoint.step, tier.name, error)
        return tuple(degraded)

    def lasting(self, checkpoint: Manifest) -> Any:  # noqa: ANN401 - the guard's own
        """What never rewinds, as a checkpoint has it.

        Raises:
            OSError: no tier has it as it was written.
        """
        problems = []
        for tier in self._tiers:
            try:
                return tier.plain(checkpoint.name)["guard"].get("lasting")
            except OSError as error:
                problems.append(str(error))
        raise OSError("; ".join(problems))

    def _check(self, name: str, seconds: float) -> tuple[list[Tier], list[Tier], list[str]]:
        """The tiers that hold a checkpoint whole, those that do not answer, and what is wrong; read side by side."""
        good, hung, problems = [], [], []
        for tier, check in [(tier, begin(tier.faults, name)) for tier in self._tiers]:
            try:
                found = check(seconds)
            except TimeoutError as error:
                hung.append(tier)
                found = [f"tier {tier.name}: {error}"]
            except OSError as error:
                found = [str(error)]
            problems += found
            if not found:
                good.append(tier)
        return good, hung, problems

    def _rotate(self, tier: Tier, written: Manifest) -> None:
        names = kept(
            list(tier.whole.values()),
            keep=tier.retention.keep,
            live=self.lineage.live,
            proven=lambda checkpoint: self._proven(checkpoint.step),
        )
        tier.rotate({written.name, *names})

    def _proven(self, step: int) -> bool:
        return step <= self.proven_step and not any(first <= step <= last for first, last in self.suspect)

    def _known(self) -> list[Manifest]:
        return list({name: m for tier in self._tiers for name, m in list(tier.whole.items())}.values())

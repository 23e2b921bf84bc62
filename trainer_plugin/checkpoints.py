"""Checkpoints in two tiers: written in the background, kept by number, and the one a rollback would take.

Knows retention and lineage, not why a run goes back. A checkpoint is written to the local tier first, then copied to
the shared one; it is a rollback target when both hold it whole. Where one tier is out of order the other goes on.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_plugin.manifest import File, Manifest
from trainer_plugin.retention import CheckpointsConfig, Lineage
from trainer_plugin.state import Snapshot
from trainer_plugin.tier import Tier
from trainer_plugin.time_limit import within

_log = logging.getLogger(__name__)
# A tier that takes longer than this to check a checkpoint (and its bytes at that rate) hangs.
_CHECK_SECONDS = 30.0
_CHECK_BYTES_PER_SECOND = 50e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint read back: from which tier, and which tiers could not be made whole."""

    manifest: Manifest
    snapshot: Snapshot
    tier: str
    degraded: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run. One background thread writes; every other method may be called from the loop.

    `lineage`, `proven_step` and `suspect` are kept up to date by the guard: a checkpoint is proven when it is live,
    not beyond `proven_step`, and in none of the `suspect` stretches of steps (first and last, both included).
    """

    def __init__(self, config: CheckpointsConfig, run: str, *, on_failure: Callable[[str], None]) -> None:
        self._run = run
        self._local = Tier("local", Path(config.local) / run, keep=config.keep_local)
        self._shared = Tier("shared", Path(config.shared) / run, keep=config.keep_shared)
        self._tiers = (self._local, self._shared)
        self._on_failure = on_failure
        self.lineage = Lineage()
        self.proven_step = -1
        self.suspect: list[tuple[int, int]] = []
        self._written = threading.Event()
        self._written.set()

    def open(self) -> None:
        """Make the folders, remove what a killed job left half-done, and find the checkpoints that are whole.

        Raises:
            OSError: a tier's folder cannot be made or written; but a run that has checkpoints in the other tier goes
                on with that one.
            ValueError: both tiers are one folder.
        """
        problems: list[OSError] = []
        for tier in self._tiers:
            try:
                tier.open()
            except OSError as error:
                problems.append(error)
        if problems and (len(problems) == len(self._tiers) or not any(tier.whole for tier in self._tiers)):
            raise problems[0]
        for problem in problems:
            _log.warning("%s: going on with the other tier", problem)
        if not problems and self._local.folder.samefile(self._shared.folder):
            found = self._local.folder.resolve()
            raise ValueError(f"checkpoints.local and checkpoints.shared must be two folders, found {found} twice")

    def save(self, snapshot: Snapshot, step: int, kind: str = "periodic") -> bool:
        """Write a snapshot in the background; False if the last one is still being written (it is then left out)."""
        if not self._written.is_set():
            return False
        branch = self.lineage.branch

        def write() -> None:
            try:
                self._write(snapshot, step, branch, kind)
            finally:
                self._written.set()

        writer = threading.Thread(target=write, name="checkpoint-writer", daemon=True)
        self._written.clear()
        try:
            writer.start()
        except RuntimeError:  # No more threads. An interrupt in here leaves the writer at work, and is not caught.
            self._written.set()
            raise
        return True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer."""
        return self._written.wait(timeout_seconds)

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
            if m.step < before_step and m.finite and self.lineage.live(m) and (self._proven(m) or not proven_only)
        ]
        return sorted(usable, key=lambda m: (m.step, len(self.tiers(m)), m.branch), reverse=True)

    def newest_first(self) -> list[Manifest]:
        """Every whole checkpoint of any branch, the one saved last first."""
        return sorted(self._known(), key=lambda m: (m.branch, m.step), reverse=True)

    def tiers(self, checkpoint: Manifest) -> tuple[str, ...]:
        """The tiers that hold a checkpoint whole, as far as known without reading it."""
        return tuple(tier.name for tier in self._tiers if checkpoint.name in tier.whole)

    def load(self, checkpoint: Manifest) -> Loaded:
        """Read a checkpoint back after checking every byte in both tiers, mending one tier from the other.

        Raises:
            OSError: no tier holds it whole.
        """
        name, problems = checkpoint.name, []
        seconds = _CHECK_SECONDS + sum(file.bytes for file in checkpoint.files.values()) / _CHECK_BYTES_PER_SECOND
        good: list[Tier] = []
        hung: list[Tier] = []
        for tier in self._tiers:
            try:
                found = within(seconds, tier.faults, name)
            except TimeoutError as error:
                hung.append(tier)
                problems.append(str(error))
                continue
            except OSError as error:
                found = [str(error)]
            problems += found
            if not found:
                good.append(tier)
        for problem in problems:
            _log.warning("%s", problem)
        if not good:
            raise OSError(f"checkpoint of step {checkpoint.step} is whole in no tier: {'; '.join(problems)}")
        degraded = [tier.name for tier in hung]
        for tier in self._tiers:
            if tier in good or tier in hung:
                continue
            try:
                within(seconds, tier.take, good[0], name)
            except OSError as error:
                degraded.append(tier.name)
                _log.warning("checkpoint of step %d stays damaged in tier %s: %s", checkpoint.step, tier.name, error)
        snapshot = within(seconds, good[0].read, name)
        return Loaded(manifest=checkpoint, snapshot=snapshot, tier=good[0].name, degraded=tuple(degraded))

    def _write(self, snapshot: Snapshot, step: int, branch: int, kind: str) -> None:
        """Both tiers, local first: the shared one by a copy, or from memory where the local one is out of order."""
        finite = all(
            bool(torch.isfinite(tensor).all())
            for name, tensor in snapshot.tensors.items()
            if tensor.is_floating_point() and name not in snapshot.unjudged
        )

        def describe(files: dict[str, File]) -> Manifest:
            return Manifest(
                run=self._run,
                step=step,
                branch=branch,
                kind=kind,
                finite=finite,
                created=time.time(),
                files=files,
                torch=str(torch.__version__),
            )

        began, name = time.monotonic(), describe({}).name
        if not finite:
            _log.warning("checkpoint of step %d holds values that are not finite: never a target", step)
            self._on_failure("local")
        local = self._attempt(self._local, step, began, lambda: self._local.write(snapshot, name, describe))
        if not finite:
            return  # Evidence, in one tier, until the next one is written.
        if local:
            self._attempt(self._shared, step, began, lambda: self._shared.take(self._local, name))
        else:
            self._attempt(self._shared, step, began, lambda: self._shared.write(snapshot, name, describe))

    def _attempt(self, tier: Tier, step: int, began: float, write: Callable[[], Manifest]) -> bool:
        """Write into a tier and rotate it; a failure is counted, and the training goes on."""
        try:
            written = write()
            tier.seconds = time.monotonic() - began
            tier.rotate(self._kept(tier, written.name))
        except Exception as error:  # noqa: BLE001 - whatever the disk says
            _log.warning("checkpoint of step %d failed in tier %s: %s", step, tier.name, error)
            self._on_failure(tier.name)
            return False
        return True

    def _kept(self, tier: Tier, newest: str) -> set[str]:
        """The newest of the live branch, and the newest proven one whatever its age.

        While nothing of the live branch is proven, what it left behind may still be all there is.
        """
        finite = sorted((m for m in tier.whole.values() if m.finite), key=lambda m: (m.step, m.branch))
        live = [m for m in finite if self.lineage.live(m)]
        proven = [m for m in live if self._proven(m)]
        kept = [*live[-tier.keep :], *proven[-1:]]
        if not proven:
            kept += [m for m in finite if m not in live][-tier.keep :]
        return {newest, *(m.name for m in kept)}

    def _proven(self, checkpoint: Manifest) -> bool:
        step = checkpoint.step
        return step <= self.proven_step and not any(first <= step <= last for first, last in self.suspect)

    def _known(self) -> list[Manifest]:
        return list({name: m for tier in self._tiers for name, m in list(tier.whole.items())}.values())

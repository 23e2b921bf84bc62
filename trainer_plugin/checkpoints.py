"""Checkpoints in two tiers: written in the background, kept by number, and the one a rollback would take.

Knows files and retention, not why a run goes back. A checkpoint is written to the local tier first, then copied to
the shared one; it is a rollback target when both hold it whole.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from trainer_plugin import manifest
from trainer_plugin.manifest import File, Manifest
from trainer_plugin.state import Snapshot, decode_plain, encode_plain
from trainer_plugin.tensor_files import read_tensors, write_tensors

_log = logging.getLogger(__name__)
_PLAIN = "plain.pt"
_FOLDERS = "step-*"


class CheckpointsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoints:` of guard.yaml. `every` is in steps; the number kept per tier counts periodic ones."""

    local: str = "checkpoints/local"
    shared: str = "checkpoints/shared"
    every: int = 1000
    keep_local: int = 2
    keep_shared: int = 5
    proof_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("every", "keep_local", "keep_shared"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, found {getattr(self, name)}")
        if self.proof_steps < 0:
            raise ValueError(f"`proof_steps` must be at least 0, found {self.proof_steps}")
        if Path(self.local).absolute() == Path(self.shared).absolute():
            raise ValueError(f"`local` and `shared` must be two folders, found {self.local!r} twice")


class Lineage(msgspec.Struct, kw_only=True):
    """Which steps belong to the weights of today: `began_at[n]` is the step from which branch n went on.

    A rollback begins a branch. What an earlier branch saved beyond the point where a later one left it is abandoned.
    """

    began_at: list[int] = msgspec.field(default_factory=lambda: [0])

    @property
    def branch(self) -> int:
        """The branch that is being trained."""
        return len(self.began_at) - 1

    def begin(self, step: int) -> None:
        """Go on from a checkpoint at `step` in a new branch."""
        self.began_at.append(step)

    def live(self, checkpoint: Manifest) -> bool:
        """Whether today's weights came through this checkpoint."""
        return all(checkpoint.step <= step for step in self.began_at[checkpoint.branch + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint read back: from which tier, and which tiers could not be made whole."""

    manifest: Manifest
    snapshot: Snapshot
    tier: str
    degraded: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run. One background thread writes; every other method may be called from the loop.

    `lineage` and `proven_step` are kept up to date by the guard: a checkpoint is proven when it is live and not
    beyond `proven_step`.
    """

    def __init__(self, config: CheckpointsConfig, run: str, *, on_failure: Callable[[str], None]) -> None:
        self._run = run
        self._folders = {"local": Path(config.local) / run, "shared": Path(config.shared) / run}
        self._keep = {"local": config.keep_local, "shared": config.keep_shared}
        self._on_failure = on_failure
        self.lineage = Lineage()
        self.proven_step = -1
        self.seconds: dict[str, float] = {}
        self._whole: dict[str, dict[str, Manifest]] = {tier: {} for tier in self._folders}
        self._writer: threading.Thread | None = None
        # Held while files of a tier are written, copied or removed: the writer and a rollback may meet.
        self._files = threading.Lock()

    def open(self) -> None:
        """Make the folders, remove what a killed job left half-done, and find the checkpoints that are whole.

        Raises:
            OSError: a tier's folder cannot be made or written.
        """
        for tier, folder in self._folders.items():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"checkpoint folder {folder} cannot be written")
            for path in folder.glob(_FOLDERS):
                found = manifest.read(path)
                if found is not None:
                    self._whole[tier][path.name] = found
                elif (path / manifest.NAME).exists():
                    _log.warning("%s: left alone, its manifest is damaged or another version's", path)
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def save(self, snapshot: Snapshot, step: int, kind: str = "periodic") -> bool:
        """Write a snapshot in the background; False if the last one is still being written (it is then left out)."""
        if self._writer is not None and self._writer.is_alive():
            return False
        branch = self.lineage.branch
        self._writer = threading.Thread(
            target=self._write, args=(snapshot, step, branch, kind), name="checkpoint-writer", daemon=True
        )
        self._writer.start()
        return True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if that takes longer."""
        if self._writer is not None:
            self._writer.join(timeout_seconds)
            return not self._writer.is_alive()
        return True

    def newest_step(self, tier: str) -> int:
        """Step of the newest whole and finite checkpoint of the live branch in a tier; -1 if there is none."""
        return max((m.step for m in list(self._whole[tier].values()) if m.finite and self.lineage.live(m)), default=-1)

    def targets(self, before_step: int, *, proven_only: bool = True) -> list[Manifest]:
        """What could be gone back to, best first: live, finite and proven, at a step below `before_step`.

        Whole in both tiers before whole in one at the same step; else the nearest step.
        """
        found = {name: m for whole in self._whole.values() for name, m in list(whole.items())}
        usable = [
            m
            for m in found.values()
            if m.step < before_step
            and m.finite
            and self.lineage.live(m)
            and (m.step <= self.proven_step or not proven_only)
        ]
        return sorted(usable, key=lambda m: (m.step, len(self.tiers(m)), m.branch), reverse=True)

    def newest_first(self) -> list[Manifest]:
        """Every whole checkpoint of any branch, the one saved last first."""
        found = {name: m for whole in self._whole.values() for name, m in list(whole.items())}
        return sorted(found.values(), key=lambda m: (m.branch, m.step), reverse=True)

    def tiers(self, checkpoint: Manifest) -> tuple[str, ...]:
        """The tiers that hold a checkpoint whole, as far as known without reading it."""
        return tuple(tier for tier, whole in self._whole.items() if checkpoint.name in whole)

    def load(self, checkpoint: Manifest) -> Loaded:
        """Read a checkpoint back after checking every byte in both tiers, mending one tier from the other.

        Raises:
            OSError: no tier holds it whole.
        """
        problems: list[str] = []
        good: list[str] = []
        with self._files:
            for tier, folder in self._folders.items():
                path = folder / checkpoint.name
                found = manifest.read(path)
                if found is None:
                    problems.append(f"{path}: no checkpoint there")
                elif damage := manifest.faults(path, found):
                    problems += damage
                else:
                    good.append(tier)
            if not good:
                raise OSError(f"checkpoint of step {checkpoint.step} is whole in no tier: {'; '.join(problems)}")
            source = self._folders[good[0]] / checkpoint.name
            degraded = []
            for tier in self._folders.keys() - set(good):
                try:
                    self._whole[tier][checkpoint.name] = manifest.copy(source, self._folders[tier] / checkpoint.name)
                except OSError as error:
                    self._whole[tier].pop(checkpoint.name, None)
                    degraded.append(tier)
                    _log.warning("checkpoint of step %d stays damaged in tier %s: %s", checkpoint.step, tier, error)
            for problem in problems:
                _log.warning("%s", problem)
            return Loaded(
                manifest=checkpoint, snapshot=_read(source), tier=good[0], degraded=tuple(degraded)
            )  # fmt: skip

    def _write(self, snapshot: Snapshot, step: int, branch: int, kind: str) -> None:
        tier = "local"
        try:
            with self._files:
                began = time.monotonic()
                written = self._write_local(snapshot, step, branch, kind)
                self._whole["local"][written.name] = written
                self.seconds["local"] = time.monotonic() - began
                if not written.finite:
                    _log.warning("checkpoint of step %d holds values that are not finite: never a target", step)
                    return  # It stays until the next one is written, in this tier alone.
                self._rotate("local")
                tier = "shared"
                copied = manifest.copy(self._folders["local"] / written.name, self._folders["shared"] / written.name)
                self._whole["shared"][copied.name] = copied
                self.seconds["shared"] = time.monotonic() - began
                self._rotate("shared")
        except Exception as error:  # noqa: BLE001 - a checkpoint that fails is counted; the training goes on
            _log.warning("checkpoint of step %d failed in tier %s: %s", step, tier, error)
            self._on_failure(tier)

    def _write_local(self, snapshot: Snapshot, step: int, branch: int, kind: str) -> Manifest:
        finite = all(bool(torch.isfinite(t).all()) for t in snapshot.tensors.values() if t.is_floating_point())

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

        folder = self._folders["local"] / describe({}).name
        manifest.remove(folder)
        folder.mkdir(mode=0o700)
        with (folder / _PLAIN).open("wb") as file:
            file.write(encode_plain(snapshot.plain))
            file.flush()
            os.fsync(file.fileno())
        write_tensors(folder, snapshot.tensors)
        return manifest.seal(folder, describe)

    def _rotate(self, tier: str) -> None:
        """Keep the newest of the live branch, and the newest proven one whatever its age; remove the others."""
        whole = self._whole[tier]
        live = sorted(
            (m for m in whole.values() if m.finite and self.lineage.live(m)), key=lambda m: (m.step, m.branch)
        )
        kept = {m.name for m in live[-self._keep[tier] :]}
        kept |= {m.name for m in [m for m in live if m.step <= self.proven_step][-1:]}
        for name in whole.keys() - kept:
            whole.pop(name)
            manifest.remove(self._folders[tier] / name)


def _read(folder: Path) -> Snapshot:
    """The snapshot in a folder whose files were just checked."""
    return Snapshot(tensors=read_tensors(folder), plain=decode_plain((folder / _PLAIN).read_bytes()))

"""Checkpoints for the tests: opened below a folder, saved, damaged, and tiers that fail or hang when told to."""

from collections.abc import Callable
from pathlib import Path

from training import snapshot

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.retention import CheckpointsConfig, Lineage
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.checkpoints.tier import Tier


class Trap:
    """An object that tells of it when it is unpickled."""

    def __init__(self, marker) -> None:
        self.marker = marker

    def __reduce__(self):
        """What a pickle has done when it is read."""
        return (type(self.marker).touch, (self.marker,))


def nothing() -> None:
    """The fault of a tier in order."""


class FaultyTier(Tier):
    """A tier whose every access to its files does `fault` first: raise what a disk would, or wait."""

    fault: Callable[[], object] = staticmethod(nothing)

    def open(self):
        """Fail, or find what is there."""
        self.fault()
        super().open()

    def write(self, snapshot, draft):
        """Fail, or write."""
        self.fault()
        return super().write(snapshot, draft)

    def take(self, source, name, **options):
        """Fail, or copy."""
        self.fault()
        return super().take(source, name, **options)

    def faults(self, name):
        """Fail, or read."""
        self.fault()
        return super().faults(name)

    def rotate(self, kept):
        """Fail, or remove."""
        self.fault()
        super().rotate(kept)


def open_checkpoints(
    folder: Path, failures: list[str] | None = None, *, lineage=None, proven=1 << 62, options=None, **arguments
) -> Checkpoints:
    """The checkpoints of the run `tiny` below a folder, as its next job finds them, everything in them proven."""
    options = {"local": str(folder / "local"), "shared": str(folder / "shared"), **(options or {})}
    count = failures.append if failures is not None else lambda _: None
    checkpoints = Checkpoints(CheckpointsConfig(**options), "tiny", on_failure=count, **arguments)
    checkpoints.lineage = lineage or Lineage()
    checkpoints.open()
    checkpoints.proven_step = proven
    return checkpoints


def save(checkpoints: Checkpoints, *steps: int, **values: float) -> None:
    """Save these steps, one after the other."""
    for step in steps:
        assert checkpoints.save(snapshot(step, **values), step)
        assert checkpoints.wait(8.0)


def target_steps(checkpoints: Checkpoints, before: int = 1 << 62, **options) -> list[int]:
    """The steps of the targets, best first."""
    return [target.step for target in checkpoints.targets(before, **options)]


def checkpoint_folder(folder: Path, tier: str, step: int, branch: int = 0) -> Path:
    """Where a checkpoint lies in a tier."""
    return folder / tier / "tiny" / f"step-{step:09d}-{branch:03d}"


def rewrite(folder: Path, tier: str, step: int, change: Callable[[Snapshot], object], *, branch: int = 0) -> None:
    """Make a checkpoint of another state, files and hashes all in agreement."""
    path = checkpoint_folder(folder, tier, step, branch)
    found, there = manifest.read(path), Tier(tier, path.parent, None)
    snapshot = there.read(path.name)
    change(snapshot)
    there.write(snapshot, found)


def flip(path: Path, place: int | None = None) -> None:
    """Flip one bit of a file, in the middle if nothing is said."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def whole(folder: Path, tier: str) -> dict[int, list[str]]:
    """The checkpoints that lie in a tier by step, each with its faults, read anew from the files."""
    found = {}
    for path in (folder / tier / "tiny").iterdir():
        told = manifest.read(path)
        found[told.step if told else -1] = manifest.faults(path, told) if told else [f"{path}: no manifest"]
    return found

"""What a scene's folder holds, read once every byte of it is as it was written."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.manifest import PLAIN, Manifest, plain_name
from trainer_plugin.checkpoints.plain import decode_plain
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tensor_files import read_tensors
from trainer_plugin.checkpoints.tier import as_no_state
from trainer_plugin.replay.normal import check
from trainer_plugin.scenes import scene
from trainer_plugin.scenes.scene import Scene


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """What a step began with: its batches in their order, and the random state before the forward pass of each.

    Of several ranks: those of the first one, then those of the second one, and so on.
    """

    rng: list[dict[str, Any]]
    batches: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """A scene, whole: `begin` of its step, `before` of the one before it."""

    folder: Path
    scene: Scene
    snapshot: Snapshot
    begin: Begin
    before: Begin


def read_material(folder: Path) -> Material:
    """Read a scene. Nothing in it is unpickled before its hash was checked.

    Raises:
        ValueError: it is no scene, damaged, or another version's; in one line.
        OSError: it cannot be read, or others may write in it.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    for place in (folder, folder.parent):
        if reason := manifest.mistrust(place, os.geteuid()):
            raise PermissionError(reason)
    found = manifest.read(folder)
    if found is None:
        there = (folder / manifest.NAME).exists()
        reason = manifest.refusal(folder) if there else f"a scene's folder wanted, found no {manifest.NAME} in it"
        raise ValueError(f"{folder}: {reason}")
    if found.kind != "scene":
        raise ValueError(f"{folder}: a scene wanted, found a {found.kind} checkpoint")
    told = _told(folder, found)
    snapshot = read_state(folder, found)
    try:
        stored = [snapshot.plain["scene"], *_of_others(folder, found)]
        begin, before = _begin(stored), _begin([one.get("before", {"rng": [], "batches": []}) for one in stored])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: {PLAIN} is not that of a scene") from error
    return Material(folder=folder, scene=told, snapshot=snapshot, begin=begin, before=before)


def read_state(folder: Path, found: Manifest) -> Snapshot:
    """The state in a folder, a checkpoint's or a scene's.

    Raises:
        ValueError: it is damaged.
        OSError: its files are as they were written, and no state.
    """
    missing = {*manifest.unhashed(found), *map(plain_name, range(found.ranks))} - found.files.keys()
    faults = [f"{folder}: no hash of {name}" for name in sorted(missing)] or manifest.faults(folder, found)
    if faults:
        raise ValueError("; ".join(faults))
    with as_no_state(folder):
        return Snapshot(tensors=read_tensors(folder), plain=decode_plain((folder / PLAIN).read_bytes()))


def _told(folder: Path, found: Manifest) -> Scene:
    told = scene.read(folder)
    if told is None:
        path = folder / scene.NAME
        try:
            schema = msgspec.json.decode(path.read_bytes())["schema"]
        except (OSError, msgspec.MsgspecError, RecursionError, TypeError, KeyError):
            schema = scene.SCHEMA
        reason = "missing or damaged" if schema == scene.SCHEMA else f"schema {schema!r}; this reads {scene.SCHEMA}"
        raise ValueError(f"{path}: {reason}")
    if (told.run, told.step, told.branch) != (found.run, found.step, found.branch):
        raise ValueError(f"{folder}: {scene.NAME} is another scene's than {manifest.NAME}")
    if not told.steps or told.steps[-1].get("step") != told.step:
        raise ValueError(f"{folder}: {scene.NAME} does not tell of step {told.step}")
    for place, step in enumerate(told.steps):
        try:
            check(step)
        except ValueError as error:
            raise ValueError(f"{folder / scene.NAME}: steps[{place}]: {error}") from error
    return told


def _of_others(folder: Path, found: Manifest) -> list[dict[str, Any]]:
    """What the ranks but the first one have stored of the step."""
    with as_no_state(folder):
        return [decode_plain((folder / plain_name(rank)).read_bytes())["scene"] for rank in range(1, found.ranks)]


def _begin(stored: list[dict[str, Any]]) -> Begin:
    return Begin(
        rng=[state for one in stored for state in one["rng"]],
        batches=[batch for one in stored for batch in one["batches"]],
    )

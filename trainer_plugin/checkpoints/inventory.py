"""The checkpoints of a run as they lie on disk, seen from outside: nothing is locked, mended or removed. No torch."""

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from exporter.catalog import TIERS
from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.retention import CheckpointsConfig, Lineage
from trainer_plugin.policy.state import PolicyState
from trainer_plugin.scenes import scene

_STATE_SCHEMA = 1
# More is no manifest and no state of a run.
_MAX_BYTES = 1 << 26
_NAME = re.compile(r"step-(\d{9,18})-(\d{3,9})")
_NOWHERE = "whole in no tier"


class _State(msgspec.Struct, kw_only=True):
    """What state.json tells about checkpoints; all else of it is passed over."""

    proven_step: int = -1
    policy: PolicyState = msgspec.field(default_factory=PolicyState)
    lineage: Lineage = msgspec.field(default_factory=Lineage)
    schema: int = _STATE_SCHEMA


class Listed(msgspec.Struct, kw_only=True):
    """One checkpoint or scene. `tiers` maps each tier to `whole`, `absent` or `damaged`; a scene lies in none.

    `obstacle` says why a rollback would not take it; it is empty for those that it could take, of which it takes the
    nearest.
    """

    step: int
    branch: int
    kind: str
    tiers: dict[str, str]
    finite: bool
    proven: bool
    bytes: int
    obstacle: str
    folder: str | None = None
    incident: int | None = None


class Inventory(msgspec.Struct, kw_only=True):
    """All of a run. `problems` are what is damaged or out of order, in lines; `notes` what else should be known."""

    run: str
    verified: bool
    tiers: dict[str, str]
    checkpoints: list[Listed] = []
    rollback_target: int | None = None
    problems: list[str] = []
    notes: list[str] = []


def take_inventory(
    run_folder: Path,
    run: str,
    config: CheckpointsConfig,
    *,
    verify: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> Inventory:
    """Look at every checkpoint and scene of a run; with `verify` every byte is held against its hash.

    `tell` hears what is being hashed. Whatever is damaged or hostile becomes a line, never an error.
    """
    folders = {tier: Path(getattr(config, tier)) / run for tier in TIERS}
    found = Inventory(run=run, verified=verify, tiers={tier: str(folder) for tier, folder in folders.items()})
    state = _read_state(run_folder / "state.json", found)
    user = run_folder.stat().st_uid
    looks = {tier: _Look(folder, run, user, verify=verify, tell=tell) for tier, folder in folders.items()}
    for tier, look in looks.items():
        look.read(found, f"tier {tier}")
    for name in {name for look in looks.values() for name in look.states}:
        known = next((look.manifests[name] for look in looks.values() if name in look.manifests), None)
        tiers = {tier: look.states.get(name, "absent") for tier, look in looks.items()}
        found.checkpoints.append(_unreadable(name, tiers) if known is None else _listed(known, tiers, state))
    found.checkpoints.sort(
        key=lambda one: (one.step, list(one.tiers.values()).count("whole"), one.branch), reverse=True
    )
    target = next((one for one in found.checkpoints if not one.obstacle), None)
    found.rollback_target = target.step if target is not None else None
    _add_scenes(_Look(run_folder / "scenes", run, user, verify=verify, tell=tell), found)
    return found


class _Look:
    """A folder with the checkpoints of a run, whose job is that user's: `states` by name, `whole` or `damaged`.

    `manifests` are those that can be read.
    """

    def __init__(self, folder: Path, run: str, user: int, *, verify: bool, tell: Callable[[str], None]) -> None:
        self.states: dict[str, str] = {}
        self.manifests: dict[str, Manifest] = {}
        self.folder = folder
        self._run = run
        self._user = user
        self._verify = verify
        self._tell = tell

    def read(self, found: Inventory, what: str) -> None:
        """Look at every checkpoint; what is wrong goes into the problems."""
        try:
            names = sorted(filter(_NAME.fullmatch, os.listdir(self.folder)))  # noqa: PTH208 - names
            mistrust = manifest.mistrust(self.folder, self._user)
        except OSError as error:
            found.problems.append(f"{what}: {self.folder}: {error.strerror or error}")
            return
        if mistrust:  # The job reads nothing of it either.
            found.problems.append(f"{what}: {mistrust}")
            return
        for name in names:
            self._look(self.folder / name, found)

    def _look(self, folder: Path, found: Inventory) -> None:
        path, seen = folder / manifest.NAME, True
        try:
            path.lstat()
        except FileNotFoundError:
            if folder.is_dir():  # Written last and removed first: nothing is wrong with a folder that has none yet.
                found.notes.append(f"{folder}: unfinished: being written or removed, or left by a job that was killed")
            return
        except OSError:
            seen = False  # Why, is told below.
        size, reason = _size(path)
        if size is not None and size > _MAX_BYTES:
            reason = f"{size} bytes are too many"
        known = manifest.read(folder) if reason is None else None
        if known is not None and known.run != self._run:
            known, reason = None, manifest.STRANGER
        if known is None:
            faults = [f"{path}: {reason or manifest.refusal(folder)}"]
        else:
            self._tell(str(folder))
            faults = self._faults(folder, known)
        if faults and seen and not os.path.lexists(path):
            return  # Removed meanwhile: a job is at work here.
        self.states[folder.name] = "damaged" if faults else "whole"
        if known is not None:
            self.manifests[folder.name] = known
        found.problems += faults

    def _faults(self, folder: Path, known: Manifest) -> list[str]:
        faults = [f"{folder}: no hash of {name}" for name in manifest.unhashed(known)]
        for name, file in known.files.items():
            size, reason = _size(folder / name)
            if size not in (None, file.bytes):
                reason = f"{size} bytes, {file.bytes} were written"
            if reason is not None:
                faults.append(f"{folder / name}: {reason}")
        return faults or (manifest.faults(folder, known) if self._verify else [])


def _listed(known: Manifest, tiers: dict[str, str], state: _State | None) -> Listed:
    proven = state is not None and _is_proven(known, state)
    obstacle = ""
    if "whole" not in tiers.values():
        obstacle = _NOWHERE
    elif not known.finite:
        obstacle = "holds values that are not finite"
    elif state is not None and not state.lineage.live(known):
        obstacle = "of a branch that was abandoned"
    elif state is None or not proven:
        obstacle = "not proven"
        if state is not None and known.step <= state.proven_step:
            obstacle = "saved in an incident"
    else:
        incident = state.policy.open_incident
        if incident is not None and known.step >= incident.before_step:
            obstacle = f"not before incident {incident.id}, which is open"
    return Listed(
        step=known.step, branch=known.branch, kind=known.kind, tiers=tiers, finite=known.finite, proven=proven,
        bytes=known.total_bytes, obstacle=obstacle,
    )  # fmt: skip


def _unreadable(name: str, tiers: dict[str, str]) -> Listed:
    """A checkpoint of which only the name is left."""
    step, branch = name.removeprefix("step-").split("-")
    return Listed(
        step=int(step), branch=int(branch), kind="periodic", tiers=tiers, finite=False, proven=False, bytes=0,
        obstacle=_NOWHERE,
    )  # fmt: skip


def _is_proven(known: Manifest, state: _State) -> bool:
    healed = [incident for incident in state.policy.incidents if incident.healed_step is not None]
    suspect = any(incident.before_step <= known.step <= (incident.healed_step or 0) for incident in healed)
    return known.step <= state.proven_step and not suspect


def _add_scenes(look: _Look, found: Inventory) -> None:
    folder = look.folder
    if not folder.exists():
        return
    look.read(found, "scenes")
    for name, state in look.states.items():
        known, told = look.manifests.get(name), scene.read(folder / name)
        if told is None and state == "whole":
            found.notes.append(f"{folder / name}: no {scene.NAME} that can be read: unfinished, or of another version")
        if known is not None and told is not None:
            listed = Listed(
                step=told.step, branch=told.branch, kind="scene", tiers=dict.fromkeys(TIERS, "absent"),
                finite=known.finite, proven=False, bytes=known.total_bytes, obstacle="a scene", incident=told.incident,
                folder=str(folder / name),
            )  # fmt: skip
            found.checkpoints.append(listed)


def _read_state(path: Path, found: Inventory) -> _State | None:
    """The run's state; None, and a line, where it is not known."""
    try:
        return _state_in(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        found.problems.append(f"{path}: {reason}: which checkpoints are proven is not known")
        return None


def _state_in(path: Path) -> _State:
    size, reason = _size(path)
    if size is None or size > _MAX_BYTES:
        raise ValueError(reason or f"{size} bytes are too many")
    try:
        state = msgspec.json.decode(path.read_bytes(), type=_State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not the state of a run: {error}") from error
    if state.schema != _STATE_SCHEMA:
        raise ValueError(f"schema {state.schema}, written by another version; this reads {_STATE_SCHEMA}")
    return state


def _size(path: Path) -> tuple[int | None, str | None]:
    """The size of a file in bytes, or why it is not to be opened: a pipe would be waited at for ever."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        return None, getattr(error, "strerror", None) or str(error)
    return (status.st_size, None) if stat.S_ISREG(status.st_mode) else (None, "no regular file")

"""What makes a checkpoint real: a manifest, written last and removed first, with a hash of every file.

A folder without a readable manifest is no checkpoint. Nothing in one is opened before its hash was checked.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from exporter.runs import write_atomically

SCHEMA = 1
NAME = "manifest.json"
_BLOCK_BYTES = 1 << 20


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's own description. `branch` counts the rollbacks before it: steps come again, branches do not."""

    run: str
    step: int
    branch: int
    kind: str
    finite: bool
    created: float
    files: dict[str, File]
    torch: str
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """The checkpoint's folder name, in every tier."""
        return f"step-{self.step:09d}-{self.branch:03d}"


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none, or none that can be understood."""
    try:
        manifest = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    plain_names = all(Path(name).name == name for name in manifest.files)
    return manifest if manifest.schema == SCHEMA and manifest.name == folder.name and plain_names else None


def seal(folder: Path, describe: Callable[[dict[str, File]], Manifest]) -> Manifest:
    """Hash the files of a finished folder and make it a checkpoint.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
    """
    files = {path.name: _hash(path) for path in sorted(folder.iterdir())}
    manifest = describe(files)
    write_atomically(folder / NAME, msgspec.json.encode(manifest))
    _sync_folder(folder)
    return manifest


def faults(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint's files: missing, of another size, of another content. Reads every byte."""
    problems = []
    for name, wanted in manifest.files.items():
        path = folder / name
        try:
            found = _hash(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
            continue
        if found != wanted:
            problems.append(f"{path}: content is not what was written")
    return problems


def copy(source: Path, target: Path) -> Manifest:
    """Copy a checkpoint into another tier, whole or not at all, verified against its manifest on arrival.

    Raises:
        OSError: it cannot be read or written, or arrives otherwise than it left.
    """
    manifest = read(source)
    if manifest is None:
        raise OSError(f"{source}: no checkpoint")
    remove(target)
    target.mkdir(parents=True, mode=0o700)
    for name in manifest.files:
        with (source / name).open("rb") as reader, (target / name).open("wb") as writer:
            shutil.copyfileobj(reader, writer, _BLOCK_BYTES)
            writer.flush()
            os.fsync(writer.fileno())
    problems = faults(target, manifest)
    if problems:
        remove(target)
        raise OSError("; ".join(problems))
    write_atomically(target / NAME, msgspec.json.encode(manifest))
    _sync_folder(target)
    return manifest


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a half-removed one is none."""
    (folder / NAME).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _hash(path: Path) -> File:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return File(bytes=size, sha256=digest.hexdigest())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What makes a checkpoint real: a manifest, written last and removed first, with a hash of every file.

A folder without a readable manifest is no checkpoint. Nothing in one is opened before its hash was checked.
"""

import hashlib
import io
import os
import shutil
import stat
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from exporter.runs import write_atomically

SCHEMA = 1
NAME = "manifest.json"
PLAIN = "plain.pt"
METADATA = ".metadata"
try:
    WRITER = f"pretraining-guard {version('pretraining-guard')}"
except PackageNotFoundError:
    WRITER = "pretraining-guard from a checkout"
_BLOCK_BYTES = 1 << 20
_LONGEST_WRITER = 100
STRANGER = "another run's checkpoint"


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class HashedFile(io.BufferedWriter):
    """A new file, hashed while it is written from front to back, on disk when it is closed.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, content: Any) -> int:  # noqa: ANN401 - bytes, or whatever can be seen as them
        """Add to the end."""
        self._digest.update(content)
        self._bytes += memoryview(content).nbytes
        return super().write(content)

    def close(self) -> None:
        """Let the disk have it."""
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def entry(self) -> File:
        """Size and hash of all that was written."""
        return File(bytes=self._bytes, sha256=self._digest.hexdigest())


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's own description. `branch` counts the rollbacks before it: steps come again, branches do not.

    `proven` is so as of writing: most become so later. `probe_loss` is that of the run's probe batch, where it has one.
    `ranks` have written it together, each file for its `holders`; a folder that has one host's only is `partial`.
    """

    run: str
    step: int
    branch: int
    kind: str
    finite: bool
    created: float
    files: dict[str, File]
    torch: str
    tier: str = ""
    proven: bool = False
    probe_loss: float | None = None
    writer: str = ""
    ranks: int = 1
    holders: dict[str, tuple[int, ...]] = {}
    partial: bool = False
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """The checkpoint's folder name, in every tier."""
        return f"step-{self.step:09d}-{self.branch:03d}"

    @property
    def total_bytes(self) -> int:
        """Size of all its files."""
        return sum(file.bytes for file in self.files.values())


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none, or none that can be understood."""
    try:
        manifest = msgspec.json.decode(_content(folder / NAME), type=Manifest)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    plain_names = all(Path(name).name == name for name in manifest.files)
    return manifest if manifest.schema == SCHEMA and manifest.name == folder.name and plain_names else None


def refusal(folder: Path) -> str:
    """Why the manifest that lies in a folder is not read: in one line, with what wrote it where that is told."""
    try:
        told = msgspec.json.decode(_content(folder / NAME))
        schema, writer = told["schema"], str(told.get("writer") or "")
    except (OSError, msgspec.MsgspecError, RecursionError, TypeError, KeyError, AttributeError):
        return "its manifest is damaged"
    if isinstance(schema, int) and schema != SCHEMA:
        # Whatever lies there is shown to people: one line of it, and no more.
        named = writer if writer.isprintable() and 0 < len(writer) <= _LONGEST_WRITER else "an unnamed version"
        return f"schema {schema}, written by {named}; this reads {SCHEMA}"
    return "its manifest is damaged, or another checkpoint's"


def mistrust(folder: Path, user: int) -> str:
    """Why what lies in a folder is not to be opened by a user (by number): others may put it there. Empty if not.

    Raises:
        OSError: it cannot be looked at.
    """
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH:
        return f"anybody may write in {folder}: take that right away (chmod o-w)"
    # What root squashing makes of root's folders belongs to somebody else, too.
    if user != 0 and status.st_uid not in (user, 0):
        return f"{folder} belongs to user {status.st_uid}, not to the one who trains"
    return ""


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Make a finished folder a checkpoint.

    Raises:
        OSError: the manifest cannot be written.
    """
    write_atomically(folder / NAME, msgspec.json.encode(manifest))
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return manifest


def faults(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint's files: missing, of another size, of another content. Reads every byte."""
    return _faults(folder, manifest.files)


def _faults(folder: Path, files: dict[str, File]) -> list[str]:
    problems = []
    for name, wanted in files.items():
        path = folder / name
        try:
            found = _hash(path)
        except (OSError, ValueError) as error:  # A name may be none that a file can have.
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
            continue
        if found != wanted:
            problems.append(f"{path}: content is not what was written")
    return problems


def plain_name(rank: int) -> str:
    """The file with what a rank holds beside its tensors."""
    return f"plain-{rank}.pt" if rank else PLAIN


def unhashed(manifest: Manifest) -> list[str]:
    """The files that a restore would open although the manifest has no hash of them."""
    return sorted(({METADATA} if manifest.partial else {PLAIN, METADATA}) - manifest.files.keys())


def copy(source: Path, target: Path, *, tier: str) -> Manifest:
    """Copy a checkpoint into a tier, whole or not at all, verified against its manifest on arrival.

    Raises:
        OSError: it cannot be read or written, or arrives otherwise than it left.
    """
    manifest = read(source)
    if manifest is None:
        raise OSError(f"{source}: no checkpoint")
    remove(target)
    target.mkdir(mode=0o700)
    try:
        copy_files(source, target, manifest.files)
        return seal(target, msgspec.structs.replace(manifest, tier=tier))
    except BaseException:
        discard(target)
        raise


def copy_files(source: Path, target: Path, files: dict[str, File]) -> None:
    """Copy files into a folder that is there, verified on arrival.

    Raises:
        OSError: one cannot be read or written, or arrives otherwise than it was written.
    """
    for name in files:
        with (source / name).open("rb") as reader, (target / name).open("wb") as writer:
            shutil.copyfileobj(reader, writer, _BLOCK_BYTES)
            writer.flush()
            os.fsync(writer.fileno())
    if problems := _faults(target, files):
        raise OSError("; ".join(problems))


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a half-removed one is none; of a link the link alone."""
    if folder.is_symlink():
        folder.unlink()
    (folder / NAME).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def discard(folder: Path) -> None:
    """Remove what has failed, as far as that goes: a full disk would stay full."""
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _hash(path: Path) -> File:
    _check_regular(path)
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return File(bytes=size, sha256=digest.hexdigest())


def _content(path: Path) -> bytes:
    _check_regular(path)
    return path.read_bytes()


def _check_regular(path: Path) -> None:
    """A pipe would be waited at for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("no regular file")

"""One tier of checkpoints: a folder in which each is there whole, checked on the way out, or not at all."""

import errno
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.manifest import PLAIN, HashedFile, Manifest
from trainer_plugin.checkpoints.plain import decode_plain, encode_plain
from trainer_plugin.checkpoints.retention import SaveEvery
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tensor_files import read_tensors, write_tensors

_log = logging.getLogger(__name__)
_FOLDERS = "step-*"
# What a rank writes apart until all have written theirs begins so.
PART = "part-"
# Writer and rollback may meet in a tier. One that is held for longer than this hangs.
_LOCK_SECONDS = 10.0


class Tier:
    """A run's folder of checkpoints. Every method that touches files may raise OSError, TimeoutError where it hangs.

    `whole` is what is known to be here without looking; `seconds` is how long the last one took to be whole.
    `left_alone` are the folders that were found at the start and are not read, each in a line that says why. `run` is
    whose checkpoints these are; by default the folder's name tells. What is done here may take `slowness` times as long
    as the bytes would have it.
    """

    slowness = 1.0
    one_folder = True

    def __init__(self, name: str, folder: Path, retention: SaveEvery, *, run: str | None = None) -> None:
        self.name = name
        self.folder = folder
        self.retention = retention
        self.whole: dict[str, Manifest] = {}
        self.left_alone: list[str] = []
        self._run = folder.name if run is None else run
        self.seconds: float | None = None
        self._made = False
        self._readable = True
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the folder, remove what a killed job left half-done, and find the checkpoints that are whole.

        Raises:
            OSError: it cannot be made or written; what can be read has been found all the same.
            PermissionError: others may write in it, who could have a restore run code of theirs; nothing is read.
        """
        with self._lock:  # One that hangs here for a while must not clear away what is being written when it goes on.
            try:
                self._open_folder()
            finally:
                if self._readable:
                    self._find()

    def _open_folder(self) -> None:
        self._readable = True
        try:
            self._make()
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable")  # As the mkdir would say it.
        except _OthersWriteError as error:
            self._readable = False
            raise PermissionError(f"checkpoints.{self.name}: {error}") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise type(error)(f"checkpoints.{self.name}: folder {self.folder} cannot be written: {reason}") from error

    def write(self, snapshot: Snapshot, draft: Manifest) -> Manifest:
        """Write a snapshot; nothing of it stays if that fails. `draft` lacks only the files and the tier."""
        folder = self.folder / draft.name
        with self._held():
            self._clear(folder)
            folder.mkdir(mode=0o700)
            try:
                with HashedFile(folder / PLAIN) as file:
                    file.write(encode_plain(snapshot.plain))
                files = {PLAIN: file.entry, **write_tensors(folder, snapshot.tensors)}
                self.whole[draft.name] = manifest.seal(folder, replace(draft, files=files, tier=self.name))
            except BaseException:
                manifest.discard(folder)
                raise
            return self.whole[draft.name]

    def take(self, source: "Tier", name: str, *, attempt: str = "") -> Manifest:
        """Copy a checkpoint from another tier, verified on arrival. `attempt` is for several ranks."""
        del attempt
        with self._held():
            self._clear(self.folder / name)
            self.whole[name] = manifest.copy(source.folder / name, self.folder / name, tier=self.name)
            return self.whole[name]

    def refuse(self, draft: Manifest, why: str) -> None:
        """A checkpoint is left out; of several ranks the others have to know."""

    def faults(self, name: str) -> list[str]:
        """What is wrong with a checkpoint here; empty if every byte is as it was written."""
        with self._held():
            folder = self.folder / name
            found = self._read(folder)
            if found is None:
                return [f"{folder}: no checkpoint there"]
            unhashed = [f"{folder}: no hash of {name}" for name in manifest.unhashed(found)]
            if found.partial:
                unhashed.append(f"{folder}: has the part of one host only")
            return unhashed or manifest.faults(folder, found)

    def read(self, name: str) -> Snapshot:
        """A checkpoint that has just been found without faults."""
        with self._held():
            folder = self.folder / name
            with as_no_state(folder):
                return Snapshot(tensors=read_tensors(folder), plain=decode_plain((folder / PLAIN).read_bytes()))

    def plain(self, name: str) -> dict[str, Any]:
        """The plain values of a checkpoint, of several ranks the first one's, checked on the way.

        Raises:
            OSError: they are not there as they were written.
        """
        with self._held():
            folder = self.folder / name
            found = self._read(folder)
            if found is None or PLAIN not in found.files:
                raise OSError(f"{folder}: no checkpoint there")
            if faults := manifest.faults(folder, replace(found, files={PLAIN: found.files[PLAIN]})):
                raise OSError("; ".join(faults))
            with as_no_state(folder):
                return decode_plain((folder / PLAIN).read_bytes())

    def rotate(self, kept: set[str]) -> None:
        """Remove every checkpoint but these, and forget those that somebody else has removed."""
        with self._held():
            for name in list(self.whole):
                if name not in kept:
                    self.whole.pop(name)
                    manifest.remove(self.folder / name)
                elif self._read(self.folder / name) is None:
                    self.whole.pop(name)

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        reason = manifest.mistrust(self.folder, os.geteuid())
        if reason:
            raise _OthersWriteError(reason)
        tier = self.folder.parent.stat()
        if tier.st_mode & stat.S_IWOTH and not tier.st_mode & stat.S_ISVTX:
            _log.warning("anybody may replace the folders in %s: take that right away (chmod o-w)", self.folder.parent)
        self._made = True

    def _clear(self, folder: Path) -> None:
        """Make room for a checkpoint."""
        self.whole.pop(folder.name, None)
        manifest.remove(folder)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The folder for oneself, made and trusted; one that was there once is not made anew: it has gone away."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise TimeoutError(f"checkpoint folder {self.folder} does not answer")
        try:
            if not self._made:
                self._make()
            yield
        finally:
            self._lock.release()

    def _read(self, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint of this run."""
        found = manifest.read(folder)
        return found if found is not None and found.run == self._run else None

    def _find(self) -> None:
        for path in self.folder.glob(f"{PART}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(_FOLDERS):
            found = self._read(path)
            if found is not None:
                self.whole[path.name] = found
            elif (path / manifest.NAME).exists():
                reason = manifest.refusal(path) if manifest.read(path) is None else manifest.STRANGER
                self.left_alone.append(f"{path}: left alone: {reason}")
                _log.warning("%s", self.left_alone[-1])
            else:
                shutil.rmtree(path, ignore_errors=True)


class _OthersWriteError(OSError):
    """A folder in which others can put what they like."""


@contextmanager
def as_no_state(folder: Path) -> Iterator[None]:
    """What goes wrong in here as an OSError: every byte is as its manifest says, and it is no state."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise OSError(f"{folder}: not a state that can be read: {reason}") from error

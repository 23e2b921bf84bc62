"""One tier of checkpoints: a folder in which each is there whole, checked on the way out, or not at all."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_plugin import manifest
from trainer_plugin.manifest import File, Manifest
from trainer_plugin.state import Snapshot, decode_plain, encode_plain
from trainer_plugin.tensor_files import read_tensors, write_tensors

_log = logging.getLogger(__name__)
_PLAIN = "plain.pt"
_FOLDERS = "step-*"
# Writer and rollback may meet in a tier. One that is held for longer than this hangs.
_LOCK_SECONDS = 10.0


class Tier:
    """A folder of checkpoints. Every method that touches files may raise OSError, TimeoutError where the tier hangs.

    `whole` is what is known to be here without looking; `seconds` is how long the last one took to be whole.
    """

    def __init__(self, name: str, folder: Path, *, keep: int) -> None:
        self.name = name
        self.folder = folder
        self.keep = keep
        self.whole: dict[str, Manifest] = {}
        self.seconds: float | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the folder, remove what a killed job left half-done, and find the checkpoints that are whole.

        Raises:
            OSError: it cannot be made or written; what can be read has been found all the same.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable")  # As the mkdir would say it.
        except OSError as error:
            reason = error.strerror or str(error)
            raise type(error)(f"checkpoints.{self.name}: folder {self.folder} cannot be written: {reason}") from error
        finally:
            self._find()

    def write(self, snapshot: Snapshot, name: str, describe: Callable[[dict[str, File]], Manifest]) -> Manifest:
        """Write a snapshot; nothing of it stays if that fails."""
        folder = self.folder / name
        with self._held():
            manifest.remove(folder)
            folder.mkdir(parents=True, mode=0o700)
            try:
                with (folder / _PLAIN).open("wb") as file:
                    file.write(encode_plain(snapshot.plain))
                    file.flush()
                    os.fsync(file.fileno())
                write_tensors(folder, snapshot.tensors)
                self.whole[name] = manifest.seal(folder, describe)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)  # A full disk would stay full.
                raise
            return self.whole[name]

    def take(self, source: "Tier", name: str) -> Manifest:
        """Copy a checkpoint from another tier, verified on arrival."""
        with self._held():
            try:
                self.whole[name] = manifest.copy(source.folder / name, self.folder / name)
            except BaseException:
                self.whole.pop(name, None)
                raise
            return self.whole[name]

    def faults(self, name: str) -> list[str]:
        """What is wrong with a checkpoint here; empty if every byte is as it was written."""
        with self._held():
            found = manifest.read(self.folder / name)
            if found is None:
                return [f"{self.folder / name}: no checkpoint there"]
            return manifest.faults(self.folder / name, found)

    def read(self, name: str) -> Snapshot:
        """A checkpoint that has just been found without faults."""
        with self._held():
            folder = self.folder / name
            return Snapshot(tensors=read_tensors(folder), plain=decode_plain((folder / _PLAIN).read_bytes()))

    def rotate(self, kept: set[str]) -> None:
        """Remove every checkpoint but these, and forget those that somebody else has removed."""
        with self._held():
            for name in list(self.whole):
                if name not in kept:
                    self.whole.pop(name)
                    manifest.remove(self.folder / name)
                elif manifest.read(self.folder / name) is None:
                    self.whole.pop(name)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise TimeoutError(f"checkpoint folder {self.folder} does not answer")
        try:
            yield
        finally:
            self._lock.release()

    def _find(self) -> None:
        for path in self.folder.glob(_FOLDERS):
            found = manifest.read(path)
            if found is not None:
                self.whole[path.name] = found
            elif (path / manifest.NAME).exists():
                _log.warning("%s: left alone, its manifest is damaged or another version's", path)
            else:
                shutil.rmtree(path, ignore_errors=True)

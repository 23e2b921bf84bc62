"""Tensors by name on disk, in the format of torch.distributed.checkpoint, written and read by one process.

`dcp.save` does the same with a warning per call where no process group exists; its planner and storage are used
directly here, which also keeps the writer thread free of collectives.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer_plugin.checkpoints.manifest import METADATA, File, HashedFile


class HashedFiles(FileSystem):
    """The file system of a writer; `files` is what it has written."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[HashedFile]:
        """A writer only writes."""
        del mode
        with HashedFile(Path(path)) as stream:
            yield stream
        self.files[Path(path).name] = stream.entry

    def held(self, write: Callable[..., Future[list[WriteResult]]], *arguments: object) -> list[WriteResult]:
        """What torch's writer has written.

        Raises:
            OSError: the folder cannot be written; torch's own archive writer speaks of positions where a disk is full.
        """
        try:
            return write(*arguments).wait()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The metadata are drafted first."""
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> dict[str, File]:
    """Write CPU tensors into `folder`, which exists: the files by name, on disk when this returns.

    Raises:
        OSError: the folder cannot be written.
    """
    # Neither syncs nor copies ahead of its own: the files are synced here, and the tensors are on the host.
    writer, planner = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0), DefaultSavePlanner()
    writer.fs = files = HashedFiles()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [files.held(writer.write_data, plan, planner)])
    return files.files


class PlainReader(FileSystemReader):
    """Reads metadata without running any code that is put there, from the folder alone."""

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """What lies where.

        Raises:
            OSError: the file cannot be read.
            ValueError: there is anything in it but metadata, or it leads out of the folder.
        """
        with (Path(self.path) / METADATA).open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except OSError:
                raise
            except Exception as error:
                raise ValueError(f"{METADATA}: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError(f"{METADATA}: what lies where wanted, found {type(metadata).__name__}")  # noqa: TRY004
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{METADATA}: a file in this folder wanted, found {info.relative_path!r}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows what torch writes as metadata, and nothing else: records and enumerations of two modules, sizes, dtypes."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _KNOWN: ClassVar[dict[str, Any]] = {
        "torch.Size": torch.Size,
        # Where it was written; that says nothing here.
        "pathlib.PosixPath": PurePosixPath,
        "pathlib._local.PosixPath": PurePosixPath,
    }

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in the base class
        """As in the base class."""
        path = f"{module}.{name}"
        if path in self._KNOWN:
            return self._KNOWN[path]
        if path == "builtins.getattr":
            return _member
        found = super().find_class(module, name) if module in self._MODULES and "." not in name else None
        if isinstance(found, type) and found.__module__ == module and (is_dataclass(found) or issubclass(found, Enum)):
            return found
        if path == "torch.serialization._get_layout":
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{path} is no part of metadata")


def _member(kind: type[Enum], name: str) -> Enum:
    """A member of an enumeration: some versions of Python pickle one as an attribute of its class."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"an attribute of {kind!r} is no part of metadata")
    return kind[name]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: its metadata are none.
    """
    reader, planner = PlainReader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    tensors: dict[str, Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
    reader.read_data(plan, planner).wait()
    return tensors

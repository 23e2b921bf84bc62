"""Tensors by name on disk, in the format of torch.distributed.checkpoint, written and read by one process.

`dcp.save` does the same with a warning per call where no process group exists; its planner and storage are used
directly here, which also keeps the writer thread free of collectives.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer_plugin.checkpoints.manifest import File, HashedFile


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


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder whose files have been checked: its metadata is unpickled here.

    Raises:
        OSError: a file cannot be read.
    """
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
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

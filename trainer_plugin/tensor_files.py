"""Tensors by name on disk, in the format of torch.distributed.checkpoint, written and read by one process.

`dcp.save` does the same with a warning per call where no process group exists; its planner and storage are used
directly here, which also keeps the writer thread free of collectives.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write CPU tensors into `folder`, which exists; on disk when this returns.

    Raises:
        OSError: the folder cannot be written.
    """
    writer, planner = FileSystemWriter(folder, sync_files=True), DefaultSavePlanner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


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

"""The parts of tensors that one rank has, in the format of torch.distributed.checkpoint, and read back by any ranks.

`dcp.save` would need collectives in the writer's thread; here each rank writes its own files, and what it knows of
them is put together as text messages allow. No collective is used.
"""

import base64
import io
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainer_plugin.checkpoints.manifest import METADATA, File, HashedFile
from trainer_plugin.checkpoints.places import Piece, Place
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tensor_files import HashedFiles, PlainReader

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult

# Of the stored tensors, by their shapes, which are wanted here, and which part of each: None for all of it.
Wanted = Callable[[dict[str, tuple[int, ...]]], dict[str, Place | None]]


class _Parts(DefaultSavePlanner):
    """Finds the tensors by name, wherever they lie in the whole."""

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - as in the base class
        """As in the base class."""
        return self.state_dict[index.fqn]


class _WantedParts(DefaultLoadPlanner):
    """As above, for reading."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """As in the base class."""
        tensor: Tensor = self.state_dict[index.fqn]
        return tensor


def write_pieces(folder: Path, snapshot: Snapshot, pieces: Iterable[Piece]) -> tuple[dict[str, File], str]:
    """Write some of a snapshot's pieces: the files by name, on disk when this returns, and what is known of them.

    Raises:
        OSError: the folder cannot be written.
    """
    writer, planner = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0), _Parts()
    writer.fs = files = HashedFiles()
    planner.set_up_planner(snapshot.tensors, None, is_coordinator=False)
    writer.set_up_storage_writer(is_coordinator=False)
    known: list[tuple[list[WriteItem], list[WriteResult]]] = []
    for piece in pieces:
        items = [_item(name, snapshot.tensors[name], snapshot.places.get(name)) for name in piece.names]
        plan = SavePlan(items, storage_data=_StoragePrefix(piece.prefix))
        known.append((items, files.held(writer.write_data, plan, planner)))
    return files.files, base64.b64encode(pickle.dumps(known)).decode()


def metadata_of(known: Iterable[str]) -> bytes:
    """The content of `.metadata`, from what all ranks know of their files."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for items, results in (entry for one in known for entry in pickle.loads(base64.b64decode(one))):  # noqa: S301 - of our own ranks
        storage.update({result.index: result.storage_data for result in results})
        for item in items:
            entry = tensors.setdefault(
                item.index.fqn, TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, [])
            )
            if item.tensor_data.chunk not in entry.chunks:
                entry.chunks.append(item.tensor_data.chunk)
    metadata = Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=storage)
    buffer = io.BytesIO()
    pickle.dump(metadata, buffer)
    return buffer.getvalue()


def write_metadata(folder: Path, content: bytes) -> dict[str, File]:
    """The file in which the tensors are found.

    Raises:
        OSError: it cannot be written.
    """
    with HashedFile(folder / METADATA) as file:
        file.write(content)
    return {METADATA: file.entry}


class Reading:
    """What is read of a folder whose metadata have been checked. `files` are the others."""

    def __init__(self, folder: Path, wanted: Wanted) -> None:
        self._reader, self._planner = PlainReader(folder), _WantedParts()
        self._metadata = metadata = self._reader.read_metadata()
        entries = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.places = wanted({name: tuple(entry.size) for name, entry in entries.items()})
        self.unknown = frozenset(name for name in entries if name.startswith("model/") and name not in self.places)
        self._dtypes = {name: entries[name].properties.dtype for name in self.places}
        self._sizes = {name: place.sizes if place else entries[name].size for name, place in self.places.items()}
        items = []
        for name, place in self.places.items():
            size = torch.Size(self._sizes[name])
            offsets = torch.Size(place.offsets if place else [0] * len(size))
            if size.numel():
                items += create_read_items_for_chunk_list(name, entries[name], [ChunkStorageMetadata(offsets, size)])
        self._plan = LoadPlan(items)
        self.files = {metadata.storage_data[item.storage_index].relative_path for item in items}

    def read(self) -> dict[str, Tensor]:
        """The tensors, or this rank's parts of them.

        Raises:
            OSError: a file cannot be read.
        """
        tensors = {name: torch.empty(size, dtype=self._dtypes[name]) for name, size in self._sizes.items()}
        self._planner.set_up_planner(tensors, self._metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._reader.read_data(self._reader.prepare_local_plan(self._plan), self._planner).wait()
        return tensors


def _item(name: str, part: Tensor, place: Place | None) -> WriteItem:
    offsets = torch.Size(place.offsets if place is not None else [0] * part.dim())
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD if place is not None else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=part.size()),
            properties=TensorProperties.create_from_tensor(part),
            size=torch.Size(place.shape) if place is not None else part.size(),
        ),
    )

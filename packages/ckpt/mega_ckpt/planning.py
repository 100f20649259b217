"""torch.distributed.checkpoint plans, our storage layer writes and reads.

DCP's planners find out which rank writes which box (a box that several ranks hold is written once) and which parts of
which saved chunks a rank's boxes need. They see a rank's boxes through DCP's checkpointable protocol. Its collectives
carry an error of one rank to all. The files are ours: shards and a manifest, nothing pickled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from mega_ckpt.checkpoint import Checkpoint
from mega_ckpt.manifest import DTYPE_NAMES, DTYPES, Chunk, FileEntry, tiles
from mega_ckpt.pieces import MAX_SLAB_BYTES, Box, Shape, Sharded, slabs
from mega_ckpt.shards import Slab, write_shards
from mega_common.errors import CheckpointError, MegaError
from mega_common.remote import Place

T = TypeVar("T")

MAX_FILE_BYTES = 4 << 30


class Held:
    """What this rank holds of one tensor, as DCP wants to see it."""

    def __init__(self, key: str, sharded: Sharded, slab_bytes: int | None = None) -> None:
        boxes = [Box(box.offset, box.tensor.detach()) for box in sharded.boxes if box.tensor.numel()]
        if slab_bytes is not None:
            boxes = [slab for box in boxes for slab in slabs(box, slab_bytes)]
            # An empty tensor has no box with elements, but has a place in the checkpoint.
            boxes = boxes or sharded.boxes[:1]
        self.key, self.shape, self.boxes = key, torch.Size(sharded.shape), boxes
        self._at = {torch.Size(box.offset): box.tensor for box in boxes}

    def size(self) -> torch.Size:
        """Global shape."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk_of(box), properties=TensorProperties(dtype=box.tensor.dtype), size=self.shape
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk_of(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._at[index.offset]


def _chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=box.tensor.shape)


class Saving(DefaultSavePlanner):
    """DCP's plan of a save, refused when the ranks' boxes do not make up the tensors.

    `tensors` is called where an error reaches every rank.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Sharded]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take this rank's boxes."""
        self.state_dict = held_of(self.tensors(), MAX_SLAB_BYTES)
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that the boxes tile each tensor, then let DCP decide who writes what."""
        boxes: dict[str, dict[Shape, Shape]] = defaultdict(dict)
        seen: dict[str, tuple[torch.dtype, Shape]] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data, key = item.tensor_data, item.index.fqn
            assert data is not None
            kind = data.properties.dtype, tuple(data.size)
            if seen.setdefault(key, kind) != kind:
                raise CheckpointError(f"{key}: the ranks do not agree on what it is: {seen[key]} and {kind}")
            boxes[key][tuple(data.chunk.offsets)] = tuple(data.chunk.sizes)
        for key, (dtype, shape) in seen.items():
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{key}: a tensor of {dtype} cannot be saved")
            if not tiles(shape, boxes[key].items()):
                raise CheckpointError(f"{key}: the boxes of all ranks overlap in part, or do not cover {list(shape)}")
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The rank's box at an offset."""
        held: Held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


class Loading(DefaultLoadPlanner):
    """DCP's plan of a load, refused when the checkpoint's tensors are not what the boxes expect."""

    def __init__(self, source: Place, tensors: Mapping[str, Sharded]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.source, self.tensors = source, tensors

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take this rank's boxes."""
        self.state_dict, self.metadata, self.is_coordinator = held_of(self.tensors), metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Compare names, shapes and dtypes, then let DCP find the overlaps."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        missing = [key for key in self.state_dict if key not in saved]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CheckpointError(f"{self.source}: there is no tensor {missing[0]}{more} in it")
        for key, held in self.state_dict.items():
            entry = saved[key]
            assert isinstance(entry, TensorStorageMetadata)
            if entry.size != held.shape:
                raise CheckpointError(
                    f"{self.source}: {key} has shape {list(entry.size)}, but {list(held.shape)} is wanted"
                )
            for box in held.boxes:
                if box.tensor.dtype != entry.properties.dtype:
                    raise CheckpointError(
                        f"{self.source}: {key} is {entry.properties.dtype}, but {box.tensor.dtype} is wanted"
                    )
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The rank's box, by its place in the list: boxes to be filled may overlap."""
        held: Held = self.state_dict[index.fqn]
        assert index.index is not None
        return held.boxes[index.index].tensor


@dataclass(frozen=True)
class Written:
    """What a rank tells of one chunk that it wrote; `file` is told with each of its chunks."""

    chunk: Chunk
    slab: Slab
    file: FileEntry


class Target(Protocol):
    """The folder that a save fills, as the coordinator sees it."""

    def begin(self) -> Place:
        """Make the folder; returns it."""

    def finish(self, written: list[Written]) -> None:
        """Complete and commit it, after all ranks have written."""


class Writer(StorageWriter):
    """Writes a rank's part to shards. The coordinator also begins and finishes the target.

    `advance` is told the bytes of each slab.
    """

    def __init__(self, target: Target, advance: Callable[[int], None]) -> None:
        self.target, self.advance = target, advance
        self.folder: Place | None = None

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        if is_coordinator:
            self.folder = self.target.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank the folder and the name that its shards begin with."""
        return [replace(plan, storage_data=(self.folder, f"shard-{rank:05d}")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the rank's shards."""
        folder, prefix = plan.storage_data
        items = {_slab_of(item): item for item in plan.items}

        def resolve(slab: Slab) -> Tensor:
            tensor = planner.resolve_data(items[slab])
            assert isinstance(tensor, Tensor)
            self.advance(slab.nbytes)
            return tensor

        results = [
            WriteResult(items[slab].index, slab.nbytes, Written(chunk, slab, file))
            for held, file in write_shards(folder, prefix, list(items), resolve, MAX_FILE_BYTES)
            for slab, chunk in held
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint."""
        self.target.finish([result.storage_data for of_rank in results for result in of_rank])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Not asked: the folder is given to the constructor."""
        return True


class Reader(StorageReader):
    """Reads the parts that a rank's boxes need. `advance` is told the bytes of each."""

    def __init__(self, folder: Place, keys: Sequence[str], advance: Callable[[int], None], *, verify: bool) -> None:
        self.folder, self.keys, self.advance, self.verify = folder, keys, advance, verify
        self._opened: Checkpoint | MegaError

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing to forget: a reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint. An error waits for the next step, because DCP would log a trace of one that is raised here."""
        try:
            self._opened = Checkpoint.open(self.folder, verify=self.verify)
        except MegaError as error:
            self._opened = error
            return Metadata({})
        tensors = self._opened.manifest.tensors
        return Metadata(
            {
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[tensors[key].dtype]),
                    size=torch.Size(tensors[key].shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in tensors[key].chunks
                    ],
                )
                for key in self.keys
                if key in tensors
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what opening the checkpoint met."""
        if isinstance(self._opened, MegaError):
            raise self._opened

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes, in the order of the files."""
        checkpoint = self._opened
        assert isinstance(checkpoint, Checkpoint)
        located = []
        for item in plan.items:
            assert item.storage_index.index is not None
            chunk = checkpoint.entry(item.storage_index.fqn).chunks[item.storage_index.index]
            located.append((chunk.file, chunk.begin, chunk, item))
        last, read = None, torch.empty(0)
        for *_, chunk, item in sorted(located, key=lambda found: found[:2]):
            if chunk is not last:  # boxes of one chunk come one after the other
                last, read = chunk, checkpoint.chunk(item.storage_index.fqn, chunk)
            source = read
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, start, length)
            planner.resolve_tensor(item).copy_(source)
            self.advance(source.nbytes)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Not asked: the folder is given to the constructor."""
        return True


def _slab_of(item: WriteItem) -> Slab:
    data = item.tensor_data
    assert data is not None
    return Slab(
        item.index.fqn, data.properties.dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    )


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def held_of(tensors: Mapping[str, Sharded], slab_bytes: int | None = None) -> dict[str, Held]:
    """The same tensors as DCP wants to see them. With `slab_bytes`, boxes are cut into parts of that size at most."""
    return {key: Held(key, sharded, slab_bytes) for key, sharded in tensors.items()}

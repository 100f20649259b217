"""torch.distributed.checkpoint (DCP) planners with mega's own storage format.

DCP's planners assign each box to the rank that writes it (a box that several ranks have is written once), and determine
the parts of saved chunks that a rank's boxes need. They access a rank's boxes through DCP's checkpointable protocol, and
its collectives propagate an error of one rank to all. The file format is mega's: shards and a manifest, without pickles.
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
from mega_ckpt.manifest import DTYPE_NAMES, DTYPES, ManifestFileEntry, TensorChunk, is_exact_tiling
from mega_ckpt.shard_files import UnwrittenTensorChunk, write_shards
from mega_ckpt.tensor_pieces import MAX_SLAB_BYTES, ShardedTensor, TensorBox, TensorShape, split_slice_by_bytes
from mega_common.errors import CheckpointError, MegaError
from mega_common.object_store import Location

T = TypeVar("T")

MAX_FILE_BYTES = 4 << 30


class DcpTensor:
    """Rectangular slices of one global tensor on this rank, for torch.distributed.checkpoint (DCP).
    The class implements DCP's checkpointable protocol.
    """

    def __init__(self, key: str, sharded: ShardedTensor, slab_bytes: int | None = None) -> None:
        boxes = [TensorBox(box.offset, box.tensor.detach()) for box in sharded.boxes if box.tensor.numel()]
        if slab_bytes is not None:
            boxes = [slab for box in boxes for slab in split_slice_by_bytes(box, slab_bytes)]
            # An empty tensor has no box with elements, but must be in the checkpoint.
            boxes = boxes or sharded.boxes[:1]
        self.key, self.shape, self.boxes = key, torch.Size(sharded.shape), boxes
        self._at = {torch.Size(box.offset): box.tensor for box in boxes}

    def size(self) -> torch.Size:
        """Return the global shape of the tensor, for torch.distributed.checkpoint (DCP)."""
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


def _chunk_of(box: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=box.tensor.shape)


class TensorSliceSavePlanner(DefaultSavePlanner):
    """Save planner of torch.distributed.checkpoint (DCP) for tensors that are split into rectangular slices.
    It rejects a save unless the slices of all ranks tile each tensor exactly.

    `tensors` is called in the planner, where an error reaches every rank.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, ShardedTensor]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Collect this rank's tensor slices to save, by calling the constructor argument `tensors`.
        The argument `state_dict` is ignored.
        """
        self.state_dict = wrap_tensors_for_dcp(self.tensors(), MAX_SLAB_BYTES)
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let DCP assign the writes to ranks; CheckpointError unless the slices of all ranks tile each tensor exactly.
        Raises CheckpointError for dtypes or shapes that differ among ranks, too.
        """
        boxes: dict[str, dict[TensorShape, TensorShape]] = defaultdict(dict)
        kinds: dict[str, tuple[torch.dtype, TensorShape]] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data, key = item.tensor_data, item.index.fqn
            assert data is not None
            kind = data.properties.dtype, tuple(data.size)
            if kinds.setdefault(key, kind) != kind:
                raise CheckpointError(f"{key}: dtype and shape must be equal on all ranks, not {kinds[key]} and {kind}")
            boxes[key][tuple(data.chunk.offsets)] = tuple(data.chunk.sizes)
        for key, (dtype, shape) in kinds.items():
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{key}: dtype {dtype} is not supported in a checkpoint")
            if not is_exact_tiling(shape, boxes[key].items()):
                raise CheckpointError(f"{key}: the boxes of all ranks must tile {list(shape)} without overlap or gap")
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return this rank's slice of tensor `index.fqn` at the offset `index.offset`."""
        held: DcpTensor = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


class TensorSliceLoadPlanner(DefaultLoadPlanner):
    """Load planner of torch.distributed.checkpoint (DCP) for tensors that are split into rectangular slices.
    It rejects a checkpoint whose tensors differ in name, shape or dtype from the slices to fill.
    """

    def __init__(self, source: Location, tensors: Mapping[str, ShardedTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.source, self.tensors = source, tensors

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Collect this rank's tensor slices to fill; `state_dict` is ignored."""
        self.state_dict, self.metadata, self.is_coordinator = (
            wrap_tensors_for_dcp(self.tensors),
            metadata,
            is_coordinator,
        )

    def create_local_plan(self) -> LoadPlan:
        """Check the slices to fill against the checkpoint, then let DCP find the overlaps with saved chunks.
        Names, shapes and dtypes are checked. Raises CheckpointError if a tensor is missing or differs.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        missing = [key for key in self.state_dict if key not in saved]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            hint = None
            if missing[0].startswith("optimizer/"):
                hint = (
                    "the checkpoint was saved with another optimizer.name: resume with that one, or start from its weights"
                    f" in another output folder: --set init_from={self.source} --set output=FOLDER"
                )
            raise CheckpointError(f"{self.source}: the tensor {missing[0]}{more} is missing", hint=hint)
        for key, tensor in self.state_dict.items():
            entry = saved[key]
            assert isinstance(entry, TensorStorageMetadata)
            if entry.size != tensor.shape:
                raise CheckpointError(
                    f"{self.source}: {key} has shape {list(entry.size)}, but the run requires {list(tensor.shape)}"
                )
            for box in tensor.boxes:
                if box.tensor.dtype != entry.properties.dtype:
                    raise CheckpointError(
                        f"{self.source}: {key} has dtype {entry.properties.dtype}, but the run requires {box.tensor.dtype}"
                    )
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return this rank's slice number `index.index` of tensor `index.fqn`.
        Slices to fill may overlap, so their offsets are not unique.
        """
        held: DcpTensor = self.state_dict[index.fqn]
        assert index.index is not None
        return held.boxes[index.index].tensor


@dataclass(frozen=True)
class WrittenChunk:
    """Record of one tensor chunk that a rank wrote to a shard file, with the length and checksum of that file."""

    chunk: TensorChunk
    slab: UnwrittenTensorChunk
    file: ManifestFileEntry


class CheckpointSaveTarget(Protocol):
    """Interface of the checkpoint folder that a save fills; only the coordinator rank uses it."""

    def begin_save(self) -> Location:
        """Create the folder of the new checkpoint and return it, on the coordinator rank."""

    def finish_save(self, written: list[WrittenChunk]) -> None:
        """Write the manifest of the tensor chunks that all ranks wrote, and commit the checkpoint."""


class ShardStorageWriter(StorageWriter):
    """Storage writer of torch.distributed.checkpoint (DCP) that writes tensor slices to safetensors shards.
    Each rank writes its own slices. The coordinator also creates and commits the checkpoint folder `target`.

    `advance` is called with the bytes of each slab.
    """

    def __init__(self, target: CheckpointSaveTarget, advance: Callable[[int], None]) -> None:
        self.target, self.advance = target, advance
        self.folder: Location | None = None

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: a writer object serves one save only, so `checkpoint_id` has no effect."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the checkpoint folder, on the coordinator only."""
        if is_coordinator:
            self.folder = self.target.begin_save()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's save plan of torch.distributed.checkpoint (DCP) unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Attach the checkpoint folder and the rank's shard name prefix to each rank's plan."""
        return [replace(plan, storage_data=(self.folder, f"shard-{rank:05d}")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensor slices in this rank's plan to shard files."""
        folder, prefix = plan.storage_data
        items = {_slab_of(item): item for item in plan.items}

        def resolve_slab(slab: UnwrittenTensorChunk) -> Tensor:
            tensor = planner.resolve_data(items[slab])
            assert isinstance(tensor, Tensor)
            self.advance(slab.nbytes)
            return tensor

        results = [
            WriteResult(items[slab].index, slab.nbytes, WrittenChunk(chunk, slab, file))
            for held, file in write_shards(folder, prefix, list(items), resolve_slab, MAX_FILE_BYTES)
            for slab, chunk in held
        ]
        return _completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint from the chunk records of all ranks, on the coordinator."""
        self.target.finish_save([result.storage_data for of_rank in results for result in of_rank])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return True for any id, which is ignored: the target folder is a constructor argument."""
        return True


class ShardStorageReader(StorageReader):
    """Storage reader of torch.distributed.checkpoint (DCP) that fills a rank's tensor slices from safetensors shards.

    Only the bytes that the slices need are read, and with `verify` compared with their checksums. `advance` is called
    with the number of bytes of each read.
    """

    def __init__(self, folder: Location, keys: Sequence[str], advance: Callable[[int], None], *, verify: bool) -> None:
        self.folder, self.keys, self.advance, self.verify = folder, keys, advance, verify
        self._opened: Checkpoint | MegaError

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: a reader object serves one load only, so `checkpoint_id` has no effect."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return DCP metadata of the requested tensors.
        An error is raised only in `set_up_storage_reader`, because DCP logs a trace of one raised here.
        """
        try:
            self._opened = Checkpoint.open_folder(self.folder, verify=self.verify)
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
        """Raise the error with which `read_metadata` failed to open the checkpoint; without one do nothing."""
        if isinstance(self._opened, MegaError):
            raise self._opened

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's load plan of torch.distributed.checkpoint (DCP) unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the load plans of all ranks of torch.distributed.checkpoint (DCP) unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensor slices in place from the checkpoint, in file order."""
        checkpoint = self._opened
        assert isinstance(checkpoint, Checkpoint)
        located = []
        for item in plan.items:
            assert item.storage_index.index is not None
            chunk = checkpoint.tensor_entry(item.storage_index.fqn).chunks[item.storage_index.index]
            located.append((chunk.file, chunk.begin, chunk, item))
        last, read = None, torch.empty(0)
        for *_, chunk, item in sorted(located, key=lambda found: found[:2]):
            if chunk is not last:  # boxes of one chunk are consecutive
                last, read = chunk, checkpoint.mmap_tensor_chunk(item.storage_index.fqn, chunk)
            source = read
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, start, length)
            planner.resolve_tensor(item).copy_(source)
            self.advance(source.nbytes)
        return _completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return True for any id, which is ignored: the checkpoint folder is a constructor argument."""
        return True


def _slab_of(item: WriteItem) -> UnwrittenTensorChunk:
    data = item.tensor_data
    assert data is not None
    return UnwrittenTensorChunk(
        item.index.fqn, data.properties.dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    )


def _completed_future(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def wrap_tensors_for_dcp(tensors: Mapping[str, ShardedTensor], slab_bytes: int | None = None) -> dict[str, DcpTensor]:
    """Wrap sharded tensors in the protocol of torch.distributed.checkpoint (DCP).
    With `slab_bytes`, each rank's slices are split into parts of at most that size.
    """
    return {key: DcpTensor(key, sharded, slab_bytes) for key, sharded in tensors.items()}

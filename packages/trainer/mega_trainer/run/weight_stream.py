"""Weights of a running model under HuggingFace's names, gathered from any layout one bucket at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families import ModelFamily
from mega_ckpt.families.disk_layouts import TensorSlice
from mega_ckpt.formats.hf_write import iterate_tensor_fillers, plan_hf_folder
from mega_ckpt.tensor_pieces import TensorBox, TensorShape, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.distributed.comm import CommGroup, all_reduce
from mega_trainer.model.decoder import Decoder
from mega_trainer.run.train_state import collect_stage_weights

NamedTensors = list[tuple[str, Tensor]]
PlannedTensor = tuple[str, torch.dtype, TensorShape, Callable[[Tensor], None]]
ALIGNMENT = 16  # bytes, of the tensors in a bucket


class RankShareWeightSource:
    """Reader of this rank's share of a trained model's weights, with zeros in the elements of other ranks.
    Construction is a collective call.

    Each element belongs to one rank, so the bytewise maximum over all ranks' shares is the weights.

    Args:
        stages: this rank's parts of the model.
        world: all ranks.
        device: of the returned tensors.
        assets: files that travel with the weights, as in `WeightSource`.
    """

    def __init__(
        self,
        model: ModelConfig,
        stages: Mapping[int, Decoder],
        world: CommGroup,
        device: torch.device,
        assets: Mapping[str, Path | bytes],
    ) -> None:
        self.model, self.device, self.world, self._assets = model, device, world, assets
        self._shapes = canonical_tensors(model)
        self._shares = collect_stage_weights(stages, computed=True, to_save=True)  # each element on one rank
        own = {name: sharded.boxes[0].tensor.dtype for name, sharded in self._shares.items() if sharded.boxes}
        by_rank: list[dict[str, torch.dtype]] = [own] * world.size
        if world.size > 1:
            dist.all_gather_object(by_rank, own, group=world.process_group)
        self._dtypes = {name: dtype for dtypes in by_rank for name, dtype in dtypes.items()}

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names of all weights, in the order of the forward pass."""
        return list(self._shapes)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of the tensor `name`."""
        return self._shapes[name]

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the model computes with the tensor `name`."""
        return self._dtypes[name]

    def read_tensor(self, name: str) -> Tensor:
        """Return this rank's share of the tensor `name` in its global shape, zeros elsewhere."""
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Return this rank's share of `tensor[offset : offset + shape]`, zeros elsewhere, on the device."""
        out = torch.empty(shape, dtype=self.tensor_dtype(name), device=self.device)
        self.copy_tensor_slice_share(TensorSlice(name, offset, shape), out)
        return out

    def copy_tensor_slice_share(self, slab: TensorSlice, out: Tensor) -> None:
        """Copy this rank's share of a tensor slice into a tensor, with zeros for elements of other ranks.
        `slab` is the slice; `out` has its shape, and elements are cast to the dtype of `out`.
        """
        out.zero_()
        for box in self._shares[slab.name].boxes if slab.name in self._shares else ():
            copy_overlap(TensorBox(slab.offset, out), box)

    def buffer_names(self) -> Sequence[str]:
        """Return no names: buffers are not part of the weights."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """Raise `KeyError`: this source has no buffers."""
        raise KeyError(name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files that are exported with the weights, such as the tokenizer, by name: path or content."""
        return self._assets


def stream_weight_buckets(
    source: RankShareWeightSource, size: int, *, family: str | None = None, dtype: torch.dtype | None = None,
    families: Sequence[ModelFamily] = ()
) -> Iterator[NamedTensors]:  # fmt: skip
    """Yield all weights under their HuggingFace names, several whole tensors at a time (a bucket).
    They are in the order of an exported folder's files.

    The tensors of a bucket share one allocation, which one collective call completes.

    Args:
        source: the weights.
        size: largest bytes of a bucket; a larger tensor gets a bucket of its own.
        family: `model_type` whose names to use; None chooses as an export does.
        dtype: to cast floating-point weights to.
        families: families that extensions add.

    Raises:
        CheckpointError: when no family, or not the given one, supports the whole model.
    """
    plan = plan_hf_folder(source, family=family, dtype=dtype, families=families)
    waiting: list[PlannedTensor] = []
    free = size
    for planned in iterate_tensor_fillers(plan, source.copy_tensor_slice_share):
        nbytes = _planned_bytes(planned)
        if waiting and nbytes > free:
            yield _gather_bucket(source, waiting)
            waiting, free = [], size
        waiting.append(planned)
        free -= nbytes
    if waiting:
        yield _gather_bucket(source, waiting)


def _planned_bytes(planned: PlannedTensor) -> int:
    _, dtype, shape, _ = planned
    return dtype.itemsize * math.prod(shape)


def _gather_bucket(source: RankShareWeightSource, planned: Sequence[PlannedTensor]) -> NamedTensors:
    sizes = [-(-_planned_bytes(tensor) // ALIGNMENT) * ALIGNMENT for tensor in planned]
    memory, bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=source.device), NamedTensors()
    for (name, dtype, shape, fill), part in zip(planned, torch.split(memory, sizes), strict=True):
        tensor = part[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        fill(tensor)
        bucket.append((name, tensor))
    # a sum would turn -0.0 into 0.0; of the bytes of all ranks at most one is not zero, so the maximum is exact
    all_reduce(memory, source.world, "max")
    return bucket

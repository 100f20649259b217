"""The weights of a running model under HuggingFace's names: what ranks hold in any layout, gathered a bucket at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.families.layouts import Slab
from mega_ckpt.formats.hf_write import fillers, plan_folder
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Box, Shape, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.comm import Group, all_reduce
from mega_trainer.model.decoder import Decoder
from mega_trainer.state import weights_of

Bucket = list[tuple[str, Tensor]]
Planned = tuple[str, torch.dtype, Shape, Callable[[Tensor], None]]
ALIGNMENT = 16  # bytes: of the places of tensors of any dtype in a bucket


class ShareSource:
    """A `mega_ckpt.source.Source` of this rank's share of the weights that the ranks of `world` hold, and zeros elsewhere.

    Each element is one rank's: of all ranks' shares the largest bytes are the weights. Making a source is a collective call.

    Args:
        model: what the weights are of.
        stages: this rank's parts of the model.
        world: all ranks.
        device: of the weights.
        assets: files that travel with the weights, as in `Source`.
    """

    def __init__(
        self,
        model: ModelConfig,
        stages: Mapping[int, Decoder],
        world: Group,
        device: torch.device,
        assets: Mapping[str, Path | bytes],
    ) -> None:
        self.model, self.device, self.world, self._assets = model, device, world, assets
        self._shapes = tensors_of(model)
        self._held = weights_of(stages, computed=True, to_save=True)  # of each element one rank has a share
        own = {name: sharded.boxes[0].tensor.dtype for name, sharded in self._held.items() if sharded.boxes}
        everyone: list[dict[str, torch.dtype]] = [own] * world.size
        if world.size > 1:
            dist.all_gather_object(everyone, own, group=world.handle)
        self._dtypes = {name: dtype for each in everyone for name, dtype in each.items()}

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """That it is computed with."""
        return self._dtypes[name]

    def read(self, name: str) -> Tensor:
        """This rank's share of the whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """This rank's share of `tensor[offset : offset + shape]`, on the device."""
        out = torch.empty(shape, dtype=self.dtype(name), device=self.device)
        self.copy(Slab(name, offset, shape), out)
        return out

    def copy(self, slab: Slab, out: Tensor) -> None:
        """Put this rank's share of a slab into a tensor of its shape, cast to that one's dtype."""
        out.zero_()
        for box in self._held[slab.name].boxes if slab.name in self._held else ():
            copy_overlap(Box(slab.offset, out), box)

    def buffers(self) -> Sequence[str]:
        """None: they are no weights."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """There is none."""
        raise KeyError(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Files that travel with the weights."""
        return self._assets


def buckets_of(
    source: ShareSource, size: int, *, family: str | None = None, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """All weights under their HuggingFace names, several at a time, in the order of an exported folder's files.

    The tensors of a bucket lie in one piece of memory, which one collective call makes whole.

    Args:
        source: the weights.
        size: most bytes of a bucket; a tensor that is larger comes alone.
        family: `model_type` whose names to use; None chooses as an export does.
        dtype: to cast floating-point weights to.

    Raises:
        CheckpointError: when no family, or not the one asked for, has all of the model.
    """
    plan = plan_folder(source, family=family, dtype=dtype)
    waiting: list[Planned] = []
    room = size
    for planned in fillers(plan, source.copy):
        nbytes = _bytes(planned)
        if waiting and nbytes > room:
            yield _gathered(source, waiting)
            waiting, room = [], size
        waiting.append(planned)
        room -= nbytes
    if waiting:
        yield _gathered(source, waiting)


def _bytes(planned: Planned) -> int:
    _, dtype, shape, _ = planned
    return dtype.itemsize * math.prod(shape)


def _gathered(source: ShareSource, planned: Sequence[Planned]) -> Bucket:
    sizes = [-(-_bytes(one) // ALIGNMENT) * ALIGNMENT for one in planned]
    memory, bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=source.device), Bucket()
    for (name, dtype, shape, fill), place in zip(planned, torch.split(memory, sizes), strict=True):
        tensor = place[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        fill(tensor)
        bucket.append((name, tensor))
    # by bytes, for -0.0 + 0.0 has not the bits of the former; of bytes of which one is not zero the largest is it
    all_reduce(memory, source.world, "max")
    return bucket

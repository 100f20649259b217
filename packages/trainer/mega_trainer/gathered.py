"""The weights of a running model as a `Source`: what ranks hold in any layout, gathered a block at a time as it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.formats.hf_write import plan_folder, whole_tensors
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Box, Shape, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.comm import Group, all_reduce
from mega_trainer.model.decoder import Decoder
from mega_trainer.state import weights_of

Bucket = list[tuple[str, Tensor]]


class GatheredSource:
    """A `mega_ckpt.source.Source` of weights that the ranks of `world` hold.

    Making one is a collective call, and so is every reading: all ranks ask for the same, in the same order, and all get it.
    A block is put together from what each rank holds of it; nothing else is gathered.

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
        self.model, self.device, self._world, self._assets = model, device, world, assets
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
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """`tensor[offset : offset + shape]`, on the device. A collective call."""
        out = torch.zeros(shape, dtype=self.dtype(name), device=self.device)
        for box in self._held[name].boxes if name in self._held else ():
            copy_overlap(Box(offset, out), box)
        # as whole numbers, whose sum with zero has the same bits: -0.0 + 0.0 has not
        all_reduce(out.view(-1).view(torch.uint8), self._world)
        return out

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
    source: GatheredSource, size: int, *, family: str | None = None, dtype: torch.dtype | None = None
) -> Iterator[Bucket]:
    """All weights under their HuggingFace names, several at a time, in the order of an exported folder's files.

    Args:
        source: the weights.
        size: most bytes of a bucket; a tensor that is larger comes alone.
        family: `model_type` whose names to use; None chooses as an export does.
        dtype: to cast floating-point weights to.

    Raises:
        CheckpointError: when no family, or not the one asked for, has all of the model.
    """
    plan = plan_folder(source, family=family, dtype=dtype)
    bucket, room = Bucket(), size
    for name, nbytes, tensor in whole_tensors(source, plan, source.device):
        if bucket and nbytes > room:
            yield bucket
            bucket, room = Bucket(), size
        bucket.append((name, tensor()))
        room -= nbytes
    if bucket:
        yield bucket

"""The canonical tensors inside those of Megatron: a weight and its two moments lie in the same way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.formats.megatron_contents import Held, overlap
from mega_ckpt.formats.megatron_names import Part
from mega_ckpt.manifest import tiles
from mega_ckpt.names import some
from mega_ckpt.pieces import Box, Piece, Shape, copy_overlap, crop
from mega_common.errors import CheckpointError


class Placed:
    """Canonical tensors, read from where they lie in `tensors`, which are exactly those of `parts`.

    Raises:
        CheckpointError: naming the tensor and the folder, when they are not.
    """

    def __init__(self, parts: Sequence[Part], tensors: Mapping[str, Held], folder: Path) -> None:
        self._places = _places(parts, tensors, folder)

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of `parts`."""
        return list(self._places)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        _, piece = self._places[name][0]
        return piece.global_shape

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype."""
        held, _ = self._places[name][0]
        return held.dtype

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it: a view of the file where it is in one piece there, else put together."""
        found = [
            (target, stored, place)
            for held, piece in self._places[name]
            if (target := overlap(offset, shape, piece.global_offset, piece.shape))
            for place in [_moved(target[0], piece.local_start, piece.global_offset)]
            for stored in held.stored
            if overlap(place, target[1], stored.offset, stored.shape)
        ]
        if len(found) == 1:
            (start, extent), stored, place = found[0]
            inside = _moved(place, (0,) * len(place), stored.offset)
            return crop(stored.read(), inside, extent)
        out = torch.empty(shape, dtype=self.dtype(name))
        for (start, extent), stored, place in found:
            inner = crop(out, _moved(start, (0,) * len(start), offset), extent)
            copy_overlap(Box(place, inner), Box(stored.offset, stored.read()))
        return out


def _places(parts: Sequence[Part], tensors: Mapping[str, Held], folder: Path) -> Mapping[str, list[tuple[Held, Piece]]]:
    """Where each canonical tensor is, when `tensors` are exactly those of the model."""
    missing = {part.name for part in parts} - tensors.keys()
    if missing:
        raise CheckpointError(f"{folder}: there is no tensor {some(missing)}, which its settings ask for")
    unknown = tensors.keys() - {part.name for part in parts}
    if unknown:
        raise CheckpointError(
            f"{folder}: the tensor {some(unknown)} is not one of a model with its settings",
            hint="a tensor that is not understood is refused rather than dropped",
        )
    out = defaultdict(list)
    for part in parts:
        held = tensors[part.name]
        fits = (
            held.shape[1:] == part.shape[1:] and held.shape[0] >= part.shape[0]
            if part.padded
            else held.shape == part.shape
        )
        if not fits:
            raise CheckpointError(
                f"{folder}: {part.name} has shape {list(held.shape)}, but the settings make it {list(part.shape)}"
            )
        if not tiles(held.shape, ((one.offset, one.shape) for one in held.stored)):
            raise CheckpointError(f"{folder}: the shards of {part.name} overlap or leave a part out")
        for piece in part.pieces:
            out[piece.name].append((held, piece))
    return out


def _moved(offset: Shape, to: Shape, origin: Shape) -> Shape:
    return tuple(o + t - g for o, t, g in zip(offset, to, origin, strict=True))

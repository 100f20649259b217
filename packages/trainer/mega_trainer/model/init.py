"""Initialisation by name: every layout of ranks starts from the same model, bit for bit.

A tensor is drawn in fp32 in tiles, each from a stream of its own, and a rank draws only the tiles that its pieces touch:
a rank of N that share the model draws about 1/N of it. Tiles are drawn where the parameter lives. A GPU draws billions of
elements in seconds, but other numbers than a CPU: the layouts that start alike are those on one kind of device.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from mega_ckpt.pieces import Box, Piece, Shape, copy_overlap
from mega_trainer.parallel.param import Normal, ParamInfo, Uniform, info_of, local_of, packed_of
from mega_trainer.rng import generator

TILE_COLUMNS = 512
TILE_ELEMENTS = 1 << 17  # few enough that a GPU has a block of threads for each: more are drawn in an order of its own


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from (seed, canonical name); padding becomes zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            packed = packed_of(parameter)
            with nullcontext(local_of(parameter).zero_()) if packed is None else packed.written() as values:
                _fill(values, info_of(parameter), seed)


def _fill(values: Tensor, info: ParamInfo, seed: int) -> None:
    for piece in info.pieces:
        view = piece.view(values)
        if info.start is None:
            view.fill_(info.fill)
        else:
            _draw(view, piece, seed, info.start)


def _draw(view: Tensor, piece: Piece, seed: int, start: Normal | Uniform) -> None:
    tile = tile_of(piece.global_shape)
    counts = [-(-n // size) for n, size in zip(piece.global_shape, tile, strict=True)]
    touched = [
        range(offset // size, -(-(offset + n) // size))
        for offset, n, size in zip(piece.global_offset, piece.shape, tile, strict=True)
    ]
    for place in product(*touched):
        offset = tuple(at * size for at, size in zip(place, tile, strict=True))
        shape = [min(size, n - o) for size, n, o in zip(tile, piece.global_shape, offset, strict=True)]
        number = int(np.ravel_multi_index(place, counts))
        stream = generator(view.device, seed, piece.name, number=number)
        draw = start.draw(torch.empty(shape, device=view.device), stream)
        copy_overlap(Box(piece.global_offset, view), Box(offset, draw))


def tile_of(shape: Shape) -> Shape:
    """How a tensor of that global shape is cut: over its last two axes, so that a part of either is drawn alone."""
    if len(shape) < 2:
        return (TILE_ELEMENTS,) * len(shape)
    columns = min(shape[-1], TILE_COLUMNS)
    return (*(1 for _ in shape[:-2]), max(1, TILE_ELEMENTS // columns), columns)

"""Weight initialisation by tensor name: every layout of ranks starts from the same model, bit for bit.

A tensor is drawn in fp32 in tiles, each from a separate random stream, and a rank draws only the tiles that its pieces
overlap: with N ranks that share the model, each draws about 1/N of it. Tiles are drawn on the parameter's device. A GPU
draws billions of elements in seconds, but other numbers than a CPU: layouts start equal on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from mega_ckpt.tensor_pieces import TensorBox, TensorPiece, TensorShape, copy_overlap
from mega_trainer.distributed.rng import seeded_generator
from mega_trainer.parallel.parameter_info import (
    NormalInit,
    ParameterInfo,
    UniformInit,
    get_local_values,
    get_parameter_info,
    get_quantized_weight,
)

TILE_COLUMNS = 512
TILE_ELEMENTS = 1 << 17  # few enough for one pass of a GPU's threads; the order of more depends on the GPU


@runtime_checkable
class SelfInitializingModel(Protocol):
    """Interface of a model that initialises its weights by a method of its own."""

    def initialize_from_seed(self, seed: int) -> None:
        """Fill all weights with values that depend only on `seed`."""


def initialize_weights(model: nn.Module, seed: int, factor: Callable[[str], float] = lambda name: 1.0) -> None:
    """Initialise every parameter, at random or with its constant, by values that do not depend on the sharding.
    Random values depend only on `seed` and the canonical name of the parameter, and are multiplied by the `factor` of
    the name; padding becomes zero. A `SelfInitializingModel` initialises itself, without factors.
    """
    if isinstance(model, SelfInitializingModel):
        model.initialize_from_seed(seed)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            packed = get_quantized_weight(parameter)
            info = get_parameter_info(parameter)
            if packed is None:
                _fill_parameter(get_local_values(parameter).zero_(), info, seed, factor)
            else:
                with packed.fill_and_quantize() as values:
                    _fill_parameter(values, info, seed, factor)


def _fill_parameter(values: Tensor, info: ParameterInfo, seed: int, factor: Callable[[str], float]) -> None:
    for piece in info.pieces:
        view = piece.local_view(values)
        if info.initializer is None:
            view.fill_(info.fill)
        else:
            _draw_tiles(view, piece, seed, info.initializer)
            if (scale := factor(piece.name)) != 1:
                view.mul_(scale)


def _draw_tiles(view: Tensor, piece: TensorPiece, seed: int, start: NormalInit | UniformInit) -> None:
    tile = init_tile_shape(piece.global_shape)
    counts = [-(-n // size) for n, size in zip(piece.global_shape, tile, strict=True)]
    touched = [
        range(offset // size, -(-(offset + n) // size))
        for offset, n, size in zip(piece.global_offset, piece.shape, tile, strict=True)
    ]
    for index in product(*touched):
        offset = tuple(at * size for at, size in zip(index, tile, strict=True))
        shape = [min(size, n - o) for size, n, o in zip(tile, piece.global_shape, offset, strict=True)]
        number = int(np.ravel_multi_index(index, counts))
        stream = seeded_generator(view.device, seed, piece.name, number=number)
        draw = start.draw_values(torch.empty(shape, device=view.device), stream)
        copy_overlap(TensorBox(piece.global_offset, view), TensorBox(offset, draw))


def init_tile_shape(shape: TensorShape) -> TensorShape:
    """Return the shape of the tiles in which a tensor of a given global shape is drawn at random.
    The tensor is cut along the last two axes, which layouts split.
    """
    if len(shape) < 2:
        return (TILE_ELEMENTS,) * len(shape)
    columns = min(shape[-1], TILE_COLUMNS)
    return (*(1 for _ in shape[:-2]), max(1, TILE_ELEMENTS // columns), columns)

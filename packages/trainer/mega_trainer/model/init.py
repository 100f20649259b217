"""Initialisation by name: every layout of ranks starts from the same model, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_ckpt.pieces import Box, Piece, copy_overlap
from mega_trainer.parallel.param import info_of, local_of
from mega_trainer.rng import generator

BLOCK_ELEMENTS = 1 << 24  # rows are drawn in blocks of about this many elements, each from a stream of its own


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from (seed, canonical name); padding becomes zero.

    A tensor is drawn in fp32 in blocks of whole rows; a rank draws only the blocks its pieces touch and keeps its part,
    so no rank ever holds a whole large tensor.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            info = info_of(parameter)
            values = local_of(parameter).zero_()
            for piece in info.pieces:
                view = piece.view(values)
                if info.std is None:
                    view.fill_(info.fill)
                else:
                    _draw(view, piece, seed, info.std)


def _draw(view: Tensor, piece: Piece, seed: int, std: float) -> None:
    row_shape = piece.global_shape[1:]
    rows = max(1, BLOCK_ELEMENTS // max(1, torch.Size(row_shape).numel()))
    begin = piece.global_offset[0]
    for block in range(begin // rows, -(-(begin + piece.shape[0]) // rows)):
        count = min(rows, piece.global_shape[0] - block * rows)
        # drawn on the CPU: the generators of different devices give different numbers
        draw = torch.empty(count, *row_shape).normal_(0.0, std, generator=generator("cpu", seed, piece.name, block))
        copy_overlap(Box(piece.global_offset, view), Box((block * rows, *(0 for _ in row_shape)), draw))

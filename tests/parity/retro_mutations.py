"""Bugs of retrieval, for `mutations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from parity.cases import VARIANTS, case
from parity.recurrence_mutations import Patch
from torch import Tensor, nn

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.data import micro_batch as batches
from mega_trainer.model import retro
from mega_trainer.model.forward_context import CrossAttentionChunks, ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.retro import NeighborEncoderBuilder, RetroDecoder
from mega_trainer.verify.layout_case import LayoutCase

swap = mock.patch.object
TP = case("retro", 2, parallel={"tp": 2, "sp": True})
PP = case("retro", 2, layers=4, parallel={"pp": 2, "schedule": "zb-h1"}, micro=4)
TIED = case("retro", 4, layers=4, parallel={"tp": 2, "pp": 2}, micro=2, variant=VARIANTS["retro"][1])


def _cut(change: Callable[..., tuple[CrossAttentionChunks, Tensor, Tensor]]) -> Patch:
    """Of the decoder's chunks, something else."""
    real = CrossAttentionChunks.attend_chunks

    def attend(self: CrossAttentionChunks, how: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, k, v = change(self, k, v) if self.shift else (self, k, v)
        return real(own, how, q, k, v)

    return lambda: swap(CrossAttentionChunks, "attend_chunks", attend)


def _of_the_next(chunks: CrossAttentionChunks, k: Tensor, v: Tensor) -> tuple[CrossAttentionChunks, Tensor, Tensor]:
    one = len(k) // chunks.count
    return chunks, k.roll(-one, 0), v.roll(-one, 0)


def _read(**fields: None) -> Patch:
    real = batches.build_neighbor_batch
    return lambda: swap(batches, "build_neighbor_batch", lambda *given: replace(real(*given), **fields))


def _open_padding() -> AbstractContextManager[Any]:
    return swap(
        retro, "SequenceMask", lambda length, device, begins, causal: SequenceMask(length, device, causal=causal)
    )


def _causal_encoder() -> AbstractContextManager[Any]:
    return swap(retro, "SequenceMask", lambda length, device, begins, causal: SequenceMask(length, device, begins))


def _open_documents() -> AbstractContextManager[Any]:
    """Neighbors are seen across a document's end, too."""
    real = retro._chunk_in_document
    return swap(retro, "_chunk_in_document", lambda begins, chunks: real(begins * 0, chunks))


def _without_gradient(stage: int) -> Patch:
    """What a stage is given of the neighbors gets no gradient there."""
    real = RetroDecoder.unpack_neighbors

    def rows(self: RetroDecoder, neighbors: Tensor) -> Tensor:
        return real(self, neighbors.detach() if self.groups.pp.rank == stage else neighbors)

    return lambda: swap(RetroDecoder, "unpack_neighbors", rows)


def _chunk_without_gradient() -> AbstractContextManager[Any]:
    """The encoder's gradient stops at the chunk it attends to."""
    real = retro.with_encoder_memory

    def remembering(context: ForwardContext, memory: Tensor) -> ForwardContext:
        asks = context.source is not None and context.source.chunks is not None and not context.source.chunks.shift
        return real(context, memory.detach() if asks else memory)

    return swap(retro, "with_encoder_memory", remembering)


def _encoder_without_sync() -> AbstractContextManager[Any]:
    def parameter(
        self: NeighborEncoderBuilder, shape: Sequence[int], pieces: Sequence[TensorPiece], **start: Any
    ) -> nn.Parameter:
        own = [replace(piece, name=piece.name.replace("model.layers.", self.prefix, 1)) for piece in pieces]
        return LayerBuilder.build_parameter(self, shape, own, **(start | {"grad_sync": ()}))

    return swap(NeighborEncoderBuilder, "build_parameter", parameter)


RETROS: list[tuple[str, LayoutCase, Patch]] = [
    ("retro: neighbors of the next chunk seen", TP, _cut(_of_the_next)),
    ("retro: shifted by a chunk, not by one token less", TP, _cut(lambda own, k, v: (replace(own, shift=own.shift + 1), k, v))),
    ("retro: a chunk without neighbors adds something", TP, _cut(lambda own, k, v: (replace(own, some=None), k, v))),
    ("retro: neighbors of the document before seen", TP, _open_documents),
    ("retro: places without a token attended to", TP, _read(attention_mask=None)),
    ("retro: places without a token read", TP, _open_padding),
    ("retro: the encoder sees only what is before", TP, _causal_encoder),
    ("retro: gradient of the encoder's norms not summed", TP, _encoder_without_sync),
    ("retro: gradient of the neighbors lost before the encoder", PP, _without_gradient(0)),
    ("retro: gradient of what the encoder made lost in the second stage", TIED, _without_gradient(1)),
    ("retro: gradient of the chunk in the encoder lost", TIED, _chunk_without_gradient),
]  # fmt: skip

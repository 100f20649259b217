"""Retro (arXiv:2112.04426): a decoder that attends to retrieved neighbors of the preceding text.

The text is cut into chunks of m tokens, and each chunk has K neighbors of 2 m tokens. They are embedded like the text, in
the first stage, and appended to the stream:

    [the text's tokens | the neighbors' tokens]        [B, S + 2 K S, D]

In the first layer that attends to neighbors, after its self-attention, an encoder processes them (each neighbor
separately, bidirectionally); the encoder's first layer also attends to the hidden states of the neighbors' chunk. Its
output replaces the neighbors in the stream. In each layer that attends to neighbors, a token attends to those of the last
chunk that is complete at the token: the tokens from the last of chunk u to the last but one of chunk u + 1 attend to those
of chunk u. So no token receives information about a chunk before its end, and the first m - 1 tokens have no neighbors.
As in Megatron-Core 0.15, the encoder has no final norm, and cross attention no positions. Chunks are cut by position; if
attention is restricted to documents, a token attends only to neighbors of a chunk in its own document, so the first m - 1
tokens of each document have none.

Under sequence parallelism each neighbor is split over the tensor ranks separately. All messages between stages have one
shape, so schedules need no changes; `tests/parity/test_communication.py` counts the extra traffic.

Legend: B batch, S tokens of the text, L = S/m chunks, K neighbors of each, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mega_ckpt.canonical_tensors import retro_encoder_prefix
from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.device import to_device
from mega_trainer.distributed.rng import DropoutFactory
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.forward_context import (
    CrossAttentionChunks,
    EncoderContext,
    ForwardContext,
    SequenceMask,
    with_encoder_memory,
)
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.transformer_layer import build_transformer_layer
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.tensor_parallel import local_sequence_slice


@dataclass(frozen=True)
class NeighborEncoderBuilder(LayerBuilder):
    """Builder of the layers of Retro's neighbor encoder, which is inside a decoder layer.

    Attributes:
        prefix: prefix of the tensor names in place of `model.layers.`.
    """

    prefix: str = ""

    @classmethod
    def from_layer_builder(cls, build: LayerBuilder, layer: int) -> NeighborEncoderBuilder:
        """Return the builder of the neighbor encoder in decoder layer number `layer`."""
        fields = {name: getattr(build, name) for name in LayerBuilder.__dataclass_fields__}
        config = build.config.neighbor_encoder_config
        return cls(**fields | {"config": config, "by_layer": {}, "adapts": {}}, prefix=retro_encoder_prefix(layer))

    def build_parameter(self, shape: Sequence[int], pieces: Sequence[TensorPiece], **start: Any) -> nn.Parameter:
        """Build a parameter of the neighbor encoder, whose checkpoint names begin with `prefix`, not with `model.layers.`."""
        own = [replace(piece, name=piece.name.replace("model.layers.", self.prefix, 1)) for piece in pieces]
        return super().build_parameter(shape, own, **start)


class NeighborEncodingLayer(nn.Module):
    """Retro's first decoder layer that attends to retrieved neighbors, together with the encoder of the neighbors."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        own = NeighborEncoderBuilder.from_layer_builder(build, layer)
        self.block = build_transformer_layer(build, layer)
        self.encoder = nn.ModuleList(build_transformer_layer(own, index) for index in range(own.config.num_layers))

    def forward(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the hidden states after this layer, and the encoded neighbors (RETRO).
        The hidden states are [B, S or S/T, D] (S/T under sequence parallelism over T ranks); the neighbors are shaped
        as `context.source.memory`.
        """
        mixer, cross, feed, source = self.block.mixer, self.block.cross, self.block.feed, context.source
        assert mixer is not None
        assert cross is not None
        assert feed is not None
        assert source is not None
        x, normed = mixer.add_and_norm(x)
        x, normed = cross.add_and_norm(x, mixer(normed, context))
        memory = source.memory
        for layer in self.encoder:
            memory = layer(memory, with_encoder_memory(source.context, normed))
        assert memory is not None
        x, normed = feed.add_and_norm(x, cross(normed, with_encoder_memory(context, memory)))
        return x + feed(normed, context), memory


class RetroDecoder(Decoder):
    """Decoder with retrieval (RETRO), or the layers of it in one pipeline stage.
    After the last layer the hidden states are the text's tokens alone, without neighbors.
    """

    def _build_layer(self, build: LayerBuilder, index: int) -> nn.Module:
        return (NeighborEncodingLayer if index == build.config.retrieval_layers[0] else build_transformer_layer)(
            build, index
        )

    def pipeline_message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Return the shape [batch, rows, D] of a micro-batch's activations between two pipeline stages.
        The rows are the text's tokens and the tokens of its retrieved neighbors.
        """
        rows, length, width = super().pipeline_message_shape(batch)
        return rows, length + self._neighbor_length(batch), width

    def _neighbor_length(self, batch: MicroBatch) -> int:
        """Return the number of a sample's neighbor tokens in this rank's stream."""
        assert batch.neighbors is not None
        _, chunks, count, length = batch.neighbors.tokens.shape
        return chunks * count * len(range(length)[local_sequence_slice(length, self.groups.tp, sp=self.sp)])

    def embed_micro_batch(self, batch: MicroBatch, context: ForwardContext) -> Tensor:
        """Return the embedded tokens of a micro-batch's text and of its retrieved neighbors.
        The neighbors are appended along the sequence.
        """
        assert batch.neighbors is not None
        assert context.source is not None
        tokens = batch.neighbors.tokens.flatten(0, 2)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        neighbors = self.embed_inputs(tokens, positions, context.source.context.dropout)
        x = super().embed_micro_batch(batch, context)
        return torch.cat([x, neighbors.reshape(len(x), -1, x.shape[-1])], 1)

    def make_batch_context(
        self, batch: MicroBatch, dropout: DropoutFactory, routing: MicroBatchRouting | None = None
    ) -> ForwardContext:
        """Return the forward context of a micro-batch, which includes the neighbor encoder's forward context.
        It has positions, mask, dropout and routing.
        """
        context, neighbors = super().make_batch_context(batch, dropout, routing), batch.neighbors
        assert neighbors is not None
        rows, chunks, count, length = neighbors.tokens.shape
        device, drop = neighbors.tokens.device, dropout(length, 1)
        if drop is not None:
            drop = replace(drop, samples=_number_parts(batch.samples, chunks * count))
        positions, bounds = torch.arange(length, device=device)[None], neighbors.sequence_bounds
        mask = SequenceMask(length, device, bounds.document_starts, causal=False)
        own = self.make_forward_context(positions, attention_mask=mask, dropout=drop, sequence_bounds=bounds)
        parts = CrossAttentionChunks(rows * chunks, _number_parts(batch.samples, chunks))
        own = replace(own, source=EncoderContext(own, batch.tokens.shape[1], chunks=parts))
        visible, has_keys = neighbors.attention_mask, None
        if visible is not None:
            present = visible.any(-1, keepdim=True)
            # a chunk without neighbors attends to all keys, to avoid NaN, and its result is multiplied by 0
            visible, has_keys = visible | ~present, present.to(self.dtype)
        if batch.sequence_bounds.document_starts is not None:
            same_document = to_device(_chunk_in_document(batch.sequence_bounds.document_starts, chunks), device)
            has_keys = same_document.to(self.dtype) if has_keys is None else has_keys * same_document
        parts = replace(parts, shift=batch.tokens.shape[1] // chunks - 1, some=has_keys)
        return replace(context, source=EncoderContext(own, self._neighbor_length(batch), visible, chunks=parts))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pass the text's hidden states, with the neighbors appended, through this stage's layers."""
        assert context.source is not None
        length = context.source.length
        x, neighbors = torch.split(x, [x.shape[1] - length, length], 1)
        memory = self.unpack_neighbors(neighbors)
        for index, layer in enumerate(self.layers):
            own = with_encoder_memory(context, memory)
            if isinstance(layer, NeighborEncodingLayer):
                x, memory = self.saved.run_layer(index, layer, x, own)
            else:
                x = self.saved.run_layer(index, layer, x, own)
        return x if self.stage.heads else torch.cat([x, memory.reshape(neighbors.shape)], 1)

    def unpack_neighbors(self, neighbors: Tensor) -> Tensor:
        """Reshape the retrieved neighbors of a pipeline message to one row for each neighbor.
        The message has them as [B, L chunks * K neighbors * 2 m tokens (/T), D]; the result is [B L K, 2 m or 2 m/T, D].
        """
        assert self.config.retro is not None
        length = self.config.retro.neighbor_length
        return neighbors.reshape(-1, length // self.groups.tp.size if self.sp else length, neighbors.shape[-1])


def _chunk_in_document(begins: np.ndarray, chunks: int) -> Tensor:
    """Return the mask of queries in a document that contains the whole chunk, of L `chunks`: bool [B L, m, 1, 1].

    The m queries of a chunk begin with its last token; `begins` are document starts, int64 [B, S], as in `DocumentBounds`.
    """
    size = begins.shape[1] // chunks
    ahead = np.pad(begins[:, size - 1 :], ((0, 0), (0, size - 1))).reshape(-1, chunks, size)
    return torch.from_numpy(ahead <= np.arange(chunks)[:, None] * size).reshape(-1, size, 1, 1)


def _number_parts(samples: Sequence[int], count: int) -> list[int]:
    """Return a number for each of the `count` parts of each sample."""
    return [sample * count + part for sample in samples for part in range(count)]

"""Retro (arXiv:2112.04426): a decoder that attends to retrieved neighbours of the text before a token.

The text is cut into chunks of m tokens, and each chunk has K neighbours of 2 m tokens. These are embedded as the text is, in
the first stage, and travel with the stream:

    [the text's tokens | the neighbours' tokens]        [B, S + 2 K S, D]

In the first layer that attends to neighbours, behind its self-attention, an encoder reads them (each neighbour alone, from
both sides); its first layer also attends to the tokens of the chunk that they belong to, as they are there. What it has made
takes their place in the stream. In each such layer a token attends to the encoded neighbours of the last chunk that is
complete with it: those from the last token of chunk u to the last but one of chunk u + 1 to those of chunk u. So nothing of
a chunk reaches a token before its end, and the first m - 1 tokens see no neighbours. As in Megatron-Core 0.15, the encoder
has no norm behind it, and cross attention no positions. Chunks are cut by place; where attention is closed between documents
a token sees neighbours only of a chunk that lies in its own document, so the first m - 1 tokens of each see none.

Under sequence parallelism each neighbour is split over the tensor ranks by itself. A message has one shape throughout, so
schedules know nothing of this; its price is counted in `tests/parity/test_communication.py`.

Legend: B batch, S tokens of the text, L = S/m chunks, K neighbours of each, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mega_ckpt.names import neighbor_encoder
from mega_ckpt.pieces import Piece
from mega_trainer.batch import MicroBatch
from mega_trainer.device import to_device
from mega_trainer.model.blocks import block_of
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.cross import Chunks, Source, remembering
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.routing import Routing
from mega_trainer.parallel.tensor import sequence_part
from mega_trainer.rng import Dropouts


@dataclass(frozen=True)
class EncoderBuilder(Builder):
    """Makes layers of the encoder that lies in a layer of the decoder.

    Attributes:
        prefix: what stands for `model.layers.` in their names.
    """

    prefix: str = ""

    @classmethod
    def of(cls, build: Builder, layer: int) -> EncoderBuilder:
        """For the encoder in that layer of that builder's model."""
        fields = {name: getattr(build, name) for name in Builder.__dataclass_fields__}
        config = build.config.neighbor_encoder
        return cls(**fields | {"config": config, "by_layer": {}, "adapts": {}}, prefix=neighbor_encoder(layer))

    def parameter(self, shape: Sequence[int], pieces: Sequence[Piece], **start: Any) -> nn.Parameter:
        """See `Builder.parameter`."""
        own = [replace(piece, name=piece.name.replace("model.layers.", self.prefix, 1)) for piece in pieces]
        return super().parameter(shape, own, **start)


class EncodingBlock(nn.Module):
    """The first layer that attends to neighbours, with their encoder."""

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        own = EncoderBuilder.of(build, layer)
        self.block = block_of(build, layer)
        self.encoder = nn.ModuleList(block_of(own, index) for index in range(own.config.num_layers))

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The stream [B, S or S/T, D] one layer further, and the encoded neighbours: of `context.source.memory`, as that is."""
        mixer, cross, feed, source = self.block.mixer, self.block.cross, self.block.feed, context.source
        assert mixer is not None
        assert cross is not None
        assert feed is not None
        assert source is not None
        x, normed = mixer.normed(x)
        x, normed = cross.normed(x, mixer(normed, context))
        memory = source.memory
        for layer in self.encoder:
            memory = layer(memory, remembering(source.context, normed))
        assert memory is not None
        x, normed = feed.normed(x, cross(normed, remembering(context, memory)))
        return x + feed(normed, context), memory


class Retro(Decoder):
    """What of a model with retrieval `stage` has; after its last layer the stream is the text's tokens alone."""

    def _layer(self, build: Builder, index: int) -> nn.Module:
        return (EncodingBlock if index == build.config.retro_layers[0] else block_of)(build, index)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """See `Decoder.message_shape`."""
        rows, length, width = super().message_shape(batch)
        return rows, length + self._length(batch), width

    def _length(self, batch: MicroBatch) -> int:
        """Tokens of a sample's neighbours in this rank's stream."""
        assert batch.neighbors is not None
        _, chunks, count, length = batch.neighbors.tokens.shape
        return chunks * count * len(range(length)[sequence_part(length, self.groups.tp, sp=self.sp)])

    def begin(self, batch: MicroBatch, context: Context) -> Tensor:
        """See `Decoder.begin`: of the text, and of its neighbours behind it."""
        assert batch.neighbors is not None
        assert context.source is not None
        tokens = batch.neighbors.tokens.flatten(0, 2)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        neighbors = self.embed(tokens, places, context.source.context.dropout)
        x = super().begin(batch, context)
        return torch.cat([x, neighbors.reshape(len(x), -1, x.shape[-1])], 1)

    def context_of(self, batch: MicroBatch, dropout: Dropouts, routing: Routing | None = None) -> Context:
        """See `Decoder.context_of`: with that of the encoder's layers."""
        context, found = super().context_of(batch, dropout, routing), batch.neighbors
        assert found is not None
        rows, chunks, count, length = found.tokens.shape
        device, drop = found.tokens.device, dropout(length, 1)
        if drop is not None:
            drop = replace(drop, samples=_parts(batch.samples, chunks * count))
        places = torch.arange(length, device=device)[None]
        sight = Sequences(length, device, found.outline.begins, causal=False)
        own = self.context(places, sight=sight, dropout=drop, outline=found.outline)
        asks = Chunks(rows * chunks, _parts(batch.samples, chunks))
        own = replace(own, source=Source(own, batch.tokens.shape[1], chunks=asks))
        seen, some = found.seen, None
        if seen is not None:
            there = seen.any(-1, keepdim=True)
            # a chunk without neighbours sees all, and what it makes of it is 0
            seen, some = seen | ~there, there.to(self.dtype)
        if batch.outline.begins is not None:
            own_text = to_device(_own_chunks(batch.outline.begins, chunks), device)
            some = own_text.to(self.dtype) if some is None else some * own_text
        asks = replace(asks, shift=batch.tokens.shape[1] // chunks - 1, some=some)
        return replace(context, source=Source(own, self._length(batch), seen, chunks=asks))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The stream, and the neighbours behind it, through this stage's layers."""
        assert context.source is not None
        behind = context.source.length
        x, neighbors = torch.split(x, [x.shape[1] - behind, behind], 1)
        memory = self.rows(neighbors)
        for index, layer in enumerate(self.layers):
            own = remembering(context, memory)
            if isinstance(layer, EncodingBlock):
                x, memory = self.saved.layer(index, layer, x, own)
            else:
                x = self.saved.layer(index, layer, x, own)
        return x if self.stage.heads else torch.cat([x, memory.reshape(neighbors.shape)], 1)

    def rows(self, neighbors: Tensor) -> Tensor:
        """Those of a message, [B, 2 m L K or that/T, D], as layers take them: [B L K, 2 m or 2 m/T, D]."""
        assert self.config.retro is not None
        length = self.config.retro.neighbor_length
        return neighbors.reshape(-1, length // self.groups.tp.size if self.sp else length, neighbors.shape[-1])


def _own_chunks(begins: np.ndarray, chunks: int) -> Tensor:
    """Whether the m queries that each of L `chunks` is for stand in a document that has all of the chunk: bool [B L, m, 1, 1].

    The queries are those from the last token of the chunk on; `begins` is int64 [B, S], as in `Outline`.
    """
    size = begins.shape[1] // chunks
    ahead = np.pad(begins[:, size - 1 :], ((0, 0), (0, size - 1))).reshape(-1, chunks, size)
    return torch.from_numpy(ahead <= np.arange(chunks)[:, None] * size).reshape(-1, size, 1, 1)


def _parts(samples: Sequence[int], count: int) -> list[int]:
    """A number for each of the parts of some samples."""
    return [sample * count + part for sample in samples for part in range(count)]

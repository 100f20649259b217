"""An encoder and a decoder as one list of layers, cut into stages like any other.

What the encoder has made travels with the stream. Between stages that is

    [the encoder's tokens | the decoder's tokens | the tables of relative positions]        [B, E + S + R, D]

Layers of the encoder work on the first part, those of the decoder on the second, and pass the first on as it is; their cross
attention reads it, so that autograd sums its gradient on the way back. All tokens are embedded in the first stage, which owns
the tables too: a table in R = 2 buckets H/T / D rows goes to every layer that uses it, and its gradient comes back like that
of any activation. So a message has one shape throughout, schedules know nothing of all this, and no parameter lies on two
stages but the tied embedding. Under sequence and context parallelism each of the first two parts is split by itself.

Legend: B batch, E and S tokens of encoder and decoder, D model width, H heads, T tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mega_common.model_config import ModelConfig
from mega_trainer.batch import MicroBatch
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.cross import CrossAttention, Source, remembering
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.offload import Offload
from mega_trainer.model.recompute import Recompute
from mega_trainer.model.relative import Relative, relative_table
from mega_trainer.model.retro import Retro
from mega_trainer.model.reward import RewardModel
from mega_trainer.model.routing import Routing
from mega_trainer.model.stage import Stage
from mega_trainer.parallel.grads import Unit
from mega_trainer.parallel.tensor import sequence_part
from mega_trainer.rng import Dropouts


class EncoderDecoder(Decoder):
    """What of a model with an encoder `stage` has; after its last layer the stream is the decoder's tokens alone."""

    def __init__(
        self,
        build: Builder,
        stage: Stage | None = None,
        recompute: Recompute | None = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(build, stage, recompute, offload)
        config, tp = self.config, self.groups.tp
        assert config.encoder is not None
        self.encoder_layers = config.encoder.num_layers
        if self.stage.first < self.encoder_layers <= self.stage.last:
            self.encoder_norm = build.norm("model.encoder_norm")
        shared = config.position == "relative" and not config.relative.every_layer
        self.table_shape = (config.relative.buckets, config.num_attention_heads // tp.size) if shared else None
        owns = shared and self.stage.embeds
        names = ("encoder", "decoder") if owns else ()
        self.tables = nn.ParameterList(relative_table(build, f"model.{name}_relative_bias") for name in names)

    def units(self) -> list[Unit]:
        """See `Decoder.units`."""
        first, *others = super().units()
        if self.stage.embeds:
            first = Unit(first.module, [*first.parameters, *self.tables])
        if hasattr(self, "encoder_norm"):
            norm = Unit(self.encoder_norm, list(self.encoder_norm.parameters()))
            others.insert(self.encoder_layers - self.stage.first - (0 if self.stage.embeds else 1), norm)
        return [first, *others]

    @property
    def table_rows(self) -> int:
        """R."""
        if self.table_shape is None:
            return 0
        rows, heads = self.table_shape
        return -(-2 * rows * heads // self.config.hidden_size)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """See `Decoder.message_shape`."""
        assert batch.source is not None
        rows, length, width = super().message_shape(batch)
        return rows, self._part(batch.source.tokens.shape[1]) + length + self.table_rows, width

    def begin(self, batch: MicroBatch, context: Context) -> Tensor:
        """See `Decoder.begin`: of both sequences, and the tables behind them."""
        assert batch.source is not None
        assert context.source is not None
        read = self.embed(batch.source.tokens, batch.source.positions, context.source.context.dropout)
        return torch.cat([read, super().begin(batch, context), self._tables_as_rows(read)], 1)

    def context_of(self, batch: MicroBatch, dropout: Dropouts, routing: Routing | None = None) -> Context:
        """See `Decoder.context_of`: that of the decoder's layers, with that of the encoder's."""
        context, source = super().context_of(batch, dropout, routing), batch.source
        assert source is not None
        length = source.tokens.shape[1]
        sight = Sequences(length * self.groups.cp.size, source.tokens.device, source.outline.begins, causal=False)
        own = self.context(source.positions, sight=sight, dropout=dropout(length, 1), outline=source.outline)
        return replace(context, source=Source(own, self._part(length), source.seen))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The stream through this stage's layers; with a cache the decoder's alone, for what the encoder made is there."""
        if context.cache is not None:
            own = replace(context, relative=self._relative(causal=True))
            for layer in self.layers[self.encoder_layers :]:
                x = layer(x, own)
            return x
        assert context.source is not None
        length = context.source.length
        memory, x, rows = torch.split(x, [length, x.shape[1] - length - self.table_rows, self.table_rows], 1)
        encoders, decoders = self.contexts(context, rows)
        for index, layer in enumerate(self.layers):
            if (number := self.stage.first + index) < self.encoder_layers:
                memory = self.saved.layer(index, layer, memory, encoders)
                memory = self.encoder_norm(memory) if number == self.encoder_layers - 1 else memory
            else:
                x = self.saved.layer(index, layer, x, remembering(decoders, memory))
        return x if self.stage.heads else torch.cat([memory, x, rows], 1)

    @torch.inference_mode()
    def encode(self, tokens: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values [1, E, K, d] that each layer of the decoder asks of a text, int64 [1, E]. Not for training."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        sight = Sequences(tokens.shape[1], tokens.device, causal=False)
        context = replace(self.context(places, sight=sight), relative=self._relative(causal=False))
        x = self.embed(tokens, places)
        for layer in self.layers[: self.encoder_layers]:
            x = layer(x, context)
        memory = self.encoder_norm(x)
        asks = (part for part in self.modules() if isinstance(part, CrossAttention))
        return {part.layer: part.keys(memory) for part in asks}

    def _relative(self, *, causal: bool) -> Relative | None:
        """One of the tables, where this stage has them."""
        return Relative(self.tables[int(causal)], self.config.relative, causal) if self.tables else None

    def _part(self, length: int) -> int:
        return len(range(length)[sequence_part(length, self.groups.tp, sp=self.sp)])

    def _tables_as_rows(self, x: Tensor) -> Tensor:
        """[B, R, D] to go with x [B, .., D]: each sample has the tables, and the first one's are read."""
        flat = torch.cat([x.new_empty(0), *(table.flatten() for table in self.tables)])
        rows = nn.functional.pad(flat, (0, self.table_rows * x.shape[-1] - flat.numel())).view(1, -1, x.shape[-1])
        return rows.expand(len(x), -1, -1)

    def contexts(self, context: Context, rows: Tensor) -> tuple[Context, Context]:
        """Those of the encoder's layers and of the decoder's, with the tables that came as rows [B, R, D]."""
        assert context.source is not None
        if self.table_shape is None:
            return context.source.context, context
        count, flat, config = self.table_shape[0] * self.table_shape[1], rows[0].flatten(), self.config.relative
        encoder, decoder = (flat[start : start + count].view(self.table_shape) for start in (0, count))
        return (
            replace(context.source.context, relative=Relative(encoder, config, causal=False)),
            replace(context, relative=Relative(decoder, config, causal=True)),
        )


def model_class(config: ModelConfig) -> type[Decoder]:
    """What a model of this configuration is an instance of."""
    if config.score:
        return RewardModel
    if config.retro:
        return Retro
    return EncoderDecoder if config.encoder else Decoder

"""Encoder-decoder transformer as one list of layers, cut into pipeline stages like any other.

The encoder's output is part of the stream. Between stages the stream is

    [the encoder's tokens | the decoder's tokens | the tables of relative positions]        [B, E + S + R, D]

Encoder layers update the first part. Decoder layers update the second part and pass the first on unchanged; their cross
attention reads it, so autograd sums its gradient. All tokens are embedded in the first stage, which also owns the tables:
R = 2 buckets H/T / D rows carry them to every layer that uses them, and their gradient returns like that of an activation.
So all messages have one shape, schedules need no changes, and no parameter except the tied embedding is on two stages. Under
sequence and context parallelism each of the first two parts is split separately.

Legend: B batch, E and S tokens of encoder and decoder, D model width, H heads, T tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.rng import DropoutFactory
from mega_trainer.model.activation_checkpointing import ActivationOffloadPool, RecomputePolicy
from mega_trainer.model.attention import build_relative_position_bias_table
from mega_trainer.model.auxiliary_models import TaskOutputDecoder
from mega_trainer.model.cross_attention import CrossAttention
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.forward_context import EncoderContext, ForwardContext, SequenceMask, with_encoder_memory
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.layer_input_decoder import LayerInputDecoder, LayerInputTaskDecoder
from mega_trainer.model.relative_position_bias import BucketedPositionBias
from mega_trainer.model.retro import RetroDecoder
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.tensor_parallel import local_sequence_slice
from mega_trainer.parallel.zero_buffers import ForwardGatherUnit


class EncoderDecoderModel(Decoder):
    """Encoder-decoder model (T5), or the layers of it in one pipeline stage.
    After the last layer the hidden states are the decoder's tokens alone.
    """

    def __init__(
        self,
        build: LayerBuilder,
        stage: PipelineStageLayers | None = None,
        recompute: RecomputePolicy | None = None,
        offload: ActivationOffloadPool | None = None,
    ) -> None:
        super().__init__(build, stage, recompute, offload)
        config, tp = self.config, self.groups.tp
        assert config.encoder is not None
        self.encoder_layers = config.encoder.num_layers
        if self.stage.first < self.encoder_layers <= self.stage.last:
            self.encoder_norm = build.build_residual_norm("model.encoder_norm")
        shared = config.position == "relative" and not config.relative.every_layer
        self.table_shape = (config.relative.buckets, config.num_attention_heads // tp.size) if shared else None
        owns = shared and self.stage.embeds
        names = ("encoder", "decoder") if owns else ()
        self.tables = nn.ParameterList(
            build_relative_position_bias_table(build, f"model.{name}_relative_bias") for name in names
        )

    def list_parameter_units(self) -> list[ForwardGatherUnit]:
        """Return the model's modules in forward order, each with the parameters that it is the first to use.
        ZeRO waits for gathered weights module by module.
        """
        first, *others = super().list_parameter_units()
        if self.stage.embeds:
            first = ForwardGatherUnit(first.module, [*first.parameters, *self.tables])
        if hasattr(self, "encoder_norm"):
            norm = ForwardGatherUnit(self.encoder_norm, list(self.encoder_norm.parameters()))
            others.insert(self.encoder_layers - self.stage.first - (0 if self.stage.embeds else 1), norm)
        return [first, *others]

    @property
    def bias_table_rows(self) -> int:
        """Number of extra rows of a pipeline message that carry the relative position bias tables.
        The rows are along the sequence axis.
        """
        if self.table_shape is None:
            return 0
        rows, heads = self.table_shape
        return -(-2 * rows * heads // self.config.hidden_size)

    def pipeline_message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Return the shape [batch, rows, D] of a micro-batch's activations between two pipeline stages.
        Rows are encoder tokens, decoder tokens and relative position bias tables.
        """
        assert batch.source is not None
        rows, length, width = super().pipeline_message_shape(batch)
        return rows, self._local_length(batch.source.tokens.shape[1]) + length + self.bias_table_rows, width

    def embed_micro_batch(self, batch: MicroBatch, context: ForwardContext) -> Tensor:
        """Return a micro-batch's embedded encoder and decoder tokens and position bias tables, along the sequence."""
        assert batch.source is not None
        assert context.source is not None
        encoder = self.embed_inputs(batch.source.tokens, batch.source.positions, context.source.context.dropout)
        return torch.cat([encoder, super().embed_micro_batch(batch, context), self._tables_as_rows(encoder)], 1)

    def make_batch_context(
        self, batch: MicroBatch, dropout: DropoutFactory, routing: MicroBatchRouting | None = None
    ) -> ForwardContext:
        """Return the forward context of the decoder's layers for a micro-batch, with that of the encoder's inside.
        It has positions, mask, dropout and routing.
        """
        context, source = super().make_batch_context(batch, dropout, routing), batch.source
        assert source is not None
        length, bounds = source.tokens.shape[1], source.sequence_bounds
        mask = SequenceMask(length * self.groups.cp.size, source.tokens.device, bounds.document_starts, causal=False)
        own = self.make_forward_context(
            source.positions, attention_mask=mask, dropout=dropout(length, 1), sequence_bounds=bounds
        )
        return replace(context, source=EncoderContext(own, self._local_length(length), source.attention_mask))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pass encoder and decoder hidden states through this stage's layers; with a KV cache, the decoder's alone.
        The cache has the encoder's keys and values.
        """
        if context.cache is not None:
            own = replace(context, relative=self._position_bias(causal=True))
            for layer in self.layers[self.encoder_layers :]:
                x = layer(x, own)
            return x
        assert context.source is not None
        length = context.source.length
        memory, x, rows = torch.split(x, [length, x.shape[1] - length - self.bias_table_rows, self.bias_table_rows], 1)
        encoders, decoders = self.split_encoder_decoder_contexts(context, rows)
        for index, layer in enumerate(self.layers):
            if (number := self.stage.first + index) < self.encoder_layers:
                memory = self.saved.run_layer(index, layer, memory, encoders)
                memory = self.encoder_norm(memory) if number == self.encoder_layers - 1 else memory
            else:
                x = self.saved.run_layer(index, layer, x, with_encoder_memory(decoders, memory))
        return x if self.stage.heads else torch.cat([memory, x, rows], 1)

    @torch.inference_mode()
    def encode_keys_values(self, tokens: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Encode a text, and return the cross-attention keys and values of each decoder layer by layer number.
        The text is int64 [1, E]; keys and values are [1, E, K, d].

        For inference only.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = SequenceMask(tokens.shape[1], tokens.device, causal=False)
        context = replace(
            self.make_forward_context(positions, attention_mask=mask), relative=self._position_bias(causal=False)
        )
        x = self.embed_inputs(tokens, positions)
        for layer in self.layers[: self.encoder_layers]:
            x = layer(x, context)
        memory = self.encoder_norm(x)
        cross = (module for module in self.modules() if isinstance(module, CrossAttention))
        return {module.layer: module.project_keys_values(memory) for module in cross}

    def _position_bias(self, *, causal: bool) -> BucketedPositionBias | None:
        """Return the relative position bias of encoder or decoder, or None if this stage has no tables."""
        return BucketedPositionBias(self.tables[int(causal)], self.config.relative, causal) if self.tables else None

    def _local_length(self, length: int) -> int:
        return len(range(length)[local_sequence_slice(length, self.groups.tp, sp=self.sp)])

    def _tables_as_rows(self, x: Tensor) -> Tensor:
        """Return the bias tables as stream rows [B, R, D] for x [B, .., D]; `split_encoder_decoder_contexts` reads the first sample's."""
        flat = torch.cat([x.new_empty(0), *(table.flatten() for table in self.tables)])
        rows = nn.functional.pad(flat, (0, self.bias_table_rows * x.shape[-1] - flat.numel())).view(1, -1, x.shape[-1])
        return rows.expand(len(x), -1, -1)

    def split_encoder_decoder_contexts(
        self, context: ForwardContext, rows: Tensor
    ) -> tuple[ForwardContext, ForwardContext]:
        """Return the forward contexts of encoder and decoder layers, with bias tables from message rows [B, R, D]."""
        assert context.source is not None
        if self.table_shape is None:
            return context.source.context, context
        count, flat, config = self.table_shape[0] * self.table_shape[1], rows[0].flatten(), self.config.relative
        encoder, decoder = (flat[start : start + count].view(self.table_shape) for start in (0, count))
        return (
            replace(context.source.context, relative=BucketedPositionBias(encoder, config, causal=False)),
            replace(context, relative=BucketedPositionBias(decoder, config, causal=True)),
        )


def select_model_class(config: ModelConfig) -> type[Decoder]:
    """Return the model class for a configuration: `Decoder`, or the one with the parts that the configuration adds."""
    if config.transformers is not None:
        from mega_trainer.model.transformers_decoder import TransformersDecoder  # only with transformers installed

        return TransformersDecoder
    if config.per_layer_input_size or config.shared_kv_layers:
        return LayerInputTaskDecoder if config.score or config.task_head else LayerInputDecoder
    if config.score or config.task_head:
        return TaskOutputDecoder
    if config.retro:
        return RetroDecoder
    return EncoderDecoderModel if config.encoder else Decoder

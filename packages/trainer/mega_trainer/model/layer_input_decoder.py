"""Decoder whose layers have inputs of their own, or share keys and values (Gemma 3n, Gemma 4), cut into pipeline stages.

All inputs are computed in the first stage. Between stages the stream is

    [hidden states | inputs of all layers]        [B, S, D + L P], with AltUp [B, S, n D + L P]

so no parameter is on two stages, and gradients of the inputs return like those of activations.

Legend: B batch, S sequence, D model width, n residual streams, P width of an input, L layers, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.model.activation_checkpointing import ActivationOffloadPool, RecomputePolicy
from mega_trainer.model.alternating_updates import StreamExpansion
from mega_trainer.model.auxiliary_models import DistillationTeacher, TaskOutputDecoder
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.per_layer_input import PerLayerEmbedding
from mega_trainer.parallel.zero_buffers import ForwardGatherUnit


class LayerInputDecoder(Decoder):
    """Decoder, or a pipeline stage of one, whose layers have inputs of their own or share keys and values."""

    def __init__(
        self,
        build: LayerBuilder,
        stage: PipelineStageLayers | None = None,
        recompute: RecomputePolicy | None = None,
        offload: ActivationOffloadPool | None = None,
    ) -> None:
        super().__init__(build, stage, recompute, offload)
        self.input_size = self.config.per_layer_input_size or 0
        embeds = self.stage.embeds and self.input_size
        self.layer_embedding = PerLayerEmbedding(build, self.input_size) if embeds else None
        self.streams = StreamExpansion(build) if embeds and self.config.altup else None

    def list_parameter_units(self) -> list[ForwardGatherUnit]:
        """Return the model's modules in forward order, with their parameters; see `Decoder.list_parameter_units`."""
        first, *others = super().list_parameter_units()
        if self.layer_embedding is not None:
            more = [] if self.streams is None else list(self.streams.parameters())
            first = ForwardGatherUnit(first.module, [*first.parameters, *self.layer_embedding.parameters(), *more])
        return [first, *others]

    def pipeline_message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Return the shape [B, S or S/T, D + L P] of a micro-batch's activations between two pipeline stages."""
        rows, length, width = super().pipeline_message_shape(batch)
        return rows, length, width + self.config.num_layers * self.input_size

    def embed_inputs(self, tokens: Tensor, positions: Tensor, *more: Any, **named: Any) -> Tensor:
        """Return the embedded tokens, followed by the inputs of all layers: [B, S or S/T, D + L P].
        See `Decoder.embed_inputs`.
        """
        x = super().embed_inputs(tokens, positions, *more, **named)
        if self.layer_embedding is None:
            return x
        vision = self.config.vision
        if vision is not None and vision.layer_input_token is not None:
            tokens = tokens.masked_fill(tokens == vision.image_token, vision.layer_input_token)
        return torch.cat([x if self.streams is None else self.streams(x), self.layer_embedding(tokens, x)], -1)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pass hidden states, followed by the inputs of all layers, through this stage's layers.
        The result has the inputs too, except in the last stage.
        """
        own = replace(context, key_values=UserDict())  # of this forward alone: a step keeps those of its micro-batches
        if not self.input_size:
            return super().forward(x, own)
        x, inputs = torch.tensor_split(x, [self.config.stream_width], -1)
        own = replace(own, layer_inputs=torch.unflatten(inputs, -1, (-1, self.input_size)).unbind(-2))
        y = super().forward(x.contiguous(), own)
        return y if self.stage.heads else torch.cat([y, inputs], -1)


class LayerInputTaskDecoder(LayerInputDecoder, TaskOutputDecoder):
    """Model with a reward or task head whose layers have inputs of their own or share keys and values."""


class LayerInputTeacher(LayerInputDecoder, DistillationTeacher):
    """Teacher model for distillation whose layers have inputs of their own or share keys and values."""

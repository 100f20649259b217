"""Decoder-only transformer, or the part of one that a pipeline stage holds, with its input embeddings.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_ckpt.canonical_tensors import EMBEDDING
from mega_common.model_config import ModelConfig
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.data.micro_batch import DocumentBounds, HeadTargets, MicroBatch, MtpTargets
from mega_trainer.distributed.rng import DropoutFactory, SeededDropout
from mega_trainer.model.activation_checkpointing import ActivationCheckpointer, ActivationOffloadPool, RecomputePolicy
from mega_trainer.model.attention import build_relative_position_bias_table
from mega_trainer.model.forward_context import AttentionMask, ForwardContext, KVCache, SequenceMask
from mega_trainer.model.input_embeddings import PositionTypeEmbeddings, apply_embedding_scale
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.output_heads import MultiTokenPredictor, OutputHead, OutputProjection
from mega_trainer.model.relative_position_bias import BucketedPositionBias, LinearPositionBias, PositionBias
from mega_trainer.model.rotary_embedding import RotaryEmbedding, query_scale_by_position
from mega_trainer.model.transformer_layer import build_transformer_layer
from mega_trainer.model.vision.vision_encoder import ImageEmbedder
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.tensor_parallel import embed_token_ids, local_sequence_slice
from mega_trainer.parallel.zero_buffers import ForwardGatherUnit


@dataclass(frozen=True)
class PipelineStageLayers:
    """Share of a model in one pipeline stage: a range of layers, and the embedding and output head, if any.
    The layers are [first, last); `embeds` and `heads` say whether the stage has the embedding and the output head.

    MTP layers are in the stage of the head. `has_embedding_and_head`: one rank has the stages of both embedding and head.
    """

    first: int
    last: int
    embeds: bool = True
    heads: bool = True
    has_embedding_and_head: bool = False

    def has_embedding_used_by_other_stage(self, config: ModelConfig) -> bool:
        """Return whether this stage lends its embedding to the output head's stage, which is on the same rank."""
        return self.separates_tied_embedding(config) and self.has_embedding_and_head and self.embeds

    @classmethod
    def for_whole_model(cls, config: ModelConfig) -> PipelineStageLayers:
        """Return the layers of a single stage that has the whole model."""
        return cls(0, config.num_layers)

    def separates_tied_embedding(self, config: ModelConfig) -> bool:
        """Return whether the output head uses the embedding matrix and not both are on this pipeline stage.
        The head uses it with tied weights or MTP layers.
        """
        return (config.tie_embeddings or config.mtp_layers > 0) and not (self.embeds and self.heads)

    def has_embedding_copy(self, config: ModelConfig) -> bool:
        """Return whether first and last pipeline stage, on different ranks, each keep a copy of the embedding."""
        return self.separates_tied_embedding(config) and not self.has_embedding_and_head

    def uses_embedding_of_other_stage(self, config: ModelConfig) -> bool:
        """Return whether the output head on this pipeline stage gets the embedding from another stage of this rank.
        It then gets it with each micro-batch.
        """
        return self.separates_tied_embedding(config) and self.has_embedding_and_head and self.heads


class Decoder(nn.Module):
    """Decoder model: embedding, layers, final norm and output head; a pipeline stage has only those that `stage` lists.

    Attributes:
        other_forwards: methods in addition to `run_stage` that run the model, for which ZeRO-3 gathers weights.
    """

    other_forwards: Sequence[str] = ()

    def __init__(
        self,
        build: LayerBuilder,
        stage: PipelineStageLayers | None = None,
        recompute: RecomputePolicy | None = None,
        offload: ActivationOffloadPool | None = None,
    ) -> None:
        super().__init__()
        config = build.config
        self.config, self.groups, self.sp, self.dtype = config, build.groups, build.sp, build.dtype
        self.stage = stage or PipelineStageLayers.for_whole_model(config)
        self.saved = ActivationCheckpointer(recompute, offload)
        build = replace(build, saved=self.saved)
        self.rotary = RotaryEmbedding.from_model_config(config.full_attention_layer_config, config.rope)
        local = config.local_rope or (config.rope if config.full_attention else None)
        self.local_rotary = None if local is None else RotaryEmbedding.from_model_config(config, local)
        self.needs_positions = "position" in build.functions or config.compressed is not None
        self.routes_by_token = bool(config.moe and config.moe.hash_layers)
        # by device of the tokens: the weights may be on another one while the model is built
        self._linear_biases: dict[torch.device, LinearPositionBias] = {}
        self.deferred, self.borrows = build.deferred, self.stage.uses_embedding_of_other_stage(config)
        mtp_layers = config.mtp_layers if self.stage.heads else 0
        copied = self.stage.has_embedding_copy(config)
        table = partial(build.build_vocab_parameter, EMBEDDING, shared=(build.groups.embedding,) if copied else ())
        if self.stage.embeds or (mtp_layers and copied):
            self.embedding = build.build_token_embedding(table())
        if self.stage.embeds:
            self.inputs = PositionTypeEmbeddings(build)
        self.bias_table = (
            build_relative_position_bias_table(build, "model.relative_bias") if config.relative_bias else None
        )
        self.vision = ImageEmbedder.from_layer_builder(build) if self.stage.embeds else None
        self.layers = nn.ModuleList(
            self._build_layer(build, index) for index in range(self.stage.first, self.stage.last)
        )
        self.matrix: nn.Parameter | None = None  # output matrix, if it is not `self.embedding`'s
        self.head_bias = build.build_output_bias() if self.stage.heads else None
        if self.stage.heads:
            self.head = OutputHead(build)
            if config.task_head and not config.num_score_outputs:
                pass  # embeddings are hidden states
            elif not config.tie_embeddings:
                self.matrix = build.build_output_matrix()
            elif copied and not mtp_layers:
                self.matrix = table()
        self.predictors = nn.ModuleList(
            MultiTokenPredictor(build, config.num_layers + index) for index in range(mtp_layers)
        )

    def _build_layer(self, build: LayerBuilder, index: int) -> nn.Module:
        return build_transformer_layer(build, index)

    def list_parameter_units(self) -> list[ForwardGatherUnit]:
        """Return the model's modules in forward order, each with the parameters that it is the first to use.
        ZeRO waits for gathered weights module by module.
        """
        units = [ForwardGatherUnit(layer, list(layer.parameters())) for layer in self.layers]
        if self.stage.embeds:
            vision = [ForwardGatherUnit(self.vision, list(self.vision.parameters()))] if self.vision else []
            tables = [] if self.bias_table is None else [self.bias_table]
            first = ForwardGatherUnit(self.embedding, [self.embedding.weight, *self.inputs.parameters(), *tables])
            units[:0] = [first, *vision]
        if self.stage.heads:
            copy = self.embedding.weight if hasattr(self, "embedding") and not self.stage.embeds else None
            output = [weight for weight in (self.matrix, self.head_bias, copy) if weight is not None]
            units.append(ForwardGatherUnit(self.head.norm, [*self.head.parameters(), *output]))
            units += [ForwardGatherUnit(predictor, list(predictor.parameters())) for predictor in self.predictors]
        return units

    def materialize(self, device: torch.device) -> None:
        """Give all parameters and buffers uninitialised memory on `device`, after a build on the meta device."""
        self.to_empty(device=device)

    @property
    def device(self) -> torch.device:
        """Device of the model's weights."""
        return next(self.parameters()).device

    @property
    def output_weight(self) -> Tensor:
        """Output matrix [V/T, D] of this rank's vocabulary rows; the embedding matrix if weights are tied.
        T is the number of tensor ranks.
        """
        return self.embedding.weight if self.matrix is None else self.matrix

    def get_output_projection(self, tied_weight: Tensor | None = None) -> OutputProjection:
        """Return the output projection (weight and bias) to logits, with `tied_weight` if another stage lends it.
        `tied_weight` is the embedding [V/T, D] (T tensor ranks).
        """
        borrowed = tied_weight if self.config.tie_embeddings else None
        return OutputProjection(self.output_weight if borrowed is None else borrowed, self.head_bias)

    def make_forward_context(
        self,
        positions: Tensor,
        *,
        tokens: Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KVCache | None = None,
        dropout: SeededDropout | None = None,
        sequence_bounds: DocumentBounds | None = None,
        routing: MicroBatchRouting | None = None,
    ) -> ForwardContext:
        """Return the forward context (rotary angles, attention mask, cache) for tokens at given positions.

        Args:
            positions: int64 [B or 1, S], or [3, B, S] for multimodal rotary positions, as for `RotaryEmbedding.compute_rotation`.
            tokens: token ids int64 [B, S], required by a model that chooses experts by them (`moe.hash_layers`).
            attention_mask: replaces the mask of causality and `sequence_bounds`; ignored with a cache.
            sequence_bounds: document bounds that restrict attention; required under context parallelism, ignored with a
                cache.
        """
        rotation = local_rotation = None
        lengths = None if sequence_bounds is None else sequence_bounds.lengths
        if self.config.position == "rope":
            rotation = local_rotation = self.rotary.compute_rotation(positions, self.dtype, lengths)
            if self.local_rotary is not None:
                local_rotation = self.local_rotary.compute_rotation(positions, self.dtype, lengths)
        length, bounds = positions.shape[-1] * self.groups.cp.size, sequence_bounds or DocumentBounds([])
        attention_mask = attention_mask or SequenceMask(
            length, positions.device, bounds.document_starts, self.config.causal, bounds.bidirectional_blocks,
            blocks_in_windows=self.config.vision is not None and self.config.vision.bidirectional_windows,
        )  # fmt: skip
        return ForwardContext(
            attention_mask, rotation, local_rotation, cache, dropout, routing, self._build_attention_bias(positions.device),
            query_scale=query_scale_by_position(self.config, positions, self.dtype),
            positions=positions if self.needs_positions else None, tokens=tokens if self.routes_by_token else None,
        )  # fmt: skip

    def _build_attention_bias(self, device: torch.device) -> PositionBias | None:
        """Return the position bias (ALiBi or MPNet's) of this rank's heads, or None if the model has none."""
        if self.bias_table is not None:
            return BucketedPositionBias(self.bias_table, self.config.relative, causal=False)
        if self.config.position != "alibi":
            return None
        if device not in self._linear_biases:
            heads, tp = self.config.num_attention_heads, self.groups.tp
            bias = LinearPositionBias.for_rank(heads, tp.rank, tp.size, dtype=self.dtype, device=device)
            self._linear_biases[device] = bias
        return self._linear_biases[device]

    def make_batch_context(
        self, batch: MicroBatch, dropout: DropoutFactory, routing: MicroBatchRouting | None = None
    ) -> ForwardContext:
        """Return the forward context of a micro-batch: positions, attention mask, dropout and expert routing."""
        drop, images = dropout(batch.tokens.shape[1], 0), batch.images
        positions = batch.positions if images is None or images.positions is None else images.positions
        return self.make_forward_context(
            positions, tokens=batch.tokens, dropout=drop, sequence_bounds=batch.sequence_bounds, routing=routing
        )

    def encode_images(self, images: BatchImages | None) -> BatchImages | None:
        """Return images with features from the vision encoder; unchanged if they have some or there is no encoder.
        A collective call of the ranks that share the images.
        """
        if self.vision is None or images is None or images.features is not None:
            return images
        return images.with_features(self.vision(images, self.device))

    def add_deepstack(self, x: Tensor, context: ForwardContext, layer: int) -> Tensor:
        """Return a decoder layer's output [B, S or S/T, D] with its DeepStack features added, if it has any.
        Only the first layers of a model with DeepStack have such features.
        """
        return (
            x if self.vision is None or context.images is None else self.vision.add_deepstack(x, context.images, layer)
        )

    def embed_micro_batch(self, batch: MicroBatch, context: ForwardContext) -> Tensor:
        """Embed a micro-batch's tokens (and images) and return the input of the first layer.
        It is [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        return self.embed_inputs(batch.tokens, batch.positions, context.dropout, batch.token_types, batch.images)

    def pipeline_message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Return the shape [B, S or S/T, stream width] of a micro-batch's activations between two pipeline stages."""
        rows, length = batch.tokens.shape
        local_length = len(range(length)[local_sequence_slice(length, self.groups.tp, sp=self.sp)])
        return rows, local_length, self.config.stream_width

    def embed_inputs(
        self,
        tokens: Tensor,
        positions: Tensor,
        dropout: SeededDropout | None = None,
        types: Tensor | None = None,
        images: BatchImages | None = None,
    ) -> Tensor:
        """Embed tokens, positions, segment types and images, and return the input of the first layer.
        Tokens, positions and types are int64 [B, S], and images are optional, with features (`encode_images`); the result
        is [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        x = apply_embedding_scale(self.embedding(tokens), self.config)
        if self.vision is not None and images is not None:
            x = self.vision.insert_features(x, images)
        return self._drop_embeddings(self.inputs(x, positions, types), dropout, -1)

    def _drop_embeddings(self, x: Tensor, dropout: SeededDropout | None, layer: int) -> Tensor:
        """Apply embedding dropout; `layer` is the MTP layer of the embeddings, or -1 for the model's input embeddings."""
        return x if dropout is None else dropout.drop_residual(x, self.config.embedding_dropout, layer, "embedding")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pass hidden states through this stage's layers, without embedding and output head.
        They are [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        for index, layer in enumerate(self.layers):
            x = self.add_deepstack(self.saved.run_layer(index, layer, x, context), context, self.stage.first + index)
        return self.resize_stream_width(x, heads=self.stage.heads)

    def resize_stream_width(self, x: Tensor, *, heads: bool = False) -> Tensor:
        """Pad with zeros or cut hidden states of a model with expert shortcuts to the width that the next stage or head needs.
        In a model whose experts' output is added after the next layer, those for a stage have the stream's width, with zeros
        where there is no such output, and those for the head the model's.
        """
        width = self.config.hidden_size if heads else self.config.stream_width
        return F.pad(x, (0, width - x.shape[-1])) if self.config.has_shortcuts and x.shape[-1] != width else x

    def compute_token_loss(self, x: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the tokens' cross entropies, and each token's unweighted cross entropy [B, S].
        Labels are int64 [B, S], weights fp32 [B, S].
        """
        return self.head.compute_token_loss(
            self.head.norm(x), self.get_output_projection(), HeadTargets(labels, weights)
        )

    def compute_objective(
        self, x: Tensor, batch: MicroBatch, context: ForwardContext, tied_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss to differentiate, next-token and auxiliary loss sums [2], and each token's loss [B, S].
        The final hidden states are [B, S or S/T, D] (S/T under sequence parallelism over T ranks).

        Args:
            tied_weight: the tied embedding [V/T, D], for a stage that `borrows` it.

        Returns:
            The objective, and, not differentiable, the sums of the weighted losses [2] (of next tokens and, in training,
            of MTP or segment order), and the loss of each next token [B, S].
        """
        hidden = self.head.norm(x)
        total, losses = self.head.compute_token_loss(
            hidden, self.get_output_projection(tied_weight), batch.head_targets
        )
        loss, extra = total, total.new_zeros(())
        if self.training and self.predictors:
            extra = self._compute_mtp_loss(hidden, batch.mtp_targets, context, tied_weight)
            loss = total + self.config.mtp_loss * extra
        elif self.training and self.head.pooler is not None and batch.segment_order is not None:
            extra = self.head.pooler.segment_order_loss(hidden, batch.segment_order)
            loss = total + extra
        return loss, torch.stack([total.detach(), extra.detach()]), losses

    def _compute_mtp_loss(
        self, hidden: Tensor, targets: Sequence[MtpTargets], context: ForwardContext, tied_weight: Tensor | None
    ) -> Tensor:
        """Return the sum of the weighted multi-token prediction losses, from normalised states [B, S or S/T, D]."""
        table = self.embedding.weight if tied_weight is None else tied_weight
        output, total = self.get_output_projection(tied_weight), hidden.new_zeros(())
        for index, (predictor, one) in enumerate(zip(self.predictors, targets, strict=True)):
            embedded = apply_embedding_scale(
                embed_token_ids(one.tokens, table, self.groups.tp, sp=self.sp), self.config
            )
            embedded = self._drop_embeddings(embedded, context.dropout, self.config.num_layers + index)
            hidden = self.saved.run_layer(len(self.layers) + index, predictor, embedded, hidden, context)
            total = total + self.head.compute_token_loss(hidden, output, HeadTargets(one.labels, one.weights))[0]
        return total

    def run_stage(
        self, x: Tensor | None, batch: MicroBatch, context: ForwardContext, tied_weight: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Run this stage on a micro-batch; return hidden states or, in the last stage, `compute_objective`'s result.
        It is one forward, so that ZeRO-3 gathers weights around it. Hidden states are of `pipeline_message_shape`.

        Args:
            x: hidden states from the previous stage; None: this stage embeds the tokens.
            tied_weight: the tied embedding [V/T, D], for a stage that `borrows` it.
        """
        if x is None:
            images = self.encode_images(batch.images)
            context = replace(context, images=images)
            x = self.embed_micro_batch(replace(batch, images=images), context)
        y = self.forward(x, context)
        return self.compute_objective(y, batch, context, tied_weight) if self.stage.heads else y

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return logits [B, S, V] of final hidden states over the whole vocabulary on every rank; not for training."""
        return self.head.compute_logits(self.head.norm(x), self.get_output_projection())

"""The decoder-only transformer, or the part of one that a pipeline stage holds.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mega_ckpt.names import EMBEDDING
from mega_trainer.batch import Ahead, MicroBatch, Outline, Targets
from mega_trainer.model.blocks import block_of
from mega_trainer.model.builder import Builder
from mega_trainer.model.cached import Cache
from mega_trainer.model.context import Context, Sequences, Sight
from mega_trainer.model.embeddings import Inputs, scaled
from mega_trainer.model.heads import Head, Output
from mega_trainer.model.mtp import Predictor
from mega_trainer.model.offload import Offload
from mega_trainer.model.recompute import Recompute, SavedActivations
from mega_trainer.model.rope import Rotary
from mega_trainer.model.routing import Routing
from mega_trainer.model.stage import Stage
from mega_trainer.model.vision.images import Images
from mega_trainer.model.vision.tower import Vision
from mega_trainer.parallel.grads import Unit
from mega_trainer.parallel.tensor import embed_tokens, sequence_part
from mega_trainer.rng import Dropout, Dropouts


class Decoder(nn.Module):
    """Embedding, layers, final norm and head, as far as `stage` has them."""

    def __init__(
        self,
        build: Builder,
        stage: Stage | None = None,
        recompute: Recompute | None = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__()
        config = build.config
        self.config, self.groups, self.sp, self.dtype = config, build.groups, build.sp, build.dtype
        self.stage = stage or Stage.whole(config)
        self.saved = SavedActivations(recompute, offload)
        build = replace(build, saved=self.saved)
        self.rotary = Rotary.of(config, config.rope)
        self.local_rotary = None if config.local_rope is None else Rotary.of(config, config.local_rope)
        self.deferred, self.borrows = build.deferred, self.stage.borrows(config)
        further = config.mtp_layers if self.stage.heads else 0
        copied = self.stage.copies(config)
        table = partial(build.vocabulary, EMBEDDING, shared=(build.groups.embedding,) if copied else ())
        if self.stage.embeds or (further and copied):
            self.embedding = build.embedding(table())
        if self.stage.embeds:
            self.inputs = Inputs(build)
        self.vision = Vision.of(build) if self.stage.embeds else None
        self.layers = nn.ModuleList(self._layer(build, index) for index in range(self.stage.first, self.stage.last))
        self.matrix: nn.Parameter | None = None  # of the output, where it is no embedding's that is here
        self.head_bias = build.vocabulary_bias("lm_head.bias") if self.stage.heads and config.head_bias else None
        if self.stage.heads:
            self.head = Head(build)
            if not config.tie_embeddings:
                self.matrix = build.head()
            elif copied and not further:
                self.matrix = table()
        self.predictors = nn.ModuleList(Predictor(build, config.num_layers + index) for index in range(further))

    def _layer(self, build: Builder, index: int) -> nn.Module:
        return block_of(build, index)

    def units(self) -> list[Unit]:
        """The parts in the order of a forward, each with the parameters that it is the first to need."""
        found = [Unit(layer, list(layer.parameters())) for layer in self.layers]
        if self.stage.embeds:
            seeing = [Unit(self.vision, list(self.vision.parameters()))] if self.vision else []
            found[:0] = [Unit(self.embedding, [self.embedding.weight, *self.inputs.parameters()]), *seeing]
        if self.stage.heads:
            copy = self.embedding.weight if hasattr(self, "embedding") and not self.stage.embeds else None
            output = [weight for weight in (self.matrix, self.head_bias, copy) if weight is not None]
            found.append(Unit(self.head.norm, [*self.head.parameters(), *output]))
            found += [Unit(predictor, list(predictor.parameters())) for predictor in self.predictors]
        return found

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V/T, D], which may be the embedding's."""
        return self.embedding.weight if self.matrix is None else self.matrix

    def output(self, borrowed: Tensor | None = None) -> Output:
        """What the head makes logits by; a stage that `borrows` is given the embedding [V/T, D]."""
        lent = borrowed if self.config.tie_embeddings else None
        return Output(self.head_weight if lent is None else lent, self.head_bias)

    def context(
        self,
        positions: Tensor,
        *,
        sight: Sight | None = None,
        cache: Cache | None = None,
        dropout: Dropout | None = None,
        outline: Outline | None = None,
        routing: Routing | None = None,
    ) -> Context:
        """What the layers share for tokens at `positions` int64 [B or 1, S], or [3, B, S] as `Rotary.at` takes them.

        `outline` says where attention is closed at document ends; it is required where context ranks have other tokens.
        An explicit `sight` replaces what would be derived; with a cache, which knows better, neither is asked.
        """
        turn = local = None
        lengths = None if outline is None else outline.lengths
        if self.config.position == "rope":
            turn = self.rotary.at(positions, self.dtype, lengths)
            local = turn if self.local_rotary is None else self.local_rotary.at(positions, self.dtype, lengths)
        length, known = positions.shape[-1] * self.groups.cp.size, outline or Outline([])
        sight = sight or Sequences(length, positions.device, known.begins, self.config.causal, known.blocks)
        return Context(sight, turn, local, cache, dropout, routing)

    def context_of(self, batch: MicroBatch, dropout: Dropouts, routing: Routing | None = None) -> Context:
        """The same for a micro-batch."""
        drop, seen = dropout(batch.tokens.shape[1], 0), batch.images
        positions = batch.positions if seen is None or seen.positions is None else seen.positions
        return self.context(positions, dropout=drop, outline=batch.outline, routing=routing)

    def begin(self, batch: MicroBatch, context: Context) -> Tensor:
        """A micro-batch's stream into the first layer."""
        return self.embed(batch.tokens, batch.positions, context.dropout, batch.types, batch.images)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Of its stream between two stages: [B, S or S/T, D]."""
        rows, length = batch.tokens.shape
        return rows, len(range(length)[sequence_part(length, self.groups.tp, sp=self.sp)]), self.config.hidden_size

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        dropout: Dropout | None = None,
        types: Tensor | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """Tokens, positions and types of segment, int64 [B, S], and perhaps images, to the residual stream [B, S or S/T, D]."""
        x = scaled(self.embedding(tokens), self.config)
        if self.vision is not None and images is not None:
            x = self.vision(x, images)
        return self._drop(self.inputs(x, positions, types), dropout, -1)

    def _drop(self, x: Tensor, dropout: Dropout | None, layer: int) -> Tensor:
        """Dropout of embeddings that are for that layer; -1 for those of the model's first."""
        return x if dropout is None else dropout.residual(x, self.config.embedding_dropout, layer, "embedding")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream through this stage's layers."""
        for index, layer in enumerate(self.layers):
            x = self.saved.layer(index, layer, x, context)
        return x

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the cross entropies of labels int64 [B, S], weighted by fp32 [B, S], and each token's [B, S]."""
        return self.head.loss(self.head.norm(x), self.output(), Targets(labels, weights))

    def objective(
        self, x: Tensor, batch: MicroBatch, context: Context, borrowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What training makes small, from the residual stream [B, S or S/T, D], and what it is made of.

        That is not differentiable: the sums of the weighted losses of the next tokens and, in training, of further ones or of
        pairs of segments, [2], and the loss of each next token [B, S]. A stage that `borrows` is given the embedding [V/T, D].
        """
        hidden = self.head.norm(x)
        total, each = self.head.loss(hidden, self.output(borrowed), batch.targets)
        loss, further = total, total.new_zeros(())
        if self.training and self.predictors:
            further = self._further(hidden, batch.ahead, context, borrowed)
            loss = total + self.config.mtp_loss * further
        elif self.training and self.head.pooler is not None and batch.pairs is not None:
            further = self.head.pooler.loss(hidden, batch.pairs)
            loss = total + further
        return loss, torch.stack([total.detach(), further.detach()]), each

    def _further(self, hidden: Tensor, ahead: Sequence[Ahead], context: Context, borrowed: Tensor | None) -> Tensor:
        """The sum of the weighted losses of further tokens, from what has been normed, [B, S or S/T, D]."""
        table, output = self.embedding.weight if borrowed is None else borrowed, self.output(borrowed)
        total = hidden.new_zeros(())
        for index, (predictor, one) in enumerate(zip(self.predictors, ahead, strict=True)):
            embedded = scaled(embed_tokens(one.tokens, table, self.groups.tp, sp=self.sp), self.config)
            embedded = self._drop(embedded, context.dropout, self.config.num_layers + index)
            hidden = self.saved.layer(len(self.layers) + index, predictor, embedded, hidden, context)
            total = total + self.head.loss(hidden, output, Targets(one.labels, one.weights))[0]
        return total

    def whole(self, batch: MicroBatch, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """All of a model on one stage, from tokens to `objective`, as one forward: ZeRO-3 gathers weights around it."""
        x = self.forward(self.begin(batch, context), context)
        return self.objective(x, batch, context)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, V] of the residual stream, whole on every tensor rank. Not for training."""
        return self.head.logits(self.head.norm(x), self.output())

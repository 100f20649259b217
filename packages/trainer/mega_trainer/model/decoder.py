"""The decoder-only transformer, or the part of one that a pipeline stage holds.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mega_common.model_config import ModelConfig
from mega_trainer.batch import MicroBatch
from mega_trainer.comm import all_gather
from mega_trainer.model.block import Block
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Cache, Context, Outline, Sequences, Sight
from mega_trainer.model.loss import head_loss
from mega_trainer.model.mtp import Predictor
from mega_trainer.model.offload import Offload
from mega_trainer.model.recompute import Recompute, SavedActivations
from mega_trainer.model.rope import Rotary
from mega_trainer.model.routing import Routing
from mega_trainer.parallel.grads import Unit
from mega_trainer.parallel.tensor import embed_tokens, sequence_part, whole_sequence
from mega_trainer.rng import Dropout


@dataclass(frozen=True)
class Stage:
    """Which part of the model: layers [first, last), with the embedding before and the head behind where it has them.

    Layers that predict further tokens go with the head. `ends_meet` says that embedding and head, if not in one stage,
    are in two of the same rank.
    """

    first: int
    last: int
    embeds: bool = True
    heads: bool = True
    ends_meet: bool = False

    @classmethod
    def whole(cls, config: ModelConfig) -> Stage:
        """All of the model."""
        return cls(0, config.num_layers)


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
        self.deferred, self.leaves = build.deferred, build.leaves
        further = config.mtp_layers if self.stage.heads else 0
        apart = (config.tie_embeddings or config.mtp_layers > 0) and not (self.stage.embeds and self.stage.heads)
        copied = apart and not self.stage.ends_meet
        copies = (build.groups.embedding,) if copied else ()
        self.borrows = apart and self.stage.ends_meet and self.stage.heads
        if self.stage.embeds or (further and copied):
            self.embedding = build.embedding(build.vocabulary("model.embed_tokens.weight", shared=copies))
        if self.stage.embeds and config.position == "learned":
            shape = (config.max_position, config.hidden_size)
            self.positions = build.replicated("model.embed_positions.weight", shape, std=config.init_std)
        self.layers = nn.ModuleList(Block(build, index) for index in range(self.stage.first, self.stage.last))
        if self.stage.heads:
            self.norm = build.norm("model.norm")
            if not config.tie_embeddings:
                self.head = build.vocabulary("lm_head.weight")
            elif copied and not hasattr(self, "embedding"):
                self.head = build.vocabulary("model.embed_tokens.weight", shared=copies)
        self.predictors = nn.ModuleList(Predictor(build, config.num_layers + index) for index in range(further))

    def units(self) -> list[Unit]:
        """The parts in the order of a forward, each with the parameters that it is the first to need."""
        found = [Unit(layer, list(layer.parameters())) for layer in self.layers]
        if self.stage.embeds:
            positions = [self.positions] if hasattr(self, "positions") else []
            found.insert(0, Unit(self.embedding, [self.embedding.weight, *positions]))
        if self.stage.heads:
            head = [self.head] if hasattr(self, "head") else []
            copy = [self.embedding.weight] if hasattr(self, "embedding") and not self.stage.embeds else []
            found.append(Unit(self.norm, [*self.norm.parameters(), *head, *copy]))
            found += [Unit(predictor, list(predictor.parameters())) for predictor in self.predictors]
        return found

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V/T, D], which may be the embedding's."""
        return self.head if hasattr(self, "head") else self.embedding.weight

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
        """What the layers share for tokens at `positions` int64 [B or 1, S].

        `outline` says where attention is closed at document ends; it is required where context ranks have other tokens.
        An explicit `sight` replaces what would be derived; with a cache, which knows better, neither is asked.
        """
        turn = local = None
        lengths = None if outline is None else outline.lengths
        if self.config.position == "rope":
            turn = self.rotary.at(positions, self.dtype, lengths)
            local = turn if self.local_rotary is None else self.local_rotary.at(positions, self.dtype, lengths)
        begins = None if outline is None else outline.begins
        sight = sight or Sequences(positions.shape[-1] * self.groups.cp.size, positions.device, begins)
        return Context(sight, turn, local, cache, dropout, routing)

    def embed(self, tokens: Tensor, positions: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Tokens and positions, int64 [B, S], to the residual stream [B, S or S/T, D]."""
        x = self._scaled(self.embedding(tokens))
        if self.config.position == "learned":
            part = sequence_part(tokens.shape[1], self.groups.tp, sp=self.sp)
            x = x + nn.functional.embedding(positions[:, part], self.positions)
        return self._drop(x, dropout, -1)

    def _scaled(self, x: Tensor) -> Tensor:
        """Embeddings as the layers want them; Gemma's factor is rounded to their dtype, as it was trained."""
        if self.config.scale_embeddings:
            x = x * x.new_tensor(math.sqrt(self.config.hidden_size))
        return x if self.config.embedding_multiplier == 1 else x * self.config.embedding_multiplier

    def _before_head(self, x: Tensor) -> Tensor:
        """What the output matrix is multiplied with: `logit_scale` is on this side of it, where it is less to do."""
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def _drop(self, x: Tensor, dropout: Dropout | None, layer: int) -> Tensor:
        """Dropout of embeddings that are for that layer; -1 for those of the model's first."""
        return x if dropout is None else dropout.residual(x, self.config.embedding_dropout, layer, "embedding")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream through this stage's layers."""
        for index, layer in enumerate(self.layers):
            x = self.saved.layer(index, layer, x, context)
        return x

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of the cross entropies, and each token's [B, S], from the residual stream.

        Args:
            x: [B, S or S/T, D].
            labels: int64 [B, S].
            weights: fp32 [B, S].
        """
        return self._head_loss(self.norm(x), labels, weights, self.head_weight)

    def objective(
        self, x: Tensor, batch: MicroBatch, context: Context, borrowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What training makes small, from the residual stream [B, S or S/T, D], and what it is made of.

        That is not differentiable: the sums of the weighted losses of the next tokens and, in training, of further ones,
        [2], and the loss of each next token [B, S]. A stage that `borrows` is given the embedding [V/T, D].
        """
        hidden = self.norm(x)
        head = borrowed if borrowed is not None and self.config.tie_embeddings else self.head_weight
        total, each = self._head_loss(hidden, batch.labels, batch.weights, head)
        further = total.new_zeros(())
        if not (self.training and self.predictors):
            return total, torch.stack([total.detach(), further]), each
        table = self.embedding.weight if borrowed is None else borrowed
        for index, (predictor, ahead) in enumerate(zip(self.predictors, batch.ahead, strict=True)):
            embedded = self._scaled(embed_tokens(ahead.tokens, table, self.groups.tp, sp=self.sp))
            embedded = self._drop(embedded, context.dropout, self.config.num_layers + index)
            hidden = self.saved.layer(len(self.layers) + index, predictor, embedded, hidden, context)
            loss, _ = self._head_loss(hidden, ahead.labels, ahead.weights, head)
            further = further + loss
        return total + self.config.mtp_loss * further, torch.stack([total.detach(), further.detach()]), each

    def whole(self, batch: MicroBatch, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """All of a model on one stage, from tokens to `objective`, as one forward: ZeRO-3 gathers weights around it."""
        x = self.forward(self.embed(batch.tokens, batch.positions, context.dropout), context)
        return self.objective(x, batch, context)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, V] of the residual stream, whole on every tensor rank. Not for training."""
        hidden = whole_sequence(self._before_head(self.norm(x)), self.groups.tp, sp=self.sp)
        local = nn.functional.linear(hidden, self.head_weight)
        logits, cap = all_gather(local, self.groups.tp, -1)[..., : self.config.vocab_size], self.config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def _head_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """As `loss`, of what has been normed, through the output matrix [V/T, D]."""
        total, losses = head_loss(
            whole_sequence(self._before_head(hidden), self.groups.tp, sp=self.sp).flatten(0, 1), head,
            labels.flatten(), weights.flatten(), self.groups.tp, self.config.vocab_size, self.config.logit_softcap, self.leaves,
        )  # fmt: skip
        return total, losses.view(labels.shape)

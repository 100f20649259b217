"""The decoder-only transformer, or the part of one that a pipeline stage holds.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_common.model_config import ModelConfig
from mega_trainer.comm import all_gather
from mega_trainer.model.block import Block
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Cache, Context, Sequences, Sight
from mega_trainer.model.loss import head_loss
from mega_trainer.model.rope import rotation
from mega_trainer.parallel.grads import Unit
from mega_trainer.parallel.tensor import gather_sequence, sequence_part, sum_gradient
from mega_trainer.rng import Dropout


@dataclass(frozen=True)
class Stage:
    """Which part of the model: layers [first, last), with the embedding before and the head behind where it has them.

    `ends_meet` says that embedding and head, if not in one stage, are in two of the same rank.
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


@dataclass(frozen=True)
class Recompute:
    """What the backward pass computes again instead of keeping: nothing, the cheap and large parts, or whole layers.

    `layers` bounds `full` to the first so many layers of each stage.
    """

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None


class Decoder(nn.Module):
    """Embedding, layers, final norm and head, as far as `stage` has them."""

    def __init__(self, build: Builder, stage: Stage | None = None, recompute: Recompute | None = None) -> None:
        super().__init__()
        config = build.config
        self.config, self.groups, self.sp, self.dtype = config, build.groups, build.sp, build.dtype
        self.stage = stage or Stage.whole(config)
        self.recompute = recompute or Recompute()
        self.deferred = build.deferred
        whole = self.stage.embeds and self.stage.heads
        copied = config.tie_embeddings and not (whole or self.stage.ends_meet)
        copies = (build.groups.embedding,) if copied else ()
        if self.stage.embeds:
            self.embedding = build.embedding(build.vocabulary("model.embed_tokens.weight", shared=copies))
            if config.position == "learned":
                shape = (config.max_position, config.hidden_size)
                self.positions = build.replicated("model.embed_positions.weight", shape, std=config.init_std)
        selective = self.recompute.kind == "selective"
        self.layers = nn.ModuleList(
            Block(build, index, selective=selective) for index in range(self.stage.first, self.stage.last)
        )
        if self.stage.heads:
            self.norm = build.norm("model.norm")
            if not config.tie_embeddings:
                self.head = build.vocabulary("lm_head.weight")
            elif copied:
                self.head = build.vocabulary("model.embed_tokens.weight", shared=copies)

    def units(self) -> list[Unit]:
        """The parts in the order of a forward, each with the parameters that it is the first to need."""
        found = [Unit(layer, list(layer.parameters())) for layer in self.layers]
        if self.stage.embeds:
            positions = [self.positions] if hasattr(self, "positions") else []
            found.insert(0, Unit(self.embedding, [self.embedding.weight, *positions]))
        if self.stage.heads:
            head = [self.head] if hasattr(self, "head") else []
            found.append(Unit(self.norm, [*self.norm.parameters(), *head]))
        return found

    @property
    def borrows_head(self) -> bool:
        """Whether the output matrix is the embedding of another stage of this rank."""
        return self.stage.heads and not self.stage.embeds and not hasattr(self, "head")

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V/T, D], which may be the embedding's."""
        return self.head if hasattr(self, "head") else self.embedding.weight

    def context(
        self,
        positions: Tensor,
        *,
        documents: Tensor | None = None,
        sight: Sight | None = None,
        cache: Cache | None = None,
        dropout: Dropout | None = None,
    ) -> Context:
        """What the layers share for tokens at `positions` int64 [B or 1, S].

        `documents` int [B, S] closes attention at document ends; an explicit `sight` replaces what would be derived,
        and is required with a cache that already holds tokens.
        """
        turn = local = None
        if self.config.position == "rope":
            turn = rotation(self.config, self.config.rope, positions, self.dtype)
            local_rope = self.config.local_rope
            local = turn if local_rope is None else rotation(self.config, local_rope, positions, self.dtype)
        sight = sight or Sequences(positions.shape[-1], documents, positions.device)
        return Context(sight, turn, local, cache, dropout)

    def embed(self, tokens: Tensor, positions: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Tokens and positions, int64 [B, S], to the residual stream [B, S or S/T, D]."""
        x: Tensor = self.embedding(tokens)
        if self.config.position == "learned":
            part = sequence_part(tokens.shape[1], self.groups.tp, sp=self.sp)
            x = x + nn.functional.embedding(positions[:, part], self.positions)
        return x if dropout is None else dropout.residual(x, self.config.embedding_dropout, -1, "embedding")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream through this stage's layers."""
        full = self.recompute.kind == "full" and self.training
        bound = len(self.layers) if self.recompute.layers is None else self.recompute.layers
        for index, layer in enumerate(self.layers):
            if full and index < bound:
                x = checkpoint(layer, x, context, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, context)
        return x

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor, head: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weighted sum of the cross entropies, and each token's [B, S], from the residual stream.

        Args:
            x: [B, S or S/T, D].
            labels: int64 [B, S].
            weights: fp32 [B, S].
            head: the output matrix [V/T, D] of a stage that borrows it.
        """
        hidden = self._final(x)
        head = self.head_weight if head is None else head
        total, losses = head_loss(
            hidden.flatten(0, 1), head, labels.flatten(), weights.flatten(), self.groups.tp,
            self.config.vocab_size,
        )  # fmt: skip
        return total, losses.view(labels.shape)

    def whole(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, weights: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """All of a model on one stage, from tokens to `loss`, as one forward: ZeRO-3 gathers weights around it."""
        x = self.forward(self.embed(tokens, positions, context.dropout), context)
        return self.loss(x, labels, weights)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, V] of the residual stream, whole on every tensor rank. Not for training."""
        local = nn.functional.linear(self._final(x), self.head_weight)
        return all_gather(local, self.groups.tp, -1)[..., : self.config.vocab_size]

    def _final(self, x: Tensor) -> Tensor:
        """Norm, and the whole sequence. Each rank's head rows give a part of the gradient, summed on the way back."""
        x = self.norm(x)
        return gather_sequence(x, self.groups.tp) if self.sp else sum_gradient(x, self.groups.tp)

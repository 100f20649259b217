"""Output heads after a model's layers: final norm, logits and losses, multi-token and masked prediction, pooler.

Modules before the output matrix work on this rank's part of the sequence: under sequence parallelism their gradients are
summed over the tensor ranks, otherwise each rank has the whole gradient.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.data.micro_batch import HeadTargets, SegmentOrderTargets
from mega_trainer.distributed.comm import all_gather
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.hyper_connections import build_final_norm
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.transformer_layer import build_transformer_layer
from mega_trainer.model.vocab_parallel_loss import (
    LossTargets,
    TeacherTargets,
    TokenLossTargets,
    fused_linear_cross_entropy,
)
from mega_trainer.parallel.tensor_parallel import gather_from_sequence_parallel_region

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
}  # fmt: skip


class MaskedLanguageHead(nn.Module):
    """BERT's transform norm(act(W x + b)) of hidden states before the output matrix."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config, head = build.config, build.config.masked_lm
        assert head is not None
        self.weight, self.bias = build_dense_parameters(
            build, "lm_head.dense", config.embedding_width, bias=head.dense_bias
        )
        self.activate = _ACTIVATIONS[head.activation]
        self.linear, self.norm = (
            build.unsharded_linear,
            build.build_residual_norm("lm_head.norm", config.embedding_width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply BERT's transform norm(act(W x + b)) to hidden states, which gives them the width of the embedding.
        They are [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        y: Tensor = self.norm(self.activate(self.linear(x, self.weight, self.bias)))
        return y


class SequencePooler(nn.Module):
    """BERT's pooler act(W x + b) of the first token, with an optional classifier of swapped segments."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        width, groups = build.config.hidden_size, build.groups
        self.weight, self.bias = build_dense_parameters(build, "model.pooler", width, bias=True)
        self.activate = _ACTIVATIONS[build.config.pooler_activation]
        self.classes: nn.Parameter | None = None
        self.offset: nn.Parameter | None = None
        if build.config.sentence_pairs:
            self.classes, self.offset = build_dense_parameters(build, "pair_head", 2, bias=True)
        self.linear = build.unsharded_linear
        self.has_first = groups.cp.rank == 0 and (groups.tp.rank == 0 or not build.sp)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states to the pooled first token [B, D], meaningful only on a rank that has this token.
        The hidden states are [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        return self.activate(self.linear(x[:, :1], self.weight, self.bias))[:, 0]

    def pool_tokens(self, x: Tensor) -> Tensor:
        """Apply the pooler to the hidden states of each token.
        They are [B, S or S/T, D] (S/T under sequence parallelism over T ranks), as the result.
        """
        return self.activate(self.linear(x, self.weight, self.bias))

    def segment_order_logits(self, x: Tensor) -> Tensor:
        """Map hidden states to segment-order logits [B, 2]: segments in order, and segments swapped.
        The hidden states are [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        assert self.classes is not None
        return self.linear(self(x), self.classes, self.offset)

    def segment_order_loss(self, x: Tensor, pairs: SegmentOrderTargets) -> Tensor:
        """Return the weighted sum of the segment-order cross entropies, zero on ranks without the first token.
        It is computed from hidden states [B, S or S/T, D] (S/T under sequence parallelism over T ranks).

        A rank without the first token computes it from another token, times zero: all ranks run the same operations.
        """
        losses = F.cross_entropy(upcast_to_fp32(self.segment_order_logits(x)), pairs.labels, reduction="none")
        return (losses * (pairs.weights if self.has_first else 0 * pairs.weights)).sum()


def build_dense_parameters(
    build: LayerBuilder, name: str, rows: int, *, bias: bool
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Build the weight [rows, D] and, with `bias`, bias [rows] of a linear layer, whole on every tensor rank."""
    config = build.config
    weight = build.build_replicated(f"{name}.weight", (rows, config.hidden_size), std=config.init_std)
    return weight, build.build_replicated(f"{name}.bias", (rows,)) if bias else None


class OutputProjection(NamedTuple):
    """Weight [V/T, D] and bias [V/T] that map hidden states to the logits of this rank's vocabulary rows.
    The V rows are split over T tensor ranks.
    """

    weight: Tensor
    bias: Tensor | None


class OutputHead(nn.Module):
    """Output head of a language model: final norm, and logits and losses by an output matrix.
    The matrix may be the tied embedding or belong to another stage.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config = build.config
        self.config, self.tp, self.sp, self.leaves = config, build.groups.tp, build.sp, build.leaves
        self.norm = build_final_norm(build)
        self.transform = MaskedLanguageHead(build) if config.masked_lm and config.masked_lm.dense else None
        self.pooler = SequencePooler(build) if config.pooler else None

    def prepare_hidden_for_logits(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [B, S, width] that multiply the output matrix: transformed (BERT), scaled and gathered.
        They are computed from normalised hidden states [B, S or S/T, D] (S/T under sequence parallelism over T ranks).

        `logit_scale` is applied here, where there are fewer elements than in the logits.
        """
        x = hidden if self.transform is None else self.transform(hidden)
        x = x if self.config.logit_scale == 1 else x * self.config.logit_scale
        return gather_from_sequence_parallel_region(x, self.tp, sp=self.sp)

    def compute_logits(self, hidden: Tensor, output: OutputProjection) -> Tensor:
        """Return logits [B, S, V] of normed hidden states over the whole vocabulary on every rank; not for training."""
        local = F.linear(self.prepare_hidden_for_logits(hidden), *output)
        logits, cap = all_gather(local, self.tp, -1)[..., : self.config.vocab_size], self.config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def compute_token_loss(
        self, hidden: Tensor, output: OutputProjection, targets: HeadTargets
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses and each token's loss [B, S], from normalised hidden states.
        The hidden states are [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        shape, cap, weight_fn = targets.labels.shape, self.config.logit_softcap, targets.weight_fn
        flat_weight_fn = None if weight_fn is None else (lambda log_probs: weight_fn(log_probs.view(shape)).flatten())
        soft = targets.soft_labels
        rows = output.weight.shape[0]
        other: LossTargets | None = None if soft is None else TeacherTargets(soft, rows, self.tp, cap)
        if targets.token_loss is not None:
            other = TokenLossTargets(targets.token_loss, targets.labels.flatten(), rows, self.tp, cap, self.leaves)
        total, losses = fused_linear_cross_entropy(
            self.prepare_hidden_for_logits(hidden).flatten(0, 1), output.weight, targets.labels.flatten(), targets.weights.flatten(),
            self.tp, self.config.vocab_size, cap, self.leaves, output.bias, flat_weight_fn, other,
        )  # fmt: skip
        return total, losses.view(shape)


class MultiTokenPredictor(nn.Module):
    """Multi-token prediction (MTP) layer, which predicts one more token ahead.
    Its number `layer` follows the numbers of the model's layers.

    The k-th layer (arXiv:2412.19437, section 2.2) predicts token i + 1 + k from the previous MTP layer's output for token i (the
    first: from the model's normalised output) and the embedding of token i + k, with the model's embedding and head:

        h = norm(block(W [enorm(embedding), hnorm(h)]))

    Weights have the names and layout of DeepSeek-V3's checkpoints. Evaluation ignores these layers; generation can use them
    for speculative decoding. W [D, 2 D] is whole on every tensor rank: under sequence parallelism each rank applies it to its
    part of the sequence.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        name, width = f"model.layers.{layer}", build.config.hidden_size
        self.layer, self.linear = layer, build.unsharded_linear
        self.embedding_norm = build.build_residual_norm(f"{name}.enorm")
        self.hidden_norm = build.build_residual_norm(f"{name}.hnorm")
        self.join = build.build_replicated(f"{name}.eh_proj.weight", (width, 2 * width), std=build.config.init_std)
        self.block = build_transformer_layer(build, layer)
        self.norm = build.build_residual_norm(f"{name}.shared_head.norm")

    def forward(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Map embeddings of later tokens and hidden states to the hidden states of a multi-token prediction layer.
        The embeddings belong to tokens k positions ahead; the hidden states are the previous layer's. All are [B, S
        or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        y: Tensor = self.norm(self.block(self.linear(joined, self.join), context))
        return y

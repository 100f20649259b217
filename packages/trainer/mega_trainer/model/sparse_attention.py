"""DeepSeek's sparse attention (DSA, DeepSeek-V3.2): latent attention over the tokens that a lightning indexer selects.

For a query at token s the indexer scores every earlier token t, with few and narrow heads that share one key:

    I_st = sum_h w_sh ReLU(q_sh . k_t / sqrt(d)) / sqrt(heads)      q = q' W_q, k = LayerNorm(x W_k), w = x W_w

with q' the latent of the queries, and the first elements of q and k rotated. The query attends to the `top_k` tokens of the
largest I_st. Selection has no gradient. The indexer is trained by its divergence from the attention that it selects for,

    KL(p_s || softmax(I_s)),   p_s the sum of the attention probabilities of all heads, normalised to a sum of one

over the selected tokens, or over all with `dense`, the warm-up of the indexer. x, q' and p are constants in this loss, so that
only the indexer has its gradient; the loss of the model has none for the indexer. It is averaged over the unmasked tokens
of a sequence and over the sequences of a step, and summed over layers, so it does not depend on the layout.

Index heads are split over the tensor ranks, whose scores are summed, as is p. Under context parallelism of any kind the latents and
index keys of all ranks are gathered, which are narrow, and a rank attends with its queries. Pairs of tokens that are not selected
are masked, not skipped: time and memory are those of attention over all tokens. Without a loss, sequences of at most `top_k`
tokens need no scores, and have the model's attention kernel.

Legend: B batch, S sequence, s tokens of a context rank, H this rank's heads, h its index heads, d size of an index key, c latent
and r rotated part of a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from mega_trainer.distributed.comm import CommGroup, all_reduce
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.attention_masks import (
    CAUSAL,
    AttentionMaskSpec,
    PagedAttentionName,
    VisiblePagedKeys,
    materialize_dense_mask,
)
from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.model.expert_router import attach_auxiliary_loss
from mega_trainer.model.forward_context import CacheAttentionFunction, ForwardContext
from mega_trainer.model.latent_attention import MultiLatentAttention
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm
from mega_trainer.parallel.context_parallel import gather_context_parallel_tokens, get_context_rank_token_indices
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction
from mega_trainer.parallel.tensor_parallel import gather_from_sequence_parallel_region, sum_partial_results

KEY_NORM_EPS = 1e-6  # as in transformers, independent of the model's


def score_index_keys(q: Tensor, weights: Tensor, k: Tensor, size: int, tp: CommGroup) -> Tensor:
    """Return the index scores [B, s, S] summed over the index heads of all tensor ranks, in the dtype of the weights.
    Index queries are [B, s, h, d], their weights [B, s, h], and index keys [B, S, d] of `size` d.
    """
    products = q.to(weights.dtype) @ k.to(weights.dtype).transpose(-1, -2).unsqueeze(1)
    scores = torch.relu(products * size**-0.5)
    return sum_partial_results((weights.unsqueeze(-2) @ scores).squeeze(-2), tp, sp=False)


def select_best_keys(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return the mask of the `count` keys with the largest scores of each query, among those `seen`.
    Scores and mask are [B, s, S], `seen` is bool [B or 1, s, S].
    """
    best = scores.detach().masked_fill(~seen, float("-inf")).topk(min(count, scores.shape[-1]), -1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices, True) & seen


class LightningIndexer(nn.Module):
    """Lightning indexer of sparse attention: narrow index queries, one index key and head weights of each token."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, mla, name = build.config, build.config.mla, f"model.layers.{layer}.self_attn.indexer"
        assert mla is not None
        assert mla.indexer is not None
        assert mla.q_lora_rank is not None
        self.config, self.rotated, self.kernels = mla.indexer, mla.qk_rope_head_dim, build.kernels
        self.tp, self.sp = build.groups.tp, build.sp
        heads, size, width, std = self.config.num_heads, self.config.head_dim, config.hidden_size, config.init_std
        self.linear = ParallelLinearFunction(
            build.kernels, build.deferred
        )  # never in fp8, as selection is by its order
        self.query = build.build_column_weight(f"{name}.wq_b", heads * size, mla.q_lora_rank)
        self.key = build.build_replicated(f"{name}.wk.weight", (size, width), std=std)
        scale = build.build_replicated(f"{name}.k_norm.weight", (size,), fill=1.0)
        offset = build.build_replicated(f"{name}.k_norm.bias", (size,))
        self.key_norm = Norm(build.kernels, scale, offset, KEY_NORM_EPS, layer=True)
        self.head_weights = build.build_replicated(f"{name}.weights_proj.weight", (heads, width), std=std)

    @property
    def is_trained(self) -> bool:
        """True if a loss trains the indexer."""
        return bool(self.config.kl_loss) and any(weight.requires_grad for weight in self.parameters())

    def forward(self, x: Tensor, query_latent: Tensor, rotation: RotaryAngles) -> tuple[Tensor, Tensor, Tensor]:
        """Return index queries [B, s, h, d], their weights [B, s, h] in at least fp32, and index keys [B, s, d].

        Args:
            x: hidden states [B, s or s/T, D] (s/T under sequence parallelism over T ranks).
            query_latent: latent of the queries [B, s, q].
        """
        key = self.key_norm(self.linear(x, self.key)).to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = functional.linear(x.to(wide), self.head_weights.to(wide))
        key, weights = (gather_from_sequence_parallel_region(part, self.tp, sp=self.sp) for part in (key, weights))
        own = weights.shape[-1] // self.tp.size
        weights = weights[..., self.tp.rank * own : (self.tp.rank + 1) * own] * self.config.num_heads**-0.5
        q = torch.unflatten(self.linear(query_latent, self.query), -1, (own, -1))
        angles = replace(rotation, interleaved=self.config.interleaved)
        return self._rotate(q, angles), weights, self._rotate(key.unsqueeze(2), angles).squeeze(2)

    def _rotate(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        rotated, rest = torch.split(x, [self.rotated, x.shape[-1] - self.rotated], -1)
        return torch.cat([self.kernels.apply_rotary(rotated, angles), rest], -1)

    def score(self, q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
        """Return the index scores [B, s, S] of all index heads, in at least fp32, summed over the tensor ranks."""
        return score_index_keys(q, weights, k, self.config.head_dim, self.tp)

    def select(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Return the mask, bool [B, s, S], of each query's `top_k` best tokens among those `seen`, or all if `dense`.
        `seen` is [B or 1, s, S].
        """
        if self.config.dense:
            return seen.expand_as(scores)
        return select_best_keys(scores, seen, self.config.top_k)


class SparseLatentAttention(MultiLatentAttention):
    """Multi-head latent attention of each query to the tokens that its lightning indexer selects (DSA)."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        self.indexer, self.layer, self.cp, self.saved = (
            LightningIndexer(build, layer),
            layer,
            build.groups.cp,
            build.saved,
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, s or s/T, D] to the output of sparse attention, of an equal shape.
        s/T is the length under sequence parallelism over T ranks.
        """
        projected = self.project_latents(x, context)
        q, q_rot, latent, k_rot = projected.q, projected.q_rot, projected.latent, projected.k_rot
        trained = self.indexer.is_trained and context.routing is not None and torch.is_grad_enabled()
        config, length = self.indexer.config, q.shape[1] * self.cp.size
        if context.cache is None and not trained and (config.dense or length <= config.top_k):
            y = self._attend(q, q_rot, latent, k_rot, context)
        else:
            rotation, query_latent = context.rotation, projected.query_latent
            assert rotation is not None
            assert query_latent is not None
            with torch.set_grad_enabled(trained):
                index = self.indexer(x.detach(), query_latent.detach(), rotation)
            if context.cache is None:
                parts = (q, q_rot, latent, k_rot, *index)
                y = self.saved.checkpoint_module("attention", self._attend_selected, context, *parts)
            else:
                y = self._attend_cached_selected(context, q, q_rot, latent, k_rot, *index)
        out: Tensor = self.out(y.flatten(-2), context.dropout)
        return out

    def _attend_selected(
        self,
        context: ForwardContext,
        q: Tensor,
        q_rot: Tensor,
        latent: Tensor,
        k_rot: Tensor,
        index_query: Tensor,
        weights: Tensor,
        index_key: Tensor,
    ) -> Tensor:
        """Attend to the selected tokens of the whole sequence: [B, s, H, e]; in training with the indexer's loss."""
        latent, k_rot, index_key = (
            gather_context_parallel_tokens(part, self.cp) for part in (latent, k_rot.squeeze(2), index_key)
        )
        k, v = self.expand_latent(latent, k_rot.unsqueeze(2), context.dropout)
        q, how = torch.cat([q, q_rot], -1), self.core.score_transform
        scores = self.indexer.score(index_query, weights, index_key)
        chosen = self.indexer.select(scores, self._find_seen(context, len(q), k.shape[1], q.device))
        y = self.core.kernels.attention(q, k, v, chosen.unsqueeze(1), how)
        if context.routing is None or not scores.requires_grad:
            return y
        share = sum_attention_probabilities(q, k, chosen, how.scale, self.indexer.tp)
        loss = self._average(compute_indexer_kl_divergence(scores, share, chosen), context.routing)
        if self.indexer.tp.rank == 0:  # equal on all tensor ranks
            context.routing.indexer_losses[self.layer] = loss.detach()
        return attach_auxiliary_loss(y, loss)

    def _find_seen(self, context: ForwardContext, rows: int, length: int, device: torch.device) -> Tensor:
        """Return which tokens of the sequence this rank's queries may attend to, bool [B or 1, s, S]."""
        mask = context.attention_mask.mask_for_window(None)
        if not isinstance(mask, Tensor):
            mask = materialize_dense_mask(mask, (rows, length), length, device)
        mask = mask.squeeze(1)
        return (
            mask if self.cp.size == 1 else mask[:, to_device(get_context_rank_token_indices(length, self.cp), device)]
        )

    def _average(self, divergence: Tensor, routing: MicroBatchRouting) -> Tensor:
        """Return this rank's part of the weighted loss from the divergence of each token [B, s]."""
        valid = routing.affects_loss_mask
        valid = torch.ones_like(divergence, dtype=torch.bool) if valid is None else valid
        counts = valid.sum(1, keepdim=True)
        all_reduce(counts, self.cp)
        mean = divergence.masked_fill(~valid, 0.0) / counts.clamp(min=1)
        return mean.sum() * (routing.sequence_weight * self.indexer.config.kl_loss)

    def _attend_cached_selected(
        self,
        context: ForwardContext,
        q: Tensor,
        q_rot: Tensor,
        latent: Tensor,
        k_rot: Tensor,
        index_query: Tensor,
        weights: Tensor,
        index_key: Tensor,
    ) -> Tensor:
        """Attend in the latent space to the selected tokens of the cache, which also holds index keys: [B, S, H, e]."""
        assert context.cache is not None
        main, keys = (
            self.project_queries_to_latent(q, q_rot),
            torch.cat([latent, k_rot.squeeze(2), index_key], -1).unsqueeze(2),
        )
        packed = torch.cat([part.to(weights.dtype).flatten(2) for part in (main, index_query, weights)], -1)
        attend = SelectedCacheAttention(
            self.core.kernels, self.core.score_transform, None, False, self.indexer, main.shape[2], index_query.shape[2]
        )
        y = context.cache.update_and_attend(self.layer, packed.unsqueeze(2), keys, None, None, attend)
        return self.project_outputs_from_latent(y)


class PackedCacheAttention(CacheAttentionFunction):
    """Attention function for the KV cache whose tokens are packed vectors, computed row by row in generation."""

    def decode_attention(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Compute the attention of one packed query per batch row [B, 1, w] to the packed cached tokens of that row."""
        rows = [
            self(row, k.transpose(1, 2), k.transpose(1, 2), CAUSAL)
            for row, k in zip(q[:, None, None], keys, strict=True)
        ]
        return torch.cat(rows).squeeze(1)

    def paged_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: VisiblePagedKeys, name: PagedAttentionName | None
    ) -> None:
        """Return None: rows are computed one by one, since each attends to tokens or entries of its own."""


@dataclass(frozen=True)
class SelectedCacheAttention(PackedCacheAttention):
    """Attention function for the KV cache that attends to the cached tokens that an indexer selects.

    A query [1, w] is a token's queries of all heads in the latent space, its index queries and their weights, one after
    the other; a key [1, c + r + d] is a token's latent, rotated part and index key.
    """

    indexer: LightningIndexer | None = None
    heads: int = 0
    index_heads: int = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec) -> Tensor:
        """Compute the attention of packed queries [B, S, 1, w] to selected keys [B, T, 1, c + r + d]: [B, S, H, c + r]."""
        assert self.indexer is not None
        size = self.indexer.config.head_dim
        keys, index_key = torch.split(k, [k.shape[-1] - size, size], -1)
        widths = [self.heads * keys.shape[-1], self.index_heads * size, self.index_heads]
        main, index_query, weights = torch.split(q.squeeze(2), widths, -1)
        seen = materialize_dense_mask(mask, q.shape, k.shape[1], q.device).squeeze(1)
        if not self.indexer.config.dense and k.shape[1] > self.indexer.config.top_k:
            queries = torch.unflatten(index_query, -1, (self.index_heads, -1)).to(k.dtype)
            seen = self.indexer.select(self.indexer.score(queries, weights, index_key.squeeze(2)), seen)
        main = torch.unflatten(main, -1, (self.heads, -1)).to(k.dtype)
        return self.kernels.attention(main, keys, keys, seen.unsqueeze(1), self.how)


@torch.no_grad()
def sum_attention_probabilities(q: Tensor, k: Tensor, chosen: Tensor, scale: float, tp: CommGroup) -> Tensor:
    """Return attention probabilities [B, s, S], summed over all tensor ranks' heads and normalised to a sum of one.
    q is [B, s, H, d], k [B, S, H, d]; `chosen`, bool [B, s, S], are the tokens attended to.
    """
    total = torch.zeros_like(chosen, dtype=torch.promote_types(q.dtype, torch.float32))
    for head in range(q.shape[2]):  # one at a time, as H of them may not fit in memory
        scores = q[:, :, head].to(total.dtype) @ k[:, :, head].to(total.dtype).transpose(-1, -2) * scale
        total += scores.masked_fill_(~chosen, float("-inf")).softmax(-1)
    all_reduce(total, tp)
    return total / total.sum(-1, keepdim=True)


def compute_indexer_kl_divergence(scores: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
    """Return KL(share || softmax(scores)) over the chosen tokens of each query, [B, s], from [B, s, S]."""
    logs = scores.masked_fill(~chosen, float("-inf")).log_softmax(-1).masked_fill(~chosen, 0.0)
    terms: Tensor = torch.special.xlogy(share, share) - share * logs
    return terms.sum(-1)

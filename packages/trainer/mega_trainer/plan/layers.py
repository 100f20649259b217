"""What one layer of a model multiplies, by the kinds of its halves: shapes of its projections, operations of its mixing.

A product of [M, K] and [K, N] is 2 M K N operations; all are of the forward, and per token.

Legend: D model width, H heads, N size of a state, Q tokens of a chunk, G groups or key heads, K and V widths of keys and values.
"""

from __future__ import annotations

from mega_common.layers import Feed, Mixer
from mega_common.model_config import ModelConfig
from mega_trainer.plan.shape import RunShape

Shape = tuple[int, int]  # (out, in)


def projections(model: ModelConfig, mixer: Mixer | None) -> tuple[list[Shape], list[Shape]]:
    """Shapes of a mixer's projections: those whose heads can be split, the one into the residual last, and those into latents."""
    width = model.hidden_size
    if mixer == "mamba" and (mamba := model.mamba):
        rows = 2 * mamba.inner_size + 2 * mamba.num_groups * mamba.state_size + mamba.num_heads
        return [(rows, width), (width, mamba.inner_size)], []
    if mixer == "delta" and (delta := model.delta):
        values = delta.num_value_heads * delta.value_head_dim
        rows = 2 * delta.num_key_heads * delta.key_head_dim + 2 * values + 2 * delta.num_value_heads
        return [(rows, width), (width, values)], []
    return _attention(model) if mixer else ([], [])


def _attention(model: ModelConfig) -> tuple[list[Shape], list[Shape]]:
    width, mla, heads = model.hidden_size, model.mla, model.num_attention_heads
    query, key_value = (heads * model.head_size, width), (model.kv_heads * model.head_size, width)
    out = (width, heads * model.value_size)
    if mla is None:
        return [query, *([query] if model.attention_gate else []), key_value, key_value, out], []
    unfolded = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    latent = (mla.kv_lora_rank + mla.qk_rope_head_dim, width)
    split = [(query[0], mla.q_lora_rank or width), unfolded, out]
    return split, [(mla.q_lora_rank, width), latent] if mla.q_lora_rank else [latent]


def visible_keys(window: int | None, seq_length: int, *, causal: bool = True) -> float:
    """How many keys a query sees within a window, or in all of the sequence, on average over its tokens.

    `causal` counts only keys that are not masked; without it, all that a dense product computes.
    """
    seen = min(window or seq_length, seq_length)
    return seen - causal * seen * (seen - 1) / (2 * seq_length)


def mixing_flops(
    model: ModelConfig, mixer: Mixer, window: int | None, seq_length: int, *, causal: bool = True
) -> float:
    """Operations of a mixer between its projections; `causal` leaves out the masked half of what is between two tokens.

    Of a recurrence those of its chunked form: scores and states (arXiv:2405.21060), of a delta rule the triangular solve too
    (arXiv:2412.06464).
    """
    if mixer == "mamba" and (mamba := model.mamba):
        pairs = visible_keys(mamba.chunk_size, min(mamba.chunk_size, seq_length), causal=causal)
        scores = mamba.num_groups * mamba.state_size + mamba.inner_size
        return 2 * pairs * scores + 4.0 * mamba.state_size * mamba.inner_size
    if mixer == "delta" and (delta := model.delta):
        pairs = visible_keys(delta.chunk_size, min(delta.chunk_size, seq_length), causal=causal)
        key, value, heads = delta.key_head_dim, delta.value_head_dim, delta.num_value_heads
        scores = 2 * key * delta.num_key_heads + heads * (key + 2 * value)
        return 2 * pairs * scores + 6.0 * heads * key * value
    pairs = visible_keys(window, seq_length, causal=causal)
    if not model.causal:  # as many behind a query as before it
        pairs = min(2 * pairs - 1, seq_length)
    return 2 * pairs * model.num_attention_heads * (model.head_size + model.value_size)


def state_elements(model: ModelConfig, mixer: Mixer) -> int:
    """Elements of a recurrence's state, and of what says how a stretch of tokens changes it; none of attention's."""
    if mixer == "mamba" and (mamba := model.mamba):
        return mamba.num_heads * (mamba.head_dim * mamba.state_size + 1)
    if mixer == "delta" and (delta := model.delta):
        return delta.num_value_heads * delta.key_head_dim * (delta.key_head_dim + delta.value_head_dim)
    return 0


def feed_width(model: ModelConfig, feed: Feed | None) -> int:
    """The feed-forward width that a token meets: of the experts it is sent to, together."""
    if feed == "moe" and (moe := model.moe):
        return moe.shared_ffn_hidden_size + moe.top_k * moe.ffn_hidden_size
    return model.ffn_hidden_size if feed else 0


def feed_elements(model: ModelConfig, feed: Feed | None) -> int:
    """Elements of all the matrices of a feed-forward block that a token meets."""
    width, matrices = model.hidden_size, 3 if model.gated else 2
    moe = model.moe if feed == "moe" else None
    if moe is None:
        return matrices * width * feed_width(model, feed)
    routed = matrices * moe.top_k * moe.ffn_hidden_size * (moe.latent_size or width)
    around = 2 * width * (moe.latent_size or 0) + width * (moe.num_experts + moe.shared_gate)
    return routed + around + matrices * width * moe.shared_ffn_hidden_size


def widest(model: ModelConfig) -> int:
    """The feed-forward width that a token meets in the layer where it is largest."""
    return max(feed_width(model, feed) for feed in {kind.feed for kind in model.kinds})


def kept_elements(model: ModelConfig, run: RunShape, wide: int) -> float:
    """Elements of a token that a layer of that feed-forward width keeps from forward to backward on a rank, about: what its
    products are given.
    """
    width = model.hidden_size
    residual = width / (run.tp if run.sp else 1)
    if run.recompute == "full":
        return residual
    again = run.recompute == "selective"
    heads = 2 * (model.num_attention_heads + model.kv_heads) * model.head_size
    rows = width * (model.moe.top_k if model.moe else 0)
    return (2 if again else 4) * residual + (heads + (2 if again else 3) * wide + rows) / run.tp

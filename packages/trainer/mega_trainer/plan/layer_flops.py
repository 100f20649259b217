"""GEMM shapes and FLOPs of one layer, by the kinds of its mixer and feed-forward block.

A GEMM of [M, K] and [K, N] has 2 M K N operations. All counts are for the forward pass and per token.
"""

from __future__ import annotations

import math
from functools import partial

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_common.extension_block import ExtensionBlock
from mega_common.layer_kinds import (
    COMPRESSED_MIXERS,
    COMPRESSED_QUERIES,
    CompressedAttentionConfig,
    FeedForwardKind,
    IndexerConfig,
    MixerKind,
)
from mega_common.lora_config import LoraConfig, is_trainable_tensor
from mega_common.model_config import ModelConfig
from mega_common.vision_config import PROJECTOR, TOWER
from mega_trainer.plan.training_layout import TrainingLayout

MatrixShape = tuple[int, int]  # (out, in)


def list_mixer_projection_shapes(
    model: ModelConfig, mixer: MixerKind | None
) -> tuple[list[MatrixShape], list[MatrixShape]]:
    """Return the shapes [out, in] of a token mixer's projections: those that tensor ranks split, and those into latents.
    The first are split by heads, with the output projection last; the latents are those of MLA and of KDA's gates.
    """
    width = model.hidden_size
    if mixer in model.mixers:
        matrices = _declared_matrices(model.mixers[mixer])
        return [*(each for each in matrices if each[0] != width), *(each for each in matrices if each[0] == width)], []
    if mixer == "mamba" and (mamba := model.mamba):
        rows = 2 * mamba.inner_size + 2 * mamba.num_groups * mamba.state_size + mamba.num_heads
        return [(rows, width), (width, mamba.inner_size)], []
    if mixer == "mamba1" and (mamba1 := model.mamba1):
        inner, rank = mamba1.inner_size, mamba1.dt_rank
        return [(2 * inner, width), (rank + 2 * mamba1.state_size, inner), (inner, rank), (width, inner)], []
    if mixer == "delta" and (delta := model.delta):
        values = delta.num_value_heads * delta.value_head_dim
        rows = 2 * delta.num_key_heads * delta.key_head_dim + 2 * values + 2 * delta.num_value_heads
        return [(rows, width), (width, values)], []
    if mixer == "kda" and (kda := model.kda):
        inner, rank = kda.inner_size, kda.head_dim
        if not kda.low_rank_gates:
            return [(5 * inner + kda.num_heads, width), (width, inner)], []
        return [(3 * inner + kda.num_heads, width), *[(inner, rank)] * 2, (width, inner)], [(rank, width)] * 2
    if mixer == "lightning" and (lightning := model.lightning):
        return [(4 * lightning.inner_size, width), (width, lightning.inner_size)], []
    if mixer == "conv":
        return [(3 * width, width), (width, width)], []
    if mixer in COMPRESSED_MIXERS and model.compressed:
        return _compressed_attention_shapes(model, model.compressed, mixer)
    return _attention_shapes(model) if mixer else ([], [])


def _declared_matrices(block: ExtensionBlock) -> list[MatrixShape]:
    """Return the shapes of the matrices of an extension's block."""
    return [(shape[0], shape[1]) for shape in block.declaration.tensors.values() if len(shape) == 2]


def _attention_shapes(model: ModelConfig) -> tuple[list[MatrixShape], list[MatrixShape]]:
    """Return the shapes of the projections of attention, or of multi-head latent attention (MLA)."""
    width, mla, heads = model.hidden_size, model.mla, model.num_attention_heads
    query, key_value = (
        (heads * model.query_key_head_dim, width),
        (model.key_value_heads * model.query_key_head_dim, width),
    )
    out = (width, heads * model.attention_value_dim)
    if mla is None:
        value = (model.key_value_heads * out[1] // heads, width)
        keys_values = [key_value, *([] if model.keys_are_values else [value])] if model.has_own_keys else []
        gates = [query] if model.attention_gate else []
        gates += [(heads if model.softplus_gate == "head" else out[1], width)] if model.softplus_gate else []
        return [query, *gates, *keys_values, out], []
    unfolded = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    latent = (mla.kv_lora_rank + mla.qk_rope_head_dim, width)
    split = [(query[0] + (heads if model.attention_gate else 0), mla.q_lora_rank or width), unfolded, out]
    latents = [(mla.q_lora_rank, width), latent] if mla.q_lora_rank else [latent]
    if mla.indexer is not None:
        index_heads, size = mla.indexer.num_heads, mla.indexer.head_dim
        split.insert(0, (index_heads * size, mla.q_lora_rank or width))
        latents += [(size, width), (index_heads, width)]
    return split, latents


def _compressed_attention_shapes(
    model: ModelConfig, section: CompressedAttentionConfig, mixer: MixerKind
) -> tuple[list[MatrixShape], list[MatrixShape]]:
    """Return the shapes of the projections of DeepSeek-V4's attention, those of its compressor and indexer included."""
    width, size, joined = model.hidden_size, model.query_key_head_dim, section.output_groups * section.output_rank
    queries, rank = model.num_attention_heads * size, section.q_lora_rank
    split = [(queries, rank), (joined, queries // section.output_groups), (width, joined)]
    latents = [(rank, width), (size, width)]
    if mixer != "swa":
        latents.append(((4 if mixer == "csa" else 2) * size, width))  # values and gates
    if mixer == "csa" and (indexer := section.indexer):
        split.insert(0, (indexer.num_heads * indexer.head_dim, rank))
        latents += [(4 * indexer.head_dim, width), (indexer.num_heads, width)]
    return split, latents


def mean_visible_keys(window: int | None, seq_length: int, *, causal: bool = True) -> float:
    """Return the mean number of keys that a query attends to.
    It attends within a sliding window of `window` tokens or, for None, in the whole sequence.

    `causal` counts only keys that are not masked; without it, all that a dense product computes.
    """
    visible = min(window or seq_length, seq_length)
    return visible - causal * visible * (visible - 1) / (2 * seq_length)


def compute_mixer_core_flops(
    model: ModelConfig, mixer: MixerKind, window: int | None, seq_length: int, *, causal: bool = True
) -> float:
    """Return the forward FLOPs per token of a token mixer between its projections.
    The mixer is attention or a recurrence; `causal` leaves out the masked half of token pairs.

    Recurrences are counted in their chunked form: scores and states (arXiv:2405.21060), and for the delta rule the triangular
    solve (arXiv:2412.06464).
    """
    if mixer in model.mixers:
        declared = model.mixers[mixer].declaration
        pairs = mean_visible_keys(declared.keys or window, seq_length, causal=causal and model.causal)
        return declared.flops_per_token + declared.flops_per_key * pairs
    if mixer == "mamba" and (mamba := model.mamba):
        pairs = mean_visible_keys(mamba.chunk_size, min(mamba.chunk_size, seq_length), causal=causal)
        scores = mamba.num_groups * mamba.state_size + mamba.inner_size
        return 2 * pairs * scores + 4.0 * mamba.state_size * mamba.inner_size
    if mixer == "mamba1" and (mamba1 := model.mamba1):
        return 2.0 * mamba1.state_size * mamba1.inner_size  # y = S C; the states are updated elementwise
    if mixer == "delta" and (delta := model.delta):
        pairs = mean_visible_keys(delta.chunk_size, min(delta.chunk_size, seq_length), causal=causal)
        key, value, heads = delta.key_head_dim, delta.value_head_dim, delta.num_value_heads
        scores = 2 * key * delta.num_key_heads + heads * (key + 2 * value)
        return 2 * pairs * scores + 6.0 * heads * key * value
    if mixer == "kda" and (kda := model.kda):
        pairs = mean_visible_keys(kda.chunk_size, min(kda.chunk_size, seq_length), causal=causal)
        return 10 * pairs * kda.inner_size + 6.0 * kda.inner_size * kda.head_dim
    if mixer == "lightning" and (lightning := model.lightning):
        pairs = mean_visible_keys(lightning.chunk_size, min(lightning.chunk_size, seq_length), causal=causal)
        return 4 * pairs * lightning.inner_size + 4.0 * lightning.inner_size * lightning.head_dim
    if mixer == "conv":
        return 0.0  # no GEMM
    if mixer in COMPRESSED_MIXERS and model.compressed:
        return _compressed_attention_flops(model, model.compressed, mixer, seq_length, causal=causal)
    if model.mla and model.mla.indexer:
        return _sparse_attention_flops(model, model.mla.indexer, seq_length, causal=causal)
    span = min(window or seq_length, seq_length) if model.chunked_window else seq_length
    pairs = mean_visible_keys(window, span, causal=causal)
    if not model.causal:  # as many keys after a query as before it
        pairs = min(2 * pairs - 1, seq_length)
    return 2 * pairs * model.num_attention_heads * (model.query_key_head_dim + model.attention_value_dim)


SCAN_CHUNK = 2048  # tokens between the states that Mamba-1's kernels keep


def recurrence_bytes(model: ModelConfig, mixer: MixerKind) -> tuple[float, float]:
    """Return the bytes per token that Mamba's recurrence kernels move beyond inputs and outputs, forward and backward.
    They are 0 for other mixers.

    Mamba-1's kernels (`selective_scan_cuda`) take x, step sizes and outputs in fp32 and transposed, so each is copied. They
    keep states once in 2,048 tokens. In the backward each channel adds its gradients of B and C to those of the others.

    Mamba-2's kernels are the Triton kernels of state-spaces/mamba (`ssd_combined`). The forward writes the states of each chunk in
    fp32, passes them from chunk to chunk, writes products of B and C, and reads both for the outputs. The backward computes
    states and products again, and has a kernel for each gradient, which reads inputs and gradients of outputs anew.
    """
    if mixer == "mamba1" and (mamba1 := model.mamba1):
        states = 8 * mamba1.state_size / SCAN_CHUNK
        copied, again = 6 + 8 + 8, 8 + 6 + 8  # x, d and y; gradients of y, x and d
        forward, gradients = copied + 12 - 6 + states, 8 * mamba1.state_size
        return mamba1.inner_size * forward, mamba1.inner_size * (again + 20 - 10 + states + gradients)
    if mixer != "mamba" or model.mamba is None:
        return 0.0, 0.0
    mamba = model.mamba
    inputs, states = 2 * mamba.inner_size, 2 * mamba.inner_size * mamba.state_size / mamba.chunk_size
    matrices, products = 2 * mamba.num_groups * mamba.state_size, 4 * mamba.num_groups * mamba.chunk_size
    forward = inputs + 6 * states + 2 * matrices + 2 * products
    return forward, 7 * inputs + 13 * states + 9 * matrices + 6 * products


def _sparse_attention_flops(model: ModelConfig, indexer: IndexerConfig, seq_length: int, *, causal: bool) -> float:
    """Return the forward FLOPs per token of sparse attention and the scores of its indexer.
    With `causal` attention is counted over the selected tokens, as a sparse kernel computes it; without, over all, as the
    masked product does. Index scores are over all earlier tokens, and there are none if all of these are selected and no
    loss needs the scores.
    """
    every = mean_visible_keys(None, seq_length, causal=causal)
    chosen = mean_visible_keys(None if indexer.dense or not causal else indexer.top_k, seq_length, causal=causal)
    heads = model.num_attention_heads * (model.query_key_head_dim + model.attention_value_dim)
    scored = indexer.kl_loss or (not indexer.dense and seq_length > indexer.top_k)
    return 2 * chosen * heads + (2 * every * indexer.num_heads * (indexer.head_dim + 1) if scored else 0.0)


def count_computed_keys(section: CompressedAttentionConfig, mixer: MixerKind, seq_length: int) -> tuple[float, float]:
    """Return the mean numbers of keys and of index keys per query that DeepSeek-V4's masked attention computes.

    They are the tokens that any query of a part may attend to and the entries that have ended by its end; index keys are the entries,
    if some are not selected.
    """
    rate = {"csa": section.csa_rate, "hca": section.hca_rate}.get(mixer, seq_length + 1)
    most = section.indexer.top_k if section.indexer and mixer == "csa" and not section.indexer.dense else seq_length
    keys = index = 0
    for first in range(0, seq_length, COMPRESSED_QUERIES):
        stop = min(first + COMPRESSED_QUERIES, seq_length)
        entries = stop // rate
        keys += (stop - first) * (stop - max(0, first + 1 - section.window) + entries)
        index += (stop - first) * (entries if entries > most else 0)
    return keys / seq_length, index / seq_length


def _compressed_attention_flops(
    model: ModelConfig, section: CompressedAttentionConfig, mixer: MixerKind, seq_length: int, *, causal: bool
) -> float:
    """Return the forward FLOPs per token of DeepSeek-V4's attention and of its indexer's scores.
    With `causal` they are over the tokens of the window and the selected entries, as a sparse kernel computes them; without, as the
    masked products do. There are no index scores if all entries are selected.
    """
    keys, index = count_computed_keys(section, mixer, seq_length)
    indexer = section.indexer if mixer == "csa" else None
    if causal:
        rate = {"csa": section.csa_rate, "hca": section.hca_rate}.get(mixer, seq_length + 1)
        most = indexer.top_k if indexer and not indexer.dense else seq_length
        ended = [token // rate for token in range(1, seq_length + 1)]
        index = sum(ended) / seq_length if index else 0.0
        keys = mean_visible_keys(section.window, seq_length) + sum(min(each, most) for each in ended) / seq_length
    scores = 2 * index * indexer.num_heads * (indexer.head_dim + 1) if indexer else 0.0
    return 4 * keys * model.num_attention_heads * model.query_key_head_dim + scores


def hyper_connection_flops(model: ModelConfig) -> dict[str, float]:
    """Return the forward FLOPs per token of hyper-connections, summed over layers; {} for a model without them."""
    if model.hyper_connections is None:
        return {}
    n, width = model.hyper_connections.streams, model.stream_width
    branches = sum(half is not None for kind in model.layer_kinds for half in kind)
    return {"hyper-connections": 2.0 * width * (branches * ((2 + n) * n + n) + n)}


def altup_shapes(model: ModelConfig) -> list[MatrixShape]:
    """Return the shapes [out, in] of the matrices of a layer with AltUp that read its streams: two routers, residual of low rank."""
    if model.altup is None:
        return []
    rank, width = model.altup.laurel_rank, model.hidden_size
    return [(model.altup.streams, width)] * 2 + [(rank, width), (width, rank)]


def altup_flops(model: ModelConfig) -> dict[str, float]:
    """Return the forward FLOPs per token of AltUp and residuals of low rank, summed over layers, or nothing without AltUp."""
    if model.altup is None:
        return {}
    n, width = model.altup.streams, model.hidden_size
    layer = sum(map(math.prod, altup_shapes(model))) + n**3 + n**2 + n**2 * width  # coefficients, and their use
    return {"residual streams": 2.0 * (model.num_layers * layer + 2 * (n - 1) * width**2)}


def recurrent_state_elements(model: ModelConfig, mixer: MixerKind) -> int:
    """Return the number of elements of a mixer's recurrent states and their transition over a chunk.
    It includes all heads of the mixer; 0 for attention.
    """
    if mixer == "mamba" and (mamba := model.mamba):
        return mamba.num_heads * (mamba.head_dim * mamba.state_size + 1)
    if mixer == "mamba1" and (mamba1 := model.mamba1):
        return 2 * mamba1.inner_size * mamba1.state_size
    if mixer == "delta" and (delta := model.delta):
        return delta.num_value_heads * delta.key_head_dim * (delta.key_head_dim + delta.value_head_dim)
    if mixer == "kda" and (kda := model.kda):
        return 2 * kda.inner_size * kda.head_dim
    if mixer == "lightning" and (lightning := model.lightning):
        return lightning.num_heads * (lightning.head_dim**2 + 1)
    return 0


def active_ffn_width(model: ModelConfig, feed: FeedForwardKind | None) -> int:
    """Return the feed-forward width used for one token, or 0 without a feed-forward.
    It is summed over shared experts and the experts that the token is routed to.
    """
    if feed in model.feed_forwards:
        return max((shape[0] for shape in _declared_matrices(model.feed_forwards[feed])), default=0)
    if feed == "moe" and (moe := model.moe):
        return moe.shared_ffn_hidden_size + moe.top_k * moe.ffn_hidden_size
    return model.ffn_hidden_size if feed else 0


def expert_input_width(model: ModelConfig) -> int:
    """Return the width of a token's vector that enters and leaves an expert, in elements, or 0 without experts.
    It is the latent width if there is one, else the model's.
    """
    return (model.moe.latent_size or model.hidden_size) if model.moe else 0


def active_ffn_elements(model: ModelConfig, feed: FeedForwardKind | None) -> int:
    """Return the number of elements of a layer's feed-forward matrices, router included, that are used for one token."""
    width, matrices = model.hidden_size, 3 if model.has_gated_mlp else 2
    if feed in model.feed_forwards:
        return sum(map(math.prod, _declared_matrices(model.feed_forwards[feed])))
    moe = model.moe if feed == "moe" else None
    if moe is None:
        return matrices * width * active_ffn_width(model, feed)
    routed = int(matrices * moe.mean_active_experts * moe.ffn_hidden_size * expert_input_width(model))
    latent_and_router = 2 * width * (moe.latent_size or 0) + width * (moe.num_router_outputs + moe.shared_gate)
    return routed + latent_and_router + matrices * width * moe.shared_ffn_hidden_size


def layer_input_shapes(model: ModelConfig) -> list[MatrixShape]:
    """Return the shapes [out, in] of the two matrices of a layer's own input (`per_layer_input_size`), or []."""
    size, width = model.per_layer_input_size, model.hidden_size
    return [(size, width), (width, size)] if size else []


def max_active_ffn_width(model: ModelConfig) -> int:
    """Return the largest feed-forward width used for one token in any layer of the model."""
    return max(active_ffn_width(model, feed) for feed in {kind.feed_forward for kind in model.layer_kinds})


def saved_activation_elements(model: ModelConfig, run: TrainingLayout, wide: int) -> float:
    """Return the approximate number of activation elements per token that a layer saves for its backward.
    The layer has the feed-forward width `wide`; the elements are the inputs of its GEMMs on one rank.
    """
    width = model.hidden_size
    residual = width / (run.tp if run.sp else 1)
    if run.recompute == "full":
        return residual
    selective = run.recompute == "selective"
    heads = 2 * (model.num_attention_heads + model.key_value_heads) * model.query_key_head_dim
    rows = expert_input_width(model) * (model.moe.top_k if model.moe else 0)
    return (2 if selective else 4) * residual + (heads + (2 if selective else 3) * wide + rows) / run.tp


def image_flops(model: ModelConfig, freeze: tuple[str, ...] = (), lora: LoraConfig | None = None) -> dict[str, float]:
    """Return the FLOPs of the vision encoder and projector for one image, forward and backward, by part.
    The parts are GEMMs with weights, and attention scores.

    A GEMM with a weight has 2 rows K N operations in the forward, as many for the weight gradient if the weight is trained, and
    as many for the input gradient if any parameter before it is trained. For models with images of any shape, the image is
    image_size x image_size. A module of transformers counts as a transformer of the same sizes with full attention.
    """
    vision, parts, input_grad = model.vision, {"products": 0.0, "scores": 0.0}, False
    tower = model.vision_encoder_config
    if vision is None or tower is None:
        return parts
    trained = partial(is_trainable_tensor, freeze=freeze, lora=lora)
    patches, reached = vision.patches_per_image + vision.class_token, dict[int, bool]()
    for name, shape in canonical_tensors(model).items():  # in the order of the forward
        if not name.startswith((TOWER, PROJECTOR)) or not vision.uses_tensor(name):
            continue
        weight_grad, kind, _, rest = trained(name), *name.removeprefix(TOWER).removeprefix(PROJECTOR).partition(".")
        number, _, tensor = rest.partition(".")
        if kind == "deepstack" and tensor == "norm.weight":  # its inputs are the outputs of an earlier layer
            input_grad = reached[vision.deepstack_layers[int(number)]]
        if len(shape) > 1 and vision.module is not None:
            positions = math.prod(shape[:-1]) in (1, patches, patches + 1)  # learned positions, or one embedding
            parts["products"] += 0 if positions else 2.0 * patches * math.prod(shape) * (1 + weight_grad + input_grad)
        elif len(shape) == 2 and "embed_positions" not in name:
            rows = vision.tokens_per_image if name.startswith(PROJECTOR) else patches
            rows = vision.patches_per_image if "embed_patches" in name else rows
            parts["products"] += 2.0 * rows * math.prod(shape) * (1 + weight_grad + input_grad)
        if vision.module is None and name.endswith("self_attn.o_proj.weight"):
            window = tower.get_attention_window(int(number))
            visible = patches if window is None else min(window, patches)
            parts["scores"] += 4.0 * patches * visible * vision.hidden_size * (1 + 2 * input_grad)
        input_grad = input_grad or weight_grad
        if kind == "layers":
            reached[int(number)] = input_grad
    if vision.module is not None:
        parts["scores"] = 4.0 * vision.num_layers * patches**2 * vision.hidden_size * (1 + 2 * input_grad)
    return parts

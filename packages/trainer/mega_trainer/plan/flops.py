"""Parameter counts and FLOPs of a model, and peak FLOP/s of devices.

A GEMM of [M, K] and [K, N] has 2 M K N operations. `compute_forward_flops_per_token` counts a model exactly, GEMM by GEMM. `compute_flops_by_convention`
follows the conventions of other trainers; the oldest is 6 N + 12 L H Q S (`compute_palm_flops_per_token`), which for a model without attention
window equals the exact count with full attention, except for the weights of norms.

Legend: D model width, F feed-forward width, H heads, Q head size, K key/value heads, L layers, S sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mega_ckpt.canonical_tensors import EXPERT_TABLE, TensorShapes, canonical_tensors
from mega_common.layer_kinds import COMPRESSED_MIXERS, MixerKind
from mega_common.model_config import ModelConfig
from mega_common.vision_config import PROJECTOR, TOWER
from mega_trainer.plan.layer_flops import (
    active_ffn_elements,
    active_ffn_width,
    altup_flops,
    compute_mixer_core_flops,
    hyper_connection_flops,
    layer_input_shapes,
    list_mixer_projection_shapes,
)
from mega_trainer.plan.training_layout import RecomputeKind

FlopsConvention = Literal["exact", "megatron", "full", "palm", "mosaic"]
CONVENTIONS: dict[FlopsConvention, str] = {
    "exact": "GEMMs, and the unmasked part of attention",
    "megatron": "as Megatron-LM and Megatron-Bridge: half of attention, no windows, no router, gates only for SwiGLU",
    "full": "as NeMo: GEMMs and all of attention",
    "palm": "as PaLM, torchtitan and nanotron: 6 N + 12 L H Q S, without embedding tables",
    "mosaic": "as llm-foundry: 6 N + 12 L H Q S, with embedding tables",
}


@dataclass(frozen=True)
class LayerParameterCounts:
    """Parameter counts of one layer: split by tensor parallelism, whole on every tensor rank, and routed experts.

    Attributes:
        split: parameters that tensor parallelism splits.
        whole: parameters that every tensor rank holds: norms, latents, routers.
        experts: parameters of all routed experts.
    """

    split: int
    whole: int
    experts: int

    @property
    def total(self) -> int:
        """Total number of parameters of the layer."""
        return self.split + self.whole + self.experts


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of a model, by part and by layer.

    Attributes:
        embedding: tables of tokens, learned or relative positions, and segment types.
        head: output matrix, 0 if it is tied to the token table; and the other heads of an encoder.
        final_norm: norms before the head, of embeddings, of an encoder's head, and after an encoder.
        layers: each layer, then each multi-token-prediction (MTP) layer with its projection and norms.
        vision: vision encoder and projector.
        top_k, num_experts: experts per token (on average with zero experts) and experts of a layer; 0 and 1 without experts.
    """

    embedding: int
    head: int
    final_norm: int
    layers: tuple[LayerParameterCounts, ...]
    vision: int = 0
    top_k: float = 0
    num_experts: int = 1

    @cached_property
    def routed_experts(self) -> int:
        """Number of parameters of all routed experts of the model."""
        return sum(layer.experts for layer in self.layers)

    @property
    def total(self) -> int:
        """Total number of parameters of the model."""
        ends = self.embedding + self.vision + self.final_norm + self.head
        return ends + sum(layer.total for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Number of parameters used for one token: without its unchosen routed experts and the vision encoder."""
        return self.total - self.vision - int(self.routed_experts * (self.num_experts - self.top_k) / self.num_experts)


def count_parameters_by_layer(model: ModelConfig, tensors: TensorShapes | None = None) -> ParameterCounts:
    """Return the parameter counts of a model, counted tensor by tensor.
    If `tensors` (canonical name -> shape) are given, count only these.
    """
    ends: Counter[str] = Counter()
    layers = [Counter[str]() for _ in range(model.num_layers + model.mtp_layers)]
    for name, shape in (canonical_tensors(model) if tensors is None else tensors).items():
        if name.endswith(EXPERT_TABLE):  # ids, not parameters
            continue
        within = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if within:
            layers[int(within[1])][_parameter_group(within[2])] += math.prod(shape)
        else:
            module = re.sub(r"\.\d+\.", ".", name).split(".")[-2]
            ends["vision" if name.startswith((TOWER, PROJECTOR)) else module] += math.prod(shape)
    tables = ends["encoder_relative_bias"] + ends["decoder_relative_bias"] + ends["relative_bias"]
    return ParameterCounts(
        embedding=sum(ends[name] for name in _INPUTS) + tables,
        head=sum(ends[name] for name in ("lm_head", "dense", "pooler", "pair_head")),
        final_norm=sum(ends[name] for name in _FINAL_NORMS),
        vision=ends["vision"],
        layers=tuple(LayerParameterCounts(each["split"], each["whole"], each["experts"]) for each in layers),
        top_k=model.moe.mean_active_experts if model.moe else 0,
        num_experts=model.moe.num_experts if model.moe else 1,
    )


_INPUTS = (
    "embed_tokens", "embed_positions", "embed_types", "embed_proj", "embed_tokens_per_layer", "per_layer_model_projection",
    "altup_projections",
)  # fmt: skip
_FINAL_NORMS = (
    "norm",
    "embed_norm",
    "encoder_norm",
    "per_layer_projection_norm",
    "hc_head",
    "altup_unembed_projections",
)


def _parameter_group(name: str) -> str:
    """Return the field of `LayerParameterCounts` that a tensor of a layer counts in."""
    if name.startswith("mlp.experts."):
        return "experts"
    return (
        "whole"
        if re.search(
            r"(?<!mamba\.)(?<!lightning\.)norm\b|(?<!o)_a_proj|^mlp\.gate\.|expert_gate|latent_proj|^eh_proj|_hc\.|^per_layer_|^altup\.|^laurel\."
            r"|^self_attn\.(kv_proj|compressor|indexer\.(kv|wk|gate|position|weights))",
            name,
        )
        else "split"
    )


def compute_forward_flops_per_token(
    model: ModelConfig, seq_length: int, *, causal: bool = True, target: int | None = None
) -> dict[str, float]:
    """Return the forward FLOPs per token by part of the model, summed over all layers; only GEMMs count.

    `causal` leaves out the masked half of scores; see `mean_visible_keys`. A multi-token-prediction (MTP) layer counts as a
    layer and one more use of the head; its input projection is the part "further tokens". For an encoder-decoder model the
    count is per token of both sequences; `target` is the length of the decoder's (default: `seq_length`). The vision encoder is
    counted per image: see `layer_flops.image_flops`.
    """
    if model.encoder is not None:
        return _encoder_decoder_flops(model, seq_length, target or seq_length, causal=causal)
    parts = dict.fromkeys(("attention projections", "attention scores", "feed-forward"), 0.0)
    for layer, count in _count_equal_layers(model).items():
        for name, operations in _layer_flops(model, layer, seq_length, causal=causal).items():
            parts[name] = parts.get(name, 0.0) + count * operations
    if model.per_layer_input_size:
        parts["per-layer inputs"] += 2.0 * model.hidden_size * model.num_layers * model.per_layer_input_size
    for layer in model.retrieval_layers:
        for name, operations in compute_retro_layer_flops(model, layer).items():
            parts[name] = parts.get(name, 0.0) + operations
    width, narrow = model.hidden_size, model.embedding_width
    dense = (model.masked_lm is not None and model.masked_lm.dense) + (model.embedding_size is not None)
    return {
        **parts,
        **hyper_connection_flops(model),
        **altup_flops(model),
        **({"further tokens": 4.0 * width * width * model.mtp_layers} if model.mtp_layers else {}),
        "head": 2.0 * narrow * (model.vocab_size * (1 + model.mtp_layers) + width * dense),
    }


def compute_encoder_decoder_layer_flops(
    model: ModelConfig, source: int, target: int, *, encodes: bool, causal: bool = True
) -> dict[str, float]:
    """Return the forward FLOPs per sample of one encoder or decoder layer, by part of the layer.
    The layer is an encoder layer if `encodes`, else a decoder layer; the encoder reads `source` tokens, the decoder
    `target` tokens.
    """
    feed, every = (
        model.get_feed_forward_kind(0),
        list(itertools.chain(*list_mixer_projection_shapes(model, "attention"))),
    )
    own, length = sum(map(math.prod, every)), source if encodes else target
    parts = {
        "attention projections": 2.0 * own * length,
        "attention scores": length
        * compute_mixer_core_flops(model, "attention", None, length, causal=causal and not encodes),
        "feed-forward": 2.0 * active_ffn_elements(model, feed) * length,
    }
    if encodes:
        return parts
    query_out = (
        2 * model.num_attention_heads * model.query_key_head_dim * model.hidden_size
    )  # query and output projections
    pairs = target * compute_mixer_core_flops(model, "attention", None, source, causal=False)
    return {**parts, "cross attention": 2.0 * (query_out * target + (own - query_out) * source) + pairs}


def compute_retro_layer_flops(model: ModelConfig, layer: int) -> dict[str, float]:
    """Return the additional forward FLOPs per text token of a layer with retrieved neighbors (RETRO), by part.

    Each text token has 2 K tokens of neighbors, which the encoder reads in the first such layer. In the encoder and
    in the decoder a query attends to all neighbors of its chunk.
    """
    retro, encoder = model.retro, model.neighbor_encoder_config
    assert retro is not None
    assert encoder is not None
    read, m = 2 * retro.neighbors, retro.chunk_length
    own = sum(map(math.prod, itertools.chain(*list_mixer_projection_shapes(model, "attention"))))
    query_out = (
        2 * model.num_attention_heads * model.query_key_head_dim * model.hidden_size
    )  # query and output projections
    per_key = 4.0 * model.num_attention_heads * model.query_key_head_dim
    parts = {"cross attention": 2.0 * (query_out + (own - query_out) * read) + per_key * read * m}
    if layer > model.retrieval_layers[0]:
        return parts
    scores = compute_mixer_core_flops(encoder, "attention", None, 2 * m, causal=False)
    encoder_layer = 2.0 * (own + active_ffn_elements(model, "mlp")) + scores
    chunk = 2.0 * (query_out * read + (own - query_out)) + per_key * read * m
    return {**parts, "neighbour encoder": read * encoder_layer * encoder.num_layers + chunk}


def _encoder_decoder_flops(model: ModelConfig, source: int, target: int, *, causal: bool) -> dict[str, float]:
    """Return `compute_forward_flops_per_token` of a model with an encoder."""
    assert model.encoder is not None
    parts: dict[str, float] = defaultdict(float)
    layers = {True: model.encoder.num_layers, False: model.num_layers - model.encoder.num_layers}
    for encodes, count in layers.items():
        for name, operations in compute_encoder_decoder_layer_flops(
            model, source, target, encodes=encodes, causal=causal
        ).items():
            parts[name] += count * operations
    parts["head"] = 2.0 * model.hidden_size * model.vocab_size * target
    return {name: operations / (source + target) for name, operations in parts.items()}


def _layer_flops(model: ModelConfig, layer: int, seq_length: int, *, causal: bool) -> dict[str, float]:
    """Return the forward FLOPs per token of the layer with this index, by part."""
    kind, window, model = (
        model.get_layer_kind(layer),
        model.get_attention_window(layer),
        model.get_layer_config(layer),
    )
    parts = {"feed-forward": 2.0 * active_ffn_elements(model, kind.feed_forward)}
    if model.per_layer_input_size:
        parts["per-layer inputs"] = 2.0 * sum(map(math.prod, layer_input_shapes(model)))
    for mixer in kind.mixers:
        first, second = MIXING.get(mixer, (f"{mixer} projections", f"{mixer} mixing"))
        parts[first] = 2.0 * sum(map(math.prod, itertools.chain(*list_mixer_projection_shapes(model, mixer))))
        parts[second] = compute_mixer_core_flops(model, mixer, window, seq_length, causal=causal)
    return parts


MIXING: dict[MixerKind, tuple[str, str]] = {
    "attention": ("attention projections", "attention scores"),
    "mamba": ("mamba projections", "mamba scan"),
    "mamba1": ("mamba projections", "mamba scan"),
    "delta": ("delta projections", "delta rule"),
    "kda": ("KDA projections", "KDA delta rule"),
    "lightning": ("lightning projections", "lightning scan"),
    "conv": ("convolution projections", "short convolution"),
    **dict.fromkeys(COMPRESSED_MIXERS, ("attention projections", "attention scores")),
}


def _count_equal_layers(model: ModelConfig) -> dict[int, int]:
    """Return {first layer of its kind and window: number of such layers}."""
    found: dict[object, list[int]] = defaultdict(list)
    for layer, kind in enumerate(model.layer_kinds):
        found[kind, model.get_attention_window(layer), model.shares_keys(layer)].append(layer)
    return {layers[0]: len(layers) for layers in found.values()}


def compute_model_flops_per_token(
    model: ModelConfig, seq_length: int, *, causal: bool = True, target: int | None = None
) -> float:
    """Return the FLOPs per token that model FLOPs utilisation counts: three times the forward, no recomputation."""
    return 3 * sum(compute_forward_flops_per_token(model, seq_length, causal=causal, target=target).values())


def compute_hardware_flops_per_token(
    model: ModelConfig, seq_length: int, *, recompute: RecomputeKind, causal: bool = True
) -> float:
    """Return the FLOPs per token: three times the forward, and the layers' forward once more for `recompute` = `full`."""
    forward = compute_forward_flops_per_token(model, seq_length, causal=causal)
    recomputed = sum(forward.values()) - forward["head"] if recompute == "full" else 0.0
    return 3 * sum(forward.values()) + recomputed


def compute_palm_flops_per_token(model: ModelConfig, seq_length: int, target: int | None = None) -> float:
    """Return the FLOPs per token, forward and backward, by PaLM's formula 6 N + 12 L H Q S.
    The formula (arXiv:2204.02311, appendix B) is for N active parameters without embedding tables, L attention layers,
    H heads of size Q, and sequence length S.

    N is the number of active parameters without embedding tables; a tied table counts once, as the head. In models with an
    encoder or retrieval no token uses all N parameters; for these, count all GEMMs, and attention over the full square.
    """
    if model.has_encoder:
        return compute_model_flops_per_token(model, seq_length, causal=False, target=target)
    count = count_parameters_by_layer(model)
    tables = count.embedding - (model.vocab_size * model.embedding_width if model.tie_embeddings else 0)
    # H Q, where Q is the mean of the head sizes of keys and values
    pairs = model.num_attention_heads * (model.query_key_head_dim + model.attention_value_dim) // 2
    attention = 12 * sum("attention" in kind.mixers for kind in model.layer_kinds) * pairs * seq_length
    return float(6 * (count.active_parameters - tables) + attention)


def compute_flops_by_convention(
    model: ModelConfig, seq_length: int, convention: FlopsConvention, target: int | None = None
) -> float:
    """Return the FLOPs per token, forward and backward, by a convention of published throughput figures.

    `CONVENTIONS` describes them. They were identified by published pairs of FLOP/s and tokens per second
    (benchmarks/plan_flops.py).
    """
    if model.has_encoder:
        return compute_model_flops_per_token(model, seq_length, causal=convention == "exact", target=target)
    match convention:
        case "exact" | "full":
            return compute_model_flops_per_token(model, seq_length, causal=convention == "exact")
        case "megatron":
            return _megatron_flops(model, seq_length)
        case "palm":
            return compute_palm_flops_per_token(model, seq_length)
        case "mosaic":
            count = count_parameters_by_layer(model)
            tables = count.embedding - (model.vocab_size * model.embedding_width if model.tie_embeddings else 0)
            return compute_palm_flops_per_token(model, seq_length) + 6 * tables


def _megatron_flops(model: ModelConfig, seq_length: int) -> float:
    """Return the FLOPs by the formula of Megatron-LM's `num_floating_point_operations`, which counts a gate only with
    `--swiglu`.
    """
    routers, gates = 0.0, 0.0
    for layer, (_, feed) in enumerate(model.layer_kinds):
        moe = model.moe if feed == "moe" else None
        routers += 2.0 * model.hidden_size * (moe.num_router_outputs + moe.shared_gate) if moe else 0.0
        gates += 2.0 * model.hidden_size * active_ffn_width(model.get_layer_config(layer), feed)
    counts_gates = model.activation == "swiglu" and model.activation_limit is None
    without_window = model.model_copy(update={"sliding_window": None})
    forward = sum(compute_forward_flops_per_token(without_window, seq_length).values()) - routers
    return 3 * (forward - (0.0 if counts_gates or not model.has_gated_mlp else gates))


def head_cost_in_layers(model: ModelConfig, seq_length: int, target: int | None = None) -> float:
    """Return the FLOPs of the output head and MTP layers in units of an average layer.
    By this number `split_stage_layers` balances pipeline stages. MTP is multi-token prediction.
    """
    forward = compute_forward_flops_per_token(model, seq_length, target=target)
    last = forward["head"] + forward.get("further tokens", 0.0)
    layer = (sum(forward.values()) - last) / (model.num_layers + model.mtp_layers)
    return last / layer + model.mtp_layers


def relative_layer_costs(model: ModelConfig, seq_length: int, target: int | None = None) -> list[float] | None:
    """Return the FLOPs of each layer in units of an average layer, or None if all are equal.
    Layers differ by the `layers` setting, an encoder or retrieval.
    """
    if model.encoder is not None:
        sizes = seq_length, target or seq_length
        stacks = [
            sum(compute_encoder_decoder_layer_flops(model, *sizes, encodes=encodes).values())
            for encodes in (False, True)
        ]
        work = [stacks[model.is_encoder_layer(layer)] for layer in range(model.num_layers)]
    elif model.layers is None and model.retro is None and not model.shared_kv_layers:
        return None
    else:
        layers = range(model.num_layers)
        work = [sum(_layer_flops(model, layer, seq_length, causal=True).values()) for layer in layers]
        for layer in model.retrieval_layers:
            work[layer] += sum(compute_retro_layer_flops(model, layer).values())
    return [each * len(work) / sum(work) for each in work]


# Dense peak in TFLOP/s from the makers' data sheets (half of a figure given with sparsity), with fp32 accumulation. A device
# matches an entry if its name has all words of the entry. `bf16` includes fp16; `fp32` is without tf32.
_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500, "nvfp4": 9000},
    "B300": {"fp64": 1.2, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500, "nvfp4": 13_500},
    "GB200": {"fp64": 40, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp8": 5000, "nvfp4": 10_000},
    "GB300": {"fp64": 1.3, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp8": 5000, "nvfp4": 15_000},
    "H200": {"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989, "fp8": 1979},
    "GH200": {"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989, "fp8": 1979},
    "H100": {"fp64": 67, "fp32": 67, "tf32": 494.5, "bf16": 989, "fp8": 1979},
    "H100 PCIe": {"fp64": 51, "fp32": 51, "tf32": 378, "bf16": 756, "fp8": 1513},
    "H100 NVL": {"fp64": 60, "fp32": 60, "tf32": 417.5, "bf16": 835, "fp8": 1670},
    "H800": {"fp64": 1, "fp32": 67, "tf32": 494.5, "bf16": 989, "fp8": 1979},
    "H20": {"fp64": 1, "fp32": 44, "tf32": 74, "bf16": 148, "fp8": 296},
    "A100": {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312},
    "A800": {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp8": 733},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp8": 242},
    "A40": {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7},
    "A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp8": 330.3},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71},
    "MI300X": {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp8": 2614.9},
    "MI355X": {"fp64": 78.6, "fp32": 157.3, "bf16": 2516.6, "fp8": 5033.2},
}


def find_peak_flops(device: str, precision: str) -> float | None:
    """Return the data sheet's peak FLOP/s of a GPU in one precision, or None if unknown.
    `device` is a name as from `torch.cuda.get_device_name`; None is returned for an unknown device or a precision that
    it lacks.

    `precision` is one of fp64, fp32, tf32, bf16, fp16, fp8 and nvfp4.
    """
    words = set(re.split(r"[\s-]+", device.lower()))
    known = [name for name in _PEAKS if set(name.lower().split()) <= words]
    if not known:
        return None
    tera = _PEAKS[max(known, key=len)].get("bf16" if precision == "fp16" else precision)
    return None if tera is None else tera * 1e12

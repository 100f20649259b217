"""How much arithmetic a model is: parameters, floating-point operations per token, and what devices can do in a second.

A product of [M, K] and [K, N] is 2 M K N operations. Two ways of counting are in use for a model: exactly, product by
product (`forward_flops`), and by the rule 6 N + 12 L H Q S (`palm_flops`); the exact count of a model without a window,
with attention over the full square, is the rule's but for the norms' weights.

Legend: D model width, F feed-forward width, H heads, Q head size, K key/value heads, L layers, S sequence, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mega_common.model_config import ModelConfig

RecomputeKind = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters. `attention`, `feed_forward`, `experts` and `norms` are those of one layer.

    Attributes:
        embedding: tables of tokens and of learned positions.
        head: the output matrix; 0 where it is the token table.
        attention: projections, with their biases.
        feed_forward: the dense block, or, in a mixture of experts, router and shared expert.
        experts: all routed experts of a layer.
        norms: all norms of a layer.
        final_norm: the norm before the head.
        layers: L.
        whole: those of a layer's attention and norms that tensor parallelism does not split: norms, and latents.
        predictors: layers behind the L that predict further tokens.
        joins: what each of these has beside a layer: a projection and three norms.
        top_k, num_experts: how many of a layer's experts see a token; 0 of 1 without experts.
    """

    embedding: int
    head: int
    attention: int
    feed_forward: int
    experts: int
    norms: int
    final_norm: int
    layers: int
    whole: int
    predictors: int = 0
    joins: int = 0
    top_k: int = 0
    num_experts: int = 1

    @property
    def total(self) -> int:
        """All parameters."""
        layer = self.attention + self.feed_forward + self.experts + self.norms
        ends = self.embedding + self.final_norm + self.head + self.predictors * self.joins
        return ends + (self.layers + self.predictors) * layer

    @property
    def active(self) -> int:
        """Parameters that a token meets: without the experts that it is not sent to."""
        idle = self.experts * (self.num_experts - self.top_k) // self.num_experts
        return self.total - (self.layers + self.predictors) * idle


def count_parameters(model: ModelConfig) -> Parameters:
    """Count the parameters of `model`."""
    width, query, key_value = _widths(model)
    qk_norm = query + key_value if model.qk_norm_span == "all" else 2 * model.head_size
    norm = width * (2 if model.norm == "layernorm" else 1)
    matrices, latents = projections(model)
    norms = 2 * norm + (qk_norm if model.qk_norm else 0)
    norms += (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank if model.mla else 0
    biased = sum(rows for rows, _ in latents) if model.mla else query + 2 * key_value
    attention = _elements(matrices) + _elements(latents) + biased * model.qkv_bias + width * model.attention_out_bias
    positions = model.max_position if model.position == "learned" else 0
    moe = model.moe
    dense = model.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size
    up = (2 if model.gated else 1) * dense
    feed_forward = width * (up + dense) + ((up + width) * model.mlp_bias if dense else 0)
    experts = 0
    if moe:
        feed_forward += width * moe.num_experts
        experts = moe.num_experts * width * moe.ffn_hidden_size * (3 if model.gated else 2)
    return Parameters(
        embedding=(model.vocab_size + positions) * width,
        head=0 if model.tie_embeddings else model.vocab_size * width,
        attention=attention,
        feed_forward=feed_forward,
        experts=experts,
        norms=norms,
        final_norm=norm,
        layers=model.num_layers,
        whole=norms + _elements(latents) + sum(rows for rows, _ in latents) * model.qkv_bias,
        predictors=model.mtp_layers,
        joins=2 * width * width + 3 * norm,
        top_k=moe.top_k if moe else 0,
        num_experts=moe.num_experts if moe else 1,
    )


def projections(model: ModelConfig) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Shapes (out, in) of a layer's attention projections: those whose heads can be split, and those into latents."""
    width, query, key_value = _widths(model)
    mla, values = model.mla, model.num_attention_heads * model.value_size
    if mla is None:
        return [(query, width), (key_value, width), (key_value, width), (width, query)], []
    unfolded = (model.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    latent = (mla.kv_lora_rank + mla.qk_rope_head_dim, width)
    split = [(query, mla.q_lora_rank or width), unfolded, (width, values)]
    return split, [(mla.q_lora_rank, width), latent] if mla.q_lora_rank else [latent]


def visible_keys(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """How many keys a query sees, on average over a sequence of `seq_length` tokens.

    `causal` counts only keys that are not masked; without it, all that a dense product computes: the whole sequence, or
    the window.
    """
    window = min(model.sliding_window or seq_length, seq_length)
    if not causal:
        return float(window)
    return window - window * (window - 1) / (2 * seq_length)


def forward_flops(model: ModelConfig, seq_length: int, *, causal: bool = True) -> dict[str, float]:
    """Operations of the forward pass per token, by part, all layers together. Only products of matrices count.

    `causal` leaves the masked half of the attention scores out; see `visible_keys`. Layers that predict further tokens
    are layers like the others, and use the head once more each; what they are fed from is a part by itself.
    """
    width, layers = model.hidden_size, model.num_layers + model.mtp_layers
    head_widths = model.num_attention_heads * (model.head_size + model.value_size)
    split, latents = projections(model)
    matrices = 3 if model.gated else 2
    moe = model.moe
    dense = model.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size + moe.top_k * moe.ffn_hidden_size
    router = moe.num_experts if moe else 0
    layer = {
        "attention projections": 2.0 * (_elements(split) + _elements(latents)),
        "attention scores": 2.0 * visible_keys(model, seq_length, causal=causal) * head_widths,
        "feed-forward": 2.0 * width * (matrices * dense + router),
    }
    return {
        **{part: flops * layers for part, flops in layer.items()},
        **({"further tokens": 4.0 * width * width * model.mtp_layers} if model.mtp_layers else {}),
        "head": 2.0 * width * model.vocab_size * (1 + model.mtp_layers),
    }


def model_flops(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Operations of forward and backward per token; the backward is twice the forward. What MFU counts."""
    return 3 * sum(forward_flops(model, seq_length, causal=causal).values())


def hardware_flops(model: ModelConfig, seq_length: int, *, recompute: RecomputeKind, causal: bool = True) -> float:
    """Like `model_flops`, with what the backward computes again: the scores (`selective`) or all layers (`full`)."""
    forward = forward_flops(model, seq_length, causal=causal)
    again = {
        "none": 0.0,
        "selective": forward["attention scores"],
        "full": sum(forward.values()) - forward["head"],
    }[recompute]
    return 3 * sum(forward.values()) + again


def palm_flops(model: ModelConfig, seq_length: int) -> float:
    """6 N + 12 L H Q S operations per token, forward and backward (arXiv:2204.02311, appendix B).

    N are the active parameters without look-up tables: a tied table counts, once, since it is the head.
    """
    count = count_parameters(model)
    tables = count.embedding - (model.vocab_size * model.hidden_size if model.tie_embeddings else 0)
    pairs = model.num_attention_heads * (model.head_size + model.value_size) // 2  # H Q, or between keys and values
    attention = 12 * (model.num_layers + model.mtp_layers) * pairs * seq_length
    return float(6 * (count.active - tables) + attention)


def head_cost(model: ModelConfig, seq_length: int) -> float:
    """The work that comes with the output head, in layers; what `stage_layers` wants to know."""
    forward = forward_flops(model, seq_length)
    last = forward["head"] + forward.get("further tokens", 0.0)
    layer = (sum(forward.values()) - last) / (model.num_layers + model.mtp_layers)
    return last / layer + model.mtp_layers


def _elements(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(map(math.prod, shapes))


def _widths(model: ModelConfig) -> tuple[int, int, int]:
    """D, H Q and K Q."""
    return model.hidden_size, model.num_attention_heads * model.head_size, model.kv_heads * model.head_size


# Dense peak in TFLOP/s from the makers' data sheets (half of a figure given with sparsity), with fp32 accumulation. A device
# is known by the words of its name; `bf16` stands for fp16 too, and `fp32` is without tf32.
_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500},
    "GB200": {"fp64": 40, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp8": 5000},
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
}


def peak_flops(device: str, precision: str) -> float | None:
    """What `device` (as `torch.cuda.get_device_name` calls it) can do at most, in FLOP/s; None where it is not known.

    `precision` is one of fp64, fp32, tf32, bf16, fp16 and fp8.
    """
    words = set(re.split(r"[\s-]+", device.lower()))
    known = [name for name in _PEAKS if set(name.lower().split()) <= words]
    if not known:
        return None
    tera = _PEAKS[max(known, key=len)].get("bf16" if precision == "fp16" else precision)
    return None if tera is None else tera * 1e12

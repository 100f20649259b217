"""The canonical tensors of a model: HuggingFace-Llama-shaped, unfused, (out, in), vocabulary unpadded.

Legend: V vocabulary, D model width, F feed-forward width, E experts, P positions, d width of one head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from mega_ckpt.pieces import Shape
from mega_common.model_config import ModelConfig

Tensors = dict[str, Shape]


def tensors_of(config: ModelConfig) -> Tensors:
    """Every tensor of a model by canonical name, with its shape, in the order of the forward pass.

    A layer's experts are one tensor stacked on axis 0. `lm_head.weight` is absent when it is the embedding.
    """
    width, vocab = config.hidden_size, config.vocab_size
    out: Tensors = {"model.embed_tokens.weight": (vocab, width)}
    if config.position == "learned":
        out["model.embed_positions.weight"] = (config.max_position, width)
    layer = _layer(config)
    for index in range(config.num_layers):
        out |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    out |= _norm(config, "model.norm")
    if not config.tie_embeddings:
        out["lm_head.weight"] = (vocab, width)
    return out


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters; tied embeddings count once."""
    return sum(map(math.prod, tensors_of(config).values()))


def some(names: Iterable[str]) -> str:
    """The first of some names and the number of the others, for a message."""
    first, *others = sorted(names)
    return first + (f" (and {len(others)} more)" if others else "")


def _layer(config: ModelConfig) -> Tensors:
    post = config.norm_position == "post"
    return {
        **({} if post else _norm(config, "input_layernorm")),
        **_attention(config),
        **_norm(config, "post_attention_layernorm"),
        **(_experts(config) if config.moe else _mlp(config, config.ffn_hidden_size)),
        **(_norm(config, "post_feedforward_layernorm") if post else {}),
    }


def _norm(config: ModelConfig, name: str) -> Tensors:
    shape: Shape = (config.hidden_size,)
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape} if config.norm == "layernorm" else {})


def _linear(name: str, out: int, into: int, bias: bool) -> Tensors:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _attention(config: ModelConfig) -> Tensors:
    width, head = config.hidden_size, config.head_size
    queries, keys = config.num_attention_heads * head, config.kv_heads * head
    spans = (head, head) if config.qk_norm_span == "head" else (queries, keys)
    norms: Tensors = {f"self_attn.{name}_norm.weight": (span,) for name, span in zip("qk", spans, strict=True)}
    return {
        **_linear("self_attn.q_proj", queries, width, config.qkv_bias),
        **_linear("self_attn.k_proj", keys, width, config.qkv_bias),
        **_linear("self_attn.v_proj", keys, width, config.qkv_bias),
        **(norms if config.qk_norm else {}),
        **_linear("self_attn.o_proj", width, queries, config.attention_out_bias),
    }


def _mlp(config: ModelConfig, ffn: int, name: str = "mlp") -> Tensors:
    width, bias = config.hidden_size, config.mlp_bias
    return {
        **(_linear(f"{name}.gate_proj", ffn, width, bias) if config.gated else {}),
        **_linear(f"{name}.up_proj", ffn, width, bias),
        **_linear(f"{name}.down_proj", width, ffn, bias),
    }


def _experts(config: ModelConfig) -> Tensors:
    """The router [E, D], the experts' projections stacked [E, ...], and the expert that every token passes."""
    assert config.moe is not None
    experts, shared = config.moe.num_experts, config.moe.shared_ffn_hidden_size
    stacked = _mlp(config, config.moe.ffn_hidden_size, "mlp.experts")
    return {
        "mlp.gate.weight": (experts, config.hidden_size),
        **{name: (experts, *shape) for name, shape in stacked.items()},
        **(_mlp(config, shared, "mlp.shared_expert") if shared else {}),
    }

"""What the parity suite compares: models, the layouts they are trained in, and how many of those are worth running."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mega_trainer.verify.layout_case import (
    STEPS,
    LayoutCase,
    choose_covering_cases,
    iterate_layouts,
    sample_memory_settings,
    sample_stages_and_batch,
)

RANKS = 8
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_attention_heads": 8, "vocab_size": 64},
    "tied": {
        "num_attention_heads": 8, "vocab_size": 59, "tie_embeddings": True, "norm": "layernorm",
        "activation": "gelu_tanh", "position": "learned", "max_position": 16, "qkv_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "embedding_dropout": 0.1, "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "gqa": {
        "num_attention_heads": 8, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 61, "qk_norm": True,
        "qkv_bias": True, "activation": "geglu", "sliding_window": 11, "rope": {"theta": 100.0, "fraction": 0.5},
    },
    "gemma": {
        "num_attention_heads": 8, "num_kv_heads": 4, "head_dim": 6, "vocab_size": 53, "tie_embeddings": True,
        "norm_position": "both", "zero_centered_norm": True, "qk_norm": True, "scale_embeddings": True,
        "attention_softcap": 2.0, "logit_softcap": 1.5, "attention_sinks": True, "attention_scale": 0.5,
        "sliding_window": 5, "full_attention_layers": [1], "rope": {"theta": 500.0}, "local_rope": {"theta": 20.0},
        "activation_limit": 0.7, "mlp_bias": True,
    },
    "mla": {
        "num_attention_heads": 8, "vocab_size": 61, "qkv_bias": True, "rope": {"theta": 100.0, "interleaved": True},
        "mtp_layers": 1,
        "mla": {
            "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
        },
    },
    "long": {
        "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 64, "sliding_window": 19, "full_attention_layers": [1],
        "attention_softcap": 5.0, "attention_sinks": True, "qk_norm": True, "embedding_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "moe": {
        "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 61, "mlp_bias": True,
        "moe": {
            "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24,
            "shared_ffn_hidden_size": 16, "shared_gate": True, "selection_bias": True, "bias_rate": 0.01, "router_bias": True,
            "aux_loss": 0.1, "z_loss": 0.01, "scaling": 1.5,
        },
    },
}  # fmt: skip
MODELS["deepseek"] = MODELS["mla"] | {
    "moe": {
        "num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "score": "sigmoid",
        "groups": 4, "top_groups": 2, "group_score": "top2", "selection_bias": True, "bias_rate": 0.01,
        "aux_loss": 0.1, "scaling": 2.5,
    },
}  # fmt: skip
# Half of the layers are the encoder's, whose sequence is the longer one.
MODELS["t5"] = {
    "num_attention_heads": 8, "vocab_size": 59, "tie_embeddings": True, "logit_scale": 32**-0.5, "position": "relative",
    "relative": {"buckets": 8, "max_distance": 12}, "activation": "relu", "attention_scale": 1.0,
    "head_dim": 3, "encoder": {"num_layers": 1},
}  # fmt: skip
# Sizes by which context ranks pass states where there are few of them, and exchange heads where there are many.
MODELS["hybrid"] = MODELS["moe"] | {
    "mlp_bias": False, "position": "none", "residual_multiplier": 0.7,
    "layers": ["mamba+moe", "attention+mlp", "mamba", "moe", "mamba+mlp", "attention"],
    "mamba": {"num_heads": 8, "head_dim": 2, "state_size": 2, "num_groups": 2, "conv_kernel": 2, "chunk_size": 5},
}  # fmt: skip
# BERT, with two losses; of its variants one is as Megatron's, one as RoBERTa and one as ModernBERT.
MODELS["encoder"] = {
    "num_attention_heads": 8, "vocab_size": 59, "causal": False, "tie_embeddings": True, "norm": "layernorm",
    "norm_position": "sum", "embedding_norm": True, "activation": "gelu", "position": "learned", "max_position": 16,
    "token_types": 2, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "masked_lm": {}, "pooler": True,
    "sentence_pairs": True, "embedding_dropout": 0.1, "residual_dropout": 0.1,
}  # fmt: skip
# Of which one layer computes nothing, and images are fewer, as many and more than the ranks that share them.
MODELS["vision"] = {
    "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 61, "scale_embeddings": True,
    "vision": {
        "num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 20, "num_attention_heads": 2, "image_size": 4,
        "patch_size": 2, "image_token": 60,
    },
}  # fmt: skip
# Chunks of which some have no neighbors, and neighbors of which some are short.
MODELS["retro"] = {
    "num_attention_heads": 8, "vocab_size": 61, "retro": {"chunk_length": 4, "neighbors": 2, "encoder_layers": 2},
}  # fmt: skip
LENGTHS = {"long": 32, "hybrid": 48, "t5": 32}
WITH_CONTEXT = ("mla", "long", "moe", "deepseek", "hybrid", "t5", "encoder", "vision")
# A choice that is balanced, and nothing else that would balance it.
SINKHORN = {
    "sinkhorn": True, "normalize": False, "scaling": 1.0, "groups": 1, "selection_bias": False, "bias_rate": 0.0,
    "aux_loss": 0.0,
}  # fmt: skip
INDEXER = {"num_heads": 8, "head_dim": 6, "top_k": 3, "kl_loss": 0.7}
# Of which each layout draws one.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {},
        {
            "parallel_residual": True, "shared_norm": True, "norm": "layernorm", "norm_bias": False,
            "tie_embeddings": True, "no_rope_layers": [0], "logit_scale": 0.3,
            "rope": {"theta": 100.0, "interleaved": True},
        },
        {
            "embedding_multiplier": 4.0, "residual_multiplier": 0.4, "logit_scale": 0.25, "attention_scale": 0.3,
            "no_rope_layers": [1], "num_kv_heads": 2, "mlp_multipliers": [0.7, 1.6],
        },
        {
            "position": "alibi", "head_bias": True, "embedding_norm": True, "norm": "layernorm", "num_kv_heads": 4,
            "vocab_size": 61, "tie_embeddings": True,
        },
        {
            "norm_weight": False, "embedding_norm": True, "qkv_clip": 0.7, "qk_norm": True, "qk_norm_span": "plain",
            "qk_norm_after_rope": True, "rope": {"theta": 100.0, "clockwise": True}, "activation": "xielu", "num_kv_heads": 2,
        },
        {
            "norm_position": "sum", "norm": "layernorm", "position": "learned", "max_position": 16, "activation": "gelu_tanh",
            "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "residual_dropout": 0.1,
        },
        {
            "output_input_norms": True, "activation": "reglu2", "qk_norm": True, "qk_norm_span": "layernorm", "num_kv_heads": 4,
            "masked_lm": {"dense_bias": False}, "tie_embeddings": True,
        },
        {"hyper_connections": {"streams": 3, "iterations": 4, "eps": 1e-3}, "num_kv_heads": 2, "residual_dropout": 0.1},
    ],
    "gqa": [
        {}, {"attention_gate": True, "zero_centered_norm": True},
        {
            "qk_norm_after_rope": True, "head_bias": True,
            "rope": {"theta": 100.0, "query_scaling": 0.3, "original_max_position": 4},
        },
        {
            "full_attention_layers": [1], "full_attention": {"head_dim": 12, "num_kv_heads": 4, "keys_are_values": True},
            "rope": {"theta": 100.0, "fraction": 0.5, "scaling": "proportional"}, "local_rope": {"theta": 20.0},
            "value_norm": True, "layer_scale": True, "attention_scale": 1.0, "norm_position": "both", "qkv_bias": False,
        },
        {"per_layer_input_size": 6, "layer_scale": True, "tie_embeddings": True, "scale_embeddings": True},
        {
            "altup": {"streams": 3, "active": 1, "laurel_rank": 5}, "ffn_sparsity": [0.6, 0.0, 0.3], "per_layer_input_size": 6,
            "per_layer_vocab_size": 50, "norm_position": "both", "tie_embeddings": True, "scale_embeddings": True,
        },
    ],
    "moe": [
        {}, {"attention_sinks": True, "activation_limit": 0.7, "sliding_window": 5, "full_attention_layers": [1]},
        {
            "sliding_window": 5, "chunked_window": True, "full_attention_layers": [1], "no_rope_layers": [1],
            "no_rope_scaling": [0.4, 3], "qk_norm": True, "qk_norm_span": "plain", "qk_norm_after_rope": True,
            "moe": MODELS["moe"]["moe"] | {"score": "sigmoid", "normalize": False, "weighted_inputs": True},
        },
        {
            "moe": MODELS["moe"]["moe"] | {
                "score": "sparsemixer", "jitter": 0.3, "normalize": False, "scaling": 1.0, "selection_bias": False, "bias_rate": 0.0,
                "shared_gate": False, "shared_scaling": 0.5, "output_norm": True,
            },
        },
        {"moe": MODELS["moe"]["moe"] | {"score": "sigmoid", "choice": "logits", "router_bias": False}},
        {
            "norm_position": "both", "zero_centered_norm": True,
            "moe": MODELS["moe"]["moe"] | {"shared_gate": False, "shared_ffn_hidden_size": 48, "separate_norms": True},
        },
        {
            "value_head_dim": 6, "value_scale": 0.7, "qkv_bias": True, "sliding_window": 5, "full_attention_layers": [1],
            "attention_sinks": True, "full_attention": {"head_dim": 4, "num_kv_heads": 2, "attention_sinks": False},
            "rope": {"theta": 100.0, "fraction": 0.5}, "local_rope": {"theta": 20.0},
        },
        {
            "softplus_gate": "head", "qk_norm": True, "sliding_window": 5, "full_attention_layers": [1],
            "full_attention": {"head_dim": 4, "num_kv_heads": 4, "num_attention_heads": 16},
            "moe": MODELS["moe"]["moe"] | {"score": "sigmoid", "logit_softcap": 0.8},
        },
        {"softplus_gate": "channel", "value_head_dim": 3, "qk_norm": True, "qk_norm_span": "all", "num_kv_heads": 2},
        {"moe": MODELS["moe"]["moe"] | SINKHORN},
    ],
    "mla": [
        {}, {"tie_embeddings": True, "mtp_layers": 2, "mla": {**MODELS["mla"]["mla"], "q_lora_rank": None}},
        {"mla": {**MODELS["mla"]["mla"], "latent_norm": False}},
        {"rope": {"theta": 100.0, "query_scaling": 0.3, "original_max_position": 4}},
        {
            "rope": {"theta": 100.0}, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logit_scale": 0.25,
            "tie_embeddings": True, "mtp_layers": 0,
        },
        {"mla": {**MODELS["mla"]["mla"], "indexer": INDEXER}},
        {"mla": {**MODELS["mla"]["mla"], "indexer": {**INDEXER, "dense": True, "interleaved": True}}, "mtp_layers": 2},
    ],
}  # fmt: skip
# DeepSeek-V4: windows of documents whose lengths are no multiples of the rates, experts by token id in some layers.
COMPRESSED: dict[str, Any] = {
    "layers": ["hca+moe", "csa+moe", "swa+moe", "csa+moe"], "num_kv_heads": 1, "head_dim": 8, "mlp_bias": False,
    "rope": {"theta": 100.0, "fraction": 0.5, "interleaved": True}, "local_rope": {"theta": 20.0, "fraction": 0.5, "interleaved": True},
    "activation": "clamped_swiglu", "activation_limit": 0.7, "hyper_connections": {"streams": 2, "iterations": 4, "eps": 1e-3},
    "compressed": {
        "q_lora_rank": 12, "window": 4, "output_groups": 4, "output_rank": 6, "csa_rate": 2, "hca_rate": 3,
        "indexer": {"num_heads": 8, "head_dim": 6, "top_k": 2, "interleaved": True},
    },
    "moe": {
        "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "score": "sqrtsoftplus",
        "selection_bias": True, "bias_rate": 0.01, "aux_loss": 0.1, "z_loss": 0.01, "scaling": 1.5, "hash_layers": [0],
    },
}  # fmt: skip
# Last layers that attend to keys and values of earlier ones, all of which the last stage has; of six layers.
SHARED_KEYS: dict[str, Any] = {
    "full_attention_layers": [1, 3, 5], "full_attention": {"head_dim": 12, "num_kv_heads": 4, "keys_are_values": True},
    "local_rope": {"theta": 20.0}, "value_norm": True, "norm_position": "both", "shared_kv_layers": 2,
    "shared_kv_ffn_hidden_size": 64, "per_layer_input_size": 6,
}  # fmt: skip
# Experts whose output is added after the next layer, some of which return their input; of pairs of layers.
SHORTCUT: dict[str, Any] = {
    "mtp_layers": 0, "layers": ["attention+moe", "attention+mlp"], "mla": {**MODELS["mla"]["mla"], "scaled_latents": True}, "moe": {
        "num_experts": 8, "zero_experts": 5, "top_k": 4, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 48, "shortcut": True,
        "normalize": False, "scaling": 2.0, "selection_bias": True, "bias_rate": 0.01, "aux_loss": 0.1, "z_loss": 0.01,
    },
}  # fmt: skip
# Its experts are in the depth of multi-token prediction, too, which so has to be there.
VARIANTS["deepseek"] = [variant for variant in VARIANTS["mla"] if variant.get("mtp_layers") != 0]
VARIANTS["hybrid"] = [
    {},
    {
        "norm_position": "both", "residual_dropout": 0.1, "mamba": {
            "num_heads": 8, "head_dim": 3, "state_size": 4, "num_groups": 8, "dt_limit": [0.01, 0.3], "bias": True,
            "norm_eps": 1e-2, "conv_bias": False,
        },
        "moe": {**MODELS["moe"]["moe"], "latent_size": 20},
    },
    {"mamba": {"num_heads": 16, "head_dim": 2, "state_size": 1, "num_groups": 1, "chunk_size": 8}},
    {
        "layers": ["delta+moe", "attention+mlp", "mamba", "delta"], "position": "rope", "attention_gate": True,
        "zero_centered_norm": True, "qk_norm": True, "delta": {
            "num_key_heads": 2, "num_value_heads": 8, "key_head_dim": 3, "value_head_dim": 2, "chunk_size": 5,
        },
    },
    {
        "layers": ["mamba+mlp", "delta+moe", "attention"], "delta": {
            "num_key_heads": 8, "num_value_heads": 8, "key_head_dim": 2, "value_head_dim": 3, "conv_kernel": 2,
            "norm_eps": 1e-2,
        },
    },
    {"layers": ["conv+mlp", "conv+moe", "attention", "conv"], "conv": {"kernel": 4, "bias": True}, "qk_norm": True},
    {
        "layers": ["kda+moe", "attention+mlp", "kda+mlp", "kda"], "num_kv_heads": None,
        "kda": {"num_heads": 8, "head_dim": 3, "conv_kernel": 3, "chunk_size": 5, "norm_eps": 1e-2},
        "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    },
    {
        "layers": ["kda+moe", "attention+moe"], "num_kv_heads": None, "position": "rope", "attention_gate": True,
        "rope": {"theta": 100.0, "interleaved": True},
        "kda": {"num_heads": 8, "head_dim": 3, "chunk_size": 5, "low_rank_gates": False, "gate_floor": -2.0},
        "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    },
    {
        "layers": ["lightning+moe", "attention+moe", "lightning+mlp", "lightning"], "position": "rope", "norm_position": "stream",
        "lightning": {"num_heads": 8, "head_dim": 3, "chunk_size": 5}, "residual_dropout": 0.1, "residual_multiplier": 1.0,
        "residual_factors": {"lightning": [2.0, 0.8], "attention": [0.9, 1.1], "moe": [1.5, 0.7]},
    },
    {
        "layers": ["mamba1+moe", "attention+mlp", "mamba1+mlp", "mamba1"], "position": "none",
        "mamba1": {"inner_size": 24, "state_size": 3, "dt_rank": 5, "conv_kernel": 3, "chunk_size": 5, "norms": "weight"},
    },
    {
        "layers": ["mamba1", "mamba1+moe"], "mamba1": {
            "inner_size": 16, "state_size": 4, "dt_rank": 2, "chunk_size": 8, "norms": "plain", "norm_eps": 1e-2, "bias": True,
            "conv_bias": False,
        },
    },
    {
        "layers": ["hybrid+moe", "hybrid+mlp"], "position": "rope", "num_kv_heads": 2, "qkv_bias": True, "mamba": {
            "num_heads": 8, "head_dim": 3, "state_size": 4, "num_groups": 2, "chunk_size": 5, "norm": "before_gate",
        },
        "hybrid": {
            "attention_input": 0.7, "attention_output": 1.4, "keys": 0.6, "mamba_input": 1.2, "mamba_output": 0.8,
            "mamba_projections": [0.5, 1.5, 0.7, 1.2, 2.0],
        },
    },
    {
        "layers": ["delta+moe", "attention+mlp", "delta+mlp", "attention+moe"], "position": "rope", "norm_position": "post",
        "norm_positions": {"delta": "pre"}, "qk_norm": True, "qk_norm_span": "all", "residual_multiplier": 1.0, "delta": {
            "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 3, "value_head_dim": 2, "chunk_size": 5,
            "negative_eigenvalues": True,
        },
    },
]  # fmt: skip
VARIANTS["vision"] = [
    {},
    {
        "tie_embeddings": True, "vision": MODELS["vision"]["vision"] | {
            "class_token": False, "patch_bias": True, "pre_norm": False, "feature_layer": -1, "feature_norm": True,
            "activation": "gelu_tanh", "projector_bias": False,
        },
    },
    {"vision": MODELS["vision"]["vision"] | {"pinpoints": [[4, 8], [8, 4], [4, 4]], "resize": "stretch"}},
    {
        "sliding_window": 5, "full_attention_layers": [1], "vision": MODELS["vision"]["vision"] | {
            "image_size": 8, "projector": "norm", "pool": 2, "bidirectional": True, "feature_layer": -1,
        },
    },
    {
        "head_dim": 8, "scale_embeddings": False, "rope": {"theta": 100.0, "sections": [2, 1, 1]},
        "vision": MODELS["vision"]["vision"] | {
            "hidden_size": 16, "class_token": False, "pre_norm": False, "feature_layer": -1, "activation": "swiglu",
            "projector": "merger", "native": {"window": 8, "full_layers": [1], "min_pixels": 64, "max_pixels": 96},
        },
    },
    {
        "head_dim": 8, "scale_embeddings": False, "qk_norm": True,
        "rope": {"theta": 100.0, "sections": [2, 1, 1], "sections_interleaved": True},
        "vision": MODELS["vision"]["vision"] | {
            "hidden_size": 16, "class_token": False, "pre_norm": False, "feature_layer": -1, "activation": "gelu_tanh",
            "patch_bias": True, "projector": "merger", "native": {
                "norm": "layernorm", "window": None, "positions": 9, "deepstack": [0, 1], "min_pixels": 64, "max_pixels": 96,
            },
        },
    },
    {
        "sliding_window": 5, "full_attention_layers": [1], "vision": MODELS["vision"]["vision"] | {
            "image_size": 8, "bidirectional": True, "bidirectional_windows": True,
        },
    },
    {"vision": MODELS["vision"]["vision"] | {"bidirectional": True, "bidirectional_prompt": True}},
]  # fmt: skip
# What may be frozen of a model.
FROZEN: dict[str, list[list[str]]] = {"vision": [[], ["model.vision_tower.*"], ["model.projector.*"]]}
VARIANTS["t5"] = [
    {}, {"residual_dropout": 0.1, "embedding_dropout": 0.1, "relative": {"buckets": 12, "max_distance": 7, "every_layer": True}},
    {"activation": "geglu", "tie_embeddings": False, "logit_scale": 1.0},
    {
        "position": "learned", "max_position": 32, "norm": "layernorm", "activation": "gelu", "qkv_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "attention_scale": None, "num_kv_heads": 4, "encoder": {"num_layers": 1, "head_bias": True},
    },
]  # fmt: skip
VARIANTS["encoder"] = [
    {},
    {"norm_position": "pre", "embedding_norm": False, "tie_embeddings": False, "num_kv_heads": 4},
    {
        "token_types": 1, "position_offset": 2, "pooler": False, "sentence_pairs": False, "sliding_window": 3,
        "masked_lm": {"bias": False, "activation": "gelu_tanh"},
    },
    {
        "norm_position": "pre", "first_norm": False, "norm_bias": False, "activation": "geglu_erf", "position": "rope",
        "rope": {"theta": 500.0}, "local_rope": {"theta": 20.0}, "token_types": 0, "qkv_bias": False,
        "attention_out_bias": False, "mlp_bias": False, "masked_lm": {"dense_bias": False}, "pooler": False,
        "sentence_pairs": False, "sliding_window": 4, "full_attention_layers": [0],
    },
    {
        "embedding_size": 20, "position": "rope", "rope": {"theta": 100.0, "interleaved": True}, "activation": "geglu_erf",
        "mlp_bias": False, "mlp_out_bias": True, "masked_lm": {"activation": "silu"}, "pooler_activation": "gelu",
    },
    {
        "norm_position": "pre", "embedding_norm": False, "norm": "rmsnorm", "activation": "swiglu", "position": "rope",
        "token_types": 0, "num_kv_heads": 4, "tie_embeddings": False, "masked_lm": {"dense": False, "dense_bias": False},
        "pooler": False, "sentence_pairs": False,
    },
]  # fmt: skip
# A bias table that all layers share, which the layers of other stages would lack.
SHARED_BIAS: dict[str, Any] = {
    "relative_bias": True,
    "relative": {"buckets": 8, "max_distance": 12},
    "position_offset": 2,
}
VARIANTS["retro"] = [
    {},
    {
        "tie_embeddings": True, "norm": "layernorm", "activation": "gelu", "position": "learned", "max_position": 16,
        "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "num_kv_heads": 4, "embedding_dropout": 0.1,
        "residual_dropout": 0.1, "attention_dropout": 0.1,
        "retro": {"chunk_length": 8, "neighbors": 1, "encoder_layers": 1, "attention_dropout": 0.2},
    },
    {"num_kv_heads": 2, "qk_norm": True, "sliding_window": 5, "retro": {"chunk_length": 4, "neighbors": 3}},
]  # fmt: skip
# A start far from zero, so that attention is not uniform and no gradient is too small to show an error.
COMMON = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "init_std": 0.2}


def model(name: str, layers: int = 2) -> dict[str, Any]:
    """The fields of one of the models, with so many layers."""
    fields = {**COMMON, **MODELS[name], "num_layers": layers}
    if "moe" in fields and "layers" not in fields:
        fields["moe"] = {**fields["moe"], "layers": list(range(1, layers + fields.get("mtp_layers", 0)))}
    return fields


def case(
    name: str, ranks: int, *, layers: int = 2, variant: Mapping[str, Any] | None = None, **more: Any
) -> LayoutCase:
    """A case of the named model, but for the fields of `variant`; `more` are `Case`'s fields."""
    fields, chosen = {"length": LENGTHS.get(name, 16), **more}, {**model(name, layers), **(variant or {})}
    if "layers" in chosen:  # a pattern, again and again
        chosen["layers"] = [chosen["layers"][layer % len(chosen["layers"])] for layer in range(layers)]
    if "ffn_sparsity" in chosen:
        chosen["ffn_sparsity"] = [
            chosen["ffn_sparsity"][layer % len(chosen["ffn_sparsity"])] for layer in range(layers)
        ]
    if "encoder" in chosen:
        chosen["encoder"] = {**chosen["encoder"], "num_layers": layers // 2}
    if "retro" in chosen:  # some of the later layers
        attending = list(range((layers - 1) // 3, layers, 1 + layers // 4))
        chosen["retro"] = {**chosen["retro"], "layers": attending}
    return LayoutCase(name, chosen, ranks, **fields)


def layouts(name: str, ranks: int) -> Iterator[dict[str, Any]]:
    """Every layout of a model on `ranks` ranks, with context parallelism and experts where the model has them."""
    experts = "moe" in MODELS[name]
    return iterate_layouts(
        ranks,
        tps=() if name == "long" else (1, 2, 4, 8),
        cps=dict.fromkeys((2, 4, 8), (1, 2, 4)) if name in WITH_CONTEXT else {},
        eps=(1, 2, 4, 8) if experts else (),
        expert_tps=(1, 2, 4) if experts else (),
    )


def all_layouts() -> list[LayoutCase]:
    """Every layout of up to eight ranks, for each model; what else there is to choose is drawn, the same each time."""
    return [
        _with_choices(name, ranks, parallel)
        for name in MODELS
        for ranks in range(1, RANKS + 1)
        for parallel in layouts(name, ranks)
    ]


def _with_choices(name: str, ranks: int, parallel: dict[str, Any]) -> LayoutCase:
    rng = random.Random(f"{name} {ranks} {parallel}")
    layers, chosen = sample_stages_and_batch(ranks, parallel, rng)
    # more than half of all have both; the others show what goes wrong from step to step
    steps = 1 if {"cp", "ep"} <= parallel.keys() else STEPS
    variants = VARIANTS.get(name, [{}])
    if name == "t5" and parallel.get("cp_kind", "alltoall") != "alltoall":  # which add nothing to scores
        variants = [variant for variant in variants if variant.get("position") == "learned"]
    variant = rng.choice(variants)
    layers += _add_deepstack_layers(variant, chosen["parallel"])
    found = case(
        name, ranks, layers=layers, variant=variant, **sample_memory_settings(rng), **chosen,
        optimizer=rng.choice(OPTIMIZERS), steps=steps,
        freeze=rng.choice(FROZEN[name]) if name in FROZEN else (),
    )  # fmt: skip
    overlaps = parallel["sp"] and rng.random() < 0.5
    return replace(
        found,
        steps=min(steps, most_steps(found)),
        parallel={**found.parallel, **({"tp_comm_overlap": True} if overlaps else {})},
    )


def _add_deepstack_layers(variant: Mapping[str, Any], parallel: dict[str, Any]) -> int:
    """Give the first stage the decoder layers that DeepStack features enter; return how many are added."""
    needed = len(variant.get("vision", {}).get("native", {}).get("deepstack", ()))
    stages = parallel["pp"] * parallel["virtual_stages"]
    first, *rest = parallel.get("pipeline_layout", [1])
    added = max(0, needed - first) if stages > 1 else 0
    if "pipeline_layout" in parallel:
        parallel["pipeline_layout"] = [first + added, *rest]
    return added


def most_steps(case: LayoutCase) -> int:
    """Steps that can be told from rounding: many layers with delta nets move, in each, by forty times what it changed."""
    layers = case.model.get("layers", [])
    return 1 if len(layers) > 4 and any("delta" in layer or "kda" in layer for layer in layers) else STEPS


def covering(cases: Sequence[LayoutCase], count: int) -> list[LayoutCase]:
    """`count` of the cases, with as many steps as their rounding allows."""
    return [replace(one, steps=most_steps(one)) for one in choose_covering_cases(cases, count)]


OPTIMIZERS = ["adamw", "adamw", "muon"]

"""Tiny random transformers models of every family that mega knows, as HuggingFace folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_ckpt.families import FAMILIES, ModelFamily
from mega_common.model_config import ModelConfig

BASE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "vocab_size": 61,
    "max_position": 64, "norm_eps": 1e-5,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "tie_embeddings": True, "qkv_bias": True,
    "attention_out_bias": True, "mlp_bias": True,
}  # fmt: skip
_BIASES: dict[str, Any] = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
OLMO2: dict[str, Any] = {"norm_position": "post", "qk_norm": True, "qk_norm_span": "all"}
NEOX: dict[str, Any] = {
    "hidden_size": 32, "norm": "layernorm", "activation": "gelu", "qkv_bias": True, "attention_out_bias": True,
    "mlp_bias": True, "parallel_residual": True, "rope": {"fraction": 0.25},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "norm_position": "both", "zero_centered_norm": True, "scale_embeddings": True, "activation": "geglu",
    "tie_embeddings": True, "num_kv_heads": 2, "head_dim": 10, "sliding_window": 7,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    **GEMMA, "full_attention_layers": [1], "attention_softcap": 3.0, "logit_softcap": 2.0, "attention_scale": 20**-0.5,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    **GEMMA, "full_attention_layers": [0], "qk_norm": True, "rope": {"theta": 5000.0}, "local_rope": {"theta": 100.0},
}  # fmt: skip
LONG: dict[str, Any] = {
    "scaling": "longrope", "original_max_position": 16, "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0],
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 6, "top_k": 2, "ffn_hidden_size": 12}
OSS: dict[str, Any] = {
    "sliding_window": 7, "full_attention_layers": [1], "attention_sinks": True, "mlp_bias": True, "qkv_bias": True,
    "attention_out_bias": True, "activation_limit": 0.5, "num_kv_heads": 2, "head_dim": 10,
    "moe": {**MOE, "router_bias": True},
}  # fmt: skip
LATENT: dict[str, Any] = {
    "mla": {"kv_lora_rank": 14, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "rope": {"interleaved": True},
}  # fmt: skip
V2: dict[str, Any] = {**MOE, "normalize": False, "shared_ffn_hidden_size": 24, "scaling": 2.0}
V3: dict[str, Any] = {
    **MOE, "score": "sigmoid", "selection_bias": True, "groups": 3, "top_groups": 2, "group_score": "top2",
    "shared_ffn_hidden_size": 12, "scaling": 2.5, "layers": [1],
}  # fmt: skip
LLAMA3 = {"scaling": "llama3", "factor": 4.0, "original_max_position": 16, "theta": 1000.0}
YARN = {"scaling": "yarn", "factor": 4.0, "original_max_position": 16, "beta_fast": 4.0}

# What a model may be, beside BASE. Each is tried in every family whose config.json can say it.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1, "tie_embeddings": True},
    "own-head-size": {"head_dim": 10, "num_kv_heads": 2},
    "odd-heads": {"hidden_size": 42, "num_attention_heads": 7, "ffn_hidden_size": 33},
    "qkv-bias": {"qkv_bias": True, "num_kv_heads": 2},
    "attention-bias": {"qkv_bias": True, "attention_out_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "qk-norm": {"qk_norm": True, "num_kv_heads": 2, "head_dim": 8},
    "qk-norm-bias": {"qk_norm": True, "qkv_bias": True, "attention_out_bias": True, "tie_embeddings": True},
    "theta": {"rope": {"theta": 500_000.0}},
    "linear": {"rope": {"scaling": "linear", "factor": 3.0}},
    "dynamic": {"rope": {"scaling": "dynamic", "factor": 2.0}, "max_position": 16},
    "llama3": {"rope": LLAMA3},
    "yarn": {"rope": YARN},
    "yarn-mscale": {"rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn-factor": {"rope": {**YARN, "attention_factor": 1.2}},
    "yarn-biased": {"rope": YARN, "qkv_bias": True},
    "yarn-normed": {"rope": YARN, "qk_norm": True},
    "window": {"sliding_window": 7, "num_kv_heads": 2},
    "window-biased": {"sliding_window": 7, "qkv_bias": True},
    "partial": {"hidden_size": 32, "rope": {"fraction": 0.5, "theta": 1000.0}},
    "partial-grouped-window": {"head_dim": 12, "num_kv_heads": 2, "rope": {"fraction": 0.67}, "sliding_window": 7},
    "windows-in-some": {"sliding_window": 7, "full_attention_layers": [0], "head_dim": 10},
    "windows-in-some-biased": {"sliding_window": 7, "full_attention_layers": [0], "qkv_bias": True},
    "windows-in-some-normed": {"sliding_window": 7, "full_attention_layers": [1], "qk_norm": True},
    "long": {"rope": LONG},
    "long-within-the-original": {"rope": {**LONG, "original_max_position": 32}},
    "long-partial": {
        "hidden_size": 48,
        "rope": {**LONG, "fraction": 0.5, "attention_factor": 1.3},
        "num_kv_heads": 2,
    },
    "long-factor": {"rope": {**LONG, "factor": 8.0}},
    "moe": {"moe": MOE, "num_kv_heads": 2},
    "moe-one-of-three": {
        "moe": {**MOE, "num_experts": 3, "top_k": 1},
        "sliding_window": 7,
        "head_dim": 10,
        "tie_embeddings": True,
    },
    "moe-normed": {"moe": {**MOE, "normalize": False, "top_k": 3}, "qk_norm": True, "num_kv_heads": 2, "head_dim": 10},
    "moe-normed-some": {
        "moe": {**MOE, "layers": [1]},
        "qk_norm": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "sliding_window": 7,
        "rope": YARN,
    },
    "moe-shared": {
        "moe": {**MOE, "normalize": False, "shared_ffn_hidden_size": 20, "shared_gate": True},
        "qkv_bias": True,
        "num_kv_heads": 2,
    },
    "moe-shared-some": {
        "moe": {**MOE, "shared_ffn_hidden_size": 20, "shared_gate": True, "layers": [0]},
        "sliding_window": 7,
        "full_attention_layers": [1],
    },
    "oss": OSS,
    "oss-plain": {
        **OSS,
        "full_attention_layers": None,
        "activation_limit": 7.0,
        "qkv_bias": False,
        "attention_out_bias": False,
        "moe": {**MOE, "router_bias": True, "top_k": 6},
        "rope": {**YARN, "truncate": False},
        "tie_embeddings": True,
    },
    "deepseek2": {**LATENT, "moe": V2},
    "deepseek2-groups": {
        "mla": {**LATENT["mla"], "q_lora_rank": None},
        "qkv_bias": True,
        "attention_out_bias": True,
        "rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "interleaved": True},
        "moe": {**V2, "groups": 3, "top_groups": 2, "layers": [1]},
    },
    "deepseek3": {**LATENT, "moe": V3},
    "deepseek3-yarn": {
        "mla": {**LATENT["mla"], "q_lora_rank": None},
        "qkv_bias": True,
        "attention_out_bias": True,
        "rope": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6, "interleaved": True},
        "tie_embeddings": True,
        "moe": {**V3, "groups": 1, "top_groups": 1, "normalize": False, "layers": None},
    },
    "deepseek-sparse": {
        "mla": {**LATENT["mla"], "indexer": {"num_heads": 12, "head_dim": 8, "top_k": 5}},
        "rope": {"interleaved": True},
        "moe": V3,
    },
    "deepseek-sparse-split-rope": {
        "mla": {**LATENT["mla"], "indexer": {"num_heads": 13, "head_dim": 6, "top_k": 7, "interleaved": True}},
        "rope": {"interleaved": True},
        "moe": V3,
    },
    "gemma2": GEMMA2,
    "gemma2-plain": {
        **GEMMA,
        "sliding_window": None,
        "tie_embeddings": False,
        "qkv_bias": True,
        "attention_out_bias": True,
    },
    "gemma2-one-cap": {**GEMMA2, "attention_softcap": None, "rope": {"scaling": "linear", "factor": 2.0}},
    "gemma3": GEMMA3,
    "gemma3-scaled-cap": {
        **GEMMA3,
        "logit_softcap": 2.0,
        "rope": {"scaling": "linear", "factor": 8.0},
        "attention_scale": 12**-0.5,
    },
    "gemma3-two-scalings": {
        **GEMMA3,
        "rope": YARN,
        "local_rope": {**LLAMA3, "theta": 50.0},
        "qkv_bias": True,
        "attention_out_bias": True,
        "tie_embeddings": False,
    },
    "window-normed": {"sliding_window": 7, "qk_norm": True},
    "olmo2": OLMO2,
    "olmo2-grouped-head": {**OLMO2, "num_kv_heads": 2, "head_dim": 10, "tie_embeddings": True},
    "olmo2-bias-yarn": {**OLMO2, "qkv_bias": True, "attention_out_bias": True, "num_kv_heads": 1, "rope": YARN},
    "neox": NEOX,
    "neox-one-after-another": {**NEOX, "parallel_residual": False, "tie_embeddings": True, "activation": "gelu_tanh"},
    "neox-no-bias-linear": {
        **NEOX,
        "qkv_bias": False,
        "attention_out_bias": False,
        "rope": {"fraction": 0.5, "theta": 500.0, "scaling": "linear", "factor": 2.0},
    },
    "gpt2": GPT2,
    "gpt2-exact-gelu": {**GPT2, "activation": "gelu"},
    "gpt2-untied": {**GPT2, "tie_embeddings": False, "ffn_hidden_size": 96},
}

_SIDE_BY_SIDE: dict[str, Any] = {"norm": "layernorm", "parallel_residual": True, "shared_norm": True}
_COHERE: dict[str, Any] = {
    **_SIDE_BY_SIDE, "norm_bias": False, "tie_embeddings": True, "logit_scale": 0.25, "rope": {"interleaved": True},
}  # fmt: skip
_NORMED_HEADS: dict[str, Any] = {"qk_norm": True, "qk_norm_span": "each"}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logit_scale": 1 / 3, "attention_scale": 0.3, "num_kv_heads": 2,
}  # fmt: skip
_PLAIN_MLP: dict[str, Any] = {"norm": "layernorm", "num_kv_heads": 2, **_BIASES}
VARIANTS |= {
    "unrotated": {"no_rope_layers": [1], "num_kv_heads": 2},
    "unrotated-window": {"no_rope_layers": [0], "sliding_window": 7, "full_attention_layers": [1], "mlp_bias": True},
    "scaled": _GRANITE,
    "scaled-yarn": {**_GRANITE, "rope": YARN, "tie_embeddings": True, "qkv_bias": True, "attention_out_bias": True},
    "scaled-moe": {**_GRANITE, "moe": MOE},
    "olmo3": {**OLMO2, "sliding_window": 7, "full_attention_layers": [1], "num_kv_heads": 2},
    "olmo3-yarn": {
        **OLMO2, "sliding_window": 7, "full_attention_layers": [0], "rope": YARN, "local_rope": {"theta": 100.0},
        "tie_embeddings": True,
    },
    "olmoe": {"qk_norm": True, "qk_norm_span": "all", "moe": {**MOE, "normalize": False}},
    "nemotron": {"norm": "layernorm", "zero_centered_norm": True, "activation": "relu2", "num_kv_heads": 2},
    "nemotron-partial-bias": {
        **_PLAIN_MLP, "zero_centered_norm": True, "activation": "relu2", "hidden_size": 32, "rope": {"fraction": 0.5},
    },
    "nemotron-yarn": {
        "norm": "layernorm", "zero_centered_norm": True, "activation": "relu2", "hidden_size": 48,
        "rope": {**YARN, "fraction": 0.5},
    },
    "layernorm-llama3": {"norm": "layernorm", "hidden_size": 48, "rope": {**LLAMA3, "fraction": 0.5}},
    "gelu-mlp": {**_PLAIN_MLP, "activation": "gelu_tanh", "sliding_window": 7},
    "gelu-mlp-no-bias": {"norm": "layernorm", "activation": "gelu_tanh", "num_kv_heads": 2, "tie_embeddings": True},
    "relu2-biased": {**_PLAIN_MLP, "activation": "relu2"},
    "relu2-mlp": {"activation": "relu2", "num_kv_heads": 2, "rope": LLAMA3},
    "layernorm": {"norm": "layernorm", "hidden_size": 32, "rope": {"fraction": 0.25}, "qkv_bias": True},
    "layernorm-side-by-side": {**_SIDE_BY_SIDE, "rope": {"fraction": 1.0}},
    "falcon": {**_SIDE_BY_SIDE, "activation": "gelu", "num_kv_heads": 1, "tie_embeddings": True},
    "falcon-groups": {
        **_SIDE_BY_SIDE, "shared_norm": False, "activation": "gelu", "num_kv_heads": 2, **_BIASES,
    },
    "falcon-groups-one-norm": {**_SIDE_BY_SIDE, "activation": "gelu", "num_kv_heads": 2},
    "cohere": _COHERE,
    "cohere-grouped-bias": {
        **_COHERE, "num_kv_heads": 2, "tie_embeddings": False, "qkv_bias": True, "attention_out_bias": True,
    },
    "cohere-normed-heads": {**_COHERE, "num_kv_heads": 2, **_NORMED_HEADS},
    "stablelm-normed-heads": {
        **_SIDE_BY_SIDE, **_NORMED_HEADS, "hidden_size": 32, "rope": {"fraction": 0.25}, "num_kv_heads": 2,
    },
    "cohere2": {**_COHERE, "sliding_window": 7, "full_attention_layers": [1], "no_rope_layers": [1], "num_kv_heads": 2},
    "exaone4": {
        "norm_position": "post", "qk_norm": True, "sliding_window": 7, "full_attention_layers": [0], "no_rope_layers": [0],
        "head_dim": 10,
    },
    "exaone4-no-window": {"norm_position": "post", "qk_norm": True, "num_kv_heads": 2},
    "gemma": {
        "zero_centered_norm": True, "scale_embeddings": True, "activation": "geglu", "tie_embeddings": True,
        "num_kv_heads": 1, "head_dim": 10,
    },
    "neighbors": {"rope": {"interleaved": True, "theta": 1000.0}, "num_kv_heads": 2},
    "neighbors-biased": {"rope": {"interleaved": True}, **_BIASES},
    "neighbors-partial": {
        "hidden_size": 32, "rope": {"interleaved": True, "fraction": 0.5}, "qkv_bias": True, "num_kv_heads": 2,
    },
    "neighbors-partial-norms": {
        "hidden_size": 32, "rope": {"interleaved": True, "fraction": 0.5}, "qkv_bias": True, "norm_position": "both",
    },
    "glm4-moe": {
        "moe": {**V3, "layers": [1]}, "head_dim": 8, "rope": {"fraction": 0.5}, "qk_norm": True, "num_kv_heads": 2,
    },
    "glm4-moe-biased": {"moe": {**V3, "groups": 1, "top_groups": 1, "layers": None}, "qkv_bias": True},
    "out-bias": {"attention_out_bias": True, "head_dim": 10},
    "gpt2-multi-query": {**GPT2, "num_kv_heads": 1},
}  # fmt: skip

_EACH: dict[str, Any] = {**MOE, "score": "sigmoid", "selection_bias": True}
VARIANTS |= {
    "minimax-m2": {
        "moe": _EACH, "qk_norm": True, "qk_norm_span": "all", "num_kv_heads": 2, "head_dim": 12, "rope": {"fraction": 0.5},
    },
    "glm4-moe-lite": {**LATENT, "moe": {**V3, "layers": [0]}},
    "dots1": {"moe": {**V3, "layers": [1]}, "qk_norm": True, "sliding_window": 7, "full_attention_layers": [0]},
    "exaone-moe": {
        "moe": {**V3, "layers": [1]}, "qk_norm": True, "num_kv_heads": 2, "sliding_window": 7, "full_attention_layers": [1],
        "no_rope_layers": [1],
    },
    "solar-open": {"moe": {**V3, "layers": None}, "head_dim": 10, "num_kv_heads": 2, "qkv_bias": True},
    "hy3": {"moe": {**_EACH, "shared_ffn_hidden_size": 24, "scaling": 2.5, "layers": [0]}, "qk_norm": True, "head_dim": 10},
    "afmoe": {
        "moe": {**_EACH, "shared_ffn_hidden_size": 24, "layers": [1]}, "qk_norm": True, "head_dim": 10, "attention_gate": True,
        "norm_position": "both", "scale_embeddings": True, "sliding_window": 7, "full_attention_layers": [0],
        "no_rope_layers": [0],
    },
    "vaultgemma": {**GEMMA2, "norm_position": "pre"},
    "flex-olmo": {**OLMO2, "moe": {**MOE, "normalize": False}},
    "mellum": {
        "moe": {**MOE, "layers": [1]}, "qk_norm": True, "num_kv_heads": 2, "sliding_window": 7, "full_attention_layers": [0],
        "local_rope": {"theta": 100.0},
    },
    "ernie-moe": {
        "moe": {**MOE, "selection_bias": True, "shared_ffn_hidden_size": 24, "layers": [1]}, "tie_embeddings": True,
        "rope": {"interleaved": True},
    },
    "granite-shared": {**_GRANITE, "moe": {**MOE, "shared_ffn_hidden_size": 20}},
    "granite-sinks": {
        **_GRANITE, "attention_sinks": True, "sliding_window": 7, "full_attention_layers": [0], "no_rope_layers": [0],
        "local_rope": {"theta": 100.0},
    },
    "granite-sinks-moe": {**_GRANITE, "attention_sinks": True, "moe": {**MOE, "shared_ffn_hidden_size": 20}},
    "hyperclovax": {**_GRANITE, "norm_position": "both"},
    "opt": {
        "norm": "layernorm", "position": "learned", "position_offset": 2, "activation": "relu", "tie_embeddings": True, **_BIASES,
    },
}  # fmt: skip

VARIANTS |= {
    "ministral3": {"rope": {**YARN, "original_max_position": 8, "query_scaling": 0.3}, "head_dim": 10, "num_kv_heads": 2},
    "hunyuan": {"qk_norm": True, "qk_norm_after_rope": True, "num_kv_heads": 2},
    "hunyuan-moe": {
        "qk_norm": True, "qk_norm_after_rope": True, "moe": {**MOE, "ffn_hidden_size": 40, "shared_ffn_hidden_size": 40},
    },
    "phi": {**_SIDE_BY_SIDE, **_BIASES, "head_bias": True, "activation": "gelu_tanh", "hidden_size": 32, "rope": {"fraction": 0.5}},
    "mpt": {
        "norm": "layernorm", "norm_bias": False, "position": "alibi", "activation": "gelu", "tie_embeddings": True,
        "ffn_hidden_size": 96,
    },
    "youtu": {**LATENT, "tie_embeddings": True},
    "gpt-neo": {
        "norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "tie_embeddings": True, "attention_scale": 1.0,
        "attention_out_bias": True, "mlp_bias": True, "sliding_window": 7, "full_attention_layers": [0],
    },
    "gptj": {
        **_SIDE_BY_SIDE, "head_bias": True, "activation": "gelu_tanh", "mlp_bias": True,
        "rope": {"fraction": 4 / 6, "interleaved": True},
    },
    "bloom": {
        "norm": "layernorm", "position": "alibi", "embedding_norm": True, "activation": "gelu_tanh", "tie_embeddings": True,
        "ffn_hidden_size": 96, **_BIASES,
    },
}  # fmt: skip

_MAMBA1: dict[str, Any] = {"inner_size": 48, "state_size": 5, "dt_rank": 3, "conv_kernel": 3, "chunk_size": 8}
_MAMBA: dict[str, Any] = {"num_heads": 6, "head_dim": 8, "state_size": 5, "num_groups": 2, "chunk_size": 8}
_ONE_HALF: dict[str, Any] = {"activation": "relu2", "position": "none", "head_dim": 10, "mamba": _MAMBA}
_RELU_MOE: dict[str, Any] = {
    **MOE, "score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 20, "scaling": 2.5, "latent_size": 8,
}  # fmt: skip
_LIMITS: dict[str, Any] = {"dt_limit": (0.3, 0.9), "conv_bias": False, "bias": True, "num_groups": 1, "conv_kernel": 3}
_DELTA: dict[str, Any] = {
    "zero_centered_norm": True, "qk_norm": True, "attention_gate": True, "num_kv_heads": 2, "head_dim": 16,
    "rope": {"fraction": 0.25},
    "delta": {"num_key_heads": 2, "num_value_heads": 6, "key_head_dim": 5, "value_head_dim": 4, "conv_kernel": 3, "chunk_size": 8},
}  # fmt: skip
VARIANTS |= {
    "nemotron-h": {**_ONE_HALF, "layers": "M*-M", "num_layers": 4, "num_kv_heads": 2},
    "nemotron-h-experts": {**_ONE_HALF, "layers": "EM*E", "num_layers": 4, "moe": {**_RELU_MOE, "groups": 3, "top_groups": 2, "group_score": "top2"}},
    "nemotron-h-limits": {
        **_ONE_HALF, "layers": "-MM*", "num_layers": 4, "mamba": {**_MAMBA, **_LIMITS}, "mlp_bias": True,
    },
    "mamba2": {"layers": "MM", "position": "none", "mamba": _MAMBA},
    "mamba2-limits-tied": {
        "layers": "MM", "position": "none", "mamba": {**_MAMBA, **_LIMITS}, "tie_embeddings": True, "norm_eps": 1e-3,
    },
    "mamba1": {"layers": ["mamba1"] * 2, "position": "none", "mamba1": _MAMBA1, "tie_embeddings": True},
    "mamba1-biases": {
        "layers": ["mamba1"] * 2, "position": "none", "mamba1": {**_MAMBA1, "bias": True, "conv_bias": False}, "norm_eps": 1e-3,
    },
    "falcon-mamba": {
        "layers": ["mamba1"] * 2, "position": "none", "mamba1": {**_MAMBA1, "norms": "plain", "norm_eps": 1e-3},
    },
    "jamba": {
        "layers": ["mamba1+moe", "attention+mlp", "mamba1+moe", "mamba1+mlp"], "num_layers": 4, "position": "none", "num_kv_heads": 2,
        "mamba1": {**_MAMBA1, "norms": "weight"}, "moe": {**MOE, "ffn_hidden_size": 40, "normalize": False},
    },
    "jamba-dense-tied": {
        "layers": ["attention+mlp", "mamba1+mlp"], "position": "none", "tie_embeddings": True,
        "mamba1": {**_MAMBA1, "norms": "weight", "bias": True},
    },
    "falcon-h1": {
        "layers": ["hybrid+mlp"] * 2, "mamba": {**_MAMBA, "norm": "none"}, "num_kv_heads": 2, "mlp_multipliers": [0.8, 1.4],
        "hybrid": {"attention_input": 0.7, "keys": 0.6, "mamba_output": 0.8, "mamba_projections": [0.5, 1.5, 0.7, 1.2, 2.0]},
        "embedding_multiplier": 2.5, "logit_scale": 0.4,
    },
    "falcon-h1-norm": {
        "layers": ["hybrid+mlp"] * 2, "mamba": {**_MAMBA, "norm": "before_gate"}, "hybrid": {}, "tie_embeddings": True,
    },
    "bamba": {
        "layers": ["mamba+mlp", "attention+mlp", "mamba+mlp"], "num_layers": 3, "hidden_size": 32,
        "mamba": {**_MAMBA, "num_heads": 8}, "rope": {"fraction": 0.5}, "num_kv_heads": 2,
    },
    "bamba-limits": {
        "layers": ["attention+mlp", "mamba+mlp"], "mamba": {**_MAMBA, **_LIMITS, "num_heads": 8}, "tie_embeddings": True,
        "hidden_size": 32, "rope": {"fraction": 0.5}, **_BIASES,
    },
    "granite4": {
        **_GRANITE, "layers": ["mamba+moe", "attention+moe", "mamba+moe"], "num_layers": 3, "position": "none",
        "mamba": {**_MAMBA, "num_groups": 1}, "moe": {**MOE, "shared_ffn_hidden_size": 20},
    },
    "qwen3-next": {
        **_DELTA, "layers": ["delta+moe", "attention+mlp", "delta+mlp", "attention+moe"], "num_layers": 4,
        "moe": {**MOE, "shared_ffn_hidden_size": 20, "shared_gate": True, "normalize": False},
    },
    "qwen3-next-all-experts": {
        **_DELTA, "layers": ["delta+moe", "attention+moe"], "moe": {**MOE, "shared_ffn_hidden_size": 20, "shared_gate": True},
        "tie_embeddings": True, "qkv_bias": True, "attention_out_bias": True,
    },
    "qwen3.5": {**_DELTA, "layers": ["delta+mlp", "attention+mlp"], "num_kv_heads": 4, "rope": {"fraction": 0.5, "theta": 500.0}},
    "olmo-hybrid": {
        **OLMO2, "layers": ["delta+mlp", "attention+mlp", "delta+mlp"], "num_layers": 3, "norm_positions": {"delta": "pre"}, "num_kv_heads": 2,
        "delta": {
            "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 5, "value_head_dim": 8, "chunk_size": 8, "norm_eps": 1e-5,
            "negative_eigenvalues": True,
        },
    },
    "lfm2": {
        "layers": ["conv+mlp", "attention+mlp", "conv+mlp"], "num_layers": 3, "conv": {}, "qk_norm": True, "num_kv_heads": 2,
    },
    "lfm2-bias-tied": {
        "layers": ["attention+mlp", "conv+mlp"], "conv": {"kernel": 4, "bias": True}, "qk_norm": True, "tie_embeddings": True,
    },
    "lfm2-moe": {
        "layers": ["conv+mlp", "attention+moe", "conv+moe"], "num_layers": 3, "conv": {}, "qk_norm": True, "num_kv_heads": 2,
        "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "scaling": 1.5}, "tie_embeddings": True,
    },
    "kimi-linear": {
        "layers": ["kda+mlp", "attention+moe", "kda+moe"], "num_layers": 3, "position": "none", "qkv_bias": True, "attention_out_bias": True,
        "kda": {"num_heads": 6, "head_dim": 5, "conv_kernel": 3, "chunk_size": 8},
        "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
        "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 24, "scaling": 2.5},
    },
    "ling3": {
        "layers": ["kda+mlp", "attention+moe", "kda+moe"], "num_layers": 3, "attention_gate": True, "rope": {"interleaved": True},
        "kda": {"num_heads": 4, "head_dim": 5, "conv_kernel": 3, "chunk_size": 8, "low_rank_gates": False, "gate_floor": -4.0},
        "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
        "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 24, "scaling": 2.5},
    },
    "minimax": {
        "layers": ["lightning+moe", "attention+moe", "lightning+moe"], "num_layers": 3, "norm_position": "stream", "num_kv_heads": 2,
        "lightning": {"num_heads": 4, "head_dim": 6, "chunk_size": 8}, "moe": MOE, "ffn_hidden_size": 12,
        "residual_factors": {"lightning": (3.5, 0.8), "attention": (0.7, 1.0), "moe": (2.0, 0.5)},
    },
    "apertus": {"activation": "xielu", "qk_norm": True, "num_kv_heads": 2},
    "olmo": {"norm": "layernorm", "norm_weight": False, "qkv_clip": 0.5},
    "nanochat": {
        "norm_weight": False, "embedding_norm": True, "qk_norm": True, "qk_norm_span": "plain", "qk_norm_after_rope": True,
        "rope": {"clockwise": True}, "activation": "relu2", "logit_softcap": 2.0,
    },
    "minicpm3": {
        "mla": LATENT["mla"], "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logit_scale": 0.25, "tie_embeddings": True,
    },
    "mistral4": {
        "mla": LATENT["mla"], "rope": {**YARN, "interleaved": True, "query_scaling": 0.3, "original_max_position": 8},
        "moe": {**MOE, "shared_ffn_hidden_size": 24, "scaling": 2.0},
    },
    "aria": {"num_kv_heads": 2, "ffn_hidden_size": 12, "moe": {**MOE, "shared_ffn_hidden_size": 24}},
    "gpt": {**GPT2, "norm_position": "sum", "ffn_hidden_size": 96},
    "llama4": {
        "num_layers": 3, "head_dim": 10, "num_kv_heads": 2, "qk_norm": True, "qk_norm_span": "plain", "qk_norm_after_rope": True,
        "sliding_window": 8, "chunked_window": True, "full_attention_layers": [1], "no_rope_layers": [1], "no_rope_scaling": [0.4, 5],
        "rope": {"interleaved": True},
        "moe": {
            **MOE, "top_k": 1, "score": "sigmoid", "normalize": False, "weighted_inputs": True, "shared_ffn_hidden_size": 12, "layers": [1, 2],
        },
    },
    "gemma4": {
        **GEMMA, "zero_centered_norm": False, "full_attention_layers": [1], "qk_norm": True, "value_norm": True, "layer_scale": True,
        "attention_scale": 1.0, "full_attention": {"head_dim": 16, "num_kv_heads": 1, "keys_are_values": True},
        "rope": {"theta": 5000.0, "fraction": 0.25, "scaling": "proportional"}, "local_rope": {"theta": 100.0},
    },
    "mimo": {
        "num_layers": 3, "num_kv_heads": 4, "head_dim": 12, "value_head_dim": 10, "value_scale": 0.7, "qkv_bias": True,
        "sliding_window": 7, "full_attention_layers": [0], "attention_sinks": True,
        "full_attention": {"head_dim": 12, "num_kv_heads": 2, "attention_sinks": False}, "rope": {"theta": 5000.0, "fraction": 0.5},
        "local_rope": {"theta": 100.0, "fraction": 0.34}, "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "layers": [1, 2]},
    },
    "laguna": {
        "num_layers": 3, "num_attention_heads": 6, "num_kv_heads": 2, "head_dim": 8, "softplus_gate": "head", "qk_norm": True,
        "sliding_window": 7, "full_attention_layers": [1], "full_attention": {"head_dim": 8, "num_kv_heads": 2, "num_attention_heads": 4},
        "rope": {**YARN, "fraction": 0.5}, "local_rope": {"theta": 100.0},
        "moe": {
            **MOE, "score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 20, "logit_softcap": 0.5, "scaling": 1.5, "layers": [0, 2],
        },
    },
    "gemma4-inputs": {
        **GEMMA, "zero_centered_norm": False, "num_layers": 4, "full_attention_layers": [1, 3], "qk_norm": True, "value_norm": True,
        "layer_scale": True, "attention_scale": 1.0, "full_attention": {"head_dim": 16, "num_kv_heads": 1},
        "per_layer_input_size": 6, "shared_kv_layers": 2, "shared_kv_ffn_hidden_size": 80, "local_rope": {"theta": 100.0},
    },
    "gemma3n": {
        **GEMMA, "zero_centered_norm": False, "num_layers": 4, "full_attention_layers": [1, 3], "qk_norm": True, "value_norm": True,
        "attention_scale": 1.0, "per_layer_input_size": 6, "per_layer_vocab_size": 50, "shared_kv_layers": 2, "logit_softcap": 3.0,
        "local_rope": {"theta": 100.0}, "altup": {"streams": 3, "active": 1, "laurel_rank": 5}, "ffn_sparsity": [0.6, 0.0, 0.3, 0.0],
    },
    "gemma4-experts": {
        **GEMMA, "zero_centered_norm": False, "full_attention_layers": [1], "qk_norm": True, "value_norm": True, "layer_scale": True,
        "attention_scale": 1.0, "moe": {**MOE, "shared_ffn_hidden_size": 48, "separate_norms": True}, "ffn_hidden_size": 48,
    },
    "longcat": {
        **LATENT, "num_layers": 4, "mla": {**LATENT["mla"], "scaled_latents": True}, "moe": {
            **MOE, "top_k": 3, "zero_experts": 3, "shortcut": True, "shared_ffn_hidden_size": 40, "layers": [0, 2], "normalize": False,
            "selection_bias": True, "scaling": 1.7,
        },
    },
    "bitnet": {"activation": "reglu2", "output_input_norms": True, "num_kv_heads": 2, "rope": {"theta": 1000.0}},
    "persimmon": {
        "norm": "layernorm", "activation": "relu2", **_BIASES, "qk_norm": True, "qk_norm_span": "layernorm", "hidden_size": 32,
        "rope": {"fraction": 0.5},
    },
    "dbrx": {"norm": "layernorm", "norm_bias": False, "qkv_clip": 0.5, "num_kv_heads": 2, "ffn_hidden_size": 12, "moe": MOE},
    "phimoe": {
        "norm": "layernorm", "head_bias": True, "num_kv_heads": 2, "moe": {**MOE, "score": "sparsemixer", "jitter": 0.2, "normalize": False},
    },
    "flint": {
        "num_layers": 3, "qk_norm": True, "attention_sinks": True, "sliding_window": 7, "full_attention_layers": [0], "no_rope_layers": [0],
        "num_kv_heads": 2, "moe": {**MOE, "score": "sigmoid", "shared_ffn_hidden_size": 20, "layers": [1, 2]},
    },
    "kolibri": {
        "norm_position": "both", "qk_norm": True, "sliding_window": 7, "full_attention_layers": [1], "no_rope_layers": [1],
        "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "choice": "logits", "normalize": False, "shared_ffn_hidden_size": 20},
    },
    "axk1": {**LATENT, "moe": {**V3, "output_norm": True}},
    "cohere2-moe": {
        **_COHERE, "num_layers": 3, "sliding_window": 7, "full_attention_layers": [0, 2], "no_rope_layers": [2],
        "moe": {**MOE, "shared_ffn_hidden_size": 24, "scaling": 0.5, "shared_scaling": 0.5, "layers": [1, 2]},
    },
    "modernbert-decoder": {
        "norm": "layernorm", "norm_bias": False, "embedding_norm": True, "first_norm": False, "activation": "geglu_erf", "num_layers": 3,
        "masked_lm": {"dense_bias": False}, "sliding_window": 5, "full_attention_layers": [0], "local_rope": {"theta": 20.0}, "tie_embeddings": True,
    },
    "bert-generation": {**GPT2, "activation": "gelu", "norm_position": "sum", "embedding_norm": True, "head_bias": True},
    "granite4-dense": {
        **_GRANITE, "layers": ["mamba+mlp", "attention+mlp"], "mamba": _MAMBA, "tie_embeddings": True, "rope": YARN,
        "qkv_bias": True, "attention_out_bias": True,
    },
}  # fmt: skip


_BERT: dict[str, Any] = {
    "causal": False, "norm": "layernorm", "norm_position": "sum", "embedding_norm": True, "activation": "gelu",
    "position": "learned", "token_types": 2, "tie_embeddings": True, "masked_lm": {}, "norm_eps": 1e-3, **_BIASES,
}  # fmt: skip
_MODERN: dict[str, Any] = {
    "causal": False, "norm": "layernorm", "norm_bias": False, "embedding_norm": True, "first_norm": False,
    "activation": "geglu_erf", "num_layers": 4, "tie_embeddings": True, "masked_lm": {"dense_bias": False},
    "sliding_window": 5, "full_attention_layers": [0, 3], "rope": {"theta": 500.0}, "local_rope": {"theta": 20.0},
}  # fmt: skip
VARIANTS |= {
    "bert": _BERT,
    "bert-pairs": {**_BERT, "pooler": True, "sentence_pairs": True, "token_types": 3},
    "bert-without-a-head": {**_BERT, "masked_lm": None, "pooler": True, "activation": "gelu_tanh"},
    "roberta": {**_BERT, "position_offset": 2, "token_types": 1},
    "roberta-pre-norms": {**_BERT, "position_offset": 2, "token_types": 1, "norm_position": "pre"},
    "xlm-roberta-xl": {**_BERT, "position_offset": 2, "token_types": 1, "norm_position": "pre", "embedding_norm": False},
    "roberta-tanh": {**_BERT, "position_offset": 1, "activation": "gelu_tanh"},
    "megatron-bert": {**_BERT, "norm_position": "pre", "embedding_norm": False, "pooler": True, "sentence_pairs": True},
    "modernbert": _MODERN,
    "modernbert-biased": {
        **_MODERN, **_BIASES, "norm_bias": True, "activation": "geglu", "full_attention_layers": [1], "tie_embeddings": False,
        "masked_lm": {"activation": "gelu_tanh", "bias": False},
    },
    "mpnet": {**_BERT, "token_types": 0, "position_offset": 2, "relative_bias": True},
    "distilbert": {**_BERT, "token_types": 0, "norm_eps": 1e-12},
    "electra": {**_BERT, "embedding_size": 14},
    "roformer": {**_BERT, "embedding_size": 14, "position": "rope", "rope": {"interleaved": True}},
    "nomic": {
        **_BERT, "position": "rope", "rope": {"theta": 500.0}, "activation": "swiglu", **dict.fromkeys(_BIASES, False),
        "masked_lm": {"activation": "silu"},
    },
    "jina": {**_BERT, "token_types": 1, "position": "rope", "rope": {"scaling": "linear", "factor": 2.0}},
    "gte": {
        **_BERT, "position": "rope", "activation": "geglu_erf", "mlp_bias": False, "mlp_out_bias": True,
    },
    "eurobert": {
        "causal": False, "masked_lm": {"dense": False, "dense_bias": False, "bias": True}, **_BIASES, "num_kv_heads": 2,
    },
    "eurobert-tied": {
        "causal": False, "masked_lm": {"dense": False, "dense_bias": False, "bias": False}, "tie_embeddings": True, "rope": YARN,
    },
    "modernbert-without-windows": {**_MODERN, "sliding_window": None, "full_attention_layers": None, "local_rope": None},
}  # fmt: skip


def variant(name: str) -> ModelConfig:
    """One of `VARIANTS`."""
    return ModelConfig.parse({**BASE, **VARIANTS[name]})


def cases() -> list[tuple[ModelFamily, str]]:
    """Every family with every variant that it can express; one of hybrids with hybrids alone."""
    models = {name: variant(name) for name in VARIANTS}
    hybrids = {
        family.name for family in FAMILIES if any("layers" in entry.handled_model_fields for entry in family.entries)
    }
    return [
        (family, name)
        for family in FAMILIES
        for name, model in models.items()
        if (family.name not in hybrids or model.layers) and not family.unsupported_settings(model)
    ]


def save_tiny(
    folder: Path, family: ModelFamily, model: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """Save a random transformers model of `family`; returns it. No weight has the value it would start from."""
    import transformers

    raw = family.write_config_json(model)
    auto = model.causal and family.name != "mistral4"  # which transformers makes alone by its own class only
    kind = transformers.AutoModelForCausalLM if auto else getattr(transformers, raw["architectures"][0])
    make, raw = (
        kind.from_config if auto else kind._from_config,
        {k: raw[k] for k in raw if k != "architectures"},
    )
    raw.setdefault(
        "pad_token_id", 0 if family.name in ("nomic_bert", "modernbert-decoder") else None
    )  # some families' default lies outside a tiny vocabulary
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(seed)
    made = make(config, attn_implementation="eager", experts_implementation="eager").to(dtype).eval()
    for module in made.modules() if model.mamba else ():
        if hasattr(
            module, "time_step_limit"
        ):  # which transformers 5.23 has wrong in Nemotron-H: time_step_min, no upper one
            low, high = model.mamba.dt_limit
            module.time_step_limit = (low, float("inf") if high is None else high)
    with torch.no_grad():
        biases = [buffer for name, buffer in made.named_buffers() if name.endswith("e_score_correction_bias")]
        fixed = {
            name
            for name, _ in made.named_parameters()
            if name.endswith("embed_positions.weight") and model.position == "rope"
        }
        parameters = [parameter for name, parameter in made.named_parameters() if name not in fixed]
        for parameter in [*parameters, *biases]:
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype), alpha=0.1)
    made.save_pretrained(folder)
    return made

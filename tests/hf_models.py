"""Tiny random HuggingFace folders, written by transformers itself or from a declared family."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0,
    "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0],
}  # fmt: skip
KINDS = ["full_attention", "sliding_attention", "full_attention"]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

_SIZES = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GEMMA = {**_SIZES, "head_dim": 10, "pad_token_id": 0}
_GEMMA3N = {
    **_GEMMA, "sliding_window": 8, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 40, "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.8, 0.5, 0.0],
}  # fmt: skip
_GEMMA4 = {**_GEMMA, "sliding_window": 8, "global_head_dim": 16}
_EXPERTS = {**_SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DEEPSEEK = {
    **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8,
    "q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
_LONGCAT = {
    **{key: value for key, value in _DEEPSEEK.items() if not key.startswith(("intermediate", "moe_", "num_hidden", "num_experts"))},
    "num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 12, "moe_topk": 3, "zero_expert_num": 5, "head_dim": 4,
}  # fmt: skip
_LATENT_SIZES = {
    **_SIZES, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
_NEO = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "window_size": 7,
}
_GPT2 = {
    "vocab_size": 97,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {key: value for key, value in {**_SIZES, "hidden_size": 32}.items() if key != "num_key_value_heads"}

_FALCON = {key: _SIZES[key] for key in _SIZES if key not in ("intermediate_size", "num_key_value_heads")}
_GRANITE = {
    **_SIZES, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 6.0,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

_CSA, _HCA, _SWA = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_V4 = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 12, "q_lora_rank": 20,
    "moe_intermediate_size": 10, "n_routed_experts": 6, "num_experts_per_tok": 2, "layer_types": [_HCA, _CSA, _SWA, _CSA],
    "compress_rates": {_CSA: 3, _HCA: 8}, "hc_mult": 3, "hc_sinkhorn_iters": 4, "hc_eps": 1e-3, "sliding_window": 5,
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"], "o_groups": 2, "o_lora_rank": 10, "index_n_heads": 12,
    "index_head_dim": 10, "index_topk": 2, "qk_rope_head_dim": 6, "max_position_embeddings": 64, "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-4, "initializer_range": 0.2, "routed_scaling_factor": 1.25, "pad_token_id": None,
}  # fmt: skip
_KINDS = ["linear_attention", "full_attention", "linear_attention"]
_MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
_NEMOTRON_H = {
    **_SIZES, "head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 5, "conv_kernel": 3,
    "chunk_size": 8,
}  # fmt: skip
_MAMBA2 = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "n_groups": 3, "state_size": 5,
    "conv_kernel": 3, "chunk_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MAMBA1 = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5, "conv_kernel": 3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_FALCON_H1 = {
    **_SIZES, "num_hidden_layers": 2, "mamba_d_ssm": 36, "mamba_n_heads": 6, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 5,
    "mamba_d_conv": 3, "mamba_chunk_size": 8,
}  # fmt: skip
_MULTIPLIERS = {
    "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.4, "key_multiplier": 0.6, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0], "mlp_multipliers": [0.9, 1.3], "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4,
}  # fmt: skip
_JAMBA = {
    **_SIZES, "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0,
    "num_experts": 5, "num_experts_per_tok": 2, "mamba_d_state": 5, "mamba_d_conv": 3,
}  # fmt: skip
_DELTA = {
    **_SIZES, "head_dim": 16, "layer_types": _KINDS, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 5, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "pad_token_id": None,
}  # fmt: skip
_DELTA_MOE = {
    **_DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
}  # fmt: skip

_OLMO_HYBRID = {**_SIZES, "layer_types": _KINDS, "pad_token_id": None}
_KIMI = {
    **_LATENT_SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_local_experts": 6, "layer_types": _KINDS, "pad_token_id": None,
    "linear_head_dim": 5, "linear_num_heads": 4, "linear_conv_kernel_dim": 3,
}  # fmt: skip
_LING = {
    **{key: value for key, value in _KIMI.items() if key != "q_lora_rank" and not key.startswith("linear_")}, "head_dim": 5,
    "short_conv_kernel_size": 3, "kda_lower_bound": -3.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_V3_EXPERTS = {**_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_OPT = {
    "vocab_size": 97, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 24,
}  # fmt: skip
_TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": YARN | {"rope_theta": 500.0},
}

_BERT = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MODERNBERT = {"local_attention": 10, "cls_token_id": 3, "sep_token_id": 4}
ENCODERS = {
    "bert",
    "megatron-bert",
    "roberta",
    "modernbert",
    "xlm-roberta",
    "camembert",
    "data2vec-text",
    "ernie",
    "roberta-prelayernorm",
    "xlm-roberta-xl",
    "distilbert",
    "electra",
    "roformer",
    "nomic_bert",
    "jina_embeddings_v3",
    "gte",
    "eurobert",
    "mpnet",
}
_T5 = {
    "vocab_size": 97, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip

# {case: (model_type, settings)}; between them every option that each family has.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "llama-tied-linear": ("llama", {**_SIZES, "tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama-biases-head-llama3": (
        "llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 10, "rope_parameters": LLAMA3},
    ),
    "llama-mha-dynamic": ("llama", {**_SIZES, "num_key_value_heads": 4, "rope_parameters": DYNAMIC}),
    "llama-mqa-yarn": ("llama", {**_SIZES, "num_key_value_heads": 1, "rope_parameters": YARN}),
    "mistral-window": ("mistral", {**_SIZES, "sliding_window": 8}),
    "ministral": ("ministral", {**_SIZES, "sliding_window": 8, "head_dim": 6}),
    "ministral-kinds": (
        "ministral", {**_SIZES, "sliding_window": 8, "layer_types": KINDS, "head_dim": 14, "tie_word_embeddings": True},
    ),
    "mistral-head": ("mistral", {**_SIZES, "sliding_window": None, "head_dim": 14, "hidden_size": 22}),
    "qwen2": ("qwen2", _SIZES),
    "qwen2-tied-window": (
        "qwen2", {**_SIZES, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 16,
                  "max_window_layers": 0},
    ),
    "qwen2-window-above": (
        "qwen2", {**_SIZES, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2-window-kinds": ("qwen2", {**_SIZES, "use_sliding_window": True, "sliding_window": 16, "layer_types": KINDS}),
    "qwen2-unused-window": (
        "qwen2", {**_SIZES, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 8}),
    "qwen3-tied-bias-yarn": (
        "qwen3", {**_SIZES, "head_dim": 12, "tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN},
    ),
    "qwen3-window": (
        "qwen3", {**_SIZES, "head_dim": 8, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "phi3": ("phi3", {**_SIZES, "pad_token_id": None}),
    "phi3-long": (
        "phi3", {**_SIZES, "pad_token_id": None, "rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "phi3-long-partial-factor": (
        "phi3", {**_SIZES, "pad_token_id": None, "original_max_position_embeddings": 32, "hidden_size": 48,
                 "rope_parameters": {**LONG, "partial_rotary_factor": 0.5, "attention_factor": 1.25}},
    ),
    "phi3-partial-window": (
        "phi3", {**_SIZES, "hidden_size": 32, "pad_token_id": None, "partial_rotary_factor": 0.5, "sliding_window": 8,
                 "tie_word_embeddings": True, "resid_pdrop": 0.1},
    ),
    "olmo2": ("olmo2", _SIZES),
    "olmo2-tied-bias-linear": (
        "olmo2", {**_SIZES, "tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LINEAR},
    ),
    "gemma2": ("gemma2", {**_GEMMA, "sliding_window": 8}),
    "gemma2-untied-bias-scalar": (
        "gemma2", {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True, "query_pre_attn_scalar": 24,
                   "attn_logit_softcapping": None, "final_logit_softcapping": 5.0, "layer_types": KINDS},
    ),
    "gemma2-no-window": (
        "gemma2", {**_GEMMA, "layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 10, "rope_parameters": LINEAR,
                   "num_key_value_heads": 1, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window": 8}),
    "gemma3-kinds-linear": (
        "gemma3_text", {**_GEMMA, "sliding_window": 8, "layer_types": KINDS, "final_logit_softcapping": 4.0,
                        "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6},
                                            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    ),
    "gemma3-untied-bias": (
        "gemma3_text", {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True, "query_pre_attn_scalar": 7,
                        "layer_types": ["full_attention"] * 3, "head_dim": 14},
    ),
    "gemma3n": (
        "gemma3n_text", {**_GEMMA3N, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3n-odd": (
        "gemma3n_text", {**_GEMMA3N, "num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2, "num_kv_shared_layers": 2,
                         "altup_num_inputs": 3, "altup_active_idx": 1, "laurel_rank": 5, "activation_sparsity_pattern": [0.9, 0.0, 0.3, 0.7],
                         "attention_bias": True, "tie_word_embeddings": False, "altup_coef_clip": 0.01, "final_logit_softcapping": 3.0,
                         "vocab_size_per_layer_input": _SIZES["vocab_size"], "rope_parameters": {
                             "full_attention": LINEAR | {"rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    ),
    "gemma4": (
        "gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-values-bias": (
        "gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_bias": True, "tie_word_embeddings": False,
                        "global_head_dim": 10, "final_logit_softcapping": 3.0},
    ),
    "gemma4-inputs-shared": (
        "gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": _SIZES["vocab_size"],
                        "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "final_logit_softcapping": 2.0,
                        "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "gemma4-experts": (
        "gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": True,
                        "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12},
    ),
    "gemma4-unified": (
        "gemma4_unified_text", {**_GEMMA4, "attention_k_eq_v": True, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "llama-3.1": ("llama", {**_SIZES, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    "qwen3-yarn": (
        "qwen3", {**_SIZES, "head_dim": 12, "attention_bias": True, "tie_word_embeddings": True,
                  "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                      "original_max_position_embeddings": 64}},
    ),
    "gemma2-plain": ("gemma2", {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 10}),
    "gemma3-plain": ("gemma3_text", {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 10}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 4}),
    "mixtral-window-tied-head": (
        "mixtral", {**_SIZES, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8, "head_dim": 10,
                    "tie_word_embeddings": True, "router_aux_loss_coef": 0.02, "output_router_logits": True},
    ),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 20}),
    "qwen2_moe-dense-window": (
        "qwen2_moe", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1],
                      "norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": True, "sliding_window": 8,
                      "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 6, "head_dim": 10, "norm_topk_prob": True}),
    "qwen3_moe-steps-bias-window": (
        "qwen3_moe", {**_EXPERTS, "num_experts": 4, "head_dim": 6, "decoder_sparse_step": 2, "attention_bias": True,
                      "use_sliding_window": True, "sliding_window": 8, "rope_parameters": YARN},
    ),
    "gpt_oss": ("gpt_oss", {**_SIZES, "head_dim": 10, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss-kinds-no-bias": (
        "gpt_oss", {**_SIZES, "head_dim": 6, "num_local_experts": 3, "num_experts_per_tok": 3, "layer_types": KINDS,
                    "attention_bias": False, "sliding_window": 8, "swiglu_limit": 2.5, "tie_word_embeddings": True,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gpt_oss-32": (  # experts of widths that MXFP4 can hold
        "gpt_oss", {**_SIZES, "hidden_size": 64, "intermediate_size": 32, "head_dim": 8, "num_local_experts": 3,
                    "num_experts_per_tok": 2},
    ),
    "deepseek_v2": ("deepseek_v2", {**_DEEPSEEK, "first_k_dense_replace": 1, "n_shared_experts": 2}),
    "deepseek_v2-groups-plain-queries": (
        "deepseek_v2", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4,
                        "topk_group": 2, "routed_scaling_factor": 16.0, "attention_bias": True, "n_shared_experts": 1,
                        "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "deepseek_v3": ("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-bias-yarn": (
        "deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "attention_bias": True,
                        "norm_topk_prob": False, "routed_scaling_factor": 1.5, "rope_parameters": YARN | {"mscale": 0.5},
                        "q_lora_rank": None, "num_nextn_predict_layers": 0},
    ),
    # enough index heads that no two tokens have a score of exactly 0: ties are broken by the length of the sequence
    "deepseek_v32": (
        "deepseek_v32", {**_DEEPSEEK, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "index_topk": 5,
                         "index_head_dim": 10, "index_n_heads": 12},
    ),
    "deepseek_v32-bias-yarn": (
        "deepseek_v32", {**_DEEPSEEK, "mlp_layer_types": ["sparse", "dense", "sparse"],
                         "n_group": 1, "topk_group": 1, "attention_bias": True, "norm_topk_prob": False, "index_topk": 3,
                         "routed_scaling_factor": 1.5, "rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.8},
                         "index_head_dim": 4, "index_n_heads": 15, "tie_word_embeddings": True},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa", {**_DEEPSEEK, "first_k_dense_replace": 0, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 16},
    ),
    "longcat_flash": ("longcat_flash", _LONGCAT),
    "longcat_flash-bias-tied-yarn": (
        "longcat_flash", {**_LONGCAT, "attention_bias": True, "tie_word_embeddings": True, "zero_expert_num": 6, "moe_topk": 5,
                          "n_routed_experts": 4, "rope_parameters": YARN, "routed_scaling_factor": 1.5, "num_layers": 1},
    ),
    "deepseek_v4": ("deepseek_v4", _V4),
    "deepseek_v4-yarn-entries-of-all": (
        "deepseek_v4", {**_V4, "num_hidden_layers": 3, "compress_rates": {_CSA: 2, _HCA: 5}, "layer_types": [_CSA, _HCA, _CSA], "mlp_layer_types": ["moe"] * 3,
                        "hc_mult": 2, "sliding_window": 40, "index_topk": 20, "scoring_func": "sigmoid", "rope_parameters": dict(YARN),
                        "compress_rope_theta": 500.0, "qk_rope_head_dim": 12, "index_head_dim": 12, "max_position_embeddings": 512, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("gpt_neox", _NEOX),
    "gpt_neox-no-bias": (
        "gpt_neox", {**_NEOX, "attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 500,
                     "use_parallel_residual": False, "hidden_act": "gelu_new", "hidden_dropout": 0.1},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied-inner": (
        "gpt2", {**_GPT2, "tie_word_embeddings": False, "n_inner": 50, "activation_function": "gelu", "attn_pdrop": 0.3},
    ),
    "nemotron": ("nemotron", {**_SIZES, "hidden_size": 32}),
    "nemotron-bias-head": (
        "nemotron", {**_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "partial_rotary_factor": 1.0,
                     "tie_word_embeddings": True},
    ),
    "granite": ("granite", _GRANITE),
    "granite-plain-tied-bias-yarn": (
        "granite", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "granitemoe": ("granitemoe", {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "olmo3": ("olmo3", {**_SIZES, "sliding_window": 8}),
    "olmo3-kinds-yarn-tied": (
        "olmo3", {**_SIZES, "sliding_window": 8, "layer_types": _WINDOWS, "tie_word_embeddings": True, "attention_bias": True,
                  "rope_parameters": {"full_attention": YARN,
                                      "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    ),
    "olmoe": ("olmoe", {**_SIZES, "num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {**_SIZES, "num_hidden_layers": 4, "pad_token_id": None}),
    "smollm3-list-windows-bias": (
        "smollm3", {**_SIZES, "pad_token_id": None, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
                    "sliding_window": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "starcoder2": ("starcoder2", _SIZES),
    "starcoder2-window-untied-no-bias": (
        "starcoder2", {**_SIZES, "sliding_window": 8, "use_bias": False, "tie_word_embeddings": False,
                       "residual_dropout": 0.1},
    ),
    "cohere": ("cohere", _SIZES),
    "cohere-untied-bias": (
        "cohere", {**_SIZES, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.25},
    ),
    "cohere-normed-heads": ("cohere", {**_SIZES, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**_SIZES, "sliding_window": 8, "num_hidden_layers": 5}),
    "cohere2-kinds": ("cohere2", {**_SIZES, "sliding_window": 8, "layer_types": KINDS, "logit_scale": 1.0}),
    "falcon": ("falcon", _FALCON),
    "falcon-new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
                   "num_ln_in_parallel_attn": 2}),
    "falcon-one-norm": (
        "falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                   "ffn_hidden_size": 40, "tie_word_embeddings": False},
    ),
    "falcon-every-head": ("falcon", {**_FALCON, "multi_query": False, "num_kv_heads": 4}),
    "gemma": ("gemma", _GEMMA),
    "gemma-untied-bias": ("gemma", {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True, "rope_theta": 500.0}),
    "stablelm": ("stablelm", {**_SIZES, "hidden_size": 32}),
    "stablelm-parallel-bias": (
        "stablelm", {**_SIZES, "use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 1.0,
                     "num_key_value_heads": 4, "hidden_dropout": 0.1, "tie_word_embeddings": True},
    ),
    "stablelm-normed-heads": ("stablelm", {**_SIZES, "hidden_size": 32, "qk_layernorm": True, "use_parallel_residual": True}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "gpt_bigcode-every-head": ("gpt_bigcode", {**_GPT2, "multi_query": False, "n_inner": 50, "tie_word_embeddings": False}),
    "arcee": ("arcee", _SIZES),
    "arcee-bias-yarn": (
        "arcee", {**_SIZES, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "glm": ("glm", {**_SIZES, "head_dim": 8, "pad_token_id": None}),
    "glm-no-bias": (
        "glm", {**_SIZES, "head_dim": 12, "pad_token_id": None, "attention_bias": False, "partial_rotary_factor": 1.0,
                "tie_word_embeddings": True},
    ),
    "glm4": ("glm4", {**_SIZES, "head_dim": 8, "pad_token_id": None}),
    "glm4_moe": (
        "glm4_moe", {**_EXPERTS, "n_routed_experts": 8, "head_dim": 8, "use_qk_norm": True, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe-groups-bias": (
        "glm4_moe", {**_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "attention_bias": True,
                     "routed_scaling_factor": 2.5, "partial_rotary_factor": 1.0, "first_k_dense_replace": 0,
                     "num_nextn_predict_layers": 0, "n_shared_experts": 2},
    ),
    "exaone4": ("exaone4", {**_SIZES, "sliding_window": 8, "num_hidden_layers": 5, "head_dim": 10}),
    "exaone4-no-window": ("exaone4", {**_SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3}),
    "seed_oss": ("seed_oss", {**_SIZES, "head_dim": 10}),
    "seed_oss-biases": (
        "seed_oss", {**_SIZES, "head_dim": 6, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True,
                     "residual_dropout": 0.0, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {**_SIZES, "head_dim": 10}),
    "ernie4_5-bias-untied": ("ernie4_5", {**_SIZES, "head_dim": 6, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("helium", {**_SIZES, "head_dim": 6, "pad_token_id": None}),
    "helium-bias": (
        "helium", {**_SIZES, "head_dim": 6, "pad_token_id": None, "attention_bias": True, "mlp_bias": True,
                   "tie_word_embeddings": True},
    ),
    "jais2": ("jais2", _SIZES),
    "jais2-no-bias-tied": (
        "jais2", {**_SIZES, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "head_dim": 10},
    ),
    "nemotron_h": ("nemotron_h", {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]}),
    "nemotron_h-experts-latent-groups": (
        "nemotron_h", {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 8,
                       "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                       "moe_shared_expert_intermediate_size": 20,
                       "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False,
                       "use_bias": True, "use_conv_bias": False},
    ),
    "nemotron_h-biases-limits": (
        "nemotron_h", {**_NEMOTRON_H, "layers_block_type": ["mlp", "full_attention", "linear_attention"], "mlp_bias": True, "mlp_hidden_act": "gelu",
                       "time_step_limit": [0.01, 0.5], "layer_norm_epsilon": 1e-3},
    ),
    "mamba2": ("mamba2", _MAMBA2),
    "mamba2-tied-bias-limits": (
        "mamba2", {**_MAMBA2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1,
                   "time_step_limit": [0.02, 0.3]},
    ),
    "mamba": ("mamba", _MAMBA1),
    "mamba-bias-untied": (
        "mamba", {**_MAMBA1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "expand": 3, "time_step_rank": 5,
                  "layer_norm_epsilon": 1e-3},
    ),
    "falcon_mamba": ("falcon_mamba", {**_MAMBA1, "mixer_rms_eps": 1e-3, "conv_kernel": 4, "tie_word_embeddings": False}),
    "jamba": ("jamba", _JAMBA),
    "jamba-dense-bias": (
        "jamba", {**_JAMBA, "num_experts": 1, "expert_layer_offset": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 1, "mamba_dt_rank": 4,
                  "attn_layer_period": 2, "attn_layer_offset": 0, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "falcon_h1": ("falcon_h1", {**_FALCON_H1, **_MULTIPLIERS}),
    "falcon_h1-norm-biases": (
        "falcon_h1", {**_FALCON_H1, **_MULTIPLIERS, "mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
                      "projectors_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True, "head_dim": 10,
                      "num_key_value_heads": 4, "time_step_limit": [0.02, 0.3], "mamba_n_groups": 1, "rms_norm_eps": 1e-3},
    ),
    "falcon_h1-norm-after-gate": (
        "falcon_h1", {**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "rope_parameters": dict(LLAMA3)},
    ),
    "bamba": ("bamba", {**_SIZES, **_MAMBA, "hidden_size": 32, "mamba_n_heads": 8, "attn_layer_indices": [1]}),
    "bamba-biases-yarn": (
        "bamba", {**_SIZES, **_MAMBA, "attn_layer_indices": [0, 2], "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3,
                  "hidden_size": 32, "mamba_d_head": "auto", "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_conv_bias": False,
                  "mamba_proj_bias": True, "tie_word_embeddings": True, "time_step_limit": [0.02, 0.3],
                  "rope_parameters": dict(YARN)},  # which its class changes
    ),
    "granitemoehybrid": (
        "granitemoehybrid", {**_GRANITE, **_MAMBA, "layer_types": _KINDS, "num_local_experts": 5, "shared_intermediate_size": 20,
                             "position_embedding_type": "nope"},
    ),
    "granitemoehybrid-dense-rope": (
        "granitemoehybrid", {**_GRANITE, **_MAMBA, "layer_types": _KINDS, "num_local_experts": 0, "intermediate_size": 20,
                             "shared_intermediate_size": 20, "position_embedding_type": "rope", "rope_parameters": YARN,
                             "attention_bias": True, "tie_word_embeddings": True, "mamba_proj_bias": True},
    ),
    "qwen3_next": ("qwen3_next", _DELTA_MOE),
    "qwen3_next-some-experts-bias": (
        "qwen3_next", {**_DELTA_MOE, "mlp_only_layers": [1], "attention_bias": True, "norm_topk_prob": False,
                       "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                                                        "partial_rotary_factor": 0.5}},
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5-tied-bias": (
        "qwen3_5_text", {**_DELTA, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4,
                         "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "lfm2": ("lfm2", {**_SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "lfm2-bias-indices": (
        "lfm2", {**_SIZES, "full_attn_idxs": [0, 2], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
                 "tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "lfm2_moe": (
        "lfm2_moe", {**_SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 12, "num_dense_layers": 1},
    ),
    "lfm2_moe-no-bias": (
        "lfm2_moe", {**_SIZES, "layer_types": ["full_attention", "conv", "conv"], "num_experts": 4, "num_experts_per_tok": 3,
                     "moe_intermediate_size": 12, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False,
                     "routed_scaling_factor": 2.5, "conv_bias": True, "tie_word_embeddings": False},
    ),
    "kimi_linear": ("kimi_linear", {**_KIMI, "linear_num_heads": 3}),
    "kimi_linear-lists-groups": (
        "kimi_linear", {**_KIMI, "num_local_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "q_lora_rank": None,
                        "n_shared_experts": 2, "attention_bias": True, "first_k_dense_replace": 0, "rms_norm_eps": 1e-3, "layer_types": None,
                        "linear_attn_config": {"full_attn_layers": [1, 3], "kda_layers": [2], "num_heads": 2, "head_dim": 7, "short_conv_kernel_size": 2}},
    ),
    "bailing_hybrid": ("bailing_hybrid", _LING),
    "bailing_hybrid-unbounded-groups": (
        "bailing_hybrid", {**_LING, "num_local_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2,
                           "attention_bias": True, "kda_safe_gate": False, "rms_norm_eps": 1e-3, "first_k_dense_replace": 0, "layer_types": None,
                           "layer_group_size": 2, "rope_parameters": YARN, "rope_theta": 1e6},
    ),
    "minimax": ("minimax", {**_SIZES, "num_local_experts": 6, "block_size": 8, "layer_types": _KINDS}),
    "minimax-factors-window": (
        "minimax", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 3, "block_size": 5, "head_dim": 10, "num_key_value_heads": 4,
                    "sliding_window": 6, "tie_word_embeddings": True, "full_attn_alpha_factor": 0.7, "full_attn_beta_factor": 1.5,
                    "linear_attn_alpha_factor": 3.55, "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 2, "mlp_beta_factor": 0.6,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama4": (
        "llama4_text", {**_SIZES, "num_hidden_layers": 4, "head_dim": 10, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4,
                        "attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.4, "interleave_moe_layer_step": 2, "rope_parameters": LLAMA3},
    ),
    "llama4-lists-no-norms": (
        "llama4_text", {**_SIZES, "head_dim": 8, "intermediate_size": 20, "intermediate_size_mlp": 40, "num_local_experts": 5,
                        "num_experts_per_tok": 2, "attention_chunk_size": 5, "use_qk_norm": False, "no_rope_layers": [0, 1, 1],
                        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
                        "attn_temperature_tuning": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "apertus": ("apertus", _SIZES),
    "apertus-bias-tied": (
        "apertus", {**_SIZES, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "olmo": ("olmo", {**_SIZES, "clip_qkv": 0.3}),
    "olmo-bias-tied": ("olmo", {**_SIZES, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "nanochat": ("nanochat", {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "nanochat-bias-tied": (
        "nanochat", {**_SIZES, "attention_bias": True, "tie_word_embeddings": True, "final_logit_softcapping": None, "rms_norm_eps": 1e-3},
    ),
    "minicpm3": ("minicpm3", {**_LATENT_SIZES, "dim_model_base": 6}),
    "minicpm3-no-query-latent": (
        "minicpm3", {**_LATENT_SIZES, "q_lora_rank": None, "attention_bias": True, "scale_emb": 3, "scale_depth": 0.7,
                     "dim_model_base": 48, "tie_word_embeddings": False},
    ),
    "mistral4": ("mistral4", {**_DEEPSEEK, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 8}}),
    "mistral4-groups": (
        "mistral4", {**_DEEPSEEK, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": False, "n_shared_experts": 2,
                     "routed_scaling_factor": 1.5, "q_lora_rank": None, "attention_bias": True,
                     "rope_parameters": YARN | {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 5}},
    ),
    "aria_text": ("aria_text", {**_SIZES, "moe_num_experts": 6, "moe_topk": 2}),
    "aria_text-bias-tied": (
        "aria_text", {**_SIZES, "moe_num_experts": 4, "moe_topk": 3, "moe_num_shared_experts": 1, "attention_bias": True,
                      "intermediate_size": 24, "tie_word_embeddings": True, "head_dim": 10},
    ),
    "openai-gpt": ("openai-gpt", {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "openai-gpt-untied-relu": (
        "openai-gpt", {"vocab_size": 97, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 64, "tie_word_embeddings": False, "afn": "relu"},
    ),
    "bert": ("bert", _BERT),
    "bert-types": ("bert", {**_BERT, "type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-6}),
    "megatron-bert": ("megatron-bert", _BERT),
    "roberta": ("roberta", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("xlm-roberta", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "ernie": ("ernie", _BERT),
    "roberta-prelayernorm": ("roberta-prelayernorm", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta-xl": ("xlm-roberta-xl", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": ("camembert", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "data2vec-text": ("data2vec-text", {**_BERT, "type_vocab_size": 2, "pad_token_id": 2}),
    "modernbert": ("modernbert", {**_BERT, **_MODERNBERT}),
    "modernbert-biases": (
        "modernbert", {**_BERT, **_MODERNBERT, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
                       "classifier_bias": True, "decoder_bias": False, "tie_word_embeddings": False,
                       "layer_types": _WINDOWS, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "t5": ("t5", _T5),
    "t5-v1.1": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": None}),
    "t5-silu": ("t5", {**_T5, "feed_forward_proj": "gated-silu", "d_kv": 6, "relative_attention_max_distance": 20, "num_layers": 1}),
    "mt5": ("mt5", _T5),
    "umt5": ("umt5", _T5),
    "minimax_m2": ("minimax_m2", {**_SIZES, "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "minimax_m2-rotary-dim": (
        "minimax_m2", {**_SIZES, "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 6,
                       "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_DEEPSEEK, "num_experts_per_tok": 2}),
    "glm4_moe_lite-groups-kinds": (
        "glm4_moe_lite", {**_DEEPSEEK, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "q_lora_rank": None,
                          "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "n_shared_experts": 2},
    ),
    "dots1": ("dots1", {**_V3_EXPERTS, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "dots1-windows-bias": (
        "dots1", {**_V3_EXPERTS, "n_shared_experts": 1, "attention_bias": True, "max_window_layers": 1, "sliding_window": 8,
                  "norm_topk_prob": True, "routed_scaling_factor": 2.5, "tie_word_embeddings": True},
    ),
    "exaone_moe": (
        "exaone_moe", {**_EXPERTS, "num_experts": 6, "sliding_window": 8, "eos_token_id": 2, "num_shared_experts": 2},
    ),
    "exaone_moe-kinds-groups": (
        "exaone_moe", {**_EXPERTS, "num_experts": 8, "n_group": 2, "topk_group": 1, "layer_types": KINDS, "head_dim": 10,
                       "mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "solar_open": ("solar_open", {**_EXPERTS, "head_dim": 8}),
    "solar_open-groups-bias": (
        "solar_open", {**_V3_EXPERTS, "head_dim": 12, "attention_bias": True, "n_shared_experts": 2, "norm_topk_prob": False,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "hy_v3": ("hy_v3", {**_EXPERTS, "head_dim": 10, "num_experts": 6}),
    "hy_v3-kinds-bias-tied": (
        "hy_v3", {**_EXPERTS, "head_dim": 8, "num_experts": 5, "mlp_layer_types": ["sparse", "dense", "sparse"],
                  "attention_bias": True, "tie_word_embeddings": True, "num_shared_experts": 2, "rope_parameters": YARN},
    ),
    "afmoe": ("afmoe", {**_EXPERTS, "head_dim": 10, "num_experts": 6, "sliding_window": 8, "num_hidden_layers": 5}),
    "afmoe-scaled-kinds": (
        "afmoe", {**_EXPERTS, "head_dim": 8, "num_experts": 5, "sliding_window": 8, "layer_types": KINDS, "mup_enabled": True,
                  "num_dense_layers": 0, "num_shared_experts": 1, "route_scale": 1.5, "tie_word_embeddings": True},
    ),
    "cwm": ("cwm", {**_SIZES, "head_dim": 10, "sliding_window": 8, "num_hidden_layers": 5}),
    "cwm-kinds-bias": (
        "cwm", {**_SIZES, "head_dim": 8, "sliding_window": 8, "layer_types": KINDS, "mlp_bias": True, "tie_word_embeddings": True,
                "rope_parameters": YARN},
    ),
    "internlm3": ("internlm3", {**_SIZES, "head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    "internlm3-plain": ("internlm3", {**_SIZES, "head_dim": 6, "rope_parameters": DYNAMIC, "tie_word_embeddings": True}),
    "iquestcoder": ("iquestcoder", {**_SIZES, "head_dim": 10}),
    "vaultgemma": ("vaultgemma", {**_GEMMA, "sliding_window": 8}),
    "vaultgemma-untied-uncapped": (
        "vaultgemma", {**_GEMMA, "tie_word_embeddings": False, "attn_logit_softcapping": None, "layer_types": KINDS,
                       "sliding_window": 8, "query_pre_attn_scalar": 24, "attention_bias": True},
    ),
    "flex_olmo": ("flex_olmo", {**_SIZES, "num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "flex_olmo-normalized-bias": (
        "flex_olmo", {**_SIZES, "num_experts": 4, "num_experts_per_tok": 3, "pad_token_id": 0, "norm_topk_prob": True,
                      "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mellum": ("mellum", {**_EXPERTS, "num_experts": 5, "head_dim": 10}),
    "mellum-windows-kinds": (
        "mellum", {**_EXPERTS, "num_experts": 5, "head_dim": 8, "sliding_window": 8, "layer_types": KINDS, "norm_topk_prob": False,
                   "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": _TWO_ROPES, "attention_bias": True},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {**_SIZES, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12}),
    "ernie4_5_moe-interval-untied": (
        "ernie4_5_moe", {**_SIZES, "moe_num_experts": 4, "moe_k": 3, "moe_intermediate_size": 12, "moe_layer_interval": 2,
                         "moe_num_shared_experts": 0, "tie_word_embeddings": False, "num_hidden_layers": 5},
    ),
    "granitemoeshared": (
        "granitemoeshared", {**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
    ),
    "granitemoeshared-without": ("granitemoeshared", {**_GRANITE, "num_local_experts": 4, "attention_bias": True}),
    "granite_swa": ("granite_swa", {**_GRANITE, "sliding_window": 8, "num_hidden_layers": 5}),
    "granite_swa-thetas": (
        "granite_swa", {**_GRANITE, "sliding_window": 8, "layer_types": KINDS, "layer_rope_theta": [0, 500.0, 1e4],
                        "tie_word_embeddings": False, "mlp_bias": True, "attention_bias": True},
    ),
    "granitemoe_swa": (
        "granitemoe_swa", {**_GRANITE, "num_local_experts": 4, "sliding_window": 8, "shared_intermediate_size": 20},
    ),
    "hyperclovax": ("hyperclovax", {**_SIZES, "head_dim": 6, "logits_scaling": 0.3, "embedding_multiplier": 3.0}),
    "hyperclovax-pre-bias": (
        "hyperclovax", {**_SIZES, "head_dim": 6, "use_post_norm": False, "attention_bias": True, "mlp_bias": True,
                        "attention_multiplier": 0.3, "residual_multiplier": 0.22, "tie_word_embeddings": True},
    ),
    "ministral3": (
        "ministral3", {**_SIZES, "head_dim": 10, "rope_parameters": YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    ),
    "ministral3-window-tied": (
        "ministral3", {**_SIZES, "head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True,
                       "rope_parameters": YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**_SIZES, "head_dim": 10}),
    "hunyuan_v1_dense-alpha-bias": (
        "hunyuan_v1_dense", {**_SIZES, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True,
                             "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_SIZES, "head_dim": 6, "num_experts": 5, "moe_topk": 2}),
    "hunyuan_v1_moe-lists": (
        "hunyuan_v1_moe", {**_SIZES, "head_dim": 8, "num_experts": 4, "moe_topk": [3, 3, 3], "attention_bias": True, "tie_word_embeddings": True},
    ),
    "phi": ("phi", {**_SIZES, "hidden_size": 32}),
    "phi-tied-gelu": ("phi", {**_SIZES, "tie_word_embeddings": True, "hidden_act": "gelu", "partial_rotary_factor": 1.0}),
    "gpt_neo": ("gpt_neo", {**_NEO, "attention_types": [[["global", "local"], 1], [["global"], 1]]}),
    "gpt_neo-width-untied": (
        "gpt_neo", {**_NEO, "attention_types": [[["local"], 3]], "intermediate_size": 40, "tie_word_embeddings": False,
                    "activation_function": "gelu"},
    ),
    "youtu": ("youtu", {**_LATENT_SIZES}),
    "youtu-bias-no-query-latent": (
        "youtu", {**_LATENT_SIZES, "q_lora_rank": None, "attention_bias": True, "initializer_range": 0.1,
                  "tie_word_embeddings": False, "rope_parameters": YARN},
    ),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}),
    "gptj-inner": ("gptj", {**_GPT2, "rotary_dim": 6, "n_inner": 50, "activation_function": "gelu"}),
    "bloom": ("bloom", {"vocab_size": 97, "hidden_size": 24, "n_layer": 3, "n_head": 4}),
    "bloom-six-heads-untied": (
        "bloom", {"vocab_size": 97, "hidden_size": 36, "n_layer": 2, "n_head": 6, "tie_word_embeddings": False, "hidden_dropout": 0.1},
    ),
    "mpt": ("mpt", {"vocab_size": 97, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "mpt-six-heads-scale-untied": (
        "mpt", {"vocab_size": 97, "d_model": 36, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, "tie_word_embeddings": False,
                "attn_config": {"softmax_scale": 0.3}},
    ),
    "codegen": ("codegen", {**_GPT2, "rotary_dim": 4}),
    "codegen-eight-heads": ("codegen", {**_GPT2, "n_embd": 32, "n_head": 8, "rotary_dim": 2, "n_inner": 40}),
    "opt": ("opt", _OPT),
    "opt-untied-no-bias": ("opt", {**_OPT, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "bitnet": ("bitnet", _SIZES),
    "bitnet-silu-bias-tied": ("bitnet", {**_SIZES, "hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "persimmon": ("persimmon", {**_SIZES, "hidden_size": 32}),
    "persimmon-unnormed-tied": (
        "persimmon", {**_SIZES, "qk_layernorm": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0, "hidden_act": "relu"},
    ),
    "phi-normed": ("phi", {**_SIZES, "hidden_size": 32, "qk_layernorm": True}),
    "dbrx": (
        "dbrx", {"vocab_size": 97, "d_model": 24, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "rope_theta": 500.0,
                 "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 500.0},
                 "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 5, "moe_top_k": 2}},
    ),
    "dbrx-unnormalized": (
        "dbrx", {"vocab_size": 97, "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
                 "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
                 "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 3, "moe_normalize_expert_weights": None}},
    ),
    "phimoe": ("phimoe", {**_SIZES, "num_local_experts": 5}),
    "phimoe-long-bias-jitter": (
        "phimoe", {**_SIZES, "num_local_experts": 6, "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True, "sliding_window": 8,
                   "rope_parameters": {**LONG, "original_max_position_embeddings": 64, "short_mscale": 1.25, "long_mscale": 1.25}},
    ),
    "flint": ("flint", {**_EXPERTS, "num_experts": 5, "head_dim": 10, "shared_expert_intermediate_size": 20, "num_hidden_layers": 5, "sliding_window": 8}),
    "flint-kinds-bias-tied": (
        "flint", {**_EXPERTS, "num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 16, "mlp_only_layers": [], "norm_topk_prob": False,
                  "layer_types": _WINDOWS, "sliding_window": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "kolibri1": (
        "kolibri1", {key: value for key, value in {**_EXPERTS, "num_experts": 6, "head_dim": 10, "shared_expert_intermediate_size": 20,
                     "sliding_window": 8, "num_hidden_layers": 5}.items() if key != "intermediate_size"},
    ),
    "kolibri1-kinds-normalized-tied": (
        "kolibri1", {key: value for key, value in {**_EXPERTS, "num_experts": 5, "head_dim": 6, "shared_expert_intermediate_size": 16,
                     "sliding_window": 8, "layer_types": KINDS, "norm_topk_prob": True, "tie_word_embeddings": True}.items() if key != "intermediate_size"},
    ),
    "axk1": ("axk1", {**_DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "axk1-kinds-bias-tied": (
        "axk1", {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"],
                 "n_shared_experts": 2, "norm_topk_prob": False, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "cohere2_moe": (
        "cohere2_moe", {**_SIZES, "head_dim": 6, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 8, "num_hidden_layers": 5},
    ),
    "cohere2_moe-dense-rms-sigmoid": (
        "cohere2_moe", {**_SIZES, "head_dim": 10, "num_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "mlp_layer_types": ["dense", "sparse", "sparse"],
                        "layer_types": KINDS, "rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
                        "num_shared_experts": 2, "shared_expert_combination_strategy": "sum", "prefix_dense_intermediate_size": 50,
                        "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2_moe-dense-unrotated": (
        "cohere2_moe", {**_SIZES, "head_dim": 6, "num_experts": 4, "sliding_window": 8, "mlp_layer_types": ["dense", "sparse", "sparse"],
                        "layer_types": KINDS, "prefix_dense_sliding_window_pattern": 2, "logit_scale": 1.0},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash", {**_V3_EXPERTS, "n_group": 1, "topk_group": 1, "head_dim": 12, "v_head_dim": 10, "sliding_window": 8},
    ),
    "mimo_v2_flash-kinds-groups-bias": (
        "mimo_v2_flash", {**_V3_EXPERTS, "head_dim": 18, "v_head_dim": 6, "sliding_window": 8, "layer_types": _WINDOWS,
                          "attention_bias": True, "attention_value_scale": None, "routed_scaling_factor": 2.5, "norm_topk_prob": False,
                          "mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads": 1, "tie_word_embeddings": True,
                          "rope_parameters": {
                              "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.7},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "mimo_v2_flash-no-window": (
        "mimo_v2_flash", {**_V3_EXPERTS, "head_dim": 12, "v_head_dim": 10, "layer_types": ["full_attention"] * 3},
    ),
    "laguna": ("laguna", {**_EXPERTS, "num_experts": 6, "head_dim": 12, "shared_expert_intermediate_size": 20}),
    "laguna-heads-kinds-channels-capped": (
        "laguna", {**_EXPERTS, "num_experts": 5, "head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": KINDS,
                   "num_attention_heads_per_layer": [4, 6, 4], "sliding_window": 8, "gating": "per-element",
                   "mlp_layer_types": ["sparse", "dense", "sparse"], "moe_routed_scaling_factor": 1.5, "tie_word_embeddings": True,
                   "moe_router_logit_softcapping": 0.4, "rope_parameters": {
                       "full_attention": YARN | {"partial_rotary_factor": 0.5},
                       "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "olmo_hybrid": ("olmo_hybrid", _OLMO_HYBRID),
    "olmo_hybrid-no-positions-bias": (
        "olmo_hybrid", {**_OLMO_HYBRID, "rope_parameters": {"rope_type": None, "rope_theta": None}, "linear_num_key_heads": 2,
                        "linear_key_head_dim": 5, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 3, "attention_bias": True,
                        "layer_types": ["full_attention", "linear_attention", "full_attention"], "linear_allow_neg_eigval": False,
                        "num_key_value_heads": None, "tie_word_embeddings": True},
    ),
    "mpnet": ("mpnet", {**_BERT, "pad_token_id": 1, "hidden_act": "gelu_new"}),
    "modernbert-decoder": ("modernbert-decoder", {**_BERT, **_MODERNBERT}),
    "modernbert-decoder-biases-kinds": (
        "modernbert-decoder", {**_BERT, **_MODERNBERT, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
                               "decoder_bias": False, "classifier_activation": "silu", "layer_types": KINDS, "tie_word_embeddings": False,
                               "hidden_activation": "silu"},
    ),
    "bert-generation": ("bert-generation", {**_BERT, "is_decoder": True}),
    "bert-generation-tanh": ("bert-generation", {**_BERT, "is_decoder": True, "hidden_act": "gelu_new"}),
    "distilbert": (
        "distilbert", {"vocab_size": 97, "dim": 24, "hidden_dim": 40, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 32},
    ),
    "electra": ("electra", {**_BERT, "embedding_size": 14}),
    "electra-wide": ("electra", {**_BERT, "embedding_size": 24, "hidden_act": "gelu_new", "type_vocab_size": 3}),
    "roformer": ("roformer", {**_BERT, "embedding_size": 14}),
    "roformer-wide": ("roformer", _BERT),
    "nomic_bert": ("nomic_bert", {**_BERT, "head_dim": 8}),
    "nomic_bert-theta": ("nomic_bert", {**_BERT, "rope_parameters": LINEAR, "layer_norm_eps": 1e-5}),
    "jina_embeddings_v3": ("jina_embeddings_v3", {**_BERT, "hidden_act": "gelu_new"}),
    "gte": ("gte", {**_BERT, "type_vocab_size": 2, "hidden_act": "gelu_pytorch_tanh"}),
    "eurobert": ("eurobert", {**_BERT, "num_key_value_heads": 2, "mlp_bias": True, "attention_bias": True}),
    "eurobert-tied": ("eurobert", {**_BERT, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {key: value for key, value in _DELTA_MOE.items() if key != "intermediate_size"}),
}  # fmt: skip


def auto_class(kind: str) -> Any:
    """The class of transformers that makes models of that type."""
    transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")
    if kind in ENCODERS:
        return transformers.AutoModelForMaskedLM
    if kind == "mistral4":  # which transformers makes alone by this class only
        return SimpleNamespace(from_config=transformers.Mistral4ForCausalLM._from_config)
    return transformers.AutoModelForSeq2SeqLM if kind.endswith("t5") else transformers.AutoModelForCausalLM


def save_model(folder: Path, case: str, *, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    """Write the folder of a case with transformers, random in every tensor, biases included."""
    transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")
    kind, settings = MODELS[case]
    torch.manual_seed(len(case))
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = auto_class(kind).from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.data = torch.randn(buffer.shape)  # in fp32, whatever the weights are
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, max_shard_size=shard)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

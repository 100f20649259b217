"""Tiny random HuggingFace folders, written by transformers itself or from a declared family."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
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
    "gpt_neox": ("gpt_neox", _NEOX),
    "gpt_neox-no-bias": (
        "gpt_neox", {**_NEOX, "attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 500,
                     "use_parallel_residual": False, "hidden_act": "gelu_new", "hidden_dropout": 0.1},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied-inner": (
        "gpt2", {**_GPT2, "tie_word_embeddings": False, "n_inner": 50, "activation_function": "gelu", "attn_pdrop": 0.3},
    ),
}  # fmt: skip


def save_model(folder: Path, case: str, *, dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    """Write the folder of a case with transformers, random in every tensor, biases included."""
    transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")
    kind, settings = MODELS[case]
    torch.manual_seed(len(case))
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, max_shard_size=shard)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

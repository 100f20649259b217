from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hf_models import LLAMA3, MODELS, YARN, auto_class
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_modules import tiny_config

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families import (
    FAMILIES,
    VISION_FAMILIES,
    ModelFamily,
    detect_model_family,
    find_family_by_name,
    find_family_expressing_model,
    is_equivalent_config,
)
from mega_ckpt.families.disk_layouts import TRANSPOSED, TensorRule, UnstackedLayout, expand_tensor_rules
from mega_ckpt.families.lfm2_decoders import Lfm2FfnWidthConfigEntry
from mega_common.errors import CheckpointError, MegaError
from mega_common.model_config import ModelConfig, RopeConfig

LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2"}
PHI3 = {**LLAMA, "model_type": "phi3"}
NEOX = {
    **{key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "num_key_value_heads")},
    "model_type": "gpt_neox", "rotary_pct": 1.0,
}  # fmt: skip
GEMMA = {**LLAMA, "model_type": "gemma3_text"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
V3 = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 16, "moe_intermediate_size": 8,
}  # fmt: skip
DSA = {**V3, "model_type": "glm_moe_dsa", "num_hidden_layers": 3}
MIMO = {**V3, "model_type": "mimo_v2_flash", "head_dim": 6, "v_head_dim": 4, "num_key_value_heads": 1}
LAGUNA = {
    **LLAMA,
    "model_type": "laguna",
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32}


def read(raw: dict[str, Any]) -> ModelConfig:
    return detect_model_family(raw).read_config_json(raw)


@pytest.mark.parametrize("case", MODELS)
def test_config_round_trip_through_transformers(case: str, tmp_path: Path) -> None:
    """transformers' config -> ours -> a config.json of ours -> transformers: says the same where the model depends on it."""
    transformers = pytest.importorskip("transformers")
    kind, chosen = MODELS[case]
    theirs = transformers.AutoConfig.for_model(kind, **chosen)
    raw = json.loads(theirs.to_json_string(use_diff=False))
    family = detect_model_family(raw)
    model = family.read_config_json(raw)
    assert family.unsupported_settings(model) == []
    written = family.write_config_json(model)
    assert is_equivalent_config(family.read_config_json(written), model)
    (tmp_path / "config.json").write_text(json.dumps(written))
    back = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded = json.loads(back.to_json_string(use_diff=False))
    assert is_equivalent_config(family.read_config_json(loaded), model)
    # Values that say the same in two ways: when a window starts, and defaults of heads and rope that are written out.
    spelled = {"max_window_layers", "use_sliding_window", "sliding_window", "rope_parameters", "head_dim"}
    spelled |= {
        "decoder_sparse_step",
        "mlp_only_layers",
        "num_experts",
        "num_local_experts",
        "n_group",
        "topk_group",
        "moe_topk",
        "interleave_moe_layer_step",
        "attention_types",  # as one list of all layers
        "first_k_dense_replace",  # mlp_layer_types says it of each layer
        "layer_group_size",
        "kda_lower_bound",  # of a gate that has none
    }
    if family.name == "lfm2":  # the width before its adjustment, and the layers with attention
        spelled |= {"full_attn_idxs", *Lfm2FfnWidthConfigEntry().handled_config_keys}
    for key in {key for entry in family.entries for key in entry.handled_config_keys} & raw.keys() - spelled:
        assert loaded[key] == raw[key], key


# In memory transformers fuses the experts of other families, and of these with other names.
_FUSED_IN_MEMORY = {family.name for family in FAMILIES if family.has_per_expert_tensors} | {
    "aria_text",
    "gte",
    "jina_embeddings_v3",
    "nomic_bert",
    "roformer",
    "granitemoe",
    "granitemoehybrid",
    "mistral4",
    "granitemoeshared",
    "olmo_hybrid",
}


@pytest.mark.parametrize("case", [case for case, (kind, _) in MODELS.items() if kind not in _FUSED_IN_MEMORY])
def test_tensors_are_those_of_transformers(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, chosen = MODELS[case]
    config = transformers.AutoConfig.for_model(kind, **chosen)
    with torch.device("meta"):
        theirs = auto_class(kind).from_config(config)
    family = find_family_by_name(kind)
    disk = {"lm_head.weight": family.head}  # one family calls it differently on disk
    named = [*theirs.named_parameters(remove_duplicate=False)]
    named += [(name, value) for name, value in theirs.named_buffers() if name.endswith("layer_scalar")]
    once = {name: value for name, value in named if name not in theirs.all_tied_weights_keys}
    shapes = {disk.get(name, name): tuple(value.shape) for name, value in once.items()}
    model = family.read_config_json(json.loads(config.to_json_string(use_diff=False)))
    assert {name: tensor.shape for name, tensor in family.disk_tensor_table(model).items()} == shapes


def test_defaults_of_absent_keys_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for family in FAMILIES:
        full = json.loads(transformers.AutoConfig.for_model(family.name, **_few(family)).to_json_string(use_diff=False))
        sparse = {key: full[key] for key in full if _is_required(family, full, key)} | {"model_type": family.name}
        assert is_equivalent_config(family.read_config_json(sparse), family.read_config_json(full)), family.name


def _few(family: ModelFamily) -> dict[str, Any]:
    """What transformers' class of the family insists on, or needs to make sense."""
    few = {
        "deepseek_v2": {"num_experts_per_tok": 2}, "glm4_moe": {"num_attention_heads": 32},
        "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
        "bert-generation": {"is_decoder": True},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    }  # fmt: skip
    return few.get(family.name, {})


def _is_required(family: ModelFamily, full: dict[str, Any], key: str) -> bool:
    try:
        family.read_config_json({other: value for other, value in full.items() if other != key})
    except CheckpointError as error:
        return "missing" in str(error) or "(transformers' default)" in str(error)
    return False


@pytest.mark.parametrize(
    ("old", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(scaling="linear", factor=4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}},
            RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_position=64),
        ),
        (
            {"rope_parameters": YARN},
            RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position=128, beta_fast=16.0, mscale=1.0,
                       mscale_all_dim=0.5),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            RopeConfig(scaling="yarn", factor=2.0, original_max_position=256),
        ),
    ],
)  # fmt: skip
def test_rope_of_older_and_newer_folders(old: dict[str, Any], rope: RopeConfig) -> None:
    assert read({**LLAMA, **old}).rope == rope


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({**LLAMA, "per_layer_config": {"1": {"hidden_act": "relu"}}}, "per_layer_config"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "must have 3 numbers with rope.scaling = longrope",
        ),
        ({**MIXTRAL, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "factor of rope_type 'linear' is missing"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "must be one set of parameters"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({**LLAMA, "hidden_act": ["silu"]}, "hidden_act = ['silu']"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window = 4096"),
        ({**LLAMA, "num_attention_heads": "four"}, "num_attention_heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "must divide num_attention_heads"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size is missing"),
        ({**QWEN, "layer_types": ["full_attention"]}, "layer_types has 1 layers, but num_hidden_layers = 3"),
        ({**QWEN, "layer_types": ["sliding_attention"] * 3}, "requires sliding_window"),
        ({**QWEN, "num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000 must be at most"),
        ({**QWEN, "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({**QWEN, "layer_types": 3}, "layer_types"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights = false"),
        ({**GPT2, "n_ctx": 16}, "n_ctx = 16"),
        (
            {**PHI3, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "must have 3 numbers with rope.scaling = longrope",
        ),
        (
            {**PHI3, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type = 'yarn' is not supported (only default, longrope)",
        ),
        ({**NEOX, "rope_theta": 500.0}, "rope_theta = 500.0"),
        ({**MIXTRAL, "num_local_experts": 2, "num_experts_per_tok": 3}, "moe.top_k"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({key: value for key, value in MIXTRAL.items() if key != "num_local_experts"}, "num_local_experts is missing"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({**V3, "topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({**V3, "num_nextn_predict_layers": 10**12}, "num_hidden_layers = 1000000000003 must be at most"),
        ({**V3, "model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be at least 1"),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 must be more than 0"),
        ({**V3, "moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({**V3, "rope_interleave": False}, "rope_interleave = false"),
        ({**V3, "num_key_value_heads": 2}, "num_key_value_heads = 2 must be 4"),
        ({**V3, "head_dim": 7}, "head_dim = 7 must be 2"),
        ({**DSA, "index_topk_freq": 3}, "selection of an earlier layer, such as 2, are not supported"),
        (
            {**DSA, "indexer_types": ["full", "shared", "full"]},
            "selection of an earlier layer, such as 1, are not supported",
        ),
        ({**DSA, "index_topk_pattern": "FFS"}, "selection of an earlier layer, such as 2, are not supported"),
        ({**DSA, "layer_types": ["full_attention"] * 3}, "(only indexed_attention)"),
        ({**DSA, "indexer_rope_interleave": False}, "indexer_rope_interleave = false"),
        ({**DSA, "model_type": "deepseek_v32", "index_head_dim": 1}, "must be at least qk_rope_head_dim = 2"),
        ({key: value for key, value in V3.items() if key != "kv_lora_rank"}, "kv_lora_rank is missing"),
        ({**V3, "model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob = true"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({**GEMMA, "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({**GEMMA, "rope_parameters": {"rope_type": "default"}}, "must be one set of parameters for each of"),
        ({**MIMO, "rope_parameters": {"full_attention": YARN}}, "rope_type = 'yarn'"),
        ({**MIMO, "layer_types": ["sliding_attention"]}, "layer_types has 1 layers"),
        ({**MIMO, "rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "local_rope.fraction"),
        (
            {**LAGUNA, "num_attention_heads_per_layer": [4, 4, 6]},
            "in all layers with a window, and in all layers without",
        ),
        ({**LAGUNA, "num_attention_heads_per_layer": [4, 4]}, "has 2 layers, not 3"),
        ({**LAGUNA, "attention_bias": True}, "attention_bias = true"),
        ({**LAGUNA, "moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = true"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not supported: |problem") as caught:
        detect_model_family(raw).read_config_json(raw, "folder/config.json")
    assert told in str(caught.value)
    assert "folder/config.json" in str(caught.value)


NEMOTRON_H = {
    "model_type": "nemotron_h", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "mamba_num_heads": 16, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "attention", "mlp"]}, {}),
        (
            {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_chunk_size": 64},
            {"n_groups": 4, "conv_kernel": 3, "chunk_size": 64},
        ),
        (
            {"mamba_conv_bias": False, "mamba_dt_limit": [0.1, 0.2]},
            {"use_conv_bias": False, "time_step_limit": (0.1, 0.2)},
        ),
        ({"attention_head_dim": 10}, {"head_dim": 10}),
        ({"time_step_limit": [0.0, float("inf")]}, {}),
        ({"time_step_limit": [0.0, "Infinity"]}, {"time_step_limit": None}),
        ({"time_step_limit": [0.5, {"__float__": "Infinity"}]}, {"time_step_limit": [0.5, float("inf")]}),
    ],
)
def test_older_and_newer_spellings_of_nemotron_h(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read({**NEMOTRON_H, **old}) == read({**NEMOTRON_H, **new})


def test_a_lower_limit_of_steps_without_an_upper_one_comes_back() -> None:
    model = read({**NEMOTRON_H, "time_step_limit": [0.5, float("inf")]})
    assert model.mamba is not None
    assert model.mamba.dt_limit == (0.5, None)
    assert is_equivalent_config(
        read(json.loads(json.dumps(find_family_by_name("nemotron_h").write_config_json(model)))), model
    )


GRANITE4 = {
    **LLAMA, "model_type": "granitemoehybrid", "num_local_experts": 2, "mamba_n_heads": 6, "mamba_d_head": 8,
    "layer_types": ["mamba", "attention", "mamba"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({**NEMOTRON_H, "hybrid_override_pattern": "M+"}, "layers_block_type"),
        ({**NEMOTRON_H, "head_dim": 8, "attention_head_dim": 10}, "must be equal"),
        ({**NEMOTRON_H, "time_step_limit": 3}, "must be two numbers"),
        ({**NEMOTRON_H, "time_step_limit": [0, "soon"]}, "'soon' must be a number"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "ME", "mlp_bias": True}, "mlp_bias = true"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "ME", "n_shared_experts": 2}, "n_shared_experts = 2"),
        ({**NEMOTRON_H, "attention_bias": True}, "attention_bias = true"),
        ({**GRANITE4, "layer_types": ["mamba"]}, "layer_types has 1 layers"),
        ({**GRANITE4, "mamba_n_heads": 5}, "x hidden_size = 48 must equal 5 heads x 8"),
        ({**LLAMA, "model_type": "bamba", "mamba_n_heads": 6, "mamba_d_head": 8, "layers_block_type": ["mamba"] * 3,
          "attn_layer_indices": [1]}, "conflicts with attn_layer_indices"),
        ({**LLAMA, "model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate = false"),
        ({**LLAMA, "model_type": "olmo_hybrid", "layer_types": ["mamba"] * 3}, "only a list of full_attention and"),
        ({**LLAMA, "model_type": "olmo_hybrid", "linear_num_key_heads": 3}, "must divide num_value_heads = 4"),
    ],
)  # fmt: skip
def test_hybrids_that_cannot_be_expressed_are_refused_by_name(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(told)):
        detect_model_family(raw).read_config_json(raw)


@pytest.mark.parametrize(
    ("rope", "position"),
    [
        (None, "rope"), ({"rope_type": None}, "none"), ({"rope_type": "default", "rope_theta": None}, "none"),
        ({"rope_type": "default", "rope_theta": 7.0}, "rope"),
    ],
)  # fmt: skip
def test_positions_of_olmo_hybrid(rope: dict[str, Any] | None, position: str) -> None:
    model = read({**LLAMA, "model_type": "olmo_hybrid", "rope_parameters": rope})
    assert model.position == position
    assert position == "none" or model.rope.theta == (rope or {"rope_theta": 10_000.0})["rope_theta"]


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(CheckpointError) as caught:
        read({**LLAMA, "hidden_act": "relu", "is_causal": False, "partial_rotary_factor": 0.5})
    assert all(key in str(caught.value) for key in ("hidden_act", "is_causal", "partial_rotary_factor"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"altup_correct_scale": False}, "altup_correct_scale = false is not supported"),
        ({"intermediate_size": [40, 48]}, "must be one width for all 3 layers"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input = 99 must be at most vocab_size = "),
        ({"activation_sparsity_pattern": [0.5]}, "ffn_sparsity = 1: must have a value for each"),
    ],
)  # fmt: skip
def test_what_gemma_3n_cannot_be_is_named(more: dict[str, Any], message: str) -> None:
    raw = {**LLAMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 40}
    raw |= {"layer_types": ["full_attention"] * 3, **more}
    with pytest.raises(CheckpointError, match=message):
        read(raw)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({}, "vocab_size_per_layer_input"), ({"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input"),
        ({"enable_moe_block": True}, "num_experts"), ({"num_kv_shared_layers": 1}, "shared_kv_layers"),
        ({"enable_moe_block": True, "num_kv_shared_layers": 1, "use_double_wide_mlp": True}, "use_double_wide_mlp"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}}, "proportional"),
    ],
)  # fmt: skip
def test_what_gemma_4_cannot_be_is_named(more: dict[str, Any], key: str) -> None:
    raw = {**LLAMA, "model_type": "gemma4_text", **({"hidden_size_per_layer_input": 0} if more else {}), **more}
    with pytest.raises(CheckpointError, match=key):
        read(raw)


HARMLESS = {
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1,
    "pretraining_tp": 4, "something_unused": None, "transformers_version": "4.40.0",
    "sliding_window": None, "layer_types": ["full_attention"] * 3,
}  # fmt: skip
# Of hub models: Qwen 2.5 and what was distilled into it, SmolLM 2, Unsloth's uploads, imports of GGUF files, older versions.
UNREAD = {
    "use_mrope": False, "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
    "unsloth_fixed": True, "unsloth_version": "2025.3.14", "_model_name_or_path": "model.gguf",
    "_attn_implementation_autoset": True, "model_max_length": 2048, "use_sliding_window": False,
    "attention_multiplier": 0.5,
}  # fmt: skip


def test_keys_that_nothing_reads_are_named_and_change_nothing() -> None:
    assert read({**LLAMA, **HARMLESS, **UNREAD, "sliding_window": 4096}) == read(LLAMA)
    llama = find_family_by_name("llama")
    assert llama.unread_keys({**LLAMA, **HARMLESS}) == []
    assert llama.unread_keys({**LLAMA, **HARMLESS, **UNREAD}) == sorted(UNREAD)


def test_parameters_of_rope_that_its_kind_does_not_ask_for_change_nothing() -> None:
    yarn = {"type": "yarn", "factor": 2.0}
    raw = {**LLAMA, "rope_scaling": {**yarn, "finetuned": True, "short_factor": [1.0]}, "rope_parameters": None}
    assert read(raw) == read({**LLAMA, "rope_scaling": yarn})
    assert find_family_by_name("llama").unread_keys(raw) == ["rope_scaling.finetuned", "rope_scaling.short_factor"]


_READ = re.compile(r"\b(?:self\.)?config\.(\w+)|getattr\(\s*(?:self\.|decoder_)?config,\s*\"(\w+)\"")
# What code reads of a configuration besides keys: methods, properties, names of the software's own, other models' parts.
_NO_KEYS = {
    "gemma3_text": {"image_token_id", "mm_tokens_per_image", "text_config", "vision_config"},
    "llama4_text": {"image_token_id"},
    "gemma4_text": {
        "attention_chunk_size", "attention_context_left", "attention_context_right", "attention_invalid_logits_value",
        "attention_logit_cap", "conv_kernel_size", "gradient_clipping", "hidden_act", "output_proj_dims", "residual_weight",
        "subsampling_conv_channels", "use_clipped_linears", "kv_sharing_modes", "is_causal",
    },
    "gemma4_unified_text": {"kv_sharing_modes", "mm_tokens_per_image"},
    "minicpm3": {"logits_scaling"},
    "dbrx": {"ffn_act_fn", "ffn_hidden_size", "moe_jitter_eps", "moe_num_experts"},  # of its section
    "aria_text": {"image_token_id", "projector_patch_to_query_dict", "max_value_projector_patch_to_query_dict", "patch_size", "text_config", "vision_config", "vision_feature_layer"},
    "": {"_attn_implementation", "get_text_config", "default_theta", "standardize_rope_params", "validate_rope", "json",
         "rope_parameters"},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_key_that_transformers_reads_is_answered_for(family: ModelFamily) -> None:
    """Of the family's configuration class, of its model code, and of the code for masks, caches and rope of all families."""
    transformers = pytest.importorskip("transformers")
    kind = type(transformers.AutoConfig.for_model(family.name, **_few(family)))
    declared = {field.name for field in dataclasses.fields(kind)}.union(*kind.attribute_map.items())
    assert declared - family.known_config_keys == set()
    code = importlib.import_module(getattr(transformers, family.architecture).__module__)
    others = _NO_KEYS.get(family.name, set()) | _NO_KEYS[""]
    if family.outer_model_type:  # whose code is in the same file
        whole = transformers.AutoConfig.for_model(family.outer_model_type, vision_config={})
        parts = [whole, whole.vision_config, getattr(whole, "audio_config", None)]
        others |= {field.name for part in parts if part is not None for field in dataclasses.fields(part)}
    assert _read_by(code) - others - family.known_config_keys == set()
    for name in ("masking_utils", "cache_utils", "modeling_rope_utils"):
        common = importlib.import_module(f"transformers.{name}")
        assert _read_by(common) - _NO_KEYS[""] - family.known_config_keys == set(), name


def _read_by(module: ModuleType) -> set[str]:
    return {name or other for name, other in _READ.findall(inspect.getsource(module))}


def test_unknown_model_type_names_the_nearest_one() -> None:
    with pytest.raises(CheckpointError, match=r"'lama' is not supported; .*docs/families.md; nearest: llama\n"):
        detect_model_family({"model_type": "lama"})
    with pytest.raises(CheckpointError, match="model_type is missing"):
        detect_model_family({"hidden_size": 3})


def test_a_number_of_layers_of_another_type_is_named_once() -> None:
    raw = {"model_type": "deepseek_v4", "num_hidden_layers": "4"}
    with pytest.raises(CheckpointError) as caught:
        detect_model_family(raw).read_config_json(raw)
    assert str(caught.value).count("num_hidden_layers = '4' must be a whole number") == 1
    assert ": : " not in str(caught.value)


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
GEMMA_LIKE = {
    "norm_position": "both", "zero_centered_norm": True, "scale_embeddings": True, "activation": "geglu",
    "sliding_window": 8, "full_attention_layers": [1],
}  # fmt: skip
OSS = {
    "sliding_window": 8, "full_attention_layers": [1], "attention_sinks": True, "mlp_bias": True, "qkv_bias": True,
    "attention_out_bias": True, "activation_limit": 7.0, "moe": {**MOE, "router_bias": True},
}  # fmt: skip
MLA = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
DEEPSEEK = {
    "mla": MLA, "rope": {"interleaved": True}, "mtp_layers": 1,
    "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "groups": 2, "top_groups": 1, "group_score": "top2",
            "shared_ffn_hidden_size": 16, "layers": [1, 2]},
}  # fmt: skip
DEEPSEEK2 = {
    "mla": {**MLA, "q_lora_rank": None}, "rope": {"interleaved": True},
    "moe": {**MOE, "normalize": False, "shared_ffn_hidden_size": 8, "scaling": 3.0},
}  # fmt: skip
SIZES = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}
BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "llama"),
        ({"residual_dropout": 0.1, "scale_residual_init": False}, "llama"),
        ({"sliding_window": 8}, "mistral"),
        ({"hidden_size": 18, "head_dim": 4}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True, "num_kv_heads": 2}, "qwen3"),
        ({"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", **BIASES}, "gpt2"),
        ({"rope": {"fraction": 0.5}}, "phi3"),
        ({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all"}, "olmo2"),
        ({"norm": "layernorm", "activation": "gelu", "parallel_residual": True, **BIASES}, "gpt_neox"),
        ({"sliding_window": 8, "full_attention_layers": [1]}, "ministral"),
        ({"sliding_window": 8, "full_attention_layers": [0, 1]}, "llama"),
        ({"sliding_window": 8, "full_attention_layers": []}, "mistral"),
        ({"sliding_window": 8, "full_attention_layers": [1], "qkv_bias": True}, "qwen2"),
        (
            {
                "rope": {
                    "scaling": "longrope",
                    "original_max_position": 64,
                    "short_factor": [1.0, 1.0],
                    "long_factor": [2.0, 3.0],
                }
            },
            "llama",
        ),
        ({**GEMMA_LIKE, "attention_softcap": 50.0, "logit_softcap": 30.0}, "gemma2"),
        ({**GEMMA_LIKE, "qk_norm": True, "local_rope": {"theta": 100.0}}, "gemma3_text"),
        ({"moe": MOE}, "mixtral"),
        ({"moe": {**MOE, "layers": [0, 1], "aux_loss": 0.1, "z_loss": 0.1}}, "mixtral"),
        ({"moe": {**MOE, "normalize": False}, "qk_norm": True}, "qwen3_moe"),
        ({"moe": {**MOE, "layers": [1]}, "qk_norm": True, "sliding_window": 8}, "qwen3_moe"),
        ({"moe": {**MOE, "shared_ffn_hidden_size": 12, "shared_gate": True}}, "qwen2_moe"),
        (OSS, "gpt_oss"),
        (DEEPSEEK, "deepseek_v3"),
        (DEEPSEEK2, "deepseek_v2"),
    ],
)
def test_the_first_family_that_fits(changes: dict[str, Any], name: str) -> None:
    model = ModelConfig.parse(SIZES | changes)
    family = find_family_expressing_model(model)
    assert family.name == name
    assert is_equivalent_config(family.read_config_json(json.loads(json.dumps(family.write_config_json(model)))), model)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"moe": {**MOE, "score": "sigmoid"}}, "moe.score = 'sigmoid' has no key in config.json"),
        ({"moe": {**MOE, "layers": [1]}}, "mixtral: moe.layers must be all layers"),
        ({"attention_sinks": True, "logit_softcap": 3.0}, "llama: attention_sinks = true has no key in config.json"),
        ({"logit_softcap": 3.0}, "llama: logit_softcap = 3.0 has no key in config.json"),
        ({**GEMMA_LIKE, "attention_scale": 0.3}, "attention_scale must be 1 / sqrt(a whole number), not 0.3"),
        ({"norm_position": "both", "logit_softcap": 3.0}, "llama: norm_position = 'both' has no key in config.json"),
        ({**OSS, "sliding_window": None, "activation_limit": None}, "gpt_oss: activation_limit is missing"),
        ({**DEEPSEEK, "attention_scale": 0.5}, "deepseek_v3: attention_scale = 0.5 has no key in config.json"),
        (DEEPSEEK | {"moe": {**DEEPSEEK["moe"], "group_score": "max"}}, "moe.group_score must be 'top2', not 'max'"),
        (DEEPSEEK | {"moe": {**DEEPSEEK["moe"], "layers": [0]}, "attention_scale": 0.5}, "moe.layers must be all layers from 0 to the last"),
        (DEEPSEEK | {"moe": {**DEEPSEEK["moe"], "shared_ffn_hidden_size": 9}}, "must be a positive multiple of moe.ffn_hidden_size = 8"),
        ({"mla": MLA, "embedding_norm": True}, "mla = {"),
    ],
)  # fmt: skip
def test_a_model_that_none_can_express_is_told_why(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match="no HuggingFace family") as caught:
        find_family_expressing_model(ModelConfig.parse(SIZES | changes))
    assert told in str(caught.value)


def test_no_family_fits_and_the_nearest_say_why() -> None:
    with pytest.raises(CheckpointError) as caught:
        find_family_expressing_model(
            ModelConfig.parse(SIZES | {"norm": "layernorm", "rope": {"fraction": 0.5}, "activation": "geglu"})
        )
    first, *reasons = str(caught.value).splitlines()
    assert "no HuggingFace family" in first
    assert reasons[0] == "  stablelm: activation must be 'swiglu', not 'geglu'"
    assert len(reasons) < len(FAMILIES) / 2


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 6), head=st.integers(1, 5), groups=st.integers(1, 3), theta=st.floats(1.0, 1e7),
    tied=st.booleans(), window=st.none() | st.integers(1, 99), bias=st.booleans(), norm=st.booleans(),
)  # fmt: skip
def test_a_model_that_fits_survives_its_config(
    heads: int, head: int, groups: int, theta: float, tied: bool, window: int | None, bias: bool, norm: bool
) -> None:
    model = ModelConfig.parse(
        {**SIZES, "num_attention_heads": heads * groups, "num_kv_heads": heads, "head_dim": 2 * head,
         "hidden_size": 2 * heads * groups, "rope": {"theta": theta}, "tie_embeddings": tied, "sliding_window": window,
         "qkv_bias": bias, "qk_norm": norm}
    )  # fmt: skip
    fitting = [family for family in FAMILIES if not family.unsupported_settings(model)]
    for family in fitting:
        written = json.loads(json.dumps(family.write_config_json(model)))
        assert is_equivalent_config(family.read_config_json(written), model), family.name


def raw_of(changes: dict[str, Any]) -> dict[str, Any]:
    model = ModelConfig.parse(SIZES | changes)
    return find_family_expressing_model(model).write_config_json(model)


@pytest.mark.parametrize(
    "raw", [GPT2, PHI3, NEOX, raw_of({"moe": MOE}), raw_of(OSS), raw_of(DEEPSEEK2)], ids=lambda raw: raw["model_type"]
)
def test_every_disk_tensor_is_views_that_tile_the_canonical_ones(raw: dict[str, Any]) -> None:
    model = read(raw)
    found = {name: torch.zeros(shape) for name, shape in canonical_tensors(model).items()}
    for disk in detect_model_family(raw).disk_tensor_table(model).values():
        for slab, view in disk.slice_views(torch.ones(disk.shape)):
            window = tuple(slice(o, o + n) for o, n in zip(slab.offset, slab.shape, strict=True))
            found[slab.name][window] += view
    assert all(bool((tensor == 1).all()) for tensor in found.values())


def test_fused_and_transposed_as_gpt2_computes_it() -> None:
    """x @ W + b, split in three, is x @ q.T and so on."""
    model = read(GPT2)
    disk = find_family_by_name("gpt2").disk_tensor_table(model)["transformer.h.1.attn.c_attn.weight"]
    weight, x = torch.randn(disk.shape, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)
    parts = {slab.name: view for slab, view in disk.slice_views(weight)}
    for name, expected in zip("qkv", (x @ weight).split(24, dim=1), strict=True):
        torch.testing.assert_close(x @ parts[f"model.layers.1.self_attn.{name}_proj.weight"].t(), expected)


def test_experts_whose_rows_take_turns() -> None:
    """x @ W + b, its even columns the gate's and its odd ones the up projection's, is what each canonical part gives."""
    table = find_family_by_name("gpt_oss").disk_tensor_table(ModelConfig.parse(SIZES | OSS))
    disk, bias = (table[f"model.layers.1.mlp.experts.gate_up_proj{kind}"] for kind in ("", "_bias"))
    assert (disk.shape, bias.shape) == ((4, 16, 16), (4, 16))
    weight, offset = torch.randn(disk.shape, dtype=torch.float64), torch.randn(bias.shape, dtype=torch.float64)
    weights, offsets = (
        [view for _, view in each.slice_views(value)] for each, value in ((disk, weight), (bias, offset))
    )
    x = torch.randn(4, 5, 16, dtype=torch.float64)
    y = x @ weight + offset[:, None]
    for index in range(2):
        torch.testing.assert_close(x @ weights[index].mT + offsets[index][:, None], y[..., index::2])
    whole = torch.zeros(disk.shape)
    for part, number in zip(disk.split_portions(), range(4), strict=True):
        assert part.shape == (1, 16, 16)
        for slab, view in part.slice_views(whole[number : number + 1]):
            assert slab.offset == (number, 0, 0)
            view += 1
    assert (whole == 1).all()


def test_heads_that_follow_each_other() -> None:
    names = [f"model.layers.0.{name}" for name in "qk"]
    rule = TensorRule("{i}.fused", tuple(name.replace("0", "{i}") for name in names), per_head="kv")
    (disk,) = expand_tensor_rules([rule], dict.fromkeys(names, (6, 3)), 1, heads={"kv": 2}).values()
    assert (disk.name, disk.shape) == ("0.fused", (12, 3))
    assert [(slab.name, slab.offset) for slab in disk.slabs] == [(name, (at, 0)) for at in (0, 3) for name in names]
    assert {slab.shape for slab in disk.slabs} == {(3, 3)}


def test_rules_for_experts() -> None:
    tensors = {"model.layers.0.mlp.experts.up_proj.weight": (3, 5, 4), "model.norm.weight": (4,)}
    rule = TensorRule("layers.{i}.experts.{e}.w3", ("model.layers.{i}.mlp.experts.up_proj.weight",), UnstackedLayout())
    table = expand_tensor_rules([rule], tensors, 1)
    assert {disk.name: disk.shape for disk in table.values()} == {
        "layers.0.experts.0.w3": (5, 4), "layers.0.experts.1.w3": (5, 4), "layers.0.experts.2.w3": (5, 4),
        "model.norm.weight": (4,),
    }  # fmt: skip
    (slab,) = table["layers.0.experts.2.w3"].slabs
    assert (slab.offset, slab.shape) == ((2, 0, 0), (1, 5, 4))


def test_a_rule_does_not_apply_where_the_model_lacks_its_tensors() -> None:
    rules = [TensorRule("w.{i}", ("model.layers.{i}.a",), TRANSPOSED), TensorRule("b.{i}", ("model.layers.{i}.bias",))]
    assert list(expand_tensor_rules(rules, {"model.layers.0.a": (2, 3)}, 1)) == ["w.0"]


ODD_VALUES: list[Any] = [
    True, -1, 0, 2.5, 10**9, "abc", [], {}, [1, 2], {"a": 1}, ["a"], float("nan"), [None], {"rope_type": "yarn"}, [[1]],
]  # fmt: skip


def iterate_key_paths(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from iterate_key_paths(value, (*path, key))


@pytest.mark.parametrize("name", [family.name for family in (*FAMILIES, *VISION_FAMILIES)])
def test_a_config_with_an_odd_value_is_read_or_refused(name: str) -> None:
    """Every key has one of the odd values in turn: a configuration or a MegaError, never another exception."""
    text = json.dumps(tiny_config(name))
    refused = 0
    for number, (*outer, key) in enumerate(iterate_key_paths(json.loads(text)), start=len(name)):
        raw = json.loads(text)
        functools.reduce(dict.__getitem__, outer, raw)[key] = ODD_VALUES[number % len(ODD_VALUES)]
        try:
            family = detect_model_family(raw)
            assert isinstance(family.read_config_json(raw), ModelConfig)
            family.unread_keys(raw)
        except MegaError:
            refused += 1
    assert refused  # at least a size that is not a number


@pytest.mark.parametrize(("key", "value", "found"), [
    ("architectures", True, "architectures must be a list, found true or false"),
    ("id2label", ["a"], "id2label must be an object, found a list"),
    ("vision_config", 3, "vision_config must be an object, found a number"),
    ("hidden_size", "wide", "hidden_size"),
    ("rope_parameters", {"rope_type": []}, "rope"),
])  # fmt: skip
def test_an_odd_value_is_named(key: str, value: object, found: str) -> None:
    raw = {**LLAMA, key: value}
    with pytest.raises(CheckpointError, match=found):
        detect_model_family(raw).read_config_json(raw)

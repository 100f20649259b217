"""Folders of the hub, by what their config.json says: against the presets, and a list of models with known sizes.

`data/hub_configs.jsonl` has a line for each model: its name, its config.json, and either its parameters as transformers
5.23 counts them (tied tensors once, selection biases too, without layers that predict further tokens) or what it is refused for. `data/image_configs.jsonl` has names and
config.json of models with images, which are counted by transformers in the test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.canonical_tensors import count_model_parameters
from mega_ckpt.families import (
    FAMILIES,
    VISION_FAMILIES,
    detect_model_family,
    find_family_expressing_model,
    is_equivalent_config,
)
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig, RopeConfig
from mega_common.model_presets import load_model_preset

COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [1, 2], "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "rope_scaling": None,
}  # fmt: skip
GEMMA = {
    **COMMON, "attention_bias": False, "cache_implementation": "hybrid", "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 26,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN3_VL = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 262144,
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}  # fmt: skip
QWEN3_EYES = {
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02, "num_heads": 16,
    "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
# What config.json says on the hub, as the makers wrote it in the version of transformers of the day.
HUB: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        **COMMON, "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        **COMMON, "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "deepseek-v3": {
        **COMMON, "model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        **COMMON, "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "gemma2-2b": {
        **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8,
        "num_key_value_heads": 4, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    },
    "gemma3-1b": {
        **GEMMA, "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_key_value_heads": 1, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "llava-1.6-mistral-7b": {
        "model_type": "llava_next", "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32000, "projector_hidden_act": "gelu", "use_image_newline_parameter": True,
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "text_config": {
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32064,
        },
        "vision_config": {
            "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        },
    },
    "qwen2.5-vl-7b": {  # the text model's keys beside the tower's
        "model_type": "qwen2_5_vl", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "use_sliding_window": False, "video_token_id": 151656, "vision_end_token_id": 151653,
        "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064, "vision_config": {
            "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280, "in_chans": 3,
            "intermediate_size": 3420, "model_type": "qwen2_5_vl", "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14,
            "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2,
            "window_size": 112,
        },
    },
    "qwen3-vl-4b": {  # a kind of encoder that is the model's own
        "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": True, "text_config": {
            **QWEN3_VL, "hidden_size": 2560, "intermediate_size": 9728, "model_type": "qwen3_vl_text", "num_hidden_layers": 36,
            "num_key_value_heads": 8, "tie_word_embeddings": True,
        },
        "vision_config": {
            **QWEN3_EYES, "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
            "model_type": "qwen3_vl", "out_hidden_size": 2560,
        },
        "video_token_id": 151656, "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    },
    "qwen3-vl-30b-a3b": {
        "model_type": "qwen3_vl_moe", "image_token_id": 151655, "tie_word_embeddings": False, "text_config": {
            **QWEN3_VL, "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        },
        "vision_config": {
            **QWEN3_EYES, "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
            "model_type": "qwen3_vl_moe", "out_hidden_size": 2048,
        },
        "video_token_id": 151656, "vision_end_token_id": 151653, "vision_start_token_id": 151652,
    },
    "gemma3-4b": {  # with as few keys as published
        "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
        "mm_tokens_per_image": 256, "initializer_range": 0.02, "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_a_folder_of_the_hub_is_the_preset(name: str) -> None:
    model = ModelConfig.parse(load_model_preset(name))
    assert is_equivalent_config(detect_model_family(HUB[name]).read_config_json(HUB[name]), model)
    assert find_family_expressing_model(model).name == HUB[name]["model_type"]


def test_another_vision_language_model_is_refused() -> None:
    raw = {
        "model_type": "mllama",
        "hidden_size": 2048,
        "vision_config": {"depth": 32, "embed_dim": 1280},
    }
    with pytest.raises(CheckpointError, match="vision-language model type 'mllama' is not supported") as error:
        detect_model_family(raw)
    assert str(error.value.hint).startswith(
        "supported: llava, llava_next, gemma3, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, "
    )


def test_every_key_of_qwen3_with_its_eyes_is_read() -> None:
    for name in ("qwen3-vl-4b", "qwen3-vl-30b-a3b"):
        assert not detect_model_family(HUB[name]).unread_keys(HUB[name])
    experts = HUB["qwen3-vl-30b-a3b"]
    text = {**experts["text_config"], "norm_topk_prob": False}
    with pytest.raises(CheckpointError, match="norm_topk_prob = false is not supported"):
        detect_model_family(experts).read_config_json({**experts, "text_config": text})


def test_what_qwen_with_its_eyes_cannot_be() -> None:
    whole = HUB["qwen2.5-vl-7b"]
    tower = whole["vision_config"]
    assert not detect_model_family(whole).unread_keys(whole)
    assert detect_model_family(whole).unread_keys({**whole, "wings": 2}) == ["wings"]
    for change, said in (
        ({"vision_config": {**tower, "out_hidden_size": 2048}}, "out_hidden_size = 2048 must equal hidden_size = 3584"),
        ({"vision_config": {**tower, "in_chans": 1}}, "in_chans = 1"),
        ({"vision_config": {**tower, "rope_parameters": {"rope_type": "axial", "rope_theta": 5.0}}}, "must be axial"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn' is not supported"),
    ):
        with pytest.raises(CheckpointError, match=said):
            detect_model_family(whole | change).read_config_json(whole | change)


def test_what_gemma3_cannot_be_with_its_eyes() -> None:
    whole = HUB["gemma3-4b"]
    text = {**whole["text_config"], "final_logit_softcapping": 30.0}
    llama = {"model_type": "llama", "hidden_size": 64}
    for change, said in (
        ({"mm_tokens_per_image": 200}, "200 must be a square that divides 64 x 64 patches"),
        ({"text_config": text}, "final_logit_softcapping = 30.0 is not supported"),
        ({"text_config": llama}, "must be gemma3_text, not llama"),
    ):
        with pytest.raises(CheckpointError, match=said):
            detect_model_family(whole | change).read_config_json(whole | change)


HYBRIDS = {
    "nemotron-h-8b": "nvidia/Nemotron-H-8B-Base-8K", "nemotron-3-nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
    "granite-4-h-small": "ibm-granite/granite-4.0-h-small", "granite-4-h-tiny": "ibm-granite/granite-4.0-h-tiny",
    "qwen3-next-80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_of_the_hub_is_the_preset(name: str) -> None:
    model, raw = ModelConfig.parse(load_model_preset(name)), READ[HYBRIDS[name]]["config"]
    assert is_equivalent_config(detect_model_family(raw).read_config_json(raw), model)
    assert find_family_expressing_model(model).name == raw["model_type"]


def test_phi3_of_the_hub_stretches_by_lists() -> None:
    factors = [1.0 + index / 10 for index in range(48)]
    raw = {
        **COMMON, "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"long_factor": factors, "short_factor": factors, "type": "su"}, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
    }  # fmt: skip
    rope = RopeConfig(
        scaling="longrope", original_max_position=4096, short_factor=factors, long_factor=factors, factor=1.0
    )
    assert detect_model_family(raw).read_config_json(raw).rope == rope


LISTED: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "hub_configs.jsonl").read_text("utf-8").splitlines()
]
READ = {entry["name"]: entry for entry in LISTED if "parameters" in entry}
REFUSED = {entry["name"]: entry for entry in LISTED if "refused" in entry}
# Values that say the same in two ways: sizes of windows that are not there, a width that is the usual one, rope_type and
# type, GELU in early Gemmas; repeated kinds, a width before its adjustment, a section with defaults; Mistral's name where some layers have a window; how mixers are called, and no limit of steps.
SPELLED = {"attn_config", "ffn_config",
    "sliding_window", "max_window_layers", "n_inner", "rope_scaling", "hidden_act", "model_type", "architectures",
    "layer_types", "time_step_limit", "attention_types", "per_layer_config", "block_auto_adjust_ff_dim",
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_model_of_the_hub_is_read_and_counted(name: str) -> None:
    """And what is written of it says the same, in the keys that the hub's file has."""
    raw = READ[name]["config"]
    family = detect_model_family(raw, images=False)
    model = family.read_config_json(raw)
    assert count_model_parameters(family.restrict_to_stored(model, ())) == READ[name]["parameters"]
    written = json.loads(json.dumps(family.write_config_json(model)))
    assert is_equivalent_config(family.read_config_json(written), model)
    said = family.select_text_config(raw)
    same = written.keys() & said.keys() - SPELLED
    assert {key: written[key] for key in same if key != "rope_parameters"} == {
        key: said[key] for key in same if key != "rope_parameters"
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_expressed_is_refused_for_what_it_is(name: str) -> None:
    raw = REFUSED[name]["config"]
    with pytest.raises(CheckpointError) as caught:
        detect_model_family(raw).read_config_json(raw)
    assert REFUSED[name]["refused"] in str(caught.value)


def test_the_list_is_of_every_family_and_has_what_the_hub_has() -> None:
    configs = [entry["config"] for entry in READ.values()]
    assert {detect_model_family(raw, images=False).name for raw in configs} == {family.name for family in FAMILIES}
    assert len(READ) >= 100
    odd = {key for raw in configs for key in detect_model_family(raw).unread_keys(raw)}
    assert {"use_mrope", "is_llama_config", "rope_interleaved", "transformers.js_config", "unsloth_fixed"} <= odd
    assert {"unsloth_version", "_model_name_or_path", "_attn_implementation_autoset", "model_max_length"} <= odd


# Sizes of models with images, written down from memory or from transformers' defaults.
IMAGES: list[dict[str, Any]] = [
    *map(json.loads, (Path(__file__).parent / "data" / "image_configs.jsonl").read_text("utf-8").splitlines()),
    *({"name": name, "config": raw} for name, raw in HUB.items() if "vision_config" in raw),
]


@pytest.mark.parametrize("raw", [pytest.param(entry["config"], id=entry["name"]) for entry in IMAGES])
def test_a_model_with_images_has_the_tensors_of_transformers(raw: dict[str, Any]) -> None:
    """Text model, vision encoder and projector together, in number of elements; tied tensors count once."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    stored = {id(tensor): tensor.numel() for tensor in theirs.state_dict(keep_vars=True).values()}
    assert count_model_parameters(detect_model_family(raw).read_config_json(raw)) == sum(stored.values())


def test_every_family_with_images_is_counted() -> None:
    assert {entry["config"]["model_type"] for entry in IMAGES} == {family.name for family in VISION_FAMILIES}

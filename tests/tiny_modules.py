"""Tiny configurations of any causal model type of transformers, made from the defaults of its class by one rule."""

from __future__ import annotations

import re
from typing import Any

VOCAB, LENGTH = 64, 64
# Settings of types whose class refuses its own defaults.
GIVEN: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
# Sizes by the name of the setting, the first pattern that matches; longer names first.
SIZES = (
    (r"vocab_size.*|encoder_hash_byte_group_vocab", VOCAB),
    (r".*(max_position|n_positions|max_seq|max_source|max_target|n_ctx|seq_len).*", LENGTH),
    (r".*(num_hidden_layers|n_layers?|num_layers|num_decoder_layers|encoder_layers|decoder_layers|num_encoder_layers)", 2),
    (r".*(num_key_value_heads|n_kv_heads|multi_query_group_num|num_kv_heads|num_key_heads)", 2),
    (r".*(num_.*heads|n_heads?|n_head|.*attention_heads|.*_n_heads|num_value_heads)", 4),
    (r".*(top_k|topk_method|experts_per_tok|num_selected_experts|moe_top_k|experts_per_token|moe_topk|moe_k)", 2),
    (r".*(topk_group|n_group|num_expert_group|router_groups)", 1),
    (r".*(n_shared_experts|num_shared_expert.*|moe_num_shared.*)", 1),
    (r".*(num_.*experts|n_routed_experts|num_experts|moe_num_experts|num_local_experts)", 4),
    (r".*(first_k_dense_replace|num_dense_layers|first_dense.*)", 1),
    (r".*(qk_nope_head_dim|v_head_dim|qk_head_dim|index_head_dim)", 8),
    (r".*(qk_rope_head_dim|rotary_dim|rope_head_dim)", 4),
    (r".*(q_lora_rank|kv_lora_rank|o_lora_rank|lora_rank|.*low_rank.*|.*_rank)", 8),
    (r".*(head_dim|d_kv|head_size|kv_channels|.*key_head_dim|.*value_head_dim|d_head|attention_head_size)", 8),
    (r".*(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden.*|feed_forward.*|ff_dim|encoder_ffn.*|decoder_ffn.*)", 48),
    (r".*(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|hidden_dim|embedding_size|n_embed|dim|width)", 32),
    (r".*(sliding_window|attention_window|local_attention|chunk_size|block_size|.*chunk_length)", 16),
    (r".*(state_size|d_state|ssm_state.*|mamba_d_state|time_step_rank|dt_rank)", 8),
    (r".*(image_size)", 16),
)  # fmt: skip


def shrink_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a config.json with small sizes."""
    out: dict[str, Any] = {}
    layers = settings.get("num_hidden_layers") or settings.get("n_layer")
    for key, value in settings.items():
        if isinstance(value, dict) and not key.startswith(
            ("rope", "per_layer", "id2", "label2", "task_", "projector_")
        ):
            out[key] = shrink_settings(value)
        elif key.endswith(("_token_id", "_token_index")):
            out[key] = None if value is None or isinstance(value, list) else min(value, 1)
        elif isinstance(value, bool) or value is None:
            out[key] = value
        elif key == "per_layer_config":
            out[key] = {at: each for at, each in value.items() if int(at) < 2}
        elif (
            key in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_layers") and value
        ):
            kinds = list(dict.fromkeys(map(str, value)))
            out[key] = (kinds * 2)[:2] if isinstance(value[0], str) else value[:2]
        elif isinstance(value, list) and len(value) > 2 and len(value) == layers:
            out[key] = shrink_settings({key: value[0]})[key] if isinstance(value[0], int) else value[:2]
        elif isinstance(value, int) and value > 1:
            out[key] = next((min(size, value) for pattern, size in SIZES if re.fullmatch(pattern, key)), value)
        elif isinstance(value, float) and "drop" in key:
            out[key] = 0.0
        else:
            out[key] = value
    return out


def tiny_config(model_type: str) -> dict[str, Any]:
    """Return a tiny config.json of a model type of transformers."""
    from transformers import CONFIG_MAPPING

    settings = CONFIG_MAPPING[model_type](**GIVEN.get(model_type, {})).to_dict()
    found = shrink_settings(settings)
    found.pop("dtype", None)
    return {**found, "model_type": model_type, "is_decoder": True}

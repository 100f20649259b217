"""LitGPT's `model_config.yaml`: configuration of a model that LitGPT created without a config.json from a hub.

Its keys are the fields of `litgpt.Config` (LitGPT 0.5: config.py and model.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_common.bounded_parsing import BoundedYamlLoader, parse_yaml_text
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.strict_config import format_setting_value

FILE = "model_config.yaml"
_FEEDS = {
    "GptNeoxMLP": {"none": "gelu", "tanh": "gelu_tanh"}, "GemmaMLP": {"none": "geglu_erf", "tanh": "geglu"},
    "LLaMAMLP": {"none": "swiglu", "tanh": "swiglu"}, "LLaMAMoE": {"none": "swiglu", "tanh": "swiglu"},
}  # fmt: skip
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# norm_1, norm_2, post_attention_norm, post_mlp_norm
_POSITIONS = {(True, True, False, False): "pre", (False, False, True, True): "post", (True, True, True, True): "both"}
_READ = frozenset({
    "name", "n_layer", "n_embd", "n_head", "head_size", "n_query_groups", "padded_vocab_size", "intermediate_size", "block_size",
    "norm_class_name", "norm_eps", "norm_qk", "mlp_class_name", "gelu_approximate", "parallel_residual",
    "shared_attention_norm", "bias", "attn_bias", "rope_base", "rotary_percentage", "rope_interleave", "rope_adjustments",
    "rope_condense_ratio", "sliding_window_size", "sliding_window_indices", "scale_embeddings",
    "attention_logit_softcapping", "final_logit_softcapping", "attention_scores_scalar", "rope_local_base_freq", "rope_indices",
    "norm_1", "norm_2", "post_attention_norm", "post_mlp_norm", "norm_qk_type", "n_expert", "n_expert_per_token",
    "moe_intermediate_size", "first_k_dense_replace",
})  # fmt: skip
# Keys without effect on what a model computes, or implied by the weights; the last one affects only expert groups, which
# are not supported.
_IGNORED = frozenset({"hf_config", "vocab_size", "padding_multiple", "norm_topk_prob"})
_ABSENT: tuple[object, ...] = (None, False, 0, [], {})  # values of keys of features that the model does not use
_DEFAULTS = {"routed_scaling_factor": 1.0}


def read_litgpt_config(path: Location) -> ModelConfig:
    """Return the model configuration that LitGPT's `model_config.yaml` describes.

    Raises:
        CheckpointError: when it is damaged, or has settings that only the model's config.json describes fully.
    """
    hint = f"add the config.json of the model to the folder of {path.name}"
    try:
        raw = parse_yaml_text(path.read_bytes().decode(), str(path), BoundedYamlLoader)
        other = [key for key in raw if key not in _READ | _IGNORED and raw[key] not in (*_ABSENT, _DEFAULTS.get(key))]
        if _norm_flags(raw) not in _POSITIONS:
            other.append("norm_1")
        if raw.get("rope_adjustments") and "beta_fast" in raw["rope_adjustments"]:
            other.append("rope_adjustments")
        if raw.get("rope_indices") and raw["rope_indices"] != raw.get("sliding_window_indices"):
            other.append("rope_indices")
        if other:
            raise CheckpointError(
                f"{path}: {other[0]} = {format_setting_value(raw[other[0]])} is not supported", hint=hint
            )
        return ModelConfig.parse(_model_fields(raw), source=str(path))
    except (LookupError, TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"{path}: does not describe a model ({error})", hint=hint) from None


def _norm_flags(raw: Mapping[str, Any]) -> tuple[bool, bool, bool, bool]:
    before = (raw.get("norm_1", True), raw.get("norm_2", True))
    return *before, raw.get("post_attention_norm", False), raw.get("post_mlp_norm", False)


def _model_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads, bias, width = raw["n_head"], raw["bias"], raw.get("intermediate_size") or 4 * raw["n_embd"]
    window, limits = raw.get("sliding_window_size"), raw.get("sliding_window_indices") or ()
    whole, scalar = [layer for layer, limited in enumerate(limits) if not limited], raw.get("attention_scores_scalar")
    local = raw.get("rope_local_base_freq")
    experts = {
        "num_experts": raw.get("n_expert"), "top_k": raw.get("n_expert_per_token"),
        "ffn_hidden_size": raw.get("moe_intermediate_size") or width,
        "layers": list(range(raw["n_layer"]))[raw.get("first_k_dense_replace") or 0 :],
    }  # fmt: skip
    return {
        "num_layers": raw["n_layer"], "hidden_size": raw["n_embd"], "num_attention_heads": heads,
        "num_kv_heads": raw.get("n_query_groups") or heads, "head_dim": raw.get("head_size") or raw["n_embd"] // heads,
        "ffn_hidden_size": width, "vocab_size": raw["padded_vocab_size"], "max_position": raw["block_size"],
        "norm": _NORMS[raw["norm_class_name"]], "norm_eps": raw["norm_eps"], "norm_position": _POSITIONS[_norm_flags(raw)],
        "zero_centered_norm": "Gemma" in raw["name"],  # as in LitGPT
        "activation": _FEEDS[raw["mlp_class_name"]][raw.get("gelu_approximate", "none")],
        "parallel_residual": raw["parallel_residual"], "shared_norm": raw.get("shared_attention_norm", False),
        "qkv_bias": bias or raw.get("attn_bias", False), "attention_out_bias": bias, "mlp_bias": bias,
        "sliding_window": window, "full_attention_layers": whole if whole and window else None,
        "rope": _rope_fields(raw["rope_base"], raw.get("rope_adjustments"), raw),
        "local_rope": _rope_fields(local, None, raw) if local else None,
        "qk_norm": raw.get("norm_qk", False), "qk_norm_span": "all" if raw.get("norm_qk_type") == "olmo2" else "head",
        "attention_scale": scalar and scalar**-0.5, "attention_softcap": raw.get("attention_logit_softcapping"),
        "scale_embeddings": raw.get("scale_embeddings", False), "logit_softcap": raw.get("final_logit_softcapping"),
        "moe": experts if raw["mlp_class_name"] == "LLaMAMoE" else None,
    }  # fmt: skip


def _rope_fields(theta: float, adjusted: Mapping[str, Any] | None, raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"theta": theta, "fraction": raw["rotary_percentage"], "interleaved": raw.get("rope_interleave", False)}
    if adjusted and "original_max_seq_len" in adjusted:
        return rope | {
            "scaling": "llama3", "factor": adjusted["factor"], "low_freq_factor": adjusted["low_freq_factor"],
            "high_freq_factor": adjusted["high_freq_factor"], "original_max_position": adjusted["original_max_seq_len"],
        }  # fmt: skip
    factor = (adjusted or {}).get("factor", 1) * raw.get("rope_condense_ratio", 1)
    return rope if factor == 1 else rope | {"scaling": "linear", "factor": float(factor)}

"""LitGPT's `model_config.yaml`: the model of a folder whose weights LitGPT made from nothing, with no config.json from a hub.

Its keys are the fields of `litgpt.Config` (LitGPT 0.5: config.py says what each is, model.py what it does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.remote import Place

FILE = "model_config.yaml"
_FEEDS = {
    "GptNeoxMLP": {"none": "gelu", "tanh": "gelu_tanh"}, "GemmaMLP": {"none": "geglu_erf", "tanh": "geglu"},
    "LLaMAMLP": {"none": "swiglu", "tanh": "swiglu"},
}  # fmt: skip
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_READ = frozenset({
    "n_layer", "n_embd", "n_head", "head_size", "n_query_groups", "padded_vocab_size", "intermediate_size", "block_size",
    "norm_class_name", "norm_eps", "norm_qk", "mlp_class_name", "gelu_approximate", "parallel_residual",
    "shared_attention_norm", "bias", "attn_bias", "rope_base", "rotary_percentage", "rope_interleave", "rope_adjustments",
    "rope_condense_ratio", "sliding_window_size", "sliding_window_indices", "scale_embeddings",
    "attention_logit_softcapping", "final_logit_softcapping",
})  # fmt: skip
# Of no effect on what a model computes, or told by the weights.
_IDLE = frozenset({"name", "hf_config", "vocab_size", "padding_multiple"})
_ABSENT: tuple[object, ...] = (None, False, 0, [], {})  # what a key says of something that the model does not have
_USUAL = {"norm_1": True, "norm_2": True, "norm_qk_type": "default", "routed_scaling_factor": 1.0}


def model_of(path: Place) -> ModelConfig:
    """The model that a `model_config.yaml` describes.

    Raises:
        CheckpointError: when it is damaged, or has what can be told from the model's config.json alone.
    """
    hint = f"put the config.json of the model beside {path.name}"
    try:
        raw = yaml.safe_load(path.read_bytes())
        other = [key for key in raw if key not in _READ | _IDLE and raw[key] not in (*_ABSENT, _USUAL.get(key))]
        if "Gemma" in raw["name"]:  # by which LitGPT itself tells how its norms and embeddings differ
            other.append("name")
        if other:
            raise CheckpointError(f"{path}: {other[0]} = {raw[other[0]]!r} is not read from it", hint=hint)
        return ModelConfig.parse(_fields(raw), source=str(path))
    except (yaml.YAMLError, LookupError, TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"{path}: describes no model ({error})", hint=hint) from None


def _fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads, adjusted, bias = raw["n_head"], raw.get("rope_adjustments"), raw["bias"]
    window, limits = raw.get("sliding_window_size"), raw.get("sliding_window_indices") or ()
    whole = [layer for layer, limited in enumerate(limits) if not limited]
    rope = {
        "theta": raw["rope_base"],
        "fraction": raw["rotary_percentage"],
        "interleaved": raw.get("rope_interleave", False),
    }
    if adjusted:
        rope |= {
            "scaling": "llama3", "factor": adjusted["factor"], "low_freq_factor": adjusted["low_freq_factor"],
            "high_freq_factor": adjusted["high_freq_factor"], "original_max_position": adjusted["original_max_seq_len"],
        }  # fmt: skip
    elif raw.get("rope_condense_ratio", 1) != 1:
        rope |= {"scaling": "linear", "factor": float(raw["rope_condense_ratio"])}
    return {
        "num_layers": raw["n_layer"], "hidden_size": raw["n_embd"], "num_attention_heads": heads,
        "num_kv_heads": raw.get("n_query_groups") or heads, "head_dim": raw.get("head_size") or raw["n_embd"] // heads,
        "ffn_hidden_size": raw.get("intermediate_size") or 4 * raw["n_embd"], "vocab_size": raw["padded_vocab_size"],
        "max_position": raw["block_size"], "norm": _NORMS[raw["norm_class_name"]], "norm_eps": raw["norm_eps"],
        "activation": _FEEDS[raw["mlp_class_name"]][raw.get("gelu_approximate", "none")],
        "parallel_residual": raw["parallel_residual"], "shared_norm": raw.get("shared_attention_norm", False),
        "qkv_bias": bias or raw.get("attn_bias", False), "attention_out_bias": bias, "mlp_bias": bias,
        "sliding_window": window, "full_attention_layers": whole if whole and window else None, "rope": rope,
        "qk_norm": raw.get("norm_qk", False), "scale_embeddings": raw.get("scale_embeddings", False),
        "attention_softcap": raw.get("attention_logit_softcapping"), "logit_softcap": raw.get("final_logit_softcapping"),
    }  # fmt: skip

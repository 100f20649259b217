"""Gemma 1 to 3, text models: norms that multiply by 1 + weight, scaled embeddings, GeGLU. Gemma 2 (arXiv:2408.00118):
norms before and after, soft caps, a window in every second layer. Gemma 3 (arXiv:2503.19786): query-key norms instead
of soft caps, five windowed layers per full-attention layer. Gemma 1: arXiv:2403.08295. VaultGemma (arXiv:2510.15001):
Gemma 2 without the norms after attention and MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    SIZES,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import LayerTypesEntry, UniformWindowEntry
from mega_common.model_config import ModelConfig

GEMMA = ModelFamily(
    name="gemma",
    architecture="GemmaForCausalLM",
    entries=(
        *SIZES,
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        # "gelu" of early folders too means the tanh form, as transformers takes it
        KeyEntry("hidden_act", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyValueHeadsEntry(kv_default=16, dim_default=256, divisible=True),
        RopeEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"use_bidirectional_attention": (None, False), "hidden_activation": (None, "gelu_pytorch_tanh")}),
        FixedFieldsEntry(
            {"norm": "rmsnorm", "position": "rope", "zero_centered_norm": True, "scale_embeddings": True,
             "mlp_bias": False, "qk_norm": False}
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class QueryScaleEntry:
    """Translation to and from config.json of Gemma's `query_pre_attn_scalar`, an integer.
    Attention scores are divided by its square root.
    """

    default: int
    handled_config_keys: frozenset[str] = frozenset({"query_pre_attn_scalar"})
    handled_model_fields: frozenset[str] = frozenset({"attention_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `attention_scale`: None if `query_pre_attn_scalar` is the head dimension, else its inverse square root.
        Raises ConfigMismatchError if it is not positive.
        """
        scalar = raw.get("query_pre_attn_scalar", self.default)
        if not scalar > 0:
            raise ConfigMismatchError(f"query_pre_attn_scalar = {scalar} must be more than 0")
        usual = scalar == (raw.get("head_dim") or self.default)
        return {"attention_scale": None if usual else scalar**-0.5}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `query_pre_attn_scalar`; ConfigMismatchError if `attention_scale` is not 1 / sqrt(an integer)."""
        if model.attention_scale is None:
            return {"query_pre_attn_scalar": model.query_key_head_dim}
        scalar = round(model.attention_scale**-2)
        if scalar < 1 or not math.isclose(scalar**-0.5, model.attention_scale, rel_tol=1e-12):
            raise ConfigMismatchError(
                f"attention_scale must be 1 / sqrt(a whole number), not {model.attention_scale!r}"
            )
        return {"query_pre_attn_scalar": scalar}


def gemma_config_entries(norm_position: str = "both") -> tuple[ConfigEntry, ...]:
    """Return the config entries that Gemma 2, Gemma 3 and VaultGemma share; `norm_position` is as in `ModelConfig`."""
    return (
        *SIZES,
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyValueHeadsEntry(kv_default=4, dim_default=256, divisible=True),
        QueryScaleEntry(256),
        FixedFieldsEntry(
            {"norm": "rmsnorm", "position": "rope", "norm_position": norm_position, "zero_centered_norm": True,
             "scale_embeddings": True, "mlp_bias": False}
        ),
        AllowedValuesEntry({"use_bidirectional_attention": (None, False), "hidden_act": ("gelu_pytorch_tanh",)}),
    )  # fmt: skip


_CAPPED: tuple[ConfigEntry, ...] = (
    RopeEntry(),
    LayerTypesEntry(size=4096, every=2),
    KeyEntry("attn_logit_softcapping", "attention_softcap", 50.0),
    KeyEntry("final_logit_softcapping", "logit_softcap", 30.0),
    FixedFieldsEntry({"qk_norm": False}),
)

GEMMA2 = ModelFamily(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    entries=(*gemma_config_entries(), *_CAPPED),
    carried=frozenset({"cache_implementation", "sliding_window_size"}),
)


VAULT_GEMMA = ModelFamily(
    name="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    entries=(*gemma_config_entries("pre"), *_CAPPED),
    rules=(TensorRule(f"{LAYER}.pre_feedforward_layernorm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),),
    carried=GEMMA2.carried,
)


SCALINGS = frozenset({"none", "linear", "llama3", "yarn"})

GEMMA3 = ModelFamily(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    entries=(
        *gemma_config_entries(),
        GlobalLocalRopeEntry(RopeEntry(theta=1_000_000.0, scalings=SCALINGS), RopeEntry(scalings=SCALINGS)),
        LayerTypesEntry(size=4096, every=6, every_keys=("sliding_window_pattern", "_sliding_window_pattern")),
        AllowedValuesEntry({"attn_logit_softcapping": (None,)}),  # transformers has the key, and does nothing with it
        KeyEntry("final_logit_softcapping", "logit_softcap", None),
        FixedFieldsEntry({"qk_norm": True}),
    ),
    carried=frozenset({"cache_implementation"}),
)

"""Dense decoders of the Llama architecture (RMSNorm, rotary positions). Llama 1 to 3 (arXiv:2302.13971,
arXiv:2407.21783), and the many models that use its architecture. Mistral 7B and successors (arXiv:2310.06825): a
sliding window in every layer. Ministral: a window in some layers; transformers treats a Mistral folder with layer types
as one. Qwen 2 and 2.5 (arXiv:2407.10671): biases on queries, keys and values. Qwen 3 (arXiv:2505.09388): per-head norms
of queries and keys, an independent head dimension. Phi-3 and Phi-4 (arXiv:2404.14219): projections fused on disk,
partial rotation and long rope. OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all heads of queries
and keys together. OLMo 3 (arXiv:2512.13961): OLMo 2 with a window in three of four layers, whose rotary positions are
not scaled. AFM (Arcee): squared ReLU, no gate. ERNIE 4.5 without experts (Baidu): interleaved rotation. EXAONE 4
(arXiv:2507.11407): post-norms; if it has windows, only layers with one rotate. Helium (Kyutai, arXiv:2410.00037):
interleaved rotation, all heads together as wide as the model. Seed-OSS (ByteDance): independent head dimension,
optional biases. SmolLM 3: no rotary positions in every fourth layer (arXiv:2501.18795).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import EVERY_SCALING, GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import (
    LayerTypesEntry,
    QwenWindowEntry,
    RopeInWindowsEntry,
    UniformWindowEntry,
    build_sliding_window_fields,
    build_window_layer_types,
    get_transformers_layer_types,
)
from mega_common.model_config import ModelConfig

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"

LLAMA = ModelFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(divisible=True),
        RopeEntry(scalings=EVERY_SCALING),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"qk_norm": False}),
    ),
)


_INTERNLM3 = (
    *llama_config_entries(norm_eps=1e-5),
    KeyValueHeadsEntry(kv_default=2, dim_default=128),
    KeyEntry("attention_bias qkv_bias", "qkv_bias attention_out_bias mlp_bias", False),
    KeyEntry("mlp_bias bias", "mlp_bias", False),
)
_IQUEST = (
    *llama_config_entries(norm_eps=1e-5),
    KeyValueHeadsEntry(kv_default=8, dim_default=128),
    AllowedValuesEntry({"clip_qkv": (None,), "use_sliding_window": (False,)}),
)
INTERNLM3 = replace(LLAMA, name="internlm3", entries=(*LLAMA.entries, *_INTERNLM3))
IQUESTCODER = replace(LLAMA, name="iquestcoder", entries=(*LLAMA.entries, *_IQUEST))

_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

CWM = ModelFamily(
    name="cwm",
    architecture="CwmForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RopeEntry(theta=1_000_000.0, scalings=EVERY_SCALING, absent=_CWM_ROPE),
        LayerTypesEntry(size=8192, every=4, first=0),
        KeyEntry("mlp_bias", "mlp_bias", False),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)


MISTRAL = ModelFamily(
    name="mistral",
    architecture="MistralForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=8),
        RopeEntry(scalings=EVERY_SCALING),
        UniformWindowEntry(4096),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
)


MINISTRAL = ModelFamily(
    name="ministral",
    architecture="MinistralForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=8),
        RopeEntry(),
        LayerTypesEntry(size=4096, every=None),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
)


_MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

MINISTRAL3 = ModelFamily(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RopeEntry(scalings=frozenset({"yarn", "llama3"}), absent=_MINISTRAL3_ROPE, query_scaling=True),
        UniformWindowEntry(),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    carried=frozenset({"llama_4_scaling_beta"}),
    tokens=("pad_token_id",),
)


QWEN2 = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=32, explicit_dim=False),
        RopeEntry(scalings=EVERY_SCALING),
        QwenWindowEntry(),
        FixedFieldsEntry({"qkv_bias": True, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
)


QWEN3 = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=32, dim_default=128),
        RopeEntry(scalings=EVERY_SCALING),
        QwenWindowEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        FixedFieldsEntry({"mlp_bias": False, "qk_norm": True}),
    ),
)


PHI3 = ModelFamily(
    name="phi3",
    architecture="Phi3ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(partial=True, scalings=frozenset({"none", "longrope"}), aliases={"su": "longrope"}, original=4096),
        UniformWindowEntry(),
        KeyEntry("embd_pdrop", "embedding_dropout", 0.0),
        KeyEntry("resid_pdrop", "residual_dropout", 0.0),
        AllowedValuesEntry({"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)}),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        TensorRule(f"{_ATTENTION}.qkv_proj.weight", tuple(f"{_ATTENTION}.{name}_proj.weight" for name in "qkv")),
        TensorRule(f"{_MLP}.gate_up_proj.weight", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    ),
    tokens=("eos_token_id", "pad_token_id"),
)


OLMO2 = ModelFamily(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
)


_ROPE = RopeEntry(theta=500_000.0, scalings=frozenset({"none", "linear", "llama3", "yarn"}))

OLMO3 = ModelFamily(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(explicit_dim=False),
        GlobalLocalRopeEntry(_ROPE, _ROPE, local_key=None),
        LayerTypesEntry(size=4096, every=4),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        FixedFieldsEntry({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
)


ARCEE = ModelFamily(
    name="arcee",
    architecture="ArceeForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5, hidden_act={"relu2": "relu2"}),
        KeyValueHeadsEntry(divisible=True),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)


ERNIE4_5 = ModelFamily(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyValueHeadsEntry(kv_default=2, dim_default=128),
        RopeEntry(theta=500_000.0, interleaved=True),
        KeyEntry("use_bias", "qkv_bias attention_out_bias mlp_bias", False),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"qk_norm": False}),
    ),
)


EXAONE4 = ModelFamily(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=32),
        RopeEntry(),
        RopeInWindowsEntry(every_key="sliding_window_pattern", none_rotates_all=True),
        FixedFieldsEntry(
            {
                "norm_position": "post",
                "qk_norm": True,
                "qkv_bias": False,
                "attention_out_bias": False,
                "mlp_bias": False,
            }
        ),
    ),
)


HELIUM = ModelFamily(
    name="helium",
    architecture="HeliumForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-8),
        KeyValueHeadsEntry(kv_default=20, dim_default=128, derived=True),
        RopeEntry(theta=100_000.0, interleaved=True),
        KeyEntry("attention_bias", "qkv_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"attention_out_bias": False, "qk_norm": False}),
    ),
)


SEED_OSS = ModelFamily(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias", True),
        KeyEntry("attention_out_bias", "attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        KeyEntry("attention_dropout", "attention_dropout", 0.1),
        KeyEntry("residual_dropout", "residual_dropout", 0.1),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"qk_norm": False}),
    ),
)


@dataclass(frozen=True)
class NoRopeLayersEntry:
    """Translation to and from config.json of SmolLM 3's `no_rope_layers`, a flag per layer for rotary positions.
    The flag is 1 with and 0 without rotary positions. With sliding windows switched on, only layers without rotary
    positions have one.
    """

    every: int = 4
    handled_config_keys: frozenset[str] = frozenset(
        {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"}
    )
    handled_model_fields: frozenset[str] = frozenset({"no_rope_layers", "sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the fields of layers without rotary positions and of windows; ConfigMismatchError if the list is too short.
        They are `no_rope_layers`, `sliding_window` and `full_attention_layers`.
        """
        layers, every = layer_indices(raw), raw.get("no_rope_layer_interval", self.every)
        rotated = raw.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
        if not isinstance(rotated, list) or len(rotated) < len(layers):
            raise ConfigMismatchError(
                f"no_rope_layers = {rotated!r} must have a number for each of {len(layers)} layers"
            )
        unrotated = [layer for layer in layers if not rotated[layer]]
        size = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        kinds = raw.get("layer_types") or build_window_layer_types(
            [not size or layer not in unrotated for layer in layers]
        )
        return {"no_rope_layers": unrotated or None, **build_sliding_window_fields(kinds, size, layers)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of layers without RoPE (`no_rope_layers`: 1 for a layer with RoPE) and of windows."""
        return {
            "no_rope_layers": [int(model.has_rotary_positions(layer)) for layer in range(model.num_layers)],
            "no_rope_layer_interval": self.every,
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
            "layer_types": get_transformers_layer_types(model),
        }


SMOLLM3 = ModelFamily(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    entries=(
        *DECODER,
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyValueHeadsEntry(kv_default=4, explicit_dim=False),
        RopeEntry(theta=2_000_000.0),
        NoRopeLayersEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        FixedFieldsEntry({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id", "pad_token_id"),
)

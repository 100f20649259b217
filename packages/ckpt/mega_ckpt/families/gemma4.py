"""Gemma 4, text models: full-attention layers with larger heads whose keys are their values, norms of values, rotary
positions in a part of the larger heads, and a stored factor on each layer's output. Small models have inputs of each layer,
and last layers that share keys and values; a large one has experts beside its MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.config_entries import (
    SIZES,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    split_words,
)
from mega_ckpt.families.disk_layouts import LAYER, ConcatExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import MoeFieldEntry, MoeInAllLayersEntry, MoeLayersEntry, MoeSectionEntry
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import (
    build_sliding_window_fields,
    build_window_layer_types,
    get_transformers_layer_types,
)
from mega_common.model_config import ModelConfig

_FULL = "full_attention"
_ALL_LAYERS = MoeInAllLayersEntry()
_HEADS = KeyValueHeadsEntry(kv_default=4, dim_default=256)


@dataclass(frozen=True)
class Gemma4AttentionEntry:
    """Translation to and from config.json of Gemma 4's windows and heads; the last layer always has full attention.
    Newer folders have the heads of full-attention layers in `per_layer_config`, older ones in keys of their own.
    """

    size: int
    handled_config_keys: frozenset[str] = split_words(
        """sliding_window layer_types num_key_value_heads head_dim global_head_dim num_global_key_value_heads
        attention_k_eq_v per_layer_config"""
    )
    handled_model_fields: frozenset[str] = split_words(
        "sliding_window full_attention_layers num_kv_heads head_dim full_attention keys_are_values"
    )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of windows and heads; ConfigMismatchError for other settings that differ by layer."""
        layers = layer_indices(raw)
        kinds = list(raw.get("layer_types") or build_window_layer_types([(layer + 1) % 6 == 0 for layer in layers]))
        kinds[-1] = _FULL
        fields, usual = (
            build_sliding_window_fields(kinds, raw.get("sliding_window", self.size), layers),
            raw.get("attention_k_eq_v"),
        )
        heads = _HEADS.fields_from_config(raw)
        full = {**heads, "keys_are_values": bool(usual), **self._full_heads(raw, kinds, heads)}
        return {**fields, **heads, "full_attention": None if full == {**heads, "keys_are_values": False} else full}

    def _full_heads(self, raw: ConfigDict, kinds: list[str], heads: Mapping[str, Any]) -> dict[str, Any]:
        """Return the head size and the number of key/value heads of full-attention layers, where they are given."""
        by_layer = raw.get("per_layer_config")
        if by_layer is None:
            shared = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
            return {
                "head_dim": raw.get("global_head_dim", 512),
                "num_kv_heads": heads["num_kv_heads"] if shared is None else shared,
            }
        given = {int(layer): dict(values) for layer, values in by_layer.items() if values}
        full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
        first = given.get(full[0], {})
        if any(given.get(layer, {}) != (first if layer in full else {}) for layer in {*given, *full}) or not (
            first.keys() <= {"head_dim", "num_key_value_heads"}
        ):
            raise ConfigMismatchError(
                "per_layer_config is only supported with head_dim and num_key_value_heads, equal in all full-attention layers"
            )
        names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
        return {names[key]: value for key, value in first.items()}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of windows and heads, those of full-attention layers in the old form and the new one.
        Raises ConfigMismatchError if the last layer has a window, or keys are values in layers with one.
        """
        kinds, full = get_transformers_layer_types(model), model.full_attention_layer_config
        if kinds[-1] != _FULL or (model.keys_are_values and not all(kind == _FULL for kind in kinds)):
            raise ConfigMismatchError("the last layer must have full attention, and keys_are_values be false")
        size, shared = full.query_key_head_dim, full.key_value_heads
        heads = {"head_dim": size, "num_key_value_heads": shared}
        return {
            **_HEADS.config_from_fields(model),
            "sliding_window": model.sliding_window or self.size,
            "layer_types": kinds,
            "attention_k_eq_v": full.keys_are_values,
            "global_head_dim": size,
            "num_global_key_value_heads": shared,
            "per_layer_config": {str(layer): heads for layer, kind in enumerate(kinds) if kind == _FULL},
        }


@dataclass(frozen=True)
class ProportionalRopeEntry(RopeEntry):
    """Translation to and from config.json of Gemma 4's rotary parameters of full-attention layers.
    They rotate a part of a head only if their kind is "proportional".
    """

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `rope`; raises ConfigMismatchError for a part of a head in another kind."""
        fields = super().fields_from_config(raw)
        if fields["rope"]["scaling"] == "none" and fields["rope"]["fraction"] != 1:
            raise ConfigMismatchError("partial_rotary_factor requires rope_type 'proportional'")
        return fields


@dataclass(frozen=True)
class SharedKeysEntry:
    """Translation to and from config.json of Gemma 4's last layers, which attend to keys and values of earlier ones.
    Their MLP is as wide as the others', or twice as wide.
    """

    handled_config_keys: frozenset[str] = frozenset({"num_kv_shared_layers", "use_double_wide_mlp"})
    handled_model_fields: frozenset[str] = frozenset({"shared_kv_layers", "shared_kv_ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `shared_kv_layers`, the number of last layers that share keys and values, and `shared_kv_ffn_hidden_size`."""
        count = raw.get("num_kv_shared_layers") or 0
        width = 2 * raw["intermediate_size"] if count and raw.get("use_double_wide_mlp") else None
        return {"shared_kv_layers": count, "shared_kv_ffn_hidden_size": width}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of layers that share keys and values; ConfigMismatchError for MLPs not 1 or 2 times as wide."""
        usual, width = model.ffn_hidden_size, model.shared_kv_ffn_hidden_size or model.ffn_hidden_size
        if width not in (usual, 2 * usual):
            raise ConfigMismatchError(f"shared_kv_ffn_hidden_size must be {usual} or {2 * usual}, not {width}")
        return {"num_kv_shared_layers": model.shared_kv_layers, "use_double_wide_mlp": width > usual}


@dataclass(frozen=True)
class LayerInputEntry:
    """Translation to and from config.json of Gemma 4's per-layer inputs, whose table must have as many rows as the embedding."""

    handled_config_keys: frozenset[str] = frozenset({"hidden_size_per_layer_input", "vocab_size_per_layer_input"})
    handled_model_fields: frozenset[str] = frozenset({"per_layer_input_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `per_layer_input_size`; ConfigMismatchError if its table has other rows than the token embedding."""
        size, rows = raw.get("hidden_size_per_layer_input", 256), raw.get("vocab_size_per_layer_input", 262_144)
        if size and rows != raw.get("vocab_size"):
            raise ConfigMismatchError(
                f"vocab_size_per_layer_input = {rows} must be vocab_size = {raw.get('vocab_size')}"
            )
        return {"per_layer_input_size": size or None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of per-layer inputs: their size (0: none) and the rows of their table."""
        size = model.per_layer_input_size
        rows = {"vocab_size_per_layer_input": model.vocab_size} if size else {}
        return {"hidden_size_per_layer_input": size or 0, **rows}


@dataclass(frozen=True)
class Gemma4ExpertsEntry(MoeSectionEntry):
    """Translation to and from config.json of experts beside the MLP of every layer, where `enable_moe_block` is true."""

    entries: tuple[MoeFieldEntry, ...] = (
        KeyEntry("num_experts", "num_experts"),
        KeyEntry("top_k_experts", "top_k"),
        KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
        KeyEntry("intermediate_size", "shared_ffn_hidden_size"),
        FixedFieldsEntry({"normalize": True, "separate_norms": True}),
    )
    layers: MoeLayersEntry = _ALL_LAYERS

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return super().handled_config_keys | {"enable_moe_block"}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `moe` from config.json, None if the model has no experts.

        Raises:
            ConfigMismatchError: if the MLPs beside the experts have two widths.
        """
        if not raw.get("enable_moe_block"):
            return {"moe": None}
        if raw.get("use_double_wide_mlp") and raw.get("num_kv_shared_layers"):
            raise ConfigMismatchError("use_double_wide_mlp = True is not supported with enable_moe_block")
        return super().fields_from_config(raw)

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's keys of experts; raises ConfigMismatchError for another width of the MLP beside them."""
        if model.moe is None:
            return {"enable_moe_block": False}
        if model.moe.shared_ffn_hidden_size != model.ffn_hidden_size or model.shared_kv_ffn_hidden_size:
            raise ConfigMismatchError("moe.shared_ffn_hidden_size must be ffn_hidden_size in all layers")
        return {"enable_moe_block": True, **super().config_from_fields(model)}


_NORMS = {  # on disk, and in mega
    "pre_feedforward_layernorm": "shared_expert_norm", "post_feedforward_layernorm_1": "shared_expert_output_norm",
    "pre_feedforward_layernorm_2": "experts_norm", "post_feedforward_layernorm_2": "experts_output_norm",
}  # fmt: skip
_ROUTER = {"proj.weight": "weight", "scale": "scale", "per_expert_scale": "per_expert_scale"}
_EXPERTS = f"{LAYER}.mlp.experts"
_EXPERT_RULES = (
    *(TensorRule(f"{LAYER}.{name}.weight", (f"{LAYER}.mlp.{norm}.weight",)) for name, norm in _NORMS.items()),
    *(TensorRule(f"{LAYER}.router.{name}", (f"{LAYER}.mlp.gate.{part}",)) for name, part in _ROUTER.items()),
    *(TensorRule(f"{LAYER}.mlp.{part}_proj.weight", (f"{LAYER}.mlp.shared_expert.{part}_proj.weight",))
      for part in ("gate", "up", "down")),
    TensorRule(
        f"{LAYER}.experts.gate_up_proj", (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
        ConcatExpertsLayout(),
    ),
    TensorRule(f"{LAYER}.experts.down_proj", (f"{_EXPERTS}.down_proj.weight",), ConcatExpertsLayout()),
)  # fmt: skip

GEMMA4_UNIFIED = ModelFamily(
    name="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    entries=(
        *exclude_entries_of_fields(SIZES, "max_position"),
        KeyEntry("max_position_embeddings", "max_position", 262_144),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("final_logit_softcapping", "logit_softcap", None),
        Gemma4AttentionEntry(1024),
        GlobalLocalRopeEntry(
            ProportionalRopeEntry(
                theta=1_000_000.0, partial=True, scalings=frozenset({"none", "proportional"}),
                absent={"rope_type": "proportional", "partial_rotary_factor": 0.25},
            ),
            RopeEntry(scalings=frozenset({"none"})), local_key=None, old_form=False,
        ),
        FixedFieldsEntry(
            {"norm": "rmsnorm", "position": "rope", "norm_position": "both", "scale_embeddings": True, "mlp_bias": False,
             "qk_norm": True, "value_norm": True, "attention_scale": 1.0, "layer_scale": True}
        ),
        SharedKeysEntry(),
        AllowedValuesEntry({"use_bidirectional_attention": (None, "vision")}),  # "vision" is for the tokens of images
    ),
    # folders may have keys and values of layers that share those of others
    buffers=r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\..*|(.*\.)?rotary_emb\.inv_freq"
    r"|.*layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)",
    outer_model_type="gemma4_unified",
)  # fmt: skip

GEMMA4 = replace(
    GEMMA4_UNIFIED,
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    entries=(
        *(Gemma4AttentionEntry(512) if isinstance(entry, Gemma4AttentionEntry) else entry
          for entry in exclude_entries_of_fields(GEMMA4_UNIFIED.entries, "max_position")),
        KeyEntry("max_position_embeddings", "max_position", 131_072),
        LayerInputEntry(),
        Gemma4ExpertsEntry(),
    ),
    rules=_EXPERT_RULES,
    outer_model_type="gemma4",
)  # fmt: skip

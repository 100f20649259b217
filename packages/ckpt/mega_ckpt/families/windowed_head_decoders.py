"""Mixture-of-experts decoders whose heads differ between layers with a sliding window and layers without.

MiMo-V2-Flash (Xiaomi, `mimo_v2_flash`): twice as many key/value heads, and attention sinks, in windows; values narrower than
keys and multiplied by a constant. Laguna (Poolside): another number of query heads in windows, and a softplus gate on
attention's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import (
    MlpLayerTypesEntry,
    MoeSectionEntry,
    build_per_expert_tensor_rules,
    build_router_config_entries,
)
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.sigmoid_moe_decoders import build_sigmoid_router_config_entries
from mega_ckpt.families.window_entries import LayerTypesEntry
from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig

_EXPERTS = build_per_expert_tensor_rules(f"{LAYER}.mlp.experts")


def _windowed_layers(model: ModelConfig) -> list[bool]:
    return [model.get_attention_window(layer) is not None for layer in range(model.num_layers)]


@dataclass(frozen=True)
class MimoHeadsEntry:
    """Translation to and from config.json of MiMo-V2-Flash's windows and heads.
    Layers with a window have twice as many key/value heads as `num_key_value_heads`, and attention sinks.
    """

    heads = KeyValueHeadsEntry(kv_default=4, dim_default=192)
    windows = LayerTypesEntry(size=129, every=6)
    handled_config_keys: frozenset[str] = frozenset(
        {*heads.handled_config_keys, *windows.handled_config_keys, "sliding_window_size"}
    )
    handled_model_fields: frozenset[str] = frozenset(
        {*heads.handled_model_fields, *windows.handled_model_fields, "full_attention", "attention_sinks"}
    )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of windows, heads and sinks from config.json.
        `sliding_window_size` does not count the query's own key.
        """
        if raw.get("sliding_window_size") is not None:
            raw = {**raw, "sliding_window": raw["sliding_window_size"] + 1}
        kinds = raw.get("layer_types")
        if not kinds:
            full = [layer == 0 or (layer + 1) % 6 == 0 for layer in layer_indices(raw)]
            kinds = ["full_attention" if each else "sliding_attention" for each in full]
        windows = self.windows.fields_from_config({**raw, "layer_types": kinds})
        heads = self.heads.fields_from_config(raw)
        if windows["sliding_window"] is None:
            return {**windows, **heads}
        full_layers = {**heads, "attention_sinks": False} if windows["full_attention_layers"] else None
        heads["num_kv_heads"] = 2 * heads["num_kv_heads"]
        return {**windows, **heads, "attention_sinks": True, "full_attention": full_layers}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of windows and heads; ConfigMismatchError unless layers with a window alone have sinks.
        Raises ConfigMismatchError also unless those layers have twice as many key/value heads.
        """
        windowed, size = _windowed_layers(model), model.query_key_head_dim
        layers = [model.get_layer_config(layer) for layer in range(model.num_layers)]
        counts = {layer.key_value_heads / (1 + near) for near, layer in zip(windowed, layers, strict=True)}
        sinks = [layer.attention_sinks for layer in layers]
        if len(counts) > 1 or counts.pop() % 1 or {layer.query_key_head_dim for layer in layers} != {size}:
            raise ConfigMismatchError("layers with a window must have twice as many key/value heads, of equal size")
        if sinks != windowed or any(layer.num_attention_heads != model.num_attention_heads for layer in layers):
            raise ConfigMismatchError("attention_sinks must be in layers with a window alone, with as many query heads")
        shared = layers[0].key_value_heads // (1 + windowed[0])
        return {**self.windows.config_from_fields(model), "num_key_value_heads": shared, "head_dim": size}


@dataclass(frozen=True)
class RoutedScalingFactorEntry:
    """Translation to and from config.json of `routed_scaling_factor`, a factor on experts' routing weights; null means 1."""

    handled_config_keys: frozenset[str] = frozenset({"routed_scaling_factor"})
    handled_model_fields: frozenset[str] = frozenset({"scaling"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` field `scaling` from `routed_scaling_factor` of config.json; 1 if it is null or absent."""
        scaling = raw.get("routed_scaling_factor")
        return {"scaling": 1.0 if scaling is None else scaling}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return the config.json key `routed_scaling_factor`, the factor on the experts' routing weights."""
        return {"routed_scaling_factor": model.scaling}


@dataclass(frozen=True)
class ValueScaleEntry:
    """Translation to and from config.json of the factor on values, which is 1 if the key is null."""

    handled_config_keys: frozenset[str] = frozenset({"attention_value_scale"})
    handled_model_fields: frozenset[str] = frozenset({"value_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `value_scale` from config.json: 0.707 if the key is absent, 1 if it is null."""
        scale = raw.get("attention_value_scale", 0.707)
        return {"value_scale": 1.0 if scale is None else scale}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return the config.json key of the factor on values, null for a factor of 1."""
        assert isinstance(model, ModelConfig)
        return {"attention_value_scale": None if model.value_scale == 1 else model.value_scale}


def _two_ropes(theta: float, fraction: float, usual: float, scalings: frozenset[str]) -> GlobalLocalRopeEntry:
    """Return the entry of rotary parameters of layers without and with a window.
    `theta` and `fraction` are those of full layers in a folder without parameters; `usual`: the fraction of other layers,
    and of sets without one.
    """
    absent = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}
    full = RopeEntry(theta=theta, fraction=usual, partial=True, scalings=scalings, absent=absent)
    return GlobalLocalRopeEntry(full, RopeEntry(fraction=usual, partial=True, scalings=scalings), None, old_form=False)


MIMO_V2_FLASH = ModelFamily(
    name="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        MimoHeadsEntry(),
        KeyEntry("v_head_dim", "value_head_dim", 128),
        ValueScaleEntry(),
        # other kinds of scaling have another default of the rotated part in transformers
        _two_ropes(5_000_000.0, 0.334, 0.334, frozenset({"none"})),
        KeyEntry("attention_bias", "qkv_bias", False),
        MoeSectionEntry(
            (
                *exclude_entries_of_fields(build_sigmoid_router_config_entries(256, 8, 1.0, True), "scaling"),
                RoutedScalingFactorEntry(),
            ),
            MlpLayerTypesEntry(1),
        ),
        FixedFieldsEntry({"attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(*_EXPERTS, TensorRule(f"{LAYER}.self_attn.attention_sink_bias", (f"{LAYER}.self_attn.sinks",))),
    buffers=r"model\.mtp\..*|(.*\.)?rotary_emb\.inv_freq",
)


@dataclass(frozen=True)
class LagunaHeadsEntry:
    """Translation to and from config.json of Laguna's windows and heads; query heads are listed layer by layer.
    They may differ between layers with a window and layers without.
    """

    heads = KeyValueHeadsEntry(kv_default=8, dim_default=128)
    windows = LayerTypesEntry(size=512, every=1)
    handled_config_keys: frozenset[str] = frozenset(
        {
            *heads.handled_config_keys,
            *windows.handled_config_keys,
            "num_attention_heads",
            "num_attention_heads_per_layer",
        }
    )
    handled_model_fields: frozenset[str] = frozenset(
        {*heads.handled_model_fields, *windows.handled_model_fields, "full_attention", "num_attention_heads"}
    )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `ModelConfig` fields of windows and heads; ConfigMismatchError if query heads differ in layers of one kind."""
        windows, heads, layers = (
            self.windows.fields_from_config(raw),
            self.heads.fields_from_config(raw),
            layer_indices(raw),
        )
        listed = raw.get("num_attention_heads_per_layer") or [raw.get("num_attention_heads", 48)] * len(layers)
        if len(listed) != len(layers):
            raise ConfigMismatchError(f"num_attention_heads_per_layer has {len(listed)} layers, not {len(layers)}")
        without = set(windows.get("full_attention_layers") or () if windows["sliding_window"] else layers)
        far, near = ({listed[i] for i in layers if (i in without) == full} for full in (True, False))
        if max(len(far), len(near)) > 1:
            rule = "must be equal in all layers with a window, and in all layers without"
            raise ConfigMismatchError(f"num_attention_heads_per_layer = {listed!r:.80} {rule}")
        (query,) = near or far
        full = {**heads, "num_attention_heads": next(iter(far))} if near and far and near != far else None
        return {**windows, **heads, "num_attention_heads": query, "full_attention": full}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of windows and heads; ConfigMismatchError if key/value heads differ by layer."""
        layers = [model.get_layer_config(layer) for layer in range(model.num_layers)]
        if len({(layer.key_value_heads, layer.query_key_head_dim, layer.attention_sinks) for layer in layers}) > 1:
            raise ConfigMismatchError("full_attention must have the key/value heads and sinks of the other layers")
        return {
            **self.windows.config_from_fields(model), **self.heads.config_from_fields(model),
            "num_attention_heads": model.full_attention_layer_config.num_attention_heads,
            "num_attention_heads_per_layer": [layer.num_attention_heads for layer in layers],
        }  # fmt: skip


@dataclass(frozen=True)
class SoftplusGateEntry:
    """Translation to and from config.json of Laguna's gate on the output of attention: true means one per head."""

    handled_config_keys: frozenset[str] = frozenset({"gating"})
    handled_model_fields: frozenset[str] = frozenset({"softplus_gate"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `softplus_gate`; any value but true and "per-head" is a gate per channel."""
        gating = raw.get("gating", True)
        return {"softplus_gate": "head" if gating is True or gating == "per-head" else "channel"}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `gating` of config.json; ConfigMismatchError for a model without a gate on the output of attention."""
        if model.softplus_gate is None:
            raise ConfigMismatchError("softplus_gate is missing (all models of this family have one)")
        return {"gating": True if model.softplus_gate == "head" else "per-element"}


@dataclass(frozen=True)
class RouterSoftcapEntry:
    """Translation to and from config.json of the soft cap of router logits, which is absent if the key is 0."""

    handled_config_keys: frozenset[str] = frozenset({"moe_router_logit_softcapping"})
    handled_model_fields: frozenset[str] = frozenset({"logit_softcap"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` field `logit_softcap` from config.json; None if the key is 0 or absent."""
        cap = raw.get("moe_router_logit_softcapping", 0.0)
        return {"logit_softcap": cap if cap > 0 else None}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return the config.json key of the soft cap of router logits, 0 for a model without one."""
        return {"moe_router_logit_softcapping": model.logit_softcap or 0.0}


LAGUNA = ModelFamily(
    name="laguna",
    architecture="LagunaForCausalLM",
    entries=(
        *exclude_entries_of_fields(llama_config_entries(norm_eps=1e-6), "num_attention_heads"),
        LagunaHeadsEntry(),
        SoftplusGateEntry(),
        _two_ropes(500_000.0, 0.5, 1.0, frozenset({"none", "linear", "llama3", "yarn"})),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_experts", top_k=8, normalize=True, experts=256),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size", 512),
                KeyEntry("shared_expert_intermediate_size", "shared_ffn_hidden_size", 512),
                KeyEntry("moe_routed_scaling_factor", "scaling", 1.0),
                RouterSoftcapEntry(),
                FixedFieldsEntry({"score": "sigmoid", "selection_bias": True}),
            ),
            MlpLayerTypesEntry(1),
        ),
        AllowedValuesEntry({"attention_bias": (False,), "moe_apply_router_weight_on_input": (False,)}),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": True}),
    ),
    rules=(
        *_EXPERTS,
        TensorRule(f"{LAYER}.mlp.experts.e_score_correction_bias", (f"{LAYER}.mlp.gate.e_score_correction_bias",)),
    ),
)

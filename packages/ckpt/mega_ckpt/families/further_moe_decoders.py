"""Mixture-of-experts decoders one setting away from other families. Phi-3.5-MoE (`phimoe`): SparseMixer routing
(arXiv:2409.12136). Command A+ (`cohere2_moe`): Command R7B with experts whose outputs are averaged with those of shared ones.
Flint: Qwen 3's attention with sinks, sigmoid scores. Kolibri (Aleph Alpha): experts chosen by logits, norms before and after.
A.X K1 (SKT): DeepSeek-V3 with a norm of the experts' output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    DECODER,
    SILU,
    SIZES,
    TIED,
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
from mega_ckpt.families.deepseek_glm import SHARED_EXPERT_RULES, LatentAttentionEntry
from mega_ckpt.families.disk_layouts import LAYER, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import UnusedFieldsEntry
from mega_ckpt.families.moe_entries import (
    MlpLayerTypesEntry,
    MoeInAllLayersEntry,
    MoeSectionEntry,
    QwenSparseStepConfigEntry,
    SharedExpertsEntry,
    build_per_expert_tensor_rules,
    build_router_config_entries,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.sigmoid_moe_decoders import build_sigmoid_router_config_entries
from mega_ckpt.families.window_entries import (
    RopeInWindowsEntry,
    UniformWindowEntry,
    build_sliding_window_fields,
    build_window_layer_types,
    get_transformers_layer_types,
)
from mega_common.model_config import ModelConfig, MoeConfig
from mega_common.strict_config import StrictConfig

_MLP = f"{LAYER}.mlp"
_EXPERTS = build_per_expert_tensor_rules(f"{_MLP}.experts")
_BOTH_BIASES = KeyEntry("attention_bias", "qkv_bias attention_out_bias", False)
_NO_WINDOW = UniformWindowEntry(supports_windows=False)


@dataclass(frozen=True)
class PhimoeRopeEntry(RopeEntry):
    """Translation to and from config.json of Phi-3.5-MoE's rotary positions.
    Two keys are the factors on scores within and past the original length.
    """

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `rope` from config.json; ConfigMismatchError if the two factors differ."""
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        fields = super().fields_from_config(raw)
        if fields["rope"]["scaling"] != "longrope":
            return fields
        short, long = given.get("short_mscale"), given.get("long_mscale")
        if short is None or short != long:
            raise ConfigMismatchError(f"short_mscale = {short!r} and long_mscale = {long!r} must be equal numbers")
        return {"rope": {**fields["rope"], "attention_factor": short}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of rotary positions, with both factors; ConfigMismatchError if `rope.attention_factor` is missing.
        Only for scaling longrope; else the factors are neither written nor required.
        """
        out, factor = super().config_from_fields(model), model.rope.attention_factor
        if model.rope.scaling != "longrope":
            return out
        if factor is None:
            raise ConfigMismatchError("rope.attention_factor is missing")
        factors = {"short_mscale": factor, "long_mscale": factor}
        return out | {key: out[key] | factors for key in ("rope_parameters", "rope_scaling")}


_MIXTRAL = f"{LAYER}.block_sparse_moe"
PHIMOE = ModelFamily(
    name="phimoe",
    architecture="PhimoeForCausalLM",
    entries=(
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", "silu", SILU),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-5),
        KeyEntry("lm_head_bias", "head_bias", False),
        KeyValueHeadsEntry(kv_default=8, explicit_dim=False),
        PhimoeRopeEntry(theta=1_000_000.0, scalings=frozenset({"none", "longrope"})),
        UniformWindowEntry(),
        _BOTH_BIASES,
        MoeSectionEntry(
            (
                *exclude_entries_of_fields(
                    build_router_config_entries("num_local_experts", top_k=2, normalize=False, experts=16), "normalize"
                ),
                KeyEntry("intermediate_size", "ffn_hidden_size", 6400),
                KeyEntry("router_jitter_noise", "jitter", 0.01),
                FixedFieldsEntry({"score": "sparsemixer", "normalize": False}),
            ),
            MoeInAllLayersEntry(),
        ),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        TensorRule(f"{_MIXTRAL}.gate.weight", (f"{_MLP}.gate.weight",)),
        *build_per_expert_tensor_rules(f"{_MIXTRAL}.experts", ("w1", "w3", "w2")),
    ),
    carried=frozenset({"input_jitter_noise"}),
)


@dataclass(frozen=True)
class FlintWindowEntry(RopeInWindowsEntry):
    """Translation to and from config.json of Flint's sliding windows, which some layers lack.
    By default all but the first two layers, every fourth and the last have one.
    """

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of sliding-window layers with rotary positions from config.json."""
        layers = layer_indices(raw)
        kinds = build_window_layer_types([layer < 2 or layer % 4 == 1 or layer == len(layers) - 1 for layer in layers])
        return super().fields_from_config({**raw, "layer_types": raw.get("layer_types") or kinds})


FLINT = ModelFamily(
    name="flint",
    architecture="FlintForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=4, dim_default=128),
        RopeEntry(),
        FlintWindowEntry(size=513),
        _BOTH_BIASES,
        MoeSectionEntry(
            (
                *exclude_entries_of_fields(
                    build_router_config_entries("num_experts", top_k=6, normalize=False, experts=256, aux_loss=0.0005),
                    "normalize",
                ),
                KeyEntry("norm_topk_prob", "normalize", True),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size", 512),
                KeyEntry("shared_expert_intermediate_size", "shared_ffn_hidden_size", 1024),
                FixedFieldsEntry({"score": "sigmoid"}),
            ),
            QwenSparseStepConfigEntry(dense=(0, 1)),
        ),
        FixedFieldsEntry({"qk_norm": True, "mlp_bias": False, "attention_sinks": True}),
    ),
    rules=(*_EXPERTS, TensorRule(f"{LAYER}.self_attn.softmax_offset", (f"{LAYER}.self_attn.sinks",))),
)

KOLIBRI1 = ModelFamily(
    name="kolibri1",
    architecture="Kolibri1ForCausalLM",
    entries=(
        *exclude_entries_of_fields(DECODER, "ffn_hidden_size"),
        KeyValueHeadsEntry(kv_default=4, dim_default=128),
        RopeEntry(),
        RopeInWindowsEntry(size=513, every=5, none_rotates_all=True),
        MoeSectionEntry(
            (
                *exclude_entries_of_fields(build_router_config_entries("num_local_experts num_experts", top_k=6, normalize=False, experts=384), "aux_loss"),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size", 512),
                KeyEntry("shared_expert_intermediate_size", "shared_ffn_hidden_size", 512),
                FixedFieldsEntry({"score": "sigmoid", "selection_bias": True, "choice": "logits"}),
            ),
            MoeInAllLayersEntry(),
        ),
        UnusedFieldsEntry({"ffn_hidden_size": "moe_intermediate_size"}),
        FixedFieldsEntry({
            "norm_position": "both", "qk_norm": True, "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False,
        }),
    ),
    rules=(
        *_EXPERTS,
        *SHARED_EXPERT_RULES,
        TensorRule(f"{LAYER}.moe.router.expert_bias", (f"{_MLP}.gate.e_score_correction_bias",)),
        TensorRule(f"{LAYER}.post_attn_norm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
        TensorRule(f"{LAYER}.post_attention_layernorm.weight", (f"{LAYER}.pre_feedforward_layernorm.weight",)),
        TensorRule(f"{LAYER}.post_ffn_norm.weight", (f"{LAYER}.post_feedforward_layernorm.weight",)),
    ),
    carried=frozenset({"intermediate_size"}),
)  # fmt: skip


@dataclass(frozen=True)
class AxK1Family(ModelFamily):
    """The family of A.X K1, whose published folders lack the selection bias that transformers' class has."""

    def restrict_to_stored(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """Return `model` without the selection bias if a folder stores none."""
        names = set(names)
        if model.moe is None or not names or any(name.endswith("e_score_correction_bias") for name in names):
            return model
        return model.model_copy(update={"moe": model.moe.model_copy(update={"selection_bias": False})})


@dataclass(frozen=True)
class OptionalSelectionBiasEntry:
    """Translation to and from config.json of a router's selection bias, which folders may lack."""

    handled_config_keys: frozenset[str] = frozenset()
    handled_model_fields: frozenset[str] = frozenset({"selection_bias"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` field `selection_bias`, which is true unless the folder lacks it."""
        return {"selection_bias": True}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return no config.json keys."""
        return {}


AXK1 = AxK1Family(
    name="axk1",
    architecture="AXK1ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-6),
        RopeEntry(interleaved=True),
        LatentAttentionEntry(),
        _BOTH_BIASES,
        MoeSectionEntry(
            (
                *exclude_entries_of_fields(
                    build_sigmoid_router_config_entries(192, 8, 2.5, True, groups=(8, 4)), "selection_bias"
                ),
                SharedExpertsEntry(1),
                OptionalSelectionBiasEntry(),
                FixedFieldsEntry({"score": "sigmoid", "output_norm": True}),
            ),
            MlpLayerTypesEntry(1, "first_k_dense_replace"),
        ),
        _NO_WINDOW,
        AllowedValuesEntry({"rope_interleave": (True,), "moe_layer_freq": (1,)}),
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
    ),
    rules=(
        *_EXPERTS,
        *SHARED_EXPERT_RULES,
        TensorRule(f"{LAYER}.post_mlp_layernorm.weight", (f"{_MLP}.output_norm.weight",)),
    ),
    # the first: of dense layers, which do not use it
    buffers=r"(.*\.)?post_mlp_layernorm\.weight|(.*\.)?rotary_emb\.inv_freq",
)


@dataclass(frozen=True)
class CohereWindowLayersConfigEntry:
    """Translation to and from config.json of the layers of Command A+ with a window, which alone have rotary positions.
    Dense layers at the start have a period of their own; if it is 1, they have positions without a window.
    """

    size: int = 4096
    handled_config_keys: frozenset[str] = frozenset(
        {"sliding_window", "layer_types", "sliding_window_pattern", "prefix_dense_sliding_window_pattern"}
    )
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers", "no_rope_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of windows and rotary positions from config.json."""
        layers, first = layer_indices(raw), raw.get("first_k_dense_replace", 0)
        every, prefix = raw.get("sliding_window_pattern", 4), raw.get("prefix_dense_sliding_window_pattern", 1)
        full = [(layer + 1) % prefix == 0 for layer in layers[:first]]
        full += [(layer + 1) % every == 0 for layer in range(len(layers) - first)]
        kinds = raw.get("layer_types") or build_window_layer_types(full)
        fields = build_sliding_window_fields(kinds, raw.get("sliding_window", self.size), layers)
        feeds = raw.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in layers]
        rotated = {layer for layer in layers if prefix == 1 and feeds[layer] == "dense"}
        return {
            **fields,
            "no_rope_layers": [n for n in layers if kinds[n] == "full_attention" and n not in rotated] or None,
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of windows; ConfigMismatchError if another layer has rotary positions."""
        layers = range(model.num_layers)
        full = {layer for layer in layers if model.get_attention_window(layer) is None}
        dense = {layer for layer in layers if not model.is_moe_layer(layer)}
        unrotated = {layer for layer in layers if not model.has_rotary_positions(layer)}
        for prefix, expected in ((1, full - dense), (2, full)):
            if unrotated == expected:
                kinds = {
                    "layer_types": get_transformers_layer_types(model),
                    "sliding_window": model.sliding_window or self.size,
                }
                return {**kinds, "prefix_dense_sliding_window_pattern": prefix}
        raise ConfigMismatchError(f"no_rope_layers must be the layers without a window, {sorted(full)}")


@dataclass(frozen=True)
class CohereExpertNormEntry:
    """Translation to and from config.json of Command A+'s norms: RMSNorm if `rms_norm_eps` is set, else LayerNorm.
    The LayerNorm has no bias.
    """

    handled_config_keys: frozenset[str] = frozenset({"rms_norm_eps", "layer_norm_eps"})
    handled_model_fields: frozenset[str] = frozenset({"norm", "norm_eps", "norm_bias"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `norm`, `norm_eps` and `norm_bias`: RMSNorm if `rms_norm_eps` is set, else LayerNorm without bias."""
        if raw.get("rms_norm_eps") is not None:
            return {"norm": "rmsnorm", "norm_eps": raw["rms_norm_eps"]}
        return {"norm": "layernorm", "norm_bias": False, "norm_eps": raw.get("layer_norm_eps", 1e-5)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of norms; ConfigMismatchError for a LayerNorm with bias."""
        if model.norm == "rmsnorm":
            return {"rms_norm_eps": model.norm_eps}
        if model.norm_bias:
            raise ConfigMismatchError("norm_bias must be False")
        return {"rms_norm_eps": None, "layer_norm_eps": model.norm_eps}


@dataclass(frozen=True)
class CohereExpertsEntry:
    """Translation to and from config.json of the router scores and shared experts of Command A+.
    The outputs of shared experts are added or averaged.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"expert_selection_fn", "norm_topk_prob", "num_shared_experts", "shared_expert_combination_strategy"}
    )
    handled_model_fields: frozenset[str] = frozenset(
        {"score", "normalize", "scaling", "shared_ffn_hidden_size", "shared_scaling"}
    )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` fields of scores and shared experts from config.json.
        Raises ConfigMismatchError for another score or combination of shared experts.
        """
        score, count = raw.get("expert_selection_fn", "softmax"), raw.get("num_shared_experts", 0)
        strategy = raw.get("shared_expert_combination_strategy", "average")
        if score not in ("softmax", "sigmoid") or strategy not in ("average", "sum"):
            raise ConfigMismatchError(
                f"expert_selection_fn = {score!r} with shared_expert_combination_strategy = {strategy!r} is not supported"
            )
        factor = 0.5 if count and strategy == "average" else 1.0
        return {
            "score": score,
            "normalize": score == "softmax" or raw.get("norm_topk_prob", True),
            "scaling": factor,
            "shared_scaling": factor,
            "shared_ffn_hidden_size": count * raw.get("intermediate_size", 22528),
        }

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return the keys of scores and shared experts; ConfigMismatchError if their factors are neither a sum nor an average."""
        assert isinstance(model, MoeConfig)
        count, rest = divmod(model.shared_ffn_hidden_size, model.ffn_hidden_size)
        averaged = bool(count) and model.scaling == model.shared_scaling == 0.5
        if rest or (not averaged and (model.scaling != 1 or model.shared_scaling != 1)):
            raise ConfigMismatchError("moe.scaling and moe.shared_scaling must be 1, or 0.5 with whole shared experts")
        if model.score == "softmax" and not model.normalize:
            raise ConfigMismatchError("moe.normalize must be True with score: softmax")
        return {
            "expert_selection_fn": model.score,
            "norm_topk_prob": model.normalize,
            "num_shared_experts": count,
            "shared_expert_combination_strategy": "average" if averaged or not count else "sum",
        }


@dataclass(frozen=True)
class DenseFfnWidthConfigEntry:
    """Translation to and from config.json of the width of dense layers, by default the width of an expert."""

    handled_config_keys: frozenset[str] = frozenset({"prefix_dense_intermediate_size"})
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `ffn_hidden_size`, the width of dense layers; by default that of an expert."""
        return {"ffn_hidden_size": raw.get("prefix_dense_intermediate_size") or raw.get("intermediate_size", 22528)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key of the width of dense layers, null if it is that of an expert."""
        same = model.moe is not None and model.moe.ffn_hidden_size == model.ffn_hidden_size
        return {"prefix_dense_intermediate_size": None if same else model.ffn_hidden_size}


COHERE2_MOE = ModelFamily(
    name="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    entries=(
        *exclude_entries_of_fields(CORE_SIZES, "ffn_hidden_size"),
        *SIZES[len(CORE_SIZES) :],
        DenseFfnWidthConfigEntry(),
        CohereExpertNormEntry(),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("hidden_act", "activation", "silu", SILU),
        KeyEntry("logit_scale", "logit_scale", 0.0625, forbids_null=True),
        _BOTH_BIASES,
        KeyValueHeadsEntry(dim_default=128),
        RopeEntry(interleaved=True),
        CohereWindowLayersConfigEntry(),
        MoeSectionEntry(
            (
                KeyEntry("num_experts", "num_experts", 8),
                KeyEntry("num_experts_per_tok", "top_k", 2),
                KeyEntry("intermediate_size", "ffn_hidden_size", 22528),
                CohereExpertsEntry(),
            ),
            MlpLayerTypesEntry(0, "first_k_dense_replace"),
        ),
        FixedFieldsEntry(
            {"position": "rope", "parallel_residual": True, "shared_norm": True, "mlp_bias": False, "qk_norm": False}
        ),
    ),
    rules=(*_EXPERTS, *SHARED_EXPERT_RULES),
    tokens=("bos_token_id", "eos_token_id"),
)

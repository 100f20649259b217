"""Decoders of Mamba-2 layers (arXiv:2405.21060). Mamba-2 in every layer: Codestral Mamba, and converted models of
state-spaces. Hybrids with attention in a few layers: Granite 4 (IBM), with shared and routed experts or an MLP, and
Bamba (IBM, Princeton, CMU, UIUC), with an MLP in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
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
    split_words,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.granite import MOE_RULES, MULTIPLIERS, granite_shared_mlp_rules
from mega_ckpt.families.hybrid_entries import (
    MAMBA,
    NO_WINDOW,
    MambaSectionEntry,
    OptionalRopeEntry,
    TimeStepLimitEntry,
    UnusedFieldsEntry,
    check_layer_mixers,
    mamba_tensor_rules,
    parse_layer_mixers,
    to_transformers_layer_types,
)
from mega_ckpt.families.moe_entries import MoeInLayerPatternEntry, MoeSectionEntry, build_router_config_entries
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.model_config import ModelConfig

_EXPERTS = MoeSectionEntry(
    (
        *build_router_config_entries("num_local_experts", top_k=2, normalize=True, experts=8),
        KeyEntry("intermediate_size", "ffn_hidden_size"),
        KeyEntry("shared_intermediate_size", "shared_ffn_hidden_size", 1024),
    ),
    MoeInLayerPatternEntry(),
)


@dataclass(frozen=True)
class GraniteLayersEntry:
    """Translation to and from config.json of the token mixers and experts of Granite 4's layers.
    The mixers are read from a list of layer types (Mamba-2 in all if it is absent). Experts are in all layers or in
    none.
    """

    handled_config_keys: frozenset[str] = _EXPERTS.handled_config_keys | {"layer_types", "layers_block_type"}
    handled_model_fields: frozenset[str] = frozenset({"layers", "moe", "ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers`, `ffn_hidden_size` and, with experts, `moe`."""
        layers = layer_indices(raw)
        kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * len(layers)
        mixers = parse_layer_mixers(kinds, "mamba", layers)
        if raw.get("num_local_experts", 8) == 0:
            width = raw.get("shared_intermediate_size", 1024)
            return {"layers": [f"{mixer}+mlp" for mixer in mixers], "ffn_hidden_size": width}
        width = {"ffn_hidden_size": raw.get("intermediate_size")}
        return {"layers": [f"{mixer}+moe" for mixer in mixers], **width, **_EXPERTS.fields_from_config(raw)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of layer types, experts and widths of a Granite 4 model.
        Without experts, `intermediate_size` is a placeholder that nothing reads. Raises ConfigMismatchError if some
        layers have experts and others none, or without a shared expert.
        """
        out: dict[str, Any] = {"layer_types": to_transformers_layer_types(check_layer_mixers(model, "mamba"))}
        feeds = {kind.feed_forward for kind in model.layer_kinds}
        if feeds == {"mlp"}:
            width = model.ffn_hidden_size
            return {**out, "num_local_experts": 0, "intermediate_size": width, "shared_intermediate_size": width}
        if feeds != {"moe"} or model.moe is None or not model.moe.shared_ffn_hidden_size:
            raise ConfigMismatchError("layers must all have experts and a shared expert, or none may have experts")
        return {**out, **_EXPERTS.config_from_fields(model)}


_ENTRIES = exclude_entries_of_fields(DECODER, "ffn_hidden_size", "position")  # covered by other entries

GRANITE_MOE_HYBRID = ModelFamily(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    entries=(
        *_ENTRIES,
        FixedFieldsEntry({"norm": "rmsnorm"}),
        KeyValueHeadsEntry(explicit_dim=False, derived=True),
        OptionalRopeEntry(RopeEntry()),
        *MULTIPLIERS,
        GraniteLayersEntry(),
        MAMBA,
        *NO_WINDOW,
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
    ),
    rules=(
        *mamba_tensor_rules(f"{LAYER}.mamba"),
        *MOE_RULES,
        *granite_shared_mlp_rules("mlp"),
        *granite_shared_mlp_rules("mlp.shared_expert"),
    ),
    carried=frozenset({"normalization_function", "init_method"}),
)


@dataclass(frozen=True)
class AttentionLayersEntry:
    """Translation to and from config.json of Bamba's `attn_layer_indices`: all other layers are Mamba-2."""

    handled_config_keys: frozenset[str] = frozenset({"attn_layer_indices", "layers_block_type", "layer_types"})
    handled_model_fields: frozenset[str] = frozenset({"layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `layers`, the kind of each layer; ConfigMismatchError if a list of layer types in config.json disagrees."""
        layers, at = layer_indices(raw), raw.get("attn_layer_indices") or ()
        mixers = ["attention" if layer in at else "mamba" for layer in layers]
        kinds = raw.get("layers_block_type") or raw.get("layer_types")
        if kinds and parse_layer_mixers(kinds, "mamba", layers) != mixers:
            raise ConfigMismatchError(f"layer_types conflicts with attn_layer_indices = {at!r}")
        return {"layers": [f"{mixer}+mlp" for mixer in mixers]}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `attn_layer_indices` of config.json; ConfigMismatchError for a model with experts."""
        mixers = check_layer_mixers(model, "mamba")
        if model.moe is not None:
            raise ConfigMismatchError("moe must be null")
        return {"attn_layer_indices": [layer for layer, mixer in enumerate(mixers) if mixer == "attention"]}


# Names on disk of Bamba, Jamba and Falcon-H1.
FEED_FORWARD_RULES = (
    TensorRule(f"{LAYER}.pre_ff_layernorm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
    *(
        rule
        for name in ("gate_proj", "up_proj", "down_proj")
        for rule in weight_bias_rules(f"{LAYER}.feed_forward.{name}", f"{LAYER}.mlp.{name}")
    ),
    TensorRule("model.final_layernorm.weight", ("model.norm.weight",)),
)

BAMBA = ModelFamily(
    name="bamba",
    architecture="BambaForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8, explicit_dim=False, derived=True),
        RopeEntry(fraction=0.5),
        AttentionLayersEntry(),
        MAMBA,
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        *NO_WINDOW,
        FixedFieldsEntry({"qk_norm": False}),
    ),
    rules=(
        *mamba_tensor_rules(f"{LAYER}.mamba"),
        *FEED_FORWARD_RULES,
    ),
    carried=frozenset({"num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"}),
)


BACKBONE = "backbone.layers.{i}"


@dataclass(frozen=True)
class MambaLayersEntry:
    """Translation to and from config.json of one kind of Mamba in every layer, which no key of config.json selects.

    Attributes:
        mixer: "mamba" or "mamba1".
        default: number of layers if the key is absent.
    """

    mixer: str = "mamba"
    default: int = 64
    handled_config_keys: frozenset[str] = frozenset({"num_hidden_layers", "layer_types"})
    handled_model_fields: frozenset[str] = frozenset({"num_layers", "layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `num_layers` and `layers`, with the mixer in every layer."""
        layers = layer_indices({"num_hidden_layers": self.default, **raw})
        return {"num_layers": len(layers), "layers": [self.mixer] * len(layers)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `num_hidden_layers`; ConfigMismatchError unless every layer has the mixer alone."""
        if any(kind != (self.mixer, None) for kind in model.layer_kinds):
            raise ConfigMismatchError(f"layers must all be {self.mixer!r}")
        return {"num_hidden_layers": model.num_layers}


MAMBA2 = ModelFamily(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        MambaLayersEntry(),
        MambaSectionEntry(
            (
                KeyEntry("num_heads", "num_heads", 128),
                KeyEntry("head_dim", "head_dim", 64),
                KeyEntry("state_size", "state_size", 128),
                KeyEntry("n_groups", "num_groups", 8),
                KeyEntry("conv_kernel", "conv_kernel", 4),
                KeyEntry("chunk_size", "chunk_size", 256),
                KeyEntry("use_conv_bias", "conv_bias", True),
                KeyEntry("use_bias", "bias", False),
                TimeStepLimitEntry(),
            ),
            expand="expand",
        ),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("initializer_range", "init_std", 0.1),
        TIED,
        AllowedValuesEntry({"hidden_act": ("silu", "swish")}),
        *NO_WINDOW,
        UnusedFieldsEntry({"num_attention_heads": 1, "ffn_hidden_size": "hidden_size", "max_position": 4096}),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "none"}),
    ),
    prefix="backbone.",
    rules=(
        TensorRule("backbone.embeddings.weight", ("model.embed_tokens.weight",)),
        TensorRule(f"{BACKBONE}.norm.weight", ("model.layers.{i}.input_layernorm.weight",)),
        *mamba_tensor_rules(f"{BACKBONE}.mixer"),
        TensorRule("backbone.norm_f.weight", ("model.norm.weight",)),
    ),
    # Initialization of time steps, and the precision of the residual stream.
    carried=split_words(
        """rescale_prenorm_residual residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor rms_norm
        intermediate_size norm_before_gate num_attention_heads max_position_embeddings"""
    ),
)

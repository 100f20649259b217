"""LFM2 (Liquid AI, arXiv:2511.23404): gated short convolutions in most layers, attention with norms of queries and keys
in the others; dense, and with experts after the first layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    split_words,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import (
    CONV1D,
    NO_WINDOW,
    check_layer_mixers,
    parse_layer_mixers,
    to_transformers_layer_types,
)
from mega_ckpt.families.moe_entries import MoeInLayerPatternEntry, MoeSectionEntry, build_per_expert_tensor_rules
from mega_ckpt.families.rope_entries import EVERY_SCALING, RopeEntry
from mega_common.layer_kinds import ShortConvolutionConfig
from mega_common.model_config import ModelConfig

_MIXER = "conv"
_KEYS = (KeyEntry("conv_L_cache", "kernel", 3), KeyEntry("conv_bias", "bias", False))


@dataclass(frozen=True)
class ShortConvolutionEntry:
    """Translation to and from config.json of the `ModelConfig` section `conv`, the short convolutions.
    A model without them may lack its keys.
    """

    handled_config_keys: frozenset[str] = frozenset().union(*(entry.handled_config_keys for entry in _KEYS))
    handled_model_fields: frozenset[str] = frozenset({"conv"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` section `conv`: kernel size and bias of the short convolutions."""
        return {"conv": {name: value for entry in _KEYS for name, value in entry.fields_from_config(raw).items()}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's kernel size and bias of the short convolutions, the defaults if the model has none."""
        conv = model.conv or ShortConvolutionConfig()
        return {key: value for entry in _KEYS for key, value in entry.config_from_fields(conv).items()}


@dataclass(frozen=True)
class Lfm2LayerTypesConfigEntry:
    """Translation to and from config.json of the kind of each layer of LFM2.
    In config.json it is a list of token mixers, or the layers with attention, and with `experts` the number of dense
    layers before those with experts.
    """

    experts: bool = False
    handled_model_fields: frozenset[str] = frozenset({"layers"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({"layer_types", "num_dense_layers" if self.experts else "full_attn_idxs"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `layers`, the kind of each layer as "mixer+feed".

        Raises:
            ConfigMismatchError: for an unknown mixer, a list of another length, and experts without a list.
        """
        layers, kinds = layer_indices(raw), raw.get("layer_types")
        if kinds is None and self.experts:
            raise ConfigMismatchError("layer_types is missing")
        at = raw.get("full_attn_idxs")
        at = layers if at is None else at
        default = ["full_attention" if layer in at else "conv" for layer in layers]
        mixers = parse_layer_mixers(kinds or default, _MIXER, layers, names=("conv",))
        dense = raw.get("num_dense_layers", 2) if self.experts else len(layers)
        return {"layers": [f"{mixer}+{'mlp' if i < dense else 'moe'}" for i, mixer in enumerate(mixers)]}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `layer_types` of config.json with its value and, with experts, `num_dense_layers`.

        Raises:
            ConfigMismatchError: for other mixers, and for a dense layer after one with experts.
        """
        out: dict[str, Any] = {
            "layer_types": to_transformers_layer_types(check_layer_mixers(model, _MIXER), other="conv")
        }
        feeds = [kind.feed_forward for kind in model.layer_kinds[: model.num_layers]]
        dense = feeds.count("mlp")
        if "moe" in feeds[:dense] or ("moe" in feeds) != self.experts:
            rule = "must all come after the dense layers" if self.experts else "are not supported"
            raise ConfigMismatchError(f"layers with experts {rule}")
        return {**out, "num_dense_layers": dense} if self.experts else out


@dataclass(frozen=True)
class Lfm2FfnWidthConfigEntry:
    """Translation to and from config.json of the width of LFM2's feed-forward blocks.
    By default it is 2/3 of `intermediate_size`, times a factor, rounded up to a multiple.
    """

    handled_config_keys: frozenset[str] = split_words(
        "intermediate_size block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of"
    )
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `ffn_hidden_size`."""
        width = raw.get("block_ff_dim", raw.get("intermediate_size", 12288))
        if raw.get("block_auto_adjust_ff_dim", True):
            width, factor = int(2 * width / 3), raw.get("block_ffn_dim_multiplier", 1.0)
            if factor is not None:
                multiple = raw.get("block_multiple_of", 256)
                width = multiple * -(-int(factor * width) // multiple)
        return {"ffn_hidden_size": width}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the width itself as config.json's `intermediate_size`, to be used without adjustment."""
        return {"intermediate_size": model.ffn_hidden_size, "block_auto_adjust_ff_dim": False}


_ENTRIES: tuple[ConfigEntry, ...] = (
    *exclude_entries_of_fields(CORE_SIZES, "ffn_hidden_size"),
    KeyEntry("max_position_embeddings", "max_position", 128_000),
    KeyEntry("initializer_range", "init_std", 0.02),
    KeyEntry("tie_embedding tie_word_embeddings", "tie_embeddings", True, must_agree=False),
    KeyEntry("norm_eps", "norm_eps", 1e-5),
    KeyValueHeadsEntry(kv_default=8, explicit_dim=False),
    RopeEntry(theta=1_000_000.0, scalings=EVERY_SCALING),
    ShortConvolutionEntry(),
    *NO_WINDOW,
    FixedFieldsEntry({
        "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "qk_norm": True, "qkv_bias": False,
        "attention_out_bias": False, "mlp_bias": False,
    }),
)  # fmt: skip

_ATTENTION, _CONV, _FEED = f"{LAYER}.self_attn", f"{LAYER}.short_conv", f"{LAYER}.feed_forward"
_W = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
_RULES = (
    TensorRule("model.embedding_norm.weight", ("model.norm.weight",)),
    TensorRule(f"{LAYER}.operator_norm.weight", (f"{LAYER}.input_layernorm.weight",)),
    TensorRule(f"{LAYER}.ffn_norm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
    TensorRule(f"{_ATTENTION}.out_proj.weight", (f"{_ATTENTION}.o_proj.weight",)),
    *(TensorRule(f"{_ATTENTION}.{x}_layernorm.weight", (f"{_ATTENTION}.{x}_norm.weight",)) for x in "qk"),
    *weight_bias_rules(f"{LAYER}.conv.in_proj", *(f"{_CONV}.in_proj.{part}" for part in "bcx")),
    TensorRule(f"{LAYER}.conv.conv.weight", (f"{_CONV}.conv1d.x.weight",), CONV1D),
    TensorRule(f"{LAYER}.conv.conv.bias", (f"{_CONV}.conv1d.x.bias",)),
    *weight_bias_rules(f"{LAYER}.conv.out_proj", f"{_CONV}.out_proj"),
    *(TensorRule(f"{_FEED}.{disk}.weight", (f"{LAYER}.mlp.{name}.weight",)) for disk, name in _W),
)

LFM2 = ModelFamily(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    entries=(
        *_ENTRIES,
        Lfm2FfnWidthConfigEntry(),
        Lfm2LayerTypesConfigEntry(),
        AllowedValuesEntry({"block_use_swiglu": (True,)}),
    ),
    rules=_RULES,
    # Initialization, and sizes that published folders give twice.
    carried=split_words(
        """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_dim conv_dim_out
        conv_use_xavier_init num_heads use_pos_enc"""
    ),
)

LFM2_MOE = ModelFamily(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    entries=(
        *_ENTRIES,
        KeyEntry("intermediate_size", "ffn_hidden_size", 7168),
        Lfm2LayerTypesConfigEntry(experts=True),
        MoeSectionEntry(
            (
                KeyEntry("num_experts num_local_experts", "num_experts", 32),
                KeyEntry("num_experts_per_tok", "top_k", 4),
                KeyEntry("norm_topk_prob", "normalize", True),
                KeyEntry("use_expert_bias", "selection_bias", True),
                KeyEntry("routed_scaling_factor", "scaling", 1.0),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size", 1792),
                FixedFieldsEntry({"score": "sigmoid"}),
            ),
            MoeInLayerPatternEntry(),
        ),
    ),
    rules=(
        *_RULES,
        TensorRule(f"{_FEED}.gate.weight", (f"{LAYER}.mlp.gate.weight",)),
        TensorRule(f"{_FEED}.expert_bias", (f"{LAYER}.mlp.gate.e_score_correction_bias",)),
        *build_per_expert_tensor_rules(f"{_FEED}.experts", ("w1", "w3", "w2")),
    ),
)

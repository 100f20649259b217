"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the fourth, many small experts and a gated
shared one. Qwen3.5, dense and with experts: the text part of a vision-language model, with the layers of Qwen3-Next.

On disk Qwen3-Next interleaves by key head the four parts of a delta net's projection and the two of its steps, and by
query head the query and gate projections; Qwen3.5 has plain projections in delta nets. A folder of Qwen3.5 has the
text model in `text_config` of config.json and in tensors `model.language_model.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, ConcatExpertsLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import (
    CONV1D,
    NO_WINDOW,
    UnusedFieldsEntry,
    check_layer_mixers,
    parse_layer_mixers,
    to_transformers_layer_types,
)
from mega_ckpt.families.moe_entries import (
    MoeFieldEntry,
    MoeInLayerPatternEntry,
    MoeSectionEntry,
    QwenSparseStepConfigEntry,
    build_per_expert_tensor_rules,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.layer_kinds import GatedDeltaConfig
from mega_common.model_config import ModelConfig

_DELTA = f"{LAYER}.linear_attn"
_SIZES = (
    KeyEntry("linear_num_key_heads", "num_key_heads", 16),
    KeyEntry("linear_num_value_heads", "num_value_heads", 32),
    KeyEntry("linear_key_head_dim", "key_head_dim", 128),
    KeyEntry("linear_value_head_dim", "value_head_dim", 128),
    KeyEntry("linear_conv_kernel_dim", "conv_kernel", 4),
)


@dataclass(frozen=True)
class GatedDeltaNetEntry:
    """Translation to and from config.json of the sizes of gated delta nets (section `delta` of `ModelConfig`).
    Their norm has the model's epsilon. A model without delta nets may lack the section.
    """

    handled_config_keys: frozenset[str] = frozenset().union(*(entry.handled_config_keys for entry in _SIZES))
    handled_model_fields: frozenset[str] = frozenset({"delta"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` section `delta`: head counts and sizes of the gated delta nets."""
        return {"delta": {name: value for entry in _SIZES for name, value in entry.fields_from_config(raw).items()}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's head counts and sizes of the gated delta nets; 1 each if the model has none.
        Raises ConfigMismatchError for another epsilon than the model's, and for negative eigenvalues.
        """
        delta = model.delta or GatedDeltaConfig(num_key_heads=1, num_value_heads=1, key_head_dim=1, value_head_dim=1)
        if delta.norm_eps not in (None, model.norm_eps):
            raise ConfigMismatchError(f"delta.norm_eps must be norm_eps = {model.norm_eps}, not {delta.norm_eps}")
        if delta.negative_eigenvalues:
            raise ConfigMismatchError("delta.negative_eigenvalues must be False")
        return {key: value for entry in _SIZES for key, value in entry.config_from_fields(delta).items()}


@dataclass(frozen=True)
class QwenLayersEntry:
    """Translation to and from config.json of the token mixer and the feed-forward kind of each layer of Qwen's hybrids.
    Config.json has a list of token mixers (by default attention in every n-th layer, else gated delta nets) and the
    keys that select layers with experts.

    `feed` is the feed-forward block of every layer; empty: keys of config.json select it.
    """

    feed: str = ""
    handled_model_fields: frozenset[str] = frozenset({"layers"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that set the kind of each layer."""
        return frozenset({"layer_types", "full_attention_interval"}) | (
            QwenSparseStepConfigEntry().handled_config_keys if not self.feed else set()
        )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `layers`, each layer of a Qwen hybrid as "mixer+feed", from config.json."""
        layers, every = layer_indices(raw), raw.get("full_attention_interval", 4)
        default = ["full_attention" if every and (layer + 1) % every == 0 else "linear_attention" for layer in layers]
        mixers = parse_layer_mixers(raw.get("layer_types") or default, "delta", layers)
        feeds = self._feed_forward_kinds(raw, layers)
        return {"layers": [f"{mixer}+{feed}" for mixer, feed in zip(mixers, feeds, strict=True)]}

    def _feed_forward_kinds(self, raw: ConfigDict, layers: Sequence[int]) -> list[str]:
        if self.feed:
            return [self.feed] * len(layers)
        sparse = QwenSparseStepConfigEntry().fields_from_config(raw)
        return ["moe" if sparse is None or layer in sparse else "mlp" for layer in layers]

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `layer_types` and, unless the family has one feed-forward block, the keys that select layers with experts.
        Raises ConfigMismatchError for another kind of feed-forward block than the family's.
        """
        out = {"layer_types": to_transformers_layer_types(check_layer_mixers(model, "delta"))}
        if not self.feed:
            return {**out, **QwenSparseStepConfigEntry().config_from_fields(model)}
        if any(kind.feed_forward != self.feed for kind in model.layer_kinds):
            raise ConfigMismatchError(f"layers must all have the feed-forward block {self.feed!r}")
        return out


def qwen_hybrid_entries(kv_heads: int) -> tuple[ConfigEntry, ...]:
    """Return the config entries that Qwen3-Next and Qwen3.5 share.
    `kv_heads` is transformers' default number of key/value heads.
    """
    return (
        KeyValueHeadsEntry(kv_default=kv_heads, dim_default=256),
        RopeEntry(fraction=0.25, partial=True),
        GatedDeltaNetEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        *NO_WINDOW,
        AllowedValuesEntry({"attn_output_gate": (True,)}),
        FixedFieldsEntry({"mlp_bias": False, "qk_norm": True, "zero_centered_norm": True, "attention_gate": True}),
    )


def qwen_hybrid_moe_entry(top_k: int, experts: int, normalize: MoeFieldEntry) -> MoeSectionEntry:
    """Return the config entry for the experts of Qwen3-Next and Qwen3.5.
    `top_k` and `experts` are transformers' defaults for absent keys.
    """
    return MoeSectionEntry(
        (
            KeyEntry("num_experts num_local_experts", "num_experts", experts),
            KeyEntry("num_experts_per_tok", "top_k", top_k),
            KeyEntry("moe_intermediate_size", "ffn_hidden_size", 512),
            KeyEntry("shared_expert_intermediate_size", "shared_ffn_hidden_size", 512),
            KeyEntry("router_aux_loss_coef", "aux_loss", 0.001),
            FixedFieldsEntry({"shared_gate": True}),
            normalize,
        ),
        MoeInLayerPatternEntry(),
    )


QWEN_RULES = (
    *weight_bias_rules(f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.g_proj", per_head="query"),
    TensorRule(f"{_DELTA}.conv1d.weight", tuple(f"{_DELTA}.conv1d.{part}.weight" for part in "qkv"), CONV1D),
)  # fmt: skip

QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    entries=(
        *llama_config_entries(),
        *qwen_hybrid_entries(2),
        QwenLayersEntry(),
        qwen_hybrid_moe_entry(10, 512, KeyEntry("norm_topk_prob", "normalize", True)),
    ),
    rules=(
        *(
            TensorRule(
                f"{_DELTA}.in_proj_{names}.weight",
                tuple(f"{_DELTA}.in_proj.{part}.weight" for part in names),
                per_head="delta",
            )
            for names in ("qkvz", "ba")
        ),
        *QWEN_RULES,
        *build_per_expert_tensor_rules(f"{LAYER}.mlp.experts"),
    ),
    buffers=r"mtp\..*",
)


_RULES = (
    TensorRule(f"{_DELTA}.in_proj_qkv.weight", tuple(f"{_DELTA}.in_proj.{part}.weight" for part in "qkv")),
    *(TensorRule(f"{_DELTA}.in_proj_{part}.weight", (f"{_DELTA}.in_proj.{part}.weight",)) for part in "zba"),
    *QWEN_RULES,
)
_CARRIED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"})

QWEN3_5 = ModelFamily(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    entries=(*llama_config_entries(), *qwen_hybrid_entries(4), QwenLayersEntry("mlp")),
    rules=_RULES,
    buffers=r"mtp\..*|model\.visual\..*",
    carried=_CARRIED,
    outer_model_type="qwen3_5",
)

_MLP = "model.layers.{i}.mlp.experts"
QWEN3_5_MOE = ModelFamily(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    entries=(
        *exclude_entries_of_fields(llama_config_entries(), "ffn_hidden_size"),
        UnusedFieldsEntry({"ffn_hidden_size": "moe_intermediate_size"}),
        *qwen_hybrid_entries(2),
        QwenLayersEntry("moe"),
        qwen_hybrid_moe_entry(8, 256, FixedFieldsEntry({"normalize": True})),
    ),
    rules=(*_RULES, *build_per_expert_tensor_rules(_MLP)),
    fused=(
        *_RULES,
        TensorRule(
            f"{_MLP}.gate_up_proj", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), ConcatExpertsLayout()
        ),
        TensorRule(f"{_MLP}.down_proj", (f"{_MLP}.down_proj.weight",), ConcatExpertsLayout()),
    ),
    buffers=r"mtp\..*|model\.visual\..*",
    carried=_CARRIED,
    outer_model_type="qwen3_5_moe",
)

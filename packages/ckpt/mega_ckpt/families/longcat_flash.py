"""LongCat-Flash (Meituan, arXiv:2509.01322): pairs of layers with latent attention and MLPs. Experts read the input of the
first MLP, and their output is added after the pair; some experts return their input.

A pair is one layer on disk, and two layers in mega, of which the first has the experts and its MLP as their shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    SILU,
    TIED,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    exclude_entries_of_fields,
)
from mega_ckpt.families.deepseek_glm import LatentAttentionEntry
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, UnstackedLayout, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import MoeSectionEntry, moe_layer_indices
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.layer_kinds import MOST_LAYERS
from mega_common.model_config import ModelConfig

_PAIR = "model.layers.{i//2}"
_ATTENTION = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LayerPairsEntry:
    """Translation to and from config.json of the number of layers, which counts pairs."""

    handled_config_keys: frozenset[str] = frozenset({"num_layers", "num_hidden_layers"})
    handled_model_fields: frozenset[str] = frozenset({"num_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `num_layers`, twice the number of pairs; ConfigMismatchError if `num_hidden_layers` is another number."""
        pairs = raw.get("num_layers", 28)
        if not 0 < pairs <= MOST_LAYERS // 2:
            raise ConfigMismatchError(f"num_layers = {pairs} must be 1 to {MOST_LAYERS // 2}")
        if raw.get("num_hidden_layers", 2 * pairs) != 2 * pairs:
            raise ConfigMismatchError(
                f"num_hidden_layers = {raw['num_hidden_layers']} must be 2 x num_layers = {2 * pairs}"
            )
        return {"num_layers": 2 * pairs}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key `num_layers`, half the model's layers; ConfigMismatchError for an odd number of layers."""
        if model.num_layers % 2:
            raise ConfigMismatchError(f"num_layers = {model.num_layers} must be even")
        return {"num_layers": model.num_layers // 2}


@dataclass(frozen=True)
class FirstOfPairEntry:
    """Mapping for families with experts in the first layer of each pair, for which config.json has no key."""

    handled_config_keys: frozenset[str] = frozenset()

    def fields_from_config(self, raw: ConfigDict) -> list[int]:
        """Return the indices of the layers with experts: every second layer, from the first."""
        return list(range(0, LayerPairsEntry().fields_from_config(raw)["num_layers"], 2))

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys; ConfigMismatchError unless every second layer has experts, and a shared expert as wide as MLPs."""
        if moe_layer_indices(model) != list(range(0, model.num_layers, 2)):
            raise ConfigMismatchError("moe.layers must be every second layer, from the first")
        if model.moe and model.moe.shared_ffn_hidden_size != model.ffn_hidden_size:
            raise ConfigMismatchError("moe.shared_ffn_hidden_size must be ffn_hidden_size")
        return {}


@dataclass(frozen=True)
class ScaledLatentAttentionEntry(LatentAttentionEntry):
    """Translation to and from config.json of latent attention with factors on both latents; also writes `head_dim`."""

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `mla`, with `scaled_latents`; ConfigMismatchError if a key is missing or conflicts."""
        (mla,) = super().fields_from_config(raw).values()
        return {"mla": {**mla, "scaled_latents": True}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of latent attention; raises ConfigMismatchError without factors on latents."""
        if model.mla is None or not model.mla.scaled_latents or model.mla.q_lora_rank is None:
            raise ConfigMismatchError("mla.scaled_latents must be true, and mla.q_lora_rank given")
        plain = model.mla.model_copy(update={"scaled_latents": False})
        keys = super().config_from_fields(model.model_copy(update={"mla": plain}))
        return keys | {"head_dim": model.mla.qk_rope_head_dim}


LONGCAT_FLASH = ModelFamily(
    name="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    entries=(
        *exclude_entries_of_fields(CORE_SIZES, "ffn_hidden_size", "num_layers"),
        LayerPairsEntry(),
        KeyEntry("ffn_hidden_size intermediate_size", "ffn_hidden_size"),
        KeyEntry("max_position_embeddings", "max_position"),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        TIED,
        KeyEntry("hidden_act", "activation", "silu", SILU),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-5),
        RopeEntry(theta=10_000_000.0, scalings=frozenset({"none", "yarn"}), interleaved=True),
        ScaledLatentAttentionEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        MoeSectionEntry(
            (
                KeyEntry("n_routed_experts num_local_experts num_experts", "num_experts", 512),
                KeyEntry("moe_topk num_experts_per_tok", "top_k", 12),
                KeyEntry("expert_ffn_hidden_size moe_intermediate_size", "ffn_hidden_size"),
                KeyEntry("ffn_hidden_size intermediate_size", "shared_ffn_hidden_size"),
                KeyEntry("zero_expert_num", "zero_experts", 256),
                KeyEntry("routed_scaling_factor", "scaling", 6.0),
                AllowedValuesEntry({"zero_expert_type": ("identity",), "norm_topk_prob": (False,), "router_bias": (False,)}),
                FixedFieldsEntry({"score": "softmax", "selection_bias": True, "normalize": False, "shortcut": True}),
            ),
            FirstOfPairEntry(),
        ),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"mla_scale_q_lora": (True,), "mla_scale_kv_lora": (True,), "attention_method": ("MLA",)}),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "rope", "qk_norm": False, "mlp_bias": False}),
    ),
    rules=(
        *(TensorRule(f"{_PAIR}.{name}.{{i%2}}.weight", (f"{LAYER}.{name}.weight",))
          for name in ("input_layernorm", "post_attention_layernorm")),
        *(rule for name in _ATTENTION
          for rule in weight_bias_rules(f"{_PAIR}.self_attn.{{i%2}}.{name}", f"{LAYER}.self_attn.{name}")),
        *(TensorRule(f"{_PAIR}.mlps.{{i%2}}.{part}.weight", (f"{LAYER}.mlp.{shared}{part}.weight",))
          for part in _MLP for shared in ("", "shared_expert.")),
        TensorRule(f"{_PAIR}.mlp.router.classifier.weight", (f"{LAYER}.mlp.gate.weight",)),
        TensorRule(f"{_PAIR}.mlp.router.e_score_correction_bias", (f"{LAYER}.mlp.gate.e_score_correction_bias",)),
        *(TensorRule(f"{_PAIR}.mlp.experts.{{e}}.{part}.weight", (f"{LAYER}.mlp.experts.{part}.weight",), UnstackedLayout())
          for part in _MLP),
    ),
    # MTP layers, which transformers does not load, and unused matrices that it stores for experts that return their input
    buffers=r"(model\.)?mtp\..*|(.*\.)?rotary_emb\.inv_freq|.*\.mlp\.experts\.\d+\.(gate|up)_proj\.weight",
)  # fmt: skip

"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), with latent attention, many small experts and shared
experts; GLM 4 (arXiv:2406.12793), dense of 2024 (`glm`) and 2025 (`glm4`), and GLM 4.5 with DeepSeek's router and MTP
layers (`glm4_moe`, arXiv:2508.06471).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import (
    FirstKDenseConfigEntry,
    MoeFieldEntry,
    MoeSectionEntry,
    SharedExpertsEntry,
    build_per_expert_tensor_rules,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.layer_kinds import MlaConfig
from mega_common.model_config import ModelConfig, MoeConfig
from mega_common.strict_config import StrictConfig, format_setting_value

_MLP = f"{LAYER}.mlp"
MTP_LAYERS = KeyEntry("num_nextn_predict_layers num_mtp_layers", "mtp_layers", 1)
SHARED_EXPERT_RULES = tuple(
    rule
    for part in ("gate_proj", "up_proj", "down_proj")
    for rule in weight_bias_rules(f"{_MLP}.shared_experts.{part}", f"{_MLP}.shared_expert.{part}")
)
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class LatentAttentionEntry:
    """Translation to and from config.json of DeepSeek's multi-head latent attention (MLA), section `mla` of `ModelConfig`.
    The norms of the latents always have transformers' default epsilon. `whole_head`: `head_dim` counts all elements of a
    head, not the rotated ones; `any_head_dim`: it is not used.
    `query_latent`: the family's class has the key `q_lora_rank`.
    """

    whole_head: bool = False
    any_head_dim: bool = False
    query_latent: bool = True
    handled_config_keys: frozenset[str] = frozenset({*_LATENT, "head_dim", "qk_head_dim", "num_key_value_heads"})
    handled_model_fields: frozenset[str] = frozenset({"mla", "num_kv_heads", "head_dim"})

    @property
    def _keys(self) -> list[str]:
        return [key for key in _LATENT if self.query_latent or key != "q_lora_rank"]

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `mla` with the ranks and head dimensions, from config.json.
        Raises ConfigMismatchError if one is missing or `head_dim`, `qk_head_dim` or `num_key_value_heads` conflicts.
        """
        absent = [key for key in self._keys if key not in raw]
        if absent:
            raise ConfigMismatchError(f"{', '.join(absent)} is missing")
        rotated, heads = raw["qk_rope_head_dim"], raw.get("num_attention_heads")
        whole = rotated + (raw["qk_nope_head_dim"] if self.whole_head else 0)
        derived = {"head_dim": whole, "qk_head_dim": raw["qk_nope_head_dim"] + rotated, "num_key_value_heads": heads}
        derived = {key: value for key, value in derived.items() if key != "head_dim" or not self.any_head_dim}
        for key, value in derived.items():
            if raw.get(key, value) not in (value, None):
                raise ConfigMismatchError(f"{key} = {raw[key]!r} must be {value}")
        return {"mla": {key: raw[key] for key in self._keys}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of multi-head latent attention (MLA).
        They are the ranks and head dimensions of `ModelConfig`'s section `mla`, and `num_key_value_heads`. Raises
        ConfigMismatchError without a section `mla`, or if it has settings that no key expresses.
        """
        if model.mla is None:
            raise ConfigMismatchError("mla is missing (all models of this family have latent attention)")
        if not model.mla.latent_norm:
            raise ConfigMismatchError(
                "mla.latent_norm = false is not supported: models of this family normalize latents"
            )
        if model.mla != MlaConfig(**{key: getattr(model.mla, key) for key in self._keys}):
            raise ConfigMismatchError(
                f"mla = {format_setting_value(model.mla)} has settings without a key in config.json"
            )
        return {key: getattr(model.mla, key) for key in self._keys} | {"num_key_value_heads": model.num_attention_heads}


@dataclass(frozen=True)
class ExpertGroupsEntry:
    """Translation to and from config.json of group-limited expert routing, where a token uses experts of some groups only.
    In DeepSeek-V2 groups apply only with one routing method.

    Attributes:
        methods: names of the routing methods without and with groups; equal if there is one method.
        score: score of a group, by which groups are selected.
        defaults: number of groups, and of groups per token, if the keys are absent.
        key: the key of the number of groups, and after spaces its aliases.
    """

    methods: tuple[str, str]
    score: str
    defaults: tuple[int | None, int | None] = (None, None)
    key: str = "n_group"
    handled_model_fields: frozenset[str] = frozenset({"groups", "top_groups", "group_score"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({*self.key.split(), "topk_group", "topk_method"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` fields of group-limited expert routing from config.json.
        They are `groups`, `top_groups` and `group_score`. There is one group if `topk_method` is the method without
        groups. Raises ConfigMismatchError for another `topk_method`.
        """
        method = raw.get("topk_method") or self.methods[0]
        if method not in self.methods:
            raise ConfigMismatchError(f"topk_method = {method!r} is not supported (only {' or '.join(self.methods)})")
        if method != self.methods[1]:
            return {"groups": 1, "top_groups": 1, "group_score": self.score}
        groups = KeyEntry(self.key, "groups", self.defaults[0]).fields_from_config(raw)["groups"]
        top = raw.get("topk_group", self.defaults[1])
        return {"groups": groups or 1, "top_groups": top or 1, "group_score": self.score}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return the keys of group-limited expert routing; ConfigMismatchError for another `group_score` than the family's."""
        assert isinstance(model, MoeConfig)
        if model.groups > 1 and model.group_score != self.score:
            raise ConfigMismatchError(f"moe.group_score must be {self.score!r}, not {model.group_score!r}")
        return {
            self.key.split()[0]: model.groups,
            "topk_group": model.top_groups,
            "topk_method": self.methods[model.groups > 1],
        }


def deepseek_family(
    version: str, moe: tuple[MoeFieldEntry, ...], layers: FirstKDenseConfigEntry, *more: ConfigEntry
) -> ModelFamily:
    """Return the model family of DeepSeek `version` ("V2" or "V3").
    `moe` are the config entries of its router, `layers` is the one that selects layers with experts, and `more` are
    further ones.
    """
    return ModelFamily(
        name=f"deepseek_{version.lower()}",
        architecture=f"Deepseek{version}ForCausalLM",
        entries=(
            *DECODER,
            RopeEntry(scalings=frozenset({"none", "yarn"}), interleaved=True),
            LatentAttentionEntry(),
            KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
            MoeSectionEntry(
                (
                    KeyEntry("n_routed_experts num_local_experts num_experts", "num_experts"),
                    KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
                    KeyEntry("aux_loss_alpha", "aux_loss", 0.001),
                    *moe,
                ),
                layers,
            ),
            UniformWindowEntry(supports_windows=False),
            FixedFieldsEntry({"qk_norm": False}),
            *more,
        ),
        rules=(
            *build_per_expert_tensor_rules(f"{_MLP}.experts"),
            *SHARED_EXPERT_RULES,
        ),
        carried=frozenset({"ep_size", "seq_aux"}),
    )


DEEPSEEK_V2 = deepseek_family(
    "V2",
    (
        KeyEntry("num_experts_per_tok", "top_k"),
        KeyEntry("routed_scaling_factor", "scaling", 1.0),
        SharedExpertsEntry(2),
        ExpertGroupsEntry(("greedy", "group_limited_greedy"), "max"),
        AllowedValuesEntry({"norm_topk_prob": (False,), "scoring_func": ("softmax",)}),
        FixedFieldsEntry({"normalize": False, "score": "softmax", "selection_bias": False}),
    ),
    FirstKDenseConfigEntry(0),
    KeyEntry("mlp_bias", "mlp_bias", False),
)

_V3 = deepseek_family(
    "V3",
    (
        KeyEntry("num_experts_per_tok", "top_k", 8),
        KeyEntry("routed_scaling_factor", "scaling", 2.5),
        SharedExpertsEntry(1),
        ExpertGroupsEntry(("noaux_tc", "noaux_tc"), "top2", (8, 4)),
        KeyEntry("norm_topk_prob", "normalize", True),
        AllowedValuesEntry({"scoring_func": ("sigmoid",)}),
        FixedFieldsEntry({"score": "sigmoid", "selection_bias": True}),
    ),
    FirstKDenseConfigEntry(3, mtp_entry=MTP_LAYERS),
    MTP_LAYERS,
    AllowedValuesEntry({"rope_interleave": (True,)}),
    FixedFieldsEntry({"mlp_bias": False}),
)


@dataclass(frozen=True)
class YoutuInitRangeConfigEntry:
    """Translation to and from config.json of Youtu's `initializer_range`, by default 2 / sqrt(5 hidden_size)."""

    handled_config_keys: frozenset[str] = frozenset({"initializer_range"})
    handled_model_fields: frozenset[str] = frozenset({"init_std"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `init_std`."""
        return {"init_std": raw.get("initializer_range") or 2.0 / (5.0 * raw["hidden_size"]) ** 0.5}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `initializer_range` of config.json with its value."""
        return {"initializer_range": model.init_std}


YOUTU = ModelFamily(
    name="youtu",
    architecture="YoutuForCausalLM",
    entries=(
        *exclude_entries_of_fields(DECODER, "init_std", "tie_embeddings"),
        YoutuInitRangeConfigEntry(),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        RopeEntry(scalings=frozenset({"none", "yarn"}), interleaved=True),
        LatentAttentionEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"rope_interleave": (True,)}),
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
    ),
    carried=frozenset({"embedding_initializer_range"}),
)  # Youtu-LLM (Tencent): DeepSeek-V3's latent attention without experts


DEEPSEEK_V3 = replace(_V3, aliases=("kimi_k2",))  # Kimi K2 (arXiv:2507.20534)


_SHARED: tuple[ConfigEntry, ...] = (
    *llama_config_entries(norm_eps=1.5625e-7),
    KeyValueHeadsEntry(kv_default=2, dim_default=128),
    RopeEntry(fraction=0.5, partial=True, interleaved=True),
    KeyEntry("attention_bias", "qkv_bias", True),
    UniformWindowEntry(supports_windows=False),
    FixedFieldsEntry({"attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
)
_GATE_UP = TensorRule(
    f"{LAYER}.mlp.gate_up_proj.weight", (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight")
)

GLM = ModelFamily(
    name="glm", architecture="GlmForCausalLM", entries=_SHARED, rules=(_GATE_UP,), tokens=("pad_token_id",)
)

GLM4 = ModelFamily(
    name="glm4",
    architecture="Glm4ForCausalLM",
    entries=(*_SHARED, FixedFieldsEntry({"norm_position": "both"})),
    rules=(
        _GATE_UP,
        TensorRule(f"{LAYER}.post_self_attn_layernorm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
        TensorRule(f"{LAYER}.post_attention_layernorm.weight", (f"{LAYER}.pre_feedforward_layernorm.weight",)),
        TensorRule(f"{LAYER}.post_mlp_layernorm.weight", (f"{LAYER}.post_feedforward_layernorm.weight",)),
    ),
    tokens=("pad_token_id",),
)

GLM4_MOE = ModelFamily(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8, explicit_dim=False),
        RopeEntry(fraction=0.5, partial=True),
        KeyEntry("attention_bias", "qkv_bias", False),
        KeyEntry("use_qk_norm", "qk_norm", False),
        MoeSectionEntry(
            (
                KeyEntry("n_routed_experts num_local_experts", "num_experts", 128),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
                KeyEntry("num_experts_per_tok", "top_k", 8),
                KeyEntry("routed_scaling_factor", "scaling", 1.0),
                KeyEntry("norm_topk_prob", "normalize", True),
                SharedExpertsEntry(1),
                ExpertGroupsEntry(("noaux_tc", "noaux_tc"), "top2", (1, 1)),
                FixedFieldsEntry({"score": "sigmoid", "selection_bias": True}),
            ),
            FirstKDenseConfigEntry(1, mtp_entry=MTP_LAYERS),
        ),
        MTP_LAYERS,
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=(*build_per_expert_tensor_rules(f"{LAYER}.mlp.experts"), *SHARED_EXPERT_RULES),
)

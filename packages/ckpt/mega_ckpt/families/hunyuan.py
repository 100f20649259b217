"""Hunyuan 1 (Tencent), dense and with experts (arXiv:2411.02265): norms of queries and keys after the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.model_equivalence import MOE_TRAINING_FIELDS
from mega_ckpt.families.moe_entries import SHARED_MLP_RULES, MoeInAllLayersEntry, build_per_expert_tensor_rules
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig, MoeConfig

_ATTENTION, _MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
_HUNYUAN: tuple[ConfigEntry, ...] = (
    *llama_config_entries(norm_eps=1e-5),
    KeyValueHeadsEntry(),
    RopeEntry(ntk_alpha=True),
    KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
    UniformWindowEntry(supports_windows=False),
    FixedFieldsEntry({"qk_norm": True, "qk_norm_after_rope": True, "mlp_bias": False}),
)
_HUNYUAN_RULES = tuple(
    TensorRule(f"{_ATTENTION}.{part}_layernorm.weight", (f"{_ATTENTION}.{part[0]}_norm.weight",))
    for part in ("query", "key")
)

HUNYUAN_V1_DENSE = ModelFamily(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    entries=_HUNYUAN,
    rules=_HUNYUAN_RULES,
    carried=frozenset({"alpha", "eod_token_id"}),
    tokens=("pad_token_id",),
)


@dataclass(frozen=True)
class HunyuanExpertsEntry:
    """Translation to and from config.json of Hunyuan's experts in every layer and its shared MLP.
    All have the width `intermediate_size`. Numbers that may differ by layer must be equal.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"num_experts", "moe_topk", "num_experts_per_tok", "num_local_experts"}
    )
    handled_model_fields: frozenset[str] = frozenset({"moe"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `moe` of a Hunyuan model; ConfigMismatchError for numbers that differ by layer."""
        numbers = {}
        for key, aliases in (("num_experts", ("num_local_experts",)), ("moe_topk", ("num_experts_per_tok",))):
            given = next((raw[name] for name in (key, *aliases) if name in raw), 1)
            values = set(given) if isinstance(given, list) else {given}
            if len(values) != 1:
                raise ConfigMismatchError(f"{key} must be one number for all layers, not {sorted(values)}")
            numbers[key] = values.pop()
        width = raw.get("intermediate_size")
        experts = {"num_experts": numbers["num_experts"], "top_k": numbers["moe_topk"]}
        return {"moe": {**experts, "ffn_hidden_size": width, "shared_ffn_hidden_size": width}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of a Hunyuan model's experts; ConfigMismatchError for another kind of router or width."""
        moe, width = model.moe, model.ffn_hidden_size
        if moe is None:
            raise ConfigMismatchError("moe is missing (all models of this family have experts)")
        own = MoeConfig(
            num_experts=moe.num_experts, top_k=moe.top_k, ffn_hidden_size=width, shared_ffn_hidden_size=width
        )
        kept = {name: getattr(moe, name) for name in MOE_TRAINING_FIELDS} | {"group_score": moe.group_score}
        if own.model_copy(update=kept) != moe.model_copy(update={"layers": None}):
            raise ConfigMismatchError(f"moe must have a normalised softmax router and one width, {width}")
        MoeInAllLayersEntry().config_from_fields(model)
        return {"num_experts": moe.num_experts, "moe_topk": moe.top_k}


HUNYUAN_V1_MOE = ModelFamily(
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    entries=(*_HUNYUAN, HunyuanExpertsEntry()),
    rules=(
        *_HUNYUAN_RULES,
        *build_per_expert_tensor_rules(f"{_MLP}.experts"),
        TensorRule(f"{_MLP}.gate.wg.weight", (f"{_MLP}.gate.weight",)),
        *SHARED_MLP_RULES,
    ),
    carried=frozenset({"alpha", "eod_token_id"}),
    tokens=("pad_token_id",),
)

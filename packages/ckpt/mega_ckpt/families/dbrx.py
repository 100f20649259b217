"""DBRX (Databricks): clipped queries, keys and values, experts' rows in one matrix, and settings in sections of config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    check_config_json_head_dim,
    check_heads_fill_hidden_size,
)
from mega_ckpt.families.disk_layouts import LAYER, QKV, TensorRule, weight_bias_rules
from mega_ckpt.families.family import CARRIED, ModelFamily
from mega_ckpt.families.hybrid_entries import UnusedFieldsEntry
from mega_ckpt.families.moe_entries import (
    MoeInAllLayersEntry,
    MoeSectionEntry,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import (
    UniformWindowEntry,
)
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.model_config import ModelConfig

_MLP = f"{LAYER}.mlp"


@dataclass(frozen=True)
class ExpertRowsLayout:
    """Disk layout of DBRX's experts: matrices stacked row by row; with `transposed`, each as (in, out)."""

    transposed: bool = False
    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the disk shape [E * rows, columns] of the only part [E, rows, columns]; [E * columns, rows] if `transposed`."""
        ((experts, rows, columns),) = parts
        return (experts * columns, rows) if self.transposed else (experts * rows, columns)

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return the disk tensor with the experts on an axis of their own."""
        ((experts, _, _),) = parts
        view = disk.view(experts, -1, disk.shape[1])
        return [view.mT if self.transposed else view]


_SECTIONS = ("attn_config", "ffn_config")


@dataclass(frozen=True)
class DbrxFamily(ModelFamily):
    """The family of DBRX, whose config.json has sections; entries read `section.key`."""

    def select_text_config(self, raw: ConfigDict) -> ConfigDict:
        """Return the config.json with the keys of its sections as `section.key`."""
        parts = {section: raw.get(section) for section in _SECTIONS}
        inner = {
            f"{section}.{key}": value
            for section, part in parts.items()
            if isinstance(part, Mapping)
            for key, value in part.items()
            if key not in CARRIED and key not in ("hidden_size", "is_encoder_decoder")
        }
        return {**raw, **inner}

    def write_config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Return the content of a config.json for `model`, with sections."""
        flat = super().write_config_json(model)
        out: dict[str, Any] = {key: value for key, value in flat.items() if "." not in key}
        for section in _SECTIONS:
            start = f"{section}."
            out[section] = {key.removeprefix(start): value for key, value in flat.items() if key.startswith(start)}
        return out


@dataclass(frozen=True)
class DbrxRopeEntry(RopeEntry):
    """Translation to and from config.json of DBRX's rotary positions.
    Their base frequency may be in the section of attention alone.
    """

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return super().handled_config_keys | {"attn_config.rope_theta", *_SECTIONS}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `rope`; ConfigMismatchError if config.json has two different bases."""
        if wrong := [key for key in _SECTIONS if not isinstance(raw.get(key, {}), Mapping)]:
            raise ConfigMismatchError(f"{' and '.join(wrong)} must be a section")
        inner = raw.get("attn_config.rope_theta")
        outer = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta")
        if inner and outer and inner != outer:
            raise ConfigMismatchError(f"attn_config.rope_theta = {inner!r} and rope_theta = {outer!r} must be equal")
        return super().fields_from_config({**raw, "rope_theta": inner} if inner and not outer else raw)

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of rotary positions."""
        return {**super().config_from_fields(model), "attn_config.rope_theta": model.rope.theta}


@dataclass(frozen=True)
class DbrxHeadsEntry:
    """Translation to and from config.json of DBRX's key/value heads; heads together are as wide as the model."""

    handled_config_keys: frozenset[str] = frozenset({"attn_config.kv_n_heads", "num_key_value_heads", "head_dim"})
    handled_model_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `num_kv_heads` from config.json; ConfigMismatchError if it has two different numbers."""
        heads = raw.get("attn_config.kv_n_heads", 1)
        if raw.get("num_key_value_heads", heads) != heads:
            raise ConfigMismatchError(f"num_key_value_heads must be attn_config.kv_n_heads = {heads!r}")
        sizes = {"hidden_size": raw.get("d_model"), "num_attention_heads": raw.get("n_heads")}
        check_config_json_head_dim({**sizes, "head_dim": raw.get("head_dim")})
        return {"num_kv_heads": heads}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key of the number of key/value heads."""
        check_heads_fill_hidden_size(model)
        return {"attn_config.kv_n_heads": model.key_value_heads}


@dataclass(frozen=True)
class DbrxNormalizeEntry:
    """Translation to and from config.json of the p-norm that divides the weights of a token's experts in DBRX.
    It is 1, or none.
    """

    key: str = "ffn_config.moe_normalize_expert_weights"
    handled_model_fields: frozenset[str] = frozenset({"normalize"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({self.key})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` field `normalize`; ConfigMismatchError for another norm."""
        value = raw.get(self.key, 1.0)
        if value not in (None, 1):
            raise ConfigMismatchError(f"{self.key} = {value!r} is not supported (only 1 or null)")
        return {"normalize": value is not None}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return the config.json key of the p-norm that divides a token's expert weights: 1, or null without normalization."""
        return {self.key: 1.0 if model.normalize else None}


_BLOCK = "transformer.blocks.{i}"
DBRX = DbrxFamily(
    name="dbrx",
    architecture="DbrxForCausalLM",
    prefix="transformer.",
    entries=(
        KeyEntry("vocab_size", "vocab_size", 32000),
        KeyEntry("d_model hidden_size", "hidden_size", 2048),
        KeyEntry("n_layers num_hidden_layers", "num_layers", 24),
        KeyEntry("n_heads num_attention_heads", "num_attention_heads", 16),
        KeyEntry("max_seq_len max_position_embeddings", "max_position", 2048),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("emb_pdrop", "embedding_dropout", 0.0),
        KeyEntry("resid_pdrop", "residual_dropout", 0.0),
        KeyEntry("attn_config.attn_pdrop", "attention_dropout", 0.0),
        KeyEntry("attn_config.clip_qkv", "qkv_clip", None),
        DbrxHeadsEntry(),
        DbrxRopeEntry(),
        UniformWindowEntry(supports_windows=False),
        MoeSectionEntry(
            (
                KeyEntry("ffn_config.moe_num_experts", "num_experts", 4),
                KeyEntry("ffn_config.moe_top_k", "top_k", 1),
                KeyEntry("ffn_config.ffn_hidden_size", "ffn_hidden_size", 3584),
                KeyEntry("ffn_config.moe_loss_weight", "aux_loss", 0.01),
                DbrxNormalizeEntry(),
                FixedFieldsEntry({"score": "softmax"}),
            ),
            MoeInAllLayersEntry(),
        ),
        UnusedFieldsEntry({"ffn_hidden_size": "ffn_config.ffn_hidden_size"}),
        AllowedValuesEntry({"ffn_config.ffn_act_fn": ({"name": "silu"}, None), "tie_word_embeddings": (False,)}),
        FixedFieldsEntry({
            "norm": "layernorm", "norm_bias": False, "norm_eps": 1e-5, "position": "rope", "activation": "swiglu", "tie_embeddings": False,
            "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False,
        }),
    ),
    rules=(
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        *weight_bias_rules(f"{_BLOCK}.norm_attn_norm.norm_1", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.norm_attn_norm.attn.Wqkv", *QKV),
        *weight_bias_rules(f"{_BLOCK}.norm_attn_norm.attn.out_proj", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_BLOCK}.norm_attn_norm.norm_2", f"{LAYER}.post_attention_layernorm"),
        TensorRule(f"{_BLOCK}.ffn.router.layer.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(f"{_BLOCK}.ffn.experts.mlp.w1", (f"{_MLP}.experts.gate_proj.weight",), ExpertRowsLayout()),
        TensorRule(f"{_BLOCK}.ffn.experts.mlp.v1", (f"{_MLP}.experts.up_proj.weight",), ExpertRowsLayout()),
        TensorRule(f"{_BLOCK}.ffn.experts.mlp.w2", (f"{_MLP}.experts.down_proj.weight",), ExpertRowsLayout(transposed=True)),
        TensorRule("transformer.norm_f.weight", ("model.norm.weight",)),
    ),
    carried=frozenset({"ffn_config.moe_jitter_eps"}),
)  # fmt: skip

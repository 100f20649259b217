"""Megatron's settings of positions, and of latent attention with its own rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import ConfigDict, ConfigMismatchError, split_words
from mega_ckpt.formats.megatron_entries import MegatronMultiKeyEntry
from mega_common.model_config import ModelConfig, RopeConfig

POSITIONS: Mapping[str, str] = {
    "learned_absolute": "learned",
    "rope": "rope",
    "yarn": "rope",
    "none": "none",
    "relative": "relative",
}
# Constants of Megatron's rope scaling; only the factor is a setting.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
YARN_TRUNCATE = "yarn_correction_range_round_to_int"


@dataclass(frozen=True)
class MegatronPositionsEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's kind of position embeddings, and its rotary settings."""

    handled_config_keys: frozenset[str] = split_words(
        f"""position_embedding_type use_rotary_position_embeddings rotary_base rotary_percent use_rope_scaling
        rope_scaling_factor rotary_scaling_factor rotary_seq_len_interpolation_factor mscale mscale_all_dim
        yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow {YARN_TRUNCATE} rotary_interleaved"""
    )
    handled_model_fields: frozenset[str] = frozenset({"position", "rope"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `position` and, if rotary, `rope` from Megatron's arguments.
        YaRN never interleaves, and rotates whole heads.
        """
        kind = _position_kind(raw)
        if POSITIONS[kind] != "rope":  # `MegatronT5Entry` reads relative positions
            return {"position": POSITIONS[kind]}
        if kind == "yarn":
            return {
                "position": "rope",
                "rope": _read_yarn(raw, "yarn_") | {"truncate": raw.get(YARN_TRUNCATE) is not False},
            }
        rope = {"fraction": float(raw.get("rotary_percent", 1.0)), "interleaved": bool(raw.get("rotary_interleaved"))}
        return {"position": "rope", "rope": rope | _rope_theta(raw) | _scaling_without_yarn(raw)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments of the kind of position embeddings and the rotary settings.
        Raises ConfigMismatchError for positions that Megatron does not have.
        """
        rope = model.rope
        yarn = rope.scaling == "yarn" and model.position == "rope"
        names = {kind: name for name, kind in POSITIONS.items() if name != "yarn"}
        if model.position not in names:
            raise ConfigMismatchError(f"position = {model.position!r} is not supported by Megatron")
        return {
            "position_embedding_type": "yarn" if yarn else names[model.position],
            "rotary_base": int(rope.theta),
            "rotary_percent": rope.fraction,
            "rotary_interleaved": rope.interleaved,
            "use_rope_scaling": rope.scaling == "llama3",
            "rope_scaling_factor": rope.factor if rope.scaling == "llama3" else 8.0,
            "rotary_seq_len_interpolation_factor": int(rope.factor) if rope.scaling == "linear" else None,
            **(_write_yarn(rope, "yarn_") | {YARN_TRUNCATE: rope.truncate} if yarn else {}),
        }


def _position_kind(raw: ConfigDict) -> str:
    kind = (
        "rope" if raw.get("use_rotary_position_embeddings") else raw.get("position_embedding_type", "learned_absolute")
    )
    if kind not in POSITIONS or (kind == "relative" and not raw.get("is_encoder_decoder")):
        raise ConfigMismatchError(f"position_embedding_type = {kind!r} is not supported")
    return str(kind)


def _rope_theta(raw: ConfigDict) -> dict[str, Any]:
    return {"theta": float(raw.get("rotary_base", 10_000))}


def _scaling_without_yarn(raw: ConfigDict) -> dict[str, Any]:
    """Return the context extension settings other than YaRN."""
    factor = raw.get("rotary_seq_len_interpolation_factor")
    if raw.get("use_rope_scaling"):
        return LLAMA3 | {"scaling": "llama3", "factor": raw.get("rope_scaling_factor", 8.0)}
    return {"scaling": "linear", "factor": float(factor)} if factor else {}


def _read_yarn(raw: ConfigDict, prefix: str) -> dict[str, Any]:
    """Return YaRN's settings, some of whose keys begin with `prefix`; the two mscale factors apply only together."""
    out = _rope_theta(raw) | {
        "scaling": "yarn",
        "factor": raw.get("rotary_scaling_factor", 1.0),
        "original_max_position": raw.get(f"{prefix}original_max_position_embeddings") or 4096,
        "beta_fast": raw.get(f"{prefix}beta_fast") or 32.0,
        "beta_slow": raw.get(f"{prefix}beta_slow") or 1.0,
    }
    mscale, all_dim = raw.get("mscale", 1.0), raw.get("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return out | {"mscale": mscale, "mscale_all_dim": all_dim}
    if all_dim or mscale not in (None, 1.0):
        raise ConfigMismatchError(f"mscale = {mscale} is not supported with mscale_all_dim = {all_dim}")
    return out


def _write_yarn(rope: RopeConfig, prefix: str) -> dict[str, Any]:
    both = rope.mscale and rope.mscale_all_dim
    return {
        "rotary_scaling_factor": rope.factor,
        f"{prefix}original_max_position_embeddings": rope.original_max_position,
        f"{prefix}beta_fast": rope.beta_fast,
        f"{prefix}beta_slow": rope.beta_slow,
        "mscale": rope.mscale if both else 1.0,
        "mscale_all_dim": rope.mscale_all_dim if both else 0.0,
    }


@dataclass(frozen=True)
class MegatronMlaEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's multi-head latent attention (MLA), with its own head sizes, norms and YaRN default."""

    handled_config_keys: frozenset[str] = split_words(
        """multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
        original_max_position_embeddings beta_fast beta_slow"""
    )
    handled_model_fields: frozenset[str] = frozenset({"mla"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of multi-head latent attention (MLA) from Megatron's arguments; empty without MLA.
        They are the section `mla`, and the attention and rotary fields that it implies.
        """
        if not raw.get("multi_latent_attention"):
            return {}
        self._check_supported(raw)
        mla = {
            "q_lora_rank": raw.get("q_lora_rank"),
            "kv_lora_rank": raw.get("kv_lora_rank", 32),
            "qk_nope_head_dim": raw.get("qk_head_dim", 128),
            "qk_rope_head_dim": raw.get("qk_pos_emb_head_dim", 64),
            "v_head_dim": raw.get("v_head_dim", 128),
            **({"norm_eps": raw.get("norm_epsilon", 1e-5)} if raw.get("qk_layernorm") else {"latent_norm": False}),
        }
        yarn = (raw.get("rope_type") or "yarn") == "yarn"
        rope = _read_yarn(raw, "") if yarn else _rope_theta(raw) | {"fraction": float(raw.get("rotary_percent", 1.0))}
        alone = {"qk_norm": False, "qkv_bias": False, "head_dim": None, "num_kv_heads": None, "position": "rope"}
        return {"mla": mla, "rope": rope | {"interleaved": True}, **alone}

    def _check_supported(self, raw: ConfigDict) -> None:
        if POSITIONS[_position_kind(raw)] == "learned":
            raise ConfigMismatchError("multi_latent_attention is not supported with learned positions")
        if raw.get("attention_output_gate"):
            raise ConfigMismatchError("multi_latent_attention is not supported with attention_output_gate")
        if raw.get("qk_layernorm") and raw.get("layernorm_zero_centered_gamma", raw.get("apply_layernorm_1p")):
            raise ConfigMismatchError(
                "multi_latent_attention with qk_layernorm is not supported with apply_layernorm_1p"
            )
        if raw.get("rope_type") == "rope" and raw.get("mscale_all_dim") and raw.get("rotary_scaling_factor", 1.0) > 1:
            raise ConfigMismatchError("mscale_all_dim is not supported without YaRN")

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments of multi-head latent attention (MLA): ranks, head sizes and rotary type.
        Raises ConfigMismatchError for an indexer, an attention gate and other positions.
        """
        mla = model.mla
        if mla is None:
            return {"multi_latent_attention": False}
        if mla.indexer is not None:
            raise ConfigMismatchError(
                "mla.indexer is not supported: Megatron checkpoints with an indexer are not written"
            )
        if model.attention_gate or model.position != "rope":
            raise ConfigMismatchError("mla requires attention_gate = false and position = rope")
        yarn = model.rope.scaling == "yarn"
        return {
            "multi_latent_attention": True,
            "qk_layernorm": mla.latent_norm,
            "group_query_attention": False,
            "q_lora_rank": mla.q_lora_rank,
            "kv_lora_rank": mla.kv_lora_rank,
            "qk_head_dim": mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
            "rope_type": "yarn" if yarn else "rope",
            "position_embedding_type": "rope",
            "rotary_interleaved": False,  # always interleaved, but Megatron rejects the setting
            **(_write_yarn(model.rope, "") if yarn else {}),
        }

"""Mapping between Megatron's `args` in its checkpoints and `ModelConfig`: one declaration for both directions.

Names and defaults are those of Megatron-LM's arguments. Arguments without an entry do not affect what the weights
compute; a value that `ModelConfig` cannot express is an error.

BERT and T5 are distinguished from GPT by tensor names (`infer_megatron_args_from_names`). Hybrids of `MambaModel` and
`HybridModel` have half a transformer layer per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    KeyEntry,
    split_words,
)
from mega_ckpt.families.model_equivalence import canonicalize_model_config, drop_redundant_model_fields
from mega_ckpt.formats.megatron_entries import (
    MegatronActivationEntry,
    MegatronAttentionWindowEntry,
    MegatronBiasesEntry,
    MegatronInvertedSwitchEntry,
    MegatronMoeEntry,
    MegatronMtpEntry,
    MegatronMultiKeyEntry,
    MegatronSizesEntry,
)
from mega_ckpt.formats.megatron_position_entries import MegatronMlaEntry, MegatronPositionsEntry
from mega_common.errors import CheckpointError, ConfigError
from mega_common.layer_kinds import LETTERS, NORM_EPS, MambaConfig, build_hybrid_pattern, build_mamba_section
from mega_common.model_config import ModelConfig
from mega_common.strict_config import format_setting_value


@dataclass(frozen=True)
class MegatronBertEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's `is_encoder` and `bert_binary_head`, which make a model a BERT."""

    handled_config_keys: frozenset[str] = frozenset({"is_encoder", "bert_binary_head"})
    handled_model_fields: frozenset[str] = frozenset({"causal", "token_types", "masked_lm", "pooler", "sentence_pairs"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of a BERT from Megatron's arguments; empty for other models.
        They are `causal`, `token_types`, `masked_lm`, `pooler` and `sentence_pairs`. The sentence-order head implies two
        segment types.
        """
        if not raw.get("is_encoder"):
            return {}
        pairs = bool(raw.get("bert_binary_head", True))
        types = 2 if pairs else 0
        return {"causal": False, "token_types": types, "masked_lm": {}, "pooler": pairs, "sentence_pairs": pairs}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments `is_encoder` and `bert_binary_head` for a bidirectional model, else no arguments."""
        return {} if model.causal else {"is_encoder": True, "bert_binary_head": model.sentence_pairs}


@dataclass(frozen=True)
class MegatronT5Entry(MegatronMultiKeyEntry):
    """Mapping between Megatron's arguments of a T5 and `ModelConfig`.
    The arguments are `is_encoder_decoder` and the layers of encoder and decoder. Megatron has no setting for the
    decoder start token; files written by mega store it.
    """

    handled_config_keys: frozenset[str] = split_words(
        """is_encoder_decoder encoder_num_layers decoder_num_layers decoder_start_token_id
        relative_attention_num_buckets relative_attention_max_distance"""
    )
    handled_model_fields: frozenset[str] = frozenset({"num_layers", "encoder", "relative"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of a T5 from Megatron's arguments; empty unless `is_encoder_decoder` is set.
        They are `num_layers`, `encoder` and, for relative positions, `position` and `relative`.
        """
        if not raw.get("is_encoder_decoder"):
            return {}
        encoder, decoder = raw["encoder_num_layers"], raw["decoder_num_layers"]
        tied, start = not raw.get("untie_embeddings_and_output_weights"), raw.get("decoder_start_token_id", 0)
        out = {
            "num_layers": encoder + decoder,
            "encoder": {"num_layers": encoder, "head_bias": tied, "start_token": start},
        }
        if raw.get("position_embedding_type") != "relative":
            return out
        most, buckets = raw.get("relative_attention_max_distance", 128), raw.get("relative_attention_num_buckets", 32)
        return {**out, "position": "relative", "relative": {"buckets": buckets, "max_distance": most}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments of a T5, none for other models.
        Megatron's `num_layers` counts the decoder's layers only. Raises ConfigMismatchError for what Megatron's T5 does
        not have.
        """
        encoder = model.encoder
        if encoder is None:
            return {}
        if model.key_value_heads != model.num_attention_heads:
            raise ConfigMismatchError(f"num_kv_heads must be {model.num_attention_heads} in a T5")
        if encoder.head_bias != model.tie_embeddings:
            raise ConfigMismatchError(f"encoder.head_bias must equal tie_embeddings = {model.tie_embeddings}")
        if model.position == "relative" and model.relative.every_layer:
            raise ConfigMismatchError("relative.every_layer must be False")
        decoder = model.num_layers - encoder.num_layers
        return {
            "is_encoder_decoder": True, "num_layers": decoder, "encoder_num_layers": encoder.num_layers,
            "decoder_num_layers": decoder, "decoder_start_token_id": encoder.start_token,
            "relative_attention_num_buckets": model.relative.buckets,
            "relative_attention_max_distance": model.relative.max_distance,
        }  # fmt: skip


_CORE = "Megatron-Core 0.16"  # the version whose format is written
_LETTER = {kind: letter for letter, kind in LETTERS.items()}


@dataclass(frozen=True)
class MegatronHybridLayersEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's pattern of layer kinds in a hybrid model, and the sizes of its Mamba-2 layers."""

    handled_config_keys: frozenset[str] = split_words(
        """is_hybrid_model hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"""
    )
    handled_model_fields: frozenset[str] = frozenset({"layers", "mamba"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of a hybrid model from Megatron's arguments; empty for a model of transformer layers.
        They are `num_layers`, `layers` and `mamba`. Raises ConfigMismatchError for an invalid pattern, gated delta nets,
        and MTP layers.
        """
        try:
            pattern = build_hybrid_pattern(raw)
        except ValueError as error:
            raise ConfigMismatchError(str(error)) from None
        if pattern is None:
            return {}
        if "G" in pattern.letters:
            raise ConfigMismatchError(
                f"hybrid_layer_pattern: G is not supported by the MambaModel of {_CORE} (only M, *, - and E)"
            )
        if pattern.mtp_letters:
            raise ConfigMismatchError(f"hybrid_layer_pattern: MTP layers (/) are not supported by {_CORE}")
        out: dict[str, Any] = {"num_layers": len(pattern.letters), "layers": pattern.layer_kind_names}
        return {**out, "mamba": build_mamba_section(raw)} if "M" in pattern.letters else out

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments of layer kinds: the hybrid pattern and Mamba-2 sizes, or `is_hybrid_model: False`.
        The pattern is `hybrid_override_pattern`, which all versions read. Raises ConfigMismatchError for layers and Mamba-2
        settings that Megatron's hybrid model does not have.
        """
        if model.layers is None:
            return {"is_hybrid_model": False}
        halves = [[half for half in kind if half] for kind in model.layer_kinds[: model.num_layers]]
        if (
            not all(len(half) == 1 for half in halves)
            or model.hybrid
            or model.mamba1
            or model.delta
            or model.kda
            or model.lightning
            or model.conv
            or model.compressed
        ):
            raise ConfigMismatchError(f"layers must each be one of mamba, attention, mlp and moe in {_CORE}")
        if model.mtp_layers:
            raise ConfigMismatchError(f"mtp_layers must be 0 in a hybrid model of {_CORE}")
        mamba = model.mamba or MambaConfig(num_heads=1, head_dim=64)
        fixed = mamba.model_copy(
            update={"norm": "gated", "conv_kernel": 4, "conv_bias": True, "bias": False, "dt_limit": (0.0, None)}
        )
        if mamba != fixed or (mamba.norm_eps or model.norm_eps) != NORM_EPS:
            raise ConfigMismatchError(
                "mamba must have norm = gated, conv_kernel = 4, conv_bias = True, bias = False, no dt_limit and norm_eps = 1e-5"
            )
        return {
            "is_hybrid_model": True,
            "hybrid_override_pattern": "".join(_LETTER[half] for (half,) in halves),
            "hybrid_attention_ratio": 0.0,
            "hybrid_mlp_ratio": 0.0,
            "mamba_state_dim": mamba.state_size,
            "mamba_head_dim": mamba.head_dim,
            "mamba_num_groups": mamba.num_groups,
            "mamba_num_heads": mamba.num_heads,
        }


NORMS: Mapping[str, str] = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
SINKS: Mapping[str, Any] = {"vanilla": False, "learnable": True}  # not off-by-one: constant zero, without weights
DIVISOR = 128  # the vocabulary is padded to a multiple of this times tp

SETTINGS: tuple[ConfigEntry, ...] = (
    KeyEntry("num_layers", "num_layers"),
    KeyEntry("hidden_size", "hidden_size"),
    KeyEntry("num_attention_heads", "num_attention_heads"),
    MegatronSizesEntry(),
    KeyEntry("max_position_embeddings", "max_position"),
    MegatronInvertedSwitchEntry("untie_embeddings_and_output_weights", "tie_embeddings"),
    KeyEntry("normalization", "norm", "LayerNorm", NORMS),
    KeyEntry("norm_epsilon", "norm_eps", 1e-5),
    KeyEntry("layernorm_zero_centered_gamma apply_layernorm_1p", "zero_centered_norm", False, must_agree=False),
    MegatronActivationEntry(),
    MegatronBiasesEntry(),
    KeyEntry("qk_layernorm", "qk_norm", False),
    KeyEntry("attention_output_gate", "attention_gate", False),
    KeyEntry("softmax_type", "attention_sinks", "vanilla", SINKS),
    MegatronAttentionWindowEntry(),
    MegatronPositionsEntry(),
    MegatronMlaEntry(),
    MegatronHybridLayersEntry(),
    MegatronMoeEntry(),
    MegatronMtpEntry(),
    MegatronBertEntry(),
    MegatronT5Entry(),
    KeyEntry("hidden_dropout", "residual_dropout", 0.1),
    KeyEntry("attention_dropout", "attention_dropout", 0.1),
    KeyEntry("init_method_std", "init_std", 0.02),
    AllowedValuesEntry(
        {
            "apply_residual_connection_post_layernorm": (False, None),
            "qk_l2_norm": (False, None),
            "experimental_attention_variant": (None,),
            "no_rope_freq": (None, 0),
            "moe_apply_probs_on_input": (False, None),
            "heterogeneous_layers_config_path": (None,),
            "use_mup": (False, None),
        }
    ),
)


def read_megatron_args(args: ConfigDict, source: object, extra: ConfigDict | None = None) -> ModelConfig:
    """Return the model configuration that Megatron's arguments describe.
    The arguments are `args`; fields of `ModelConfig` in `extra` override them, and errors name `source`.

    Raises:
        CheckpointError: naming what is missing, and what `ModelConfig` cannot express.
    """
    if args.get("retro_add_retriever"):
        raise CheckpointError(
            f"{source}: Megatron's Retro models are not supported", hint="train a new one with model.retro"
        )
    fields, found = _read_fields(args, (extra or {}).keys()) if args else ({}, [])
    if found:
        raise CheckpointError(
            f"{source}: its settings (args) are incomplete or not supported: {'; '.join(found)}",
            hint="give missing settings of the model in a file: --config model.yaml",
        )
    try:
        return ModelConfig.parse(fields | dict(extra or {}), source=f"{source}: its settings (args)")
    except ConfigError as error:
        other = "" if args else "; for a checkpoint of FSDP or torchtitan, add the model's config.json to the folder"
        raise CheckpointError(error.message, hint=f"add or override settings with --config model.yaml{other}") from None


def _read_fields(args: ConfigDict, given: Set[str] = frozenset()) -> tuple[dict[str, Any], list[str]]:
    """Return fields of `ModelConfig`, and the settings without counterpart, except those that only affect fields in
    `given`.
    """
    raw, fields, found = dict(args), dict[str, Any](), []
    raw.setdefault("norm_epsilon", raw.get("layernorm_epsilon", 1e-5))
    if raw.get("num_layers") is None and raw.get("hybrid_layer_pattern"):
        raw["num_layers"] = sum(letter not in "|" for letter in str(raw["hybrid_layer_pattern"]).partition("/")[0])
    for entry in SETTINGS:
        try:
            fields |= entry.fields_from_config(raw)
        except ConfigMismatchError as error:
            if not entry.handled_model_fields or not entry.handled_model_fields <= given:
                found.append(str(error))
        except (TypeError, ValueError):
            found.append(f"{', '.join(sorted(entry.handled_config_keys & raw.keys()))}: a value has the wrong type")
    if fields.get("layers") and not any(layer.endswith("moe") for layer in fields["layers"]):
        fields["moe"] = None  # settings of experts are unused
    return fields | {"embedding_dropout": fields.get("residual_dropout", 0.0)}, found


def write_megatron_args(model: ModelConfig, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Return Megatron's arguments (`args` of its checkpoints) for a model; a CheckpointError for settings that Megatron lacks.
    They are those of a run of `model` with tensor parallel size `tp` and pipeline parallel size `pp`.

    Raises:
        CheckpointError: naming every setting that Megatron cannot express.
    """
    if model.retro is not None:
        raise CheckpointError("retro is not supported with --to megatron", hint="use --to mega")
    out, model = dict[str, Any](), drop_redundant_model_fields(model)
    for entry in SETTINGS:
        try:
            out |= entry.config_from_fields(model)
        except ConfigMismatchError as error:
            raise CheckpointError(f"Megatron cannot express this model: {error}") from None
    fields, found = _read_fields(out)
    if found:
        raise CheckpointError(f"Megatron cannot express this model: {'; '.join(found)}")
    lost = _list_differences(_comparable_fields(model), _comparable_fields(ModelConfig.parse(fields)))
    if model.qk_norm and model.norm == "layernorm":
        lost.append("qk_norm = True with norm = layernorm")
    if lost:
        raise CheckpointError(f"Megatron cannot express this model: {', '.join(lost)} is not supported")
    return out | {
        "padded_vocab_size": padded_vocab_size(model.vocab_size, tp),
        "make_vocab_size_divisible_by": DIVISOR,
        "seq_length": model.max_position,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "layernorm_epsilon": model.norm_eps,
        "apply_layernorm_1p": model.zero_centered_norm,
    }


def _comparable_fields(model: ModelConfig) -> dict[str, Any]:
    fields, rope = canonicalize_model_config(model).model_dump(), model.rope
    if model.mla and not model.mla.latent_norm:
        fields["mla"].pop("norm_eps")  # without effect
    if model.position != "rope":
        return fields | {"rope": None}
    unused = {} if rope.mscale and rope.mscale_all_dim else {"mscale": None, "mscale_all_dim": None}
    return fields | {"rope": fields["rope"] | unused}


def _list_differences(one: ConfigDict, other: ConfigDict) -> list[str]:
    """Return 'name = value' of the settings in `one` that differ in `other`."""
    out = []
    for name, value in one.items():
        if isinstance(value, dict) and isinstance(other[name], dict):
            out += [f"{name}.{text}" for text in _list_differences(value, other[name])]
        elif value != other[name]:
            out.append(f"{name} = {format_setting_value(value)}")
    return out


def padded_vocab_size(size: int, tp: int) -> int:
    """Return the rows of Megatron's embedding for a vocabulary of `size`: the next multiple of 128 times `tp`."""
    return -(-size // (DIVISOR * tp)) * DIVISOR * tp

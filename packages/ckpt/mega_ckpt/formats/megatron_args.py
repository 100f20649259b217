"""Mapping between Megatron's `args` in its checkpoints and `ModelConfig`: one declaration for both directions.

Names and defaults are those of Megatron-LM's arguments. An argument that is not here changes nothing of what the weights
compute; one that is here with a value that `ModelConfig` has not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigEntry,
    ConfigMismatchError,
    HfConfigDict,
    KeyEntry,
)
from mega_ckpt.families.model_equivalence import normalize_config, resolve_config
from mega_ckpt.formats.megatron_architecture_entries import BertEntry, HybridLayersEntry, T5Entry
from mega_ckpt.formats.megatron_entries import (
    ActivationEntry,
    BiasesEntry,
    InvertedSwitchEntry,
    MegatronMoeEntry,
    MegatronSizesEntry,
    MtpEntry,
    WindowEntry,
)
from mega_ckpt.formats.megatron_position_entries import MegatronMlaEntry, PositionsEntry
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig

NORMS: Mapping[str, str] = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
SINKS: Mapping[str, Any] = {"vanilla": False, "learnable": True}  # off-by-one: they are zero, and no weights
DIVISOR = 128  # the vocabulary is padded to a multiple of this times tp

SETTINGS: tuple[ConfigEntry, ...] = (
    KeyEntry("num_layers", "num_layers"),
    KeyEntry("hidden_size", "hidden_size"),
    KeyEntry("num_attention_heads", "num_attention_heads"),
    MegatronSizesEntry(),
    KeyEntry("max_position_embeddings", "max_position"),
    InvertedSwitchEntry("untie_embeddings_and_output_weights", "tie_embeddings"),
    KeyEntry("normalization", "norm", "LayerNorm", NORMS),
    KeyEntry("norm_epsilon", "norm_eps", 1e-5),
    KeyEntry("layernorm_zero_centered_gamma apply_layernorm_1p", "zero_centered_norm", False, must_agree=False),
    ActivationEntry(),
    BiasesEntry(),
    KeyEntry("qk_layernorm", "qk_norm", False),
    KeyEntry("attention_output_gate", "attention_gate", False),
    KeyEntry("softmax_type", "attention_sinks", "vanilla", SINKS),
    WindowEntry(),
    PositionsEntry(),
    MegatronMlaEntry(),
    HybridLayersEntry(),
    MegatronMoeEntry(),
    MtpEntry(),
    BertEntry(),
    T5Entry(),
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


def read_megatron_args(args: HfConfigDict, source: object, extra: HfConfigDict | None = None) -> ModelConfig:
    """Return the model that `args` describe, with the fields of `ModelConfig` in `extra` overriding theirs.

    Raises:
        CheckpointError: naming what is missing, and what `ModelConfig` cannot express.
    """
    if args.get("retro_add_retriever"):
        raise CheckpointError(
            f"{source}: a model of Megatron's Retro, which mega does not read",
            hint="model.retro trains one from its start",
        )
    fields, found = _read_fields(args, (extra or {}).keys()) if args else ({}, [])
    if found:
        raise CheckpointError(
            f"{source}: its settings (args) do not give a model: {'; '.join(found)}",
            hint="give what is missing in a file of model settings: --config model.yaml",
        )
    try:
        return ModelConfig.parse(fields | dict(extra or {}), source=f"{source}: its settings (args)")
    except ConfigError as error:
        other = "" if args else "; where FSDP or torchtitan wrote it, put the model's config.json into the folder"
        raise CheckpointError(
            error.message, hint=f"settings can be given, or replaced, with --config model.yaml{other}"
        ) from None


def _read_fields(args: HfConfigDict, given: Set[str] = frozenset()) -> tuple[dict[str, Any], list[str]]:
    """Return fields of `ModelConfig`, and the settings without counterpart, except those that only affect fields in
    `given`.
    """
    raw, fields, found = dict(args), dict[str, Any](), []
    raw.setdefault("norm_epsilon", raw.get("layernorm_epsilon", 1e-5))
    if raw.get("num_layers") is None and raw.get("hybrid_layer_pattern"):
        raw["num_layers"] = sum(letter not in "|" for letter in str(raw["hybrid_layer_pattern"]).partition("/")[0])
    for entry in SETTINGS:
        try:
            fields |= entry.read_config_keys(raw)
        except ConfigMismatchError as error:
            if not entry.covered_fields or not entry.covered_fields <= given:
                found.append(str(error))
        except (TypeError, ValueError):
            found.append(f"{', '.join(sorted(entry.covered_keys & raw.keys()))}: a value of the wrong kind")
    if fields.get("layers") and not any(layer.endswith("moe") for layer in fields["layers"]):
        fields["moe"] = None  # whatever is said of experts
    return fields | {"embedding_dropout": fields.get("residual_dropout", 0.0)}, found


def write_megatron_args(model: ModelConfig, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Return the `args` of `model`, as in a run with these parallel sizes.

    Raises:
        CheckpointError: naming every setting that Megatron has not.
    """
    if model.retro is not None:
        told = "it reads neighbours (retro), and mega writes no checkpoints of Megatron's Retro"
        raise CheckpointError(f"Megatron cannot express this model: {told}", hint="--to mega")
    out, model = dict[str, Any](), normalize_config(model)
    for entry in SETTINGS:
        try:
            out |= entry.write_config_keys(model)
        except ConfigMismatchError as error:
            raise CheckpointError(f"Megatron cannot express this model: {error}") from None
    fields, found = _read_fields(out)
    if found:
        raise CheckpointError(f"Megatron cannot express this model: {'; '.join(found)}")
    lost = _list_differences(_comparable_fields(model), _comparable_fields(ModelConfig.parse(fields)))
    if model.qk_norm and model.norm == "layernorm":
        lost.append("qk_norm = True (in Megatron it would be a layernorm)")
    if lost:
        raise CheckpointError(f"Megatron cannot express this model: it has no {', no '.join(lost)}")
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
    fields, rope = resolve_config(model).model_dump(), model.rope
    if model.position != "rope":
        return fields | {"rope": None}
    unused = {} if rope.mscale and rope.mscale_all_dim else {"mscale": None, "mscale_all_dim": None}
    return fields | {"rope": fields["rope"] | unused}


def _list_differences(one: HfConfigDict, other: HfConfigDict) -> list[str]:
    """Return 'name = value' of the settings in `one` that differ in `other`."""
    out = []
    for name, value in one.items():
        if isinstance(value, dict) and isinstance(other[name], dict):
            out += [f"{name}.{text}" for text in _list_differences(value, other[name])]
        elif value != other[name]:
            out.append(f"{name} = {value!r}")
    return out


def padded_vocab_size(size: int, tp: int) -> int:
    """Return the rows of the embedding that Megatron allocates for a vocabulary."""
    return -(-size // (DIVISOR * tp)) * DIVISOR * tp

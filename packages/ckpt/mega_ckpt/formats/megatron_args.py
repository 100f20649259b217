"""Megatron's `args`, which lie in its checkpoints, and `ModelConfig`: one declaration for both directions.

Names and defaults are those of Megatron-LM's arguments. An argument that is not here changes nothing of what the weights
compute; one that is here with a value that `ModelConfig` has not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from mega_ckpt.families.keys import Entry, Key, MismatchError, Only, Raw
from mega_ckpt.families.plain import plain, resolved
from mega_ckpt.formats.megatron_encoders import Encoder, EncoderDecoder
from mega_ckpt.formats.megatron_entries import Activation, Biases, Experts, Further, Not, Sizes, Window
from mega_ckpt.formats.megatron_hybrid import Hybrid
from mega_ckpt.formats.megatron_rope import Latent, Positions
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig

NORMS: Mapping[str, str] = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
SINKS: Mapping[str, Any] = {"vanilla": False, "learnable": True}  # off-by-one: they are zero, and no weights
DIVISOR = 128  # the vocabulary is padded to a multiple of this times tp

SETTINGS: tuple[Entry, ...] = (
    Key("num_layers", "num_layers"),
    Key("hidden_size", "hidden_size"),
    Key("num_attention_heads", "num_attention_heads"),
    Sizes(),
    Key("max_position_embeddings", "max_position"),
    Not("untie_embeddings_and_output_weights", "tie_embeddings"),
    Key("normalization", "norm", "LayerNorm", NORMS),
    Key("norm_epsilon", "norm_eps", 1e-5),
    Key("layernorm_zero_centered_gamma apply_layernorm_1p", "zero_centered_norm", False, agreed=False),
    Activation(),
    Biases(),
    Key("qk_layernorm", "qk_norm", False),
    Key("attention_output_gate", "attention_gate", False),
    Key("softmax_type", "attention_sinks", "vanilla", SINKS),
    Window(),
    Positions(),
    Latent(),
    Hybrid(),
    Experts(),
    Further(),
    Encoder(),
    EncoderDecoder(),
    Key("hidden_dropout", "residual_dropout", 0.1),
    Key("attention_dropout", "attention_dropout", 0.1),
    Key("init_method_std", "init_std", 0.02),
    Only(
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


def read_args(args: Raw, source: object, extra: Raw | None = None) -> ModelConfig:
    """The model that `args` describe, with the settings in `extra` (fields of `ModelConfig`) in place of theirs.

    Raises:
        CheckpointError: naming what is missing, and what `ModelConfig` cannot express.
    """
    fields, found = _fields(args, (extra or {}).keys()) if args else ({}, [])
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


def _fields(args: Raw, given: Set[str] = frozenset()) -> tuple[dict[str, Any], list[str]]:
    """Fields of `ModelConfig`, and what has none there, but for what only concerns those that are `given` anyway."""
    raw, fields, found = dict(args), dict[str, Any](), []
    raw.setdefault("norm_epsilon", raw.get("layernorm_epsilon", 1e-5))
    if raw.get("num_layers") is None and raw.get("hybrid_layer_pattern"):
        raw["num_layers"] = sum(letter not in "|" for letter in str(raw["hybrid_layer_pattern"]).partition("/")[0])
    for entry in SETTINGS:
        try:
            fields |= entry.read(raw)
        except MismatchError as error:
            if not entry.fields or not entry.fields <= given:
                found.append(str(error))
        except (TypeError, ValueError):
            found.append(f"{', '.join(sorted(entry.keys & raw.keys()))}: a value of the wrong kind")
    if fields.get("layers") and not any(layer.endswith("moe") for layer in fields["layers"]):
        fields["moe"] = None  # whatever is said of experts
    return fields | {"embedding_dropout": fields.get("residual_dropout", 0.0)}, found


def write_args(model: ModelConfig, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """The `args` of `model`, as a run with these sizes would have them.

    Raises:
        CheckpointError: naming every setting that Megatron has not.
    """
    out, model = dict[str, Any](), plain(model)
    for entry in SETTINGS:
        try:
            out |= entry.write(model)
        except MismatchError as error:
            raise CheckpointError(f"Megatron cannot express this model: {error}") from None
    fields, found = _fields(out)
    if found:
        raise CheckpointError(f"Megatron cannot express this model: {'; '.join(found)}")
    lost = _different(_said(model), _said(ModelConfig.parse(fields)))
    if model.qk_norm and model.norm == "layernorm":
        lost.append("qk_norm = True (in Megatron it would be a layernorm)")
    if lost:
        raise CheckpointError(f"Megatron cannot express this model: it has no {', no '.join(lost)}")
    return out | {
        "padded_vocab_size": padded_vocab(model.vocab_size, tp),
        "make_vocab_size_divisible_by": DIVISOR,
        "seq_length": model.max_position,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "layernorm_epsilon": model.norm_eps,
        "apply_layernorm_1p": model.zero_centered_norm,
    }


def _said(model: ModelConfig) -> dict[str, Any]:
    fields, rope = resolved(model).model_dump(), model.rope
    if model.position != "rope":
        return fields | {"rope": None}
    unused = {} if rope.mscale and rope.mscale_all_dim else {"mscale": None, "mscale_all_dim": None}
    return fields | {"rope": fields["rope"] | unused}


def _different(one: Raw, other: Raw) -> list[str]:
    """'name = value' of what is in `one` and not the same in `other`."""
    out = []
    for name, value in one.items():
        if isinstance(value, dict) and isinstance(other[name], dict):
            out += [f"{name}.{text}" for text in _different(value, other[name])]
        elif value != other[name]:
            out.append(f"{name} = {value!r}")
    return out


def padded_vocab(size: int, tp: int) -> int:
    """Rows of the embedding that Megatron makes for a vocabulary."""
    return -(-size // (DIVISOR * tp)) * DIVISOR * tp

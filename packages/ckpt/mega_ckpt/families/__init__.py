"""The families of models that mega reads and writes, each declared in one small file."""

from __future__ import annotations

import difflib
from typing import Any

from mega_ckpt.families.base import TRAINING_FIELDS, Family
from mega_ckpt.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mega_ckpt.families.experts import TRAINING_FIELDS as MOE_TRAINING_FIELDS
from mega_ckpt.families.gemma2 import GEMMA2
from mega_ckpt.families.gemma3 import GEMMA3
from mega_ckpt.families.gpt2 import GPT2
from mega_ckpt.families.gpt_neox import GPT_NEOX
from mega_ckpt.families.gpt_oss import GPT_OSS
from mega_ckpt.families.keys import Raw
from mega_ckpt.families.llama import LLAMA
from mega_ckpt.families.ministral import MINISTRAL
from mega_ckpt.families.mistral import MISTRAL
from mega_ckpt.families.mixtral import MIXTRAL
from mega_ckpt.families.olmo2 import OLMO2
from mega_ckpt.families.phi3 import PHI3
from mega_ckpt.families.qwen2 import QWEN2
from mega_ckpt.families.qwen2_moe import QWEN2_MOE
from mega_ckpt.families.qwen3 import QWEN3
from mega_ckpt.families.qwen3_moe import QWEN3_MOE
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig, MoeConfig

__all__ = ["FAMILIES", "Family", "family_for", "family_named", "family_of", "same_model"]

# In order of preference: a model that several can express becomes the first.
FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, PHI3, OLMO2, GPT_NEOX, GEMMA2, GEMMA3, MINISTRAL, MIXTRAL, QWEN3_MOE, QWEN2_MOE,
    GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2,
)  # fmt: skip


def family_named(name: object, source: str = "family") -> Family:
    """The family with that `model_type`.

    Raises:
        CheckpointError: for a name that is not known, with the nearest one and all known ones.
    """
    known = {family.name: family for family in FAMILIES}
    if isinstance(name, str) and name in known:
        return known[name]
    near = difflib.get_close_matches(str(name), known, n=1)
    raise CheckpointError(
        f"{source}: model_type {name!r} is not known" + (f"; did you mean {near[0]!r}?" if near else ""),
        hint=f"known: {', '.join(known)}",
    )


def family_of(raw: Raw, source: str = "config.json") -> Family:
    """The family that a config.json names.

    Raises:
        CheckpointError: when it names none or one that is not known.
    """
    if "model_type" not in raw:
        raise CheckpointError(f"{source}: has no model_type", hint="is this the config.json of a language model?")
    if raw["model_type"] == MISTRAL.name and "layer_types" in raw:  # as transformers takes it
        return MINISTRAL
    return family_named(raw["model_type"], source)


def family_for(model: ModelConfig) -> Family:
    """The first family that can express `model`.

    Raises:
        CheckpointError: when none can, with the settings that prevent each.
    """
    found = [(family, family.problems(model)) for family in FAMILIES]
    for family, problems in found:
        if not problems:
            return family
    reasons = "\n".join(f"  {family.name}: {'; '.join(problems)}" for family, problems in found)
    raise CheckpointError(f"no HuggingFace family can express this model:\n{reasons}")


def same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations compute the same from the same weights: defaults filled in, training set aside."""
    return one.num_layers == other.num_layers and _resolved(one) == _resolved(other)


def _resolved(model: ModelConfig) -> ModelConfig:
    plain = {name: ModelConfig.model_fields[name].default for name in TRAINING_FIELDS}
    heads = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    return model.model_copy(update={**plain, **heads, **_windows(model), **_experts(model)})


def _experts(model: ModelConfig) -> dict[str, Any]:
    """The fields about experts, those that say nothing left out."""
    if model.moe is None:
        return {}
    layers = range(model.num_layers + model.mtp_layers)
    sparse = [layer for layer in layers if model.has_experts(layer)]
    everywhere = len(sparse) == len(layers)
    plain = {name: MoeConfig.model_fields[name].default for name in MOE_TRAINING_FIELDS}
    ungrouped = {"group_score": "max"} if model.moe.groups == 1 else {}
    moe = model.moe.model_copy(update={**plain, **ungrouped, "layers": None if everywhere else sparse})
    return {"moe": moe, "ffn_hidden_size": model.moe.ffn_hidden_size if everywhere else model.ffn_hidden_size}


def _windows(model: ModelConfig) -> dict[str, Any]:
    """The fields about sliding windows, those that say nothing left out."""
    full = [layer for layer in range(model.num_layers) if model.window(layer) is None]
    if len(full) == model.num_layers:
        return dict.fromkeys(("sliding_window", "full_attention_layers", "local_rope"))
    same = model.local_rope == model.rope
    return {"full_attention_layers": full or None, "local_rope": None if same else model.local_rope}

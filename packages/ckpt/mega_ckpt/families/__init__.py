"""Model families that mega reads and writes, as declarations."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from mega_ckpt.families.bert_encoders import BERT, MEGATRON_BERT, MODERNBERT, ROBERTA
from mega_ckpt.families.config_entries import HfConfigDict
from mega_ckpt.families.deepseek_glm import DEEPSEEK_V2, DEEPSEEK_V3, GLM, GLM4, GLM4_MOE
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.gemma import GEMMA, GEMMA2, GEMMA3
from mega_ckpt.families.gpt2_decoders import GPT2, GPT_BIGCODE
from mega_ckpt.families.granite import GRANITE, GRANITE_MOE
from mega_ckpt.families.layernorm_decoders import (
    COHERE,
    COHERE2,
    FALCON,
    GPT_NEOX,
    JAIS2,
    NEMOTRON,
    STABLELM,
    STARCODER2,
)
from mega_ckpt.families.llama_decoders import (
    ARCEE,
    ERNIE4_5,
    EXAONE4,
    HELIUM,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from mega_ckpt.families.mamba_decoders import BAMBA, GRANITE_MOE_HYBRID, MAMBA2
from mega_ckpt.families.model_equivalence import is_same_model
from mega_ckpt.families.moe_decoders import GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from mega_ckpt.families.nemotron_h import NEMOTRON_H
from mega_ckpt.families.qwen_hybrids import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mega_ckpt.families.t5 import MT5, T5, UMT5
from mega_ckpt.families.vision_family import VisionLanguageFamily, text_only_config
from mega_ckpt.families.vision_language import GEMMA3_VISION, LLAVA, LLAVA_NEXT, QWEN2_5_VL
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

__all__ = ["FAMILIES", "ModelFamily", "family_by_name", "family_for_model", "family_of_config", "is_same_model"]

# In order of preference: a model that several can express becomes the first.
FAMILIES: tuple[ModelFamily, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, PHI3, OLMO2, GPT_NEOX, GEMMA2, GEMMA3, MINISTRAL, MIXTRAL, QWEN3_MOE, QWEN2_MOE,
    GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2, SMOLLM3, SEED_OSS, GRANITE, GRANITE_MOE, OLMO3, OLMOE, GEMMA, ERNIE4_5, HELIUM,
    GLM, GLM4, GLM4_MOE, EXAONE4, ARCEE, STARCODER2, NEMOTRON, STABLELM, JAIS2, COHERE, COHERE2, FALCON, GPT_BIGCODE,
    NEMOTRON_H, MAMBA2, BAMBA, GRANITE_MOE_HYBRID, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, T5, MT5, UMT5, BERT, ROBERTA,
    MODERNBERT, MEGATRON_BERT,
)  # fmt: skip

# Models that see, around a text model of one of these families.
SEEING: tuple[VisionLanguageFamily, ...] = (LLAVA, LLAVA_NEXT, GEMMA3_VISION, QWEN2_5_VL)

_NEAREST = 8  # families that are named where none fits


def family_by_name(name: object, source: str = "family") -> ModelFamily:
    """Return the family with this `model_type`.

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


def family_of_config(raw: HfConfigDict, source: str = "config.json") -> ModelFamily:
    """Return the family of a config.json.

    Raises:
        CheckpointError: when it names none or one that is not known.
    """
    if "model_type" not in raw:
        raise CheckpointError(f"{source}: has no model_type", hint="is this the config.json of a language model?")
    if raw["model_type"] == MISTRAL.name and "layer_types" in raw:  # as transformers takes it
        return MINISTRAL
    seeing = next((family for family in SEEING if family.name == raw["model_type"]), None)
    if seeing is not None:
        return replace(
            seeing, text=seeing.text or family_of_config(seeing.text_config_of(raw), f"{source}: text_config")
        )
    whole = next(
        (family for family in FAMILIES if family.outer_model_type and family.outer_model_type == raw["model_type"]),
        None,
    )
    if whole is None and "vision_config" in raw:
        known = ", ".join(family.name for family in SEEING)
        raise CheckpointError(
            f"{source}: model_type {raw['model_type']!r} sees images in a way that mega does not know",
            hint=f"models that see: {known}",
        )
    return whole or family_by_name(raw["model_type"], source)


def family_for_model(model: ModelConfig) -> ModelFamily:
    """Return the first family that can express `model`.

    Raises:
        CheckpointError: when none can, with the settings that prevent those that come nearest.
    """
    if model.retro is not None:
        raise CheckpointError(
            "no HuggingFace family reads neighbours of its text (retro)", hint="keep mega's own format"
        )
    known: Sequence[ModelFamily] = FAMILIES
    if model.vision is not None:
        known = [family for family in SEEING if family.text is not None]  # of one text model alone
        if model.rope.sections is None:
            known = [
                replace(family, text=family_for_model(text_only_config(model)))
                for family in SEEING
                if family not in known
            ]
    found = [(family, family.unsupported_settings(model)) for family in known]
    for family, problems in found:
        if not problems:
            return family
    nearest = sorted(found, key=lambda each: len(each[1]))[:_NEAREST]
    reasons = "\n".join(f"  {family.name}: {'; '.join(problems)}" for family, problems in nearest)
    raise CheckpointError(f"no HuggingFace family can express this model:\n{reasons}")

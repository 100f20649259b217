"""The families of models that mega reads and writes, each declared in one small file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from mega_ckpt.families.arcee import ARCEE
from mega_ckpt.families.bamba import BAMBA
from mega_ckpt.families.base import Family
from mega_ckpt.families.bert import BERT, MEGATRON_BERT
from mega_ckpt.families.cohere import COHERE, COHERE2
from mega_ckpt.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mega_ckpt.families.ernie4_5 import ERNIE4_5
from mega_ckpt.families.exaone4 import EXAONE4
from mega_ckpt.families.falcon import FALCON
from mega_ckpt.families.gemma import GEMMA
from mega_ckpt.families.gemma2 import GEMMA2
from mega_ckpt.families.gemma3 import GEMMA3
from mega_ckpt.families.gemma3_vision import GEMMA3_VISION
from mega_ckpt.families.glm import GLM, GLM4, GLM4_MOE
from mega_ckpt.families.gpt2 import GPT2
from mega_ckpt.families.gpt_bigcode import GPT_BIGCODE
from mega_ckpt.families.gpt_neox import GPT_NEOX
from mega_ckpt.families.gpt_oss import GPT_OSS
from mega_ckpt.families.granite import GRANITE, GRANITE_MOE
from mega_ckpt.families.granite_hybrid import GRANITE_MOE_HYBRID
from mega_ckpt.families.helium import HELIUM
from mega_ckpt.families.jais2 import JAIS2
from mega_ckpt.families.keys import Raw
from mega_ckpt.families.llama import LLAMA
from mega_ckpt.families.llava import LLAVA
from mega_ckpt.families.llava_next import LLAVA_NEXT
from mega_ckpt.families.mamba2 import MAMBA2
from mega_ckpt.families.ministral import MINISTRAL
from mega_ckpt.families.mistral import MISTRAL
from mega_ckpt.families.mixtral import MIXTRAL
from mega_ckpt.families.modernbert import MODERNBERT
from mega_ckpt.families.nemotron import NEMOTRON
from mega_ckpt.families.nemotron_h import NEMOTRON_H
from mega_ckpt.families.olmo2 import OLMO2
from mega_ckpt.families.olmo3 import OLMO3
from mega_ckpt.families.olmoe import OLMOE
from mega_ckpt.families.phi3 import PHI3
from mega_ckpt.families.plain import same_model
from mega_ckpt.families.qwen2 import QWEN2
from mega_ckpt.families.qwen2_5_vl import QWEN2_5_VL
from mega_ckpt.families.qwen2_moe import QWEN2_MOE
from mega_ckpt.families.qwen3 import QWEN3
from mega_ckpt.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from mega_ckpt.families.qwen3_moe import QWEN3_MOE
from mega_ckpt.families.qwen3_next import QWEN3_NEXT
from mega_ckpt.families.roberta import ROBERTA
from mega_ckpt.families.seed_oss import SEED_OSS
from mega_ckpt.families.smollm3 import SMOLLM3
from mega_ckpt.families.stablelm import STABLELM
from mega_ckpt.families.starcoder2 import STARCODER2
from mega_ckpt.families.t5 import MT5, T5, UMT5
from mega_ckpt.families.vision import SeeingFamily, text_model
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

__all__ = ["FAMILIES", "Family", "family_for", "family_named", "family_of", "same_model"]

# In order of preference: a model that several can express becomes the first.
FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, PHI3, OLMO2, GPT_NEOX, GEMMA2, GEMMA3, MINISTRAL, MIXTRAL, QWEN3_MOE, QWEN2_MOE,
    GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2, SMOLLM3, SEED_OSS, GRANITE, GRANITE_MOE, OLMO3, OLMOE, GEMMA, ERNIE4_5, HELIUM,
    GLM, GLM4, GLM4_MOE, EXAONE4, ARCEE, STARCODER2, NEMOTRON, STABLELM, JAIS2, COHERE, COHERE2, FALCON, GPT_BIGCODE,
    NEMOTRON_H, MAMBA2, BAMBA, GRANITE_MOE_HYBRID, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, T5, MT5, UMT5, BERT, ROBERTA,
    MODERNBERT, MEGATRON_BERT,
)  # fmt: skip

# Models that see, around a text model of one of these families.
SEEING: tuple[SeeingFamily, ...] = (LLAVA, LLAVA_NEXT, GEMMA3_VISION, QWEN2_5_VL)

_NEAREST = 8  # families that are named where none fits


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
    seeing = next((family for family in SEEING if family.name == raw["model_type"]), None)
    if seeing is not None:
        return replace(seeing, text=seeing.text or family_of(seeing.text_of(raw), f"{source}: text_config"))
    whole = next((family for family in FAMILIES if family.whole and family.whole == raw["model_type"]), None)
    if whole is None and "vision_config" in raw:
        known = ", ".join(family.name for family in SEEING)
        raise CheckpointError(
            f"{source}: model_type {raw['model_type']!r} sees images in a way that mega does not know",
            hint=f"models that see: {known}",
        )
    return whole or family_named(raw["model_type"], source)


def family_for(model: ModelConfig) -> Family:
    """The first family that can express `model`.

    Raises:
        CheckpointError: when none can, with the settings that prevent those that come nearest.
    """
    if model.retro is not None:
        raise CheckpointError(
            "no HuggingFace family reads neighbours of its text (retro)", hint="keep mega's own format"
        )
    known: Sequence[Family] = FAMILIES
    if model.vision is not None:
        known = [family for family in SEEING if family.text is not None]  # of one text model alone
        if model.rope.sections is None:
            known = [replace(family, text=family_for(text_model(model))) for family in SEEING if family not in known]
    found = [(family, family.problems(model)) for family in known]
    for family, problems in found:
        if not problems:
            return family
    nearest = sorted(found, key=lambda each: len(each[1]))[:_NEAREST]
    reasons = "\n".join(f"  {family.name}: {'; '.join(problems)}" for family, problems in nearest)
    raise CheckpointError(f"no HuggingFace family can express this model:\n{reasons}")

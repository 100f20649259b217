"""Model families that mega reads and writes, as declarations."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from mega_ckpt.families.alibi_decoders import BLOOM, MPT
from mega_ckpt.families.bert_decoders import BERT_GENERATION, MODERNBERT_DECODER
from mega_ckpt.families.bert_encoders import (
    BERT,
    CAMEMBERT,
    DATA2VEC_TEXT,
    ERNIE,
    MEGATRON_BERT,
    MODERNBERT,
    ROBERTA,
    ROBERTA_PRE_LAYER_NORM,
    XLM_ROBERTA,
    XLM_ROBERTA_XL,
)
from mega_ckpt.families.config_entries import ConfigDict
from mega_ckpt.families.dbrx import DBRX
from mega_ckpt.families.deepseek_glm import DEEPSEEK_V2, DEEPSEEK_V3, GLM, GLM4, GLM4_MOE, YOUTU
from mega_ckpt.families.deepseek_v4 import DEEPSEEK_V4
from mega_ckpt.families.falcon_h1 import FALCON_H1
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.further_decoders import (
    APERTUS,
    ARIA_TEXT,
    BITNET,
    MINICPM3,
    MISTRAL4,
    NANOCHAT,
    OLMO,
    OPENAI_GPT,
)
from mega_ckpt.families.further_encoders import (
    DISTILBERT,
    ELECTRA,
    EUROBERT,
    GTE,
    JINA_EMBEDDINGS_V3,
    MPNET,
    NOMIC_BERT,
    ROFORMER,
)
from mega_ckpt.families.further_moe_decoders import AXK1, COHERE2_MOE, FLINT, KOLIBRI1, PHIMOE
from mega_ckpt.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from mega_ckpt.families.gemma3n import GEMMA3N
from mega_ckpt.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from mega_ckpt.families.glm_vision import GLM_VISION_FAMILIES
from mega_ckpt.families.gpt2_decoders import CODEGEN, GPT2, GPT_BIGCODE, GPT_NEO, GPTJ
from mega_ckpt.families.granite import (
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SWA,
    GRANITE_SWA,
    HYPERCLOVAX,
)
from mega_ckpt.families.hunyuan import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE
from mega_ckpt.families.indexed_decoders import DEEPSEEK_V32, GLM_MOE_DSA
from mega_ckpt.families.kimi_vision import KIMI_K25
from mega_ckpt.families.layernorm_decoders import (
    COHERE,
    COHERE2,
    FALCON,
    GPT_NEOX,
    JAIS2,
    NEMOTRON,
    PERSIMMON,
    PHI,
    STABLELM,
    STARCODER2,
)
from mega_ckpt.families.lfm2_decoders import LFM2, LFM2_MOE
from mega_ckpt.families.linear_attention_decoders import BAILING_HYBRID, KIMI_LINEAR, MINIMAX
from mega_ckpt.families.llama4_decoders import LLAMA4
from mega_ckpt.families.llama_decoders import (
    ARCEE,
    CWM,
    ERNIE4_5,
    EXAONE4,
    HELIUM,
    INTERNLM3,
    IQUESTCODER,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from mega_ckpt.families.longcat_flash import LONGCAT_FLASH
from mega_ckpt.families.mamba1_decoders import FALCON_MAMBA, JAMBA, MAMBA1
from mega_ckpt.families.mamba_decoders import BAMBA, GRANITE_MOE_HYBRID, MAMBA2
from mega_ckpt.families.model_equivalence import is_equivalent_config
from mega_ckpt.families.moe_decoders import (
    ERNIE4_5_MOE,
    FLEX_OLMO,
    GPT_OSS,
    MELLUM,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from mega_ckpt.families.nemotron_h import NEMOTRON_H
from mega_ckpt.families.olmo_hybrid import OLMO_HYBRID
from mega_ckpt.families.opt import OPT
from mega_ckpt.families.qwen_hybrids import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mega_ckpt.families.qwen_vision import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE
from mega_ckpt.families.sigmoid_moe_decoders import (
    AFMOE,
    DOTS1,
    EXAONE_MOE,
    GLM4_MOE_LITE,
    HY_V3,
    MINIMAX_M2,
    SOLAR_OPEN,
)
from mega_ckpt.families.t5 import MT5, T5, UMT5
from mega_ckpt.families.vision_family import VisionLanguageFamily, text_only_config
from mega_ckpt.families.vision_language import GEMMA3_VISION, LLAVA, LLAVA_NEXT
from mega_ckpt.families.vision_modules import REFUSED, VISION_MODULE_FAMILIES, VisionModuleFamily
from mega_ckpt.families.windowed_head_decoders import LAGUNA, MIMO_V2_FLASH
from mega_common.bounded_parsing import describe_json_type
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

__all__ = [
    "FAMILIES",
    "ModelFamily",
    "detect_model_family",
    "find_family_by_name",
    "find_family_expressing_model",
    "is_equivalent_config",
]

# In order of preference: a model that several families can express is written as the first of them.
FAMILIES: tuple[ModelFamily, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, PHI3, OLMO2, GPT_NEOX, GEMMA2, GEMMA3, MINISTRAL, MIXTRAL, QWEN3_MOE, QWEN2_MOE,
    GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2, SMOLLM3, SEED_OSS, GRANITE, GRANITE_MOE, OLMO3, OLMOE, GEMMA, ERNIE4_5, HELIUM,
    GLM, GLM4, GLM4_MOE, EXAONE4, ARCEE, STARCODER2, NEMOTRON, STABLELM, JAIS2, COHERE, COHERE2, FALCON, GPT_BIGCODE,
    NEMOTRON_H, MAMBA2, BAMBA, GRANITE_MOE_HYBRID, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, T5, MT5, UMT5, BERT, ROBERTA,
    MODERNBERT, MEGATRON_BERT, MINIMAX_M2, GLM4_MOE_LITE, DOTS1, EXAONE_MOE, SOLAR_OPEN, HY_V3, AFMOE, CWM, INTERNLM3,
    IQUESTCODER, VAULT_GEMMA, FLEX_OLMO, MELLUM, ERNIE4_5_MOE, GRANITE_MOE_SHARED, GRANITE_SWA, GRANITE_MOE_SWA, HYPERCLOVAX,
    OPT, MINISTRAL3, HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE, PHI, GPTJ, BLOOM, LFM2, LFM2_MOE, XLM_ROBERTA,
    CAMEMBERT, DATA2VEC_TEXT, GPT_NEO, YOUTU, MPT, CODEGEN, LLAMA4, KIMI_LINEAR, MINIMAX, BAILING_HYBRID, GEMMA3N, GEMMA4, GEMMA4_UNIFIED,
    OLMO, NANOCHAT, MINICPM3, MISTRAL4, ARIA_TEXT, OPENAI_GPT, APERTUS, ERNIE, ROBERTA_PRE_LAYER_NORM, XLM_ROBERTA_XL,
    DEEPSEEK_V32, DEEPSEEK_V4, GLM_MOE_DSA,
    DISTILBERT, ELECTRA, ROFORMER, NOMIC_BERT, JINA_EMBEDDINGS_V3, GTE, EUROBERT, BITNET, PERSIMMON, DBRX, PHIMOE, FLINT, KOLIBRI1,
    COHERE2_MOE, AXK1, MPNET, MAMBA1, FALCON_MAMBA, JAMBA, FALCON_H1, MODERNBERT_DECODER, BERT_GENERATION, MIMO_V2_FLASH, LAGUNA,
    OLMO_HYBRID, LONGCAT_FLASH,
)  # fmt: skip

MODULE_FAMILIES: tuple[VisionModuleFamily, ...] = (*VISION_MODULE_FAMILIES, *GLM_VISION_FAMILIES, KIMI_K25)
VISION_FAMILIES: tuple[VisionLanguageFamily, ...] = (
    LLAVA, LLAVA_NEXT, GEMMA3_VISION, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, *MODULE_FAMILIES,
)  # fmt: skip

_NEAREST = 5  # families named in the error if none fits


def find_family_by_name(name: object, source: str = "family", added: Sequence[ModelFamily] = ()) -> ModelFamily:
    """Return the HuggingFace model family with this `model_type`.
    It is one of mega, or one that extensions `added`.

    Raises:
        CheckpointError: for an unsupported name, with the nearest supported one.
    """
    known = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}
    if clash := known.keys() & {family.name for family in added}:
        raise CheckpointError(
            f"{source}: an extension declares the family {min(clash)}, which mega has",
            hint="leave out the extension, or give its family another name",
        )
    families = {**known, **{name: family for family in added for name in (family.name, *family.aliases)}}
    if isinstance(name, str) and name in families:
        return families[name]
    nearest = difflib.get_close_matches(str(name), families, n=1)
    other = (
        "leave out --family, which writes the first family that has all settings of the model"
        if source == "--family"
        else "model: {from: FOLDER, implementation: transformers} trains any model that transformers loads; mega new family"
        " NAME adds a family"
    )
    raise CheckpointError(
        f"{source}: model type {name!r} is not supported; supported families: docs/families.md"
        + "".join(f"; nearest: {near}" for near in nearest),
        hint=other,
    )


def detect_model_family(
    raw: ConfigDict, source: str = "config.json", added: Sequence[ModelFamily] = (), *, images: bool = True
) -> ModelFamily:
    """Return the model family that a HuggingFace config.json belongs to, by its `model_type`.
    `added` are families of extensions; without `images` a model with images belongs to the family of its text model, if that
    carries the other tensors.

    Raises:
        CheckpointError: when it has no model type, or an unsupported one, or a section that is not a JSON object.
    """
    if "model_type" not in raw:
        raise CheckpointError(f"{source}: model_type is missing", hint="use the config.json of a language model")
    _check_sections(raw, source)
    kind = raw["model_type"]
    if kind == MISTRAL.name and "layer_types" in raw:  # as in transformers
        return MINISTRAL
    outer = next((family for family in FAMILIES if family.outer_model_type and family.outer_model_type == kind), None)
    vision = next((family for family in VISION_FAMILIES if family.name == kind and family.reads_images_of(raw)), None)
    if vision is not None and (images or outer is None):
        inner = vision.text_config_of(raw)
        text = vision.find_own_text(inner.get("model_type"))
        text = text or detect_model_family(inner, f"{source}: text_config", added)
        return replace(vision, text=text)
    if outer is None and "vision_config" in raw:
        supported = ", ".join(family.name for family in VISION_FAMILIES)
        reason = f": {REFUSED[kind]}" if kind in REFUSED else ""
        raise CheckpointError(
            f"{source}: vision-language model type {kind!r} is not supported{reason}", hint=f"supported: {supported}"
        )
    return outer or find_family_by_name(kind, source, added)


def _check_sections(raw: ConfigDict, source: str) -> None:
    """Raise CheckpointError if a key of a config.json that many families read has another type of value."""
    kinds = {"model_type": str, "architectures": list, "id2label": dict, "text_config": dict, "vision_config": dict}
    for key, kind in kinds.items():
        value = raw.get(key)
        if value is not None and not isinstance(value, kind):
            found = describe_json_type(value)
            raise CheckpointError(f"{source}: {key} must be {describe_json_type(kind())}, found {found}")
    for key in ("text_config", "vision_config"):
        if raw.get(key):
            _check_sections(raw[key], f"{source}: {key}")


def find_family_expressing_model(model: ModelConfig, added: Sequence[ModelFamily] = ()) -> ModelFamily:
    """Return the first HuggingFace model family whose config.json can express `model`; a CheckpointError if none can.

    The families of mega come first, then those that extensions `added`.

    Raises:
        CheckpointError: when none can, with the settings that prevent the nearest ones.
    """
    if model.retro is not None:
        raise CheckpointError(
            "model.retro is not supported by any HuggingFace family", hint="keep the model in mega's own format"
        )
    candidates: Sequence[ModelFamily] = (*FAMILIES, *added) if model.vision is None else _vision_candidates(model)
    found = [(family, family.unsupported_settings(model)) for family in candidates]
    for family, problems in found:
        if not problems:
            return family
    if blocks := [*model.mixers, *model.feed_forwards]:
        raise CheckpointError(
            f"no HuggingFace family has {', '.join(blocks)}, which an extension adds",
            hint="keep the model in mega's own format (--to mega); mega generate, eval and serve read it with --extension",
        )
    nearest = sorted(found, key=lambda each: len(each[1]))[:_NEAREST]
    reasons = "\n".join(f"  {family.name}: {'; '.join(problems)}" for family, problems in nearest)
    raise CheckpointError(
        f"no HuggingFace family can express this model; the nearest:\n{reasons}",
        hint="keep the model in mega's own format, which mega eval, generate and serve read",
    )


def _vision_candidates(model: ModelConfig) -> list[ModelFamily]:
    """Return the families with multimodal rotary positions, or else those that accept a text model of any family.
    A vision encoder that is a module of transformers has its own.
    """
    if model.rope.sections is not None:
        own = [(family, text) for family in VISION_FAMILIES for text in (family.text, *family.own_texts)]
        return [replace(family, text=text) for family, text in own if text is not None]
    text, module = find_family_expressing_model(text_only_config(model)), model.vision and model.vision.module
    families = MODULE_FAMILIES if module else VISION_FAMILIES
    return [replace(family, text=text) for family in families if family.text is None]

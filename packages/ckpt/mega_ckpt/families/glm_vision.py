"""Vision-language models of Zhipu: GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv:2507.01006) and GLM-OCR.

Text models of GLM-4, dense or with experts, with rotary positions of rows and columns (M-RoPE) on part of a head; the vision
encoders run as modules of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from mega_ckpt.families.config_entries import ConfigEntry, FixedFieldsEntry, KeyEntry, KeyValueHeadsEntry
from mega_ckpt.families.deepseek_glm import GLM4, GLM4_MOE, SHARED_EXPERT_RULES
from mega_ckpt.families.disk_layouts import LAYER, ConcatExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.qwen_vision import MultimodalRopeEntry
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.vision_modules import VisionModuleFamily, vision_module_family

_SCALINGS = frozenset({"none", "linear", "yarn", "llama3"})


def _replace_entries(
    entries: Iterable[ConfigEntry], change: Callable[[ConfigEntry], ConfigEntry | None]
) -> tuple[ConfigEntry, ...]:
    return tuple(new for entry in entries if (new := change(entry)) is not None)


def _dense_entry(entry: ConfigEntry) -> ConfigEntry | None:
    """Return the entry of GLM-4's that a dense text model has in its place, or None for `attention_bias`, a key it lacks."""
    if isinstance(entry, RopeEntry):
        return MultimodalRopeEntry(partial=True, interleaved=True, scalings=_SCALINGS, sections=(8, 12, 12))
    if isinstance(entry, KeyValueHeadsEntry):
        return KeyValueHeadsEntry(kv_default=2, explicit_dim=False)
    return None if isinstance(entry, KeyEntry) and entry.key == "attention_bias" else entry


def _moe_entry(entry: ConfigEntry) -> ConfigEntry | None:
    """Return the entry that GLM-4.5V's text model has in place of GLM-4.5's."""
    if isinstance(entry, RopeEntry):
        return MultimodalRopeEntry(fraction=0.5, partial=True, scalings=_SCALINGS, sections=(8, 12, 12))
    return replace(entry, default=True) if isinstance(entry, KeyEntry) and entry.key == "attention_bias" else entry


GLM4V_TEXT = replace(
    GLM4,
    name="glm4v_text",
    architecture="Glm4vTextModel",
    entries=(*_replace_entries(GLM4.entries, _dense_entry), FixedFieldsEntry({"qkv_bias": True})),
)
GLM_OCR_TEXT = replace(
    GLM4,
    name="glm_ocr_text",
    architecture="GlmOcrTextModel",
    entries=(*_replace_entries(GLM4.entries, _dense_entry), FixedFieldsEntry({"qkv_bias": False})),
)
GLM4V_MOE_TEXT = replace(
    GLM4_MOE,
    name="glm4v_moe_text",
    architecture="Glm4vMoeTextModel",
    entries=_replace_entries(GLM4_MOE.entries, _moe_entry),
)
_EXPERTS = f"{LAYER}.mlp.experts"
_STACKED_TEXT = replace(  # transformers stores and reads the experts of GLM-4.6V as two tensors
    GLM4V_MOE_TEXT,
    rules=(
        TensorRule(
            f"{_EXPERTS}.gate_up_proj",
            (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
            ConcatExpertsLayout(),
        ),
        TensorRule(f"{_EXPERTS}.down_proj", (f"{_EXPERTS}.down_proj.weight",), ConcatExpertsLayout()),
        *SHARED_EXPERT_RULES,
    ),
)


def _family(name: str, architecture: str, *texts: ModelFamily) -> VisionModuleFamily:
    family = vision_module_family(name, architecture, encoder="visual")
    return replace(family, text=texts[0]) if len(texts) == 1 else replace(family, own_texts=texts)


GLM_VISION_FAMILIES = (
    _family("glm4v", "Glm4v", GLM4V_TEXT),
    _family("glm4v_moe", "Glm4vMoe", GLM4V_MOE_TEXT),
    _family("glm46v", "Glm46V", GLM4V_TEXT, _STACKED_TEXT),
    _family("glmga", "Glm46V", GLM4V_TEXT, _STACKED_TEXT),
    _family("glm_ocr", "GlmOcr", GLM_OCR_TEXT),
)

"""Text models of vision-language types whose vision encoder mega does not have: the text model is read, trained and written, the other
tensors of a folder are carried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mega_ckpt.families.family import ModelFamily

# {model_type: beginning of the tensor names of the text model alone, and its replacement in the whole model}
TEXT_OF_VISION: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("aria", "got_ocr2", "internvl", "llava_onevision", "mistral3", "vipllava"), ("", "language_model.")
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), ("model.", "model.text_model.")),
    "lfm2_vl": ("model.", "model.language_model."),
}


def text_family_of_vision_model(kind: str, text: ModelFamily) -> ModelFamily:
    """Return the family `text` for folders of the vision-language type `kind`, whose other tensors are carried as buffers."""
    before, inside = TEXT_OF_VISION[kind]
    others = rf"(?!{re.escape(inside)}|lm_head\.).*"
    return replace(text, outer_model_type=kind, inner_prefix=(before, inside), buffers=f"{others}|{text.buffers}")

"""LLaVA-NeXT, or LLaVA 1.6: LLaVA whose images are cut in tiles, with a learned row behind each line of their patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.keys import Fixed, Raw
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.llava import LLAVA
from mega_common.vision import PROJECTOR

_USUAL = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # where a config.json says nothing


@dataclass(frozen=True)
class Pinpoints:
    """The resolutions that an image may be resized to."""

    keys: frozenset[str] = frozenset({"image_grid_pinpoints"})
    fields: frozenset[str] = frozenset({"pinpoints"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Heights and widths."""
        return {"pinpoints": raw.get("image_grid_pinpoints") or _USUAL}

    def write(self, model: Any) -> dict[str, Any]:
        """As it would be read, of a `VisionConfig`."""
        return {"image_grid_pinpoints": [list(one) for one in model.pinpoints or ()]}


_FIXED: Mapping[str, Any] = {
    "projector": "mlp", "pool": 1, "bidirectional": False, "begin_token": None, "end_token": None, "feature_class": False,
    "resize": "stretch",
}  # fmt: skip
LLAVA_NEXT = replace(
    LLAVA,
    name="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    entries=(*(entry for entry in LLAVA.entries if not isinstance(entry, Fixed)), Pinpoints(), Fixed(_FIXED)),
    projector=(Rule("image_newline", (f"{PROJECTOR}newline",)), *LLAVA.projector),
    carried=LLAVA.carried | {"use_image_newline_parameter"},
)

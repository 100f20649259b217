"""Gemma 3 with its eyes (arXiv:2503.19786): SigLIP, whose patches are averaged in squares, and a norm and a matrix behind it.

The tokens of an image see one another in the text model, within a window or without.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

from mega_ckpt.families.keys import Fixed, Key, MismatchError, Raw
from mega_ckpt.families.layouts import TRANSPOSED, Rule
from mega_ckpt.families.llava import TOWER_BUFFERS
from mega_ckpt.families.vision import SeeingFamily
from mega_common.vision import PROJECTOR


@dataclass(frozen=True)
class Pooled:
    """`mm_tokens_per_image`: what the patches of an image are averaged to."""

    keys: frozenset[str] = frozenset({"mm_tokens_per_image"})
    fields: frozenset[str] = frozenset({"pool"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """How many patches of a side are one; MismatchError where squares do not make that many tokens."""
        tokens, tower = raw.get("mm_tokens_per_image", 256), raw.get("vision_config") or {}
        patches, side = tower.get("image_size", 224) // tower.get("patch_size", 16), isqrt(tokens)
        if side * side != tokens or not side or patches % side:
            raise MismatchError(
                f"mm_tokens_per_image = {tokens} is no square that divides {patches} x {patches} patches"
            )
        return {"pool": patches // side}

    def write(self, model: Any) -> dict[str, Any]:
        """As it would be read, of a `VisionConfig`."""
        return {"mm_tokens_per_image": model.tokens}


@dataclass(frozen=True)
class Uncapped:
    """The text model's cap on logits, which transformers leaves out in a model that sees."""

    keys: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing; MismatchError where there is a cap."""
        cap = (raw.get("text_config") or {}).get("final_logit_softcapping")
        if cap is not None:
            raise MismatchError(
                f"text_config.final_logit_softcapping = {cap} is not supported (transformers ignores it)"
            )
        return {}

    def write(self, model: Any) -> dict[str, Any]:
        """Nothing."""
        return {}


GEMMA3_VISION = SeeingFamily(
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    entries=(
        Key("image_token_index image_token_id", "image_token", 262_144),
        Key("boi_token_index boi_token_id", "begin_token", 255_999),
        Key("eoi_token_index eoi_token_id", "end_token", 256_000),
        Pooled(),
        Uncapped(),
        Fixed(
            {
                "projector": "norm",
                "bidirectional": True,
                "feature_layer": -1,
                "feature_norm": True,
                "feature_class": False,
                "pinpoints": None,
            }
        ),
    ),
    projector=(
        Rule("multi_modal_projector.mm_soft_emb_norm.weight", (f"{PROJECTOR}norm.weight",)),
        Rule("multi_modal_projector.mm_input_projection_weight", (f"{PROJECTOR}linear.weight",), TRANSPOSED),
    ),
    buffers=TOWER_BUFFERS,
    carried=frozenset({"initializer_range"}),
    towers=("siglip_vision_model",),
    texts=("gemma3_text",),
    pixels={"resample": "bilinear"},
)

"""LLaVA 1.5 (arXiv:2310.03744): a CLIP or SigLIP tower, two matrices, and any text model that there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import words
from mega_ckpt.families.keys import Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.vision import ACTIVATIONS, SeeingFamily
from mega_common.vision import PROJECTOR

TOWER_BUFFERS = r"(.*\.)?(rotary_emb\.inv_freq|embeddings\.position_ids|vision_tower\.(vision_model\.)?head\..*)"


@dataclass(frozen=True)
class Selected:
    """Which of a tower's outputs are features: `default` leaves out the first one, which is the class token of a CLIP tower.

    Of a tower without one it would leave out a patch, which nothing published does.
    """

    keys: frozenset[str] = frozenset({"vision_feature_select_strategy"})
    fields: frozenset[str] = frozenset({"feature_class"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Both are known; MismatchError for a patch that would be left out."""
        kind, chosen = (
            (raw.get("vision_config") or {}).get("model_type"),
            raw.get("vision_feature_select_strategy", "default"),
        )
        if chosen not in ("default", "full") or (chosen == "default" and kind == "siglip_vision_model"):
            raise MismatchError(f"vision_feature_select_strategy = {chosen!r} is not supported with this tower")
        return {"feature_class": chosen == "full" and kind != "siglip_vision_model"}

    def write(self, model: Any) -> dict[str, Any]:
        """As it would be read, of a `VisionConfig`."""
        full = model.feature_class or not model.class_token
        return {"vision_feature_select_strategy": "full" if full else "default", "image_seq_length": model.tokens}


LLAVA = SeeingFamily(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    entries=(
        Key("image_token_index image_token_id", "image_token", 32000),
        Key("projector_hidden_act", "projector_activation", "gelu", ACTIVATIONS),
        Key("multimodal_projector_bias", "projector_bias", True),
        Key("vision_feature_layer", "feature_layer", -2),
        Selected(),
        Only({"vision_feature_layers": (None,)}),
        Fixed(
            {
                "projector": "mlp",
                "pool": 1,
                "bidirectional": False,
                "begin_token": None,
                "end_token": None,
                "pinpoints": None,
            }
        ),
    ),
    projector=tuple(
        Rule(f"multi_modal_projector.{part}.{kind}", (f"{PROJECTOR}{part}.{kind}",))
        for part in ("linear_1", "linear_2")
        for kind in ("weight", "bias")
    ),
    buffers=TOWER_BUFFERS,
    carried=words("ignore_index image_seq_length pad_token_id projector_hidden_act vocab_size"),
)

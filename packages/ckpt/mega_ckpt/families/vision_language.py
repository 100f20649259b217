"""Vision-language models. LLaVA 1.5 (arXiv:2310.03744): a CLIP or SigLIP vision encoder, a two-layer projector, and a
text model of any family. LLaVA-NeXT (1.6): images in tiles, with a learned newline embedding after each row of patches.
Gemma 3 (arXiv:2503.19786): SigLIP with average-pooled patches, a norm and a matrix as projector.

In Gemma 3, attention of the text model is bidirectional among the tokens of an image, within a window or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    split_words,
)
from mega_ckpt.families.disk_layouts import TRANSPOSED, TensorRule, weight_bias_rules
from mega_ckpt.families.vision_encoders import ACTIVATIONS
from mega_ckpt.families.vision_family import VisionLanguageFamily
from mega_common.vision_config import PROJECTOR

TOWER_BUFFERS = r"(.*\.)?(rotary_emb\.inv_freq|embeddings\.position_ids|vision_tower\.(vision_model\.)?head\..*)"


@dataclass(frozen=True)
class FeatureSelectEntry:
    """Translation to and from config.json of LLaVA's selection of the vision encoder's outputs.
    The value `default` drops the first one, the class token of CLIP.

    Without a class token it would drop a patch, which is not supported.
    """

    handled_config_keys: frozenset[str] = frozenset({"vision_feature_select_strategy"})
    handled_model_fields: frozenset[str] = frozenset({"feature_class"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `feature_class`, true if the class token is kept; ConfigMismatchError if a patch would be dropped."""
        siglip = (raw.get("vision_config") or {}).get("model_type") == "siglip_vision_model"
        strategy = raw.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full") or (strategy == "default" and siglip):
            raise ConfigMismatchError(
                f"vision_feature_select_strategy = {strategy!r} is not supported with this vision encoder"
            )
        return {"feature_class": strategy == "full" and not siglip}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return `vision_feature_select_strategy` and `image_seq_length` of config.json from the fields of a `VisionConfig`."""
        full = model.feature_class or not model.class_token
        return {
            "vision_feature_select_strategy": "full" if full else "default",
            "image_seq_length": model.tokens_per_image,
        }


LLAVA = VisionLanguageFamily(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    entries=(
        KeyEntry("image_token_index image_token_id", "image_token", 32000),
        KeyEntry("projector_hidden_act", "projector_activation", "gelu", ACTIVATIONS),
        KeyEntry("multimodal_projector_bias", "projector_bias", True),
        KeyEntry("vision_feature_layer", "feature_layer", -2),
        FeatureSelectEntry(),
        AllowedValuesEntry({"vision_feature_layers": (None,)}),
        FixedFieldsEntry(
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
    projector=(
        *weight_bias_rules("multi_modal_projector.linear_1", f"{PROJECTOR}linear_1"),
        *weight_bias_rules("multi_modal_projector.linear_2", f"{PROJECTOR}linear_2"),
    ),
    buffers=TOWER_BUFFERS,
    carried=split_words("ignore_index image_seq_length pad_token_id projector_hidden_act vocab_size"),
)


_DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True)
class GridPinpointsEntry:
    """Translation to and from config.json of LLaVA-NeXT's `image_grid_pinpoints`.
    They are the resolutions that an image may be resized to.
    """

    handled_config_keys: frozenset[str] = frozenset({"image_grid_pinpoints"})
    handled_model_fields: frozenset[str] = frozenset({"pinpoints"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `VisionConfig` field `pinpoints`, a list of [height, width]."""
        return {"pinpoints": raw.get("image_grid_pinpoints") or _DEFAULT_PINPOINTS}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return the key `image_grid_pinpoints` of config.json with its value from the fields of a `VisionConfig`."""
        return {"image_grid_pinpoints": [list(size) for size in model.pinpoints or ()]}


_FIXED: Mapping[str, Any] = {
    "projector": "mlp", "pool": 1, "bidirectional": False, "begin_token": None, "end_token": None, "feature_class": False,
    "resize": "stretch",
}  # fmt: skip
LLAVA_NEXT = replace(
    LLAVA,
    name="llava_next",
    architecture="LlavaNextForConditionalGeneration",
    entries=(
        *(entry for entry in LLAVA.entries if not isinstance(entry, FixedFieldsEntry)),
        GridPinpointsEntry(),
        FixedFieldsEntry(_FIXED),
    ),
    projector=(TensorRule("image_newline", (f"{PROJECTOR}newline",)), *LLAVA.projector),
    carried=LLAVA.carried | {"use_image_newline_parameter"},
)


@dataclass(frozen=True)
class TokensPerImageEntry:
    """Translation to and from config.json of Gemma 3's `mm_tokens_per_image`, the number of tokens per image.
    The patches of an image are average-pooled to that number of tokens.
    """

    handled_config_keys: frozenset[str] = frozenset({"mm_tokens_per_image"})
    handled_model_fields: frozenset[str] = frozenset({"pool"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `pool`, the pooling factor per side; ConfigMismatchError if square pools do not give the tokens per image."""
        tokens, tower = raw.get("mm_tokens_per_image", 256), raw.get("vision_config") or {}
        patches, side = tower.get("image_size", 224) // tower.get("patch_size", 16), isqrt(tokens)
        if side * side != tokens or not side or patches % side:
            raise ConfigMismatchError(
                f"mm_tokens_per_image = {tokens} must be a square that divides {patches} x {patches} patches"
            )
        return {"pool": patches // side}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return the key `mm_tokens_per_image` of config.json with its value from the fields of a `VisionConfig`."""
        return {"mm_tokens_per_image": model.tokens_per_image}


@dataclass(frozen=True)
class NoLogitCapEntry:
    """Config entry that rejects a logit soft cap of a vision-language model's text model.
    Transformers ignores the cap in such a model.
    """

    handled_config_keys: frozenset[str] = frozenset()
    handled_model_fields: frozenset[str] = frozenset()

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return no `VisionConfig` fields; ConfigMismatchError if `text_config` has `final_logit_softcapping`."""
        cap = (raw.get("text_config") or {}).get("final_logit_softcapping")
        if cap is not None:
            raise ConfigMismatchError(
                f"text_config.final_logit_softcapping = {cap} is not supported (transformers ignores it)"
            )
        return {}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return no config.json keys: this config entry only checks."""
        return {}


GEMMA3_VISION = VisionLanguageFamily(
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    entries=(
        KeyEntry("image_token_index image_token_id", "image_token", 262_144),
        KeyEntry("boi_token_index boi_token_id", "begin_token", 255_999),
        KeyEntry("eoi_token_index eoi_token_id", "end_token", 256_000),
        TokensPerImageEntry(),
        NoLogitCapEntry(),
        FixedFieldsEntry(
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
        TensorRule("multi_modal_projector.mm_soft_emb_norm.weight", (f"{PROJECTOR}norm.weight",)),
        TensorRule("multi_modal_projector.mm_input_projection_weight", (f"{PROJECTOR}linear.weight",), TRANSPOSED),
    ),
    buffers=TOWER_BUFFERS,
    carried=frozenset({"initializer_range"}),
    towers=("siglip_vision_model",),
    texts=("gemma3_text",),
    pixels={"resample": "bilinear"},
)

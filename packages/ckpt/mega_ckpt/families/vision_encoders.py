"""Entries of the vision encoders in config.json (`vision_config`), by their `model_type`, and the preprocessing of their
images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
)

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_CENTRED = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}  # pixels from -1 to 1


def _encoder_entries(
    layers: int, heads: int, patch: int, activation: str, eps: float, **fixed: Any
) -> tuple[ConfigEntry, ...]:
    """Return the entries of a `vision_config`, with transformers' defaults for absent keys."""
    return (
        KeyEntry("num_hidden_layers", "num_layers", layers),
        KeyEntry("hidden_size", "hidden_size", 768),
        KeyEntry("intermediate_size", "ffn_hidden_size", 3072),
        KeyEntry("num_attention_heads", "num_attention_heads", heads),
        KeyEntry("image_size", "image_size", 224),
        KeyEntry("patch_size", "patch_size", patch),
        KeyEntry("hidden_act", "activation", activation, ACTIVATIONS),
        KeyEntry("layer_norm_eps", "norm_eps", eps),
        AllowedValuesEntry({"num_channels": (3,), "attention_dropout": (0.0,)}),
        FixedFieldsEntry(fixed),
    )


@dataclass(frozen=True)
class NativeResolutionEntry:
    """Translation to and from config.json of the section `native` of `VisionConfig`, for images of any shape.
    The section has the patches, windows and positions of a vision encoder for such images.

    Attributes:
        entries: mapping between config.json and fields of the section.
        pixels: image sizes, which config.json has no keys for.
    """

    entries: tuple[ConfigEntry, ...]
    pixels: Mapping[str, int] = field(default_factory=dict)
    handled_model_fields: frozenset[str] = frozenset({"native"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({"rope_parameters"}).union(*(entry.handled_config_keys for entry in self.entries))

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the section `native`, for images of any shape; ConfigMismatchError unless positions are axial, base 10000."""
        rope = raw.get("rope_parameters") or {}
        if rope.get("rope_type", "axial") != "axial" or rope.get("rope_theta", 10_000) != 10_000:
            raise ConfigMismatchError(f"rope_parameters = {rope!r} must be axial with rope_theta = 10000")
        fields = {name: value for entry in self.entries for name, value in entry.fields_from_config(raw).items()}
        return {"native": {**fields, **self.pixels}}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return the keys of patches, windows and positions; ConfigMismatchError for a model without a section `native`."""
        if model.native is None:
            raise ConfigMismatchError("vision.native is missing")
        return {key: value for entry in self.entries for key, value in entry.config_from_fields(model.native).items()}


def _native_entries(
    layers: int, width: int, ffn: int, patch: int, native: NativeResolutionEntry, *, patch_bias: bool
) -> tuple[ConfigEntry, ...]:
    """Return the entries of the `vision_config` of Qwen's vision encoders, with transformers' defaults for absent keys."""
    return (
        KeyEntry("depth num_hidden_layers", "num_layers", layers),
        KeyEntry("hidden_size", "hidden_size", width),
        KeyEntry("intermediate_size", "ffn_hidden_size", ffn),
        KeyEntry("num_heads num_attention_heads", "num_attention_heads", 16),
        KeyEntry("patch_size", "patch_size", patch),
        native,
        AllowedValuesEntry({"in_channels": (3,), "in_chans": (3,)}),
        FixedFieldsEntry({
            "norm_eps": 1e-6, "class_token": False, "pre_norm": False, "patch_bias": patch_bias, "feature_layer": -1,
            "projector": "merger", "feature_norm": False, "feature_class": False, "pool": 1, "bidirectional": False,
            "projector_bias": True, "projector_activation": "gelu", "pinpoints": None,
        }),
    )  # fmt: skip


_PATCHES: tuple[ConfigEntry, ...] = (
    KeyEntry("spatial_merge_size", "merge", 2),
    KeyEntry("temporal_patch_size", "frames", 2),
)
_WINDOWS = NativeResolutionEntry(
    (
        *_PATCHES,
        KeyEntry("window_size", "window", 112, forbids_null=True),
        KeyEntry("fullatt_block_indexes", "full_layers", (7, 15, 23, 31)),
        FixedFieldsEntry({"norm": "rmsnorm", "positions": 0, "deepstack": ()}),
    )
)
_DEEPSTACK = NativeResolutionEntry(
    (
        *_PATCHES,
        KeyEntry("num_position_embeddings", "positions", 2304),
        KeyEntry("deepstack_visual_indexes", "deepstack", (8, 16, 24)),
        FixedFieldsEntry({"norm": "layernorm", "window": None}),
    ),
    {"min_pixels": 65_536, "max_pixels": 16_777_216},
)
_QWEN2_5 = (
    *_native_entries(32, 3584, 3420, 14, _WINDOWS, patch_bias=False),
    KeyEntry("hidden_act", "activation", "silu", {"silu": "swiglu"}),
)
_QWEN3 = (
    *_native_entries(27, 1152, 4304, 16, _DEEPSTACK, patch_bias=True),
    KeyEntry("hidden_act", "activation", "gelu_pytorch_tanh", ACTIVATIONS),
)
# Entries of vision encoders by the `model_type` of the vision_config.
VISION_ENCODERS: Mapping[str, tuple[ConfigEntry, ...]] = {
    "qwen2_5_vl_vision": _QWEN2_5, "qwen2_5_vl": _QWEN2_5, "qwen3_vl_vision": _QWEN3, "qwen3_vl": _QWEN3,
    "qwen3_vl_moe_vision": _QWEN3, "qwen3_vl_moe": _QWEN3,
    "clip_vision_model": _encoder_entries(
        12, 12, 32, "quick_gelu", 1e-5, class_token=True, patch_bias=False, pre_norm=True
    ),
    "siglip_vision_model": _encoder_entries(
        12, 12, 16, "gelu_pytorch_tanh", 1e-6, class_token=False, patch_bias=True, pre_norm=False
    ),
}  # fmt: skip
# Preprocessing of their images that config.json has no keys for: fields of `VisionConfig`.
PIXELS: Mapping[str, dict[str, Any]] = {
    "qwen2_5_vl_vision": {}, "qwen2_5_vl": {},
    **{kind: {**_CENTRED, "image_size": 512} for kind, entries in VISION_ENCODERS.items() if entries is _QWEN3},
    "clip_vision_model": {}, "siglip_vision_model": {"resize": "stretch", **_CENTRED},
}  # fmt: skip

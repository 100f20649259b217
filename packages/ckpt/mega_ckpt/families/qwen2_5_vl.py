"""Qwen2.5-VL (arXiv:2502.13923): Qwen 2.5 that turns tokens by time, line and column, behind a tower for images of any shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.base import words
from mega_ckpt.families.keys import Key, MismatchError, Raw
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.qwen2 import QWEN2
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.vision import Patches, SeeingFamily, Style
from mega_common.model_config import ModelConfig
from mega_common.vision import PROJECTOR, TOWER, VisionConfig

_SECTIONS = "mrope_section"


@dataclass(frozen=True)
class SectionedRope(Rope):
    """See `Rope`; with `mrope_section`, which folders write in its parameters, of kind mrope before transformers 5."""

    def read(self, raw: Raw) -> dict[str, Any]:
        """`rope` and its sections."""
        out = super().read(raw)
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        return {"rope": out["rope"] | {"sections": given.get(_SECTIONS, [16, 24, 24])}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both forms, as `Rope.write`."""
        if model.rope.sections is None:
            raise MismatchError("rope.sections must be given")
        sections = {_SECTIONS: list(model.rope.sections)}
        plain = model.model_copy(update={"rope": model.rope.model_copy(update={"sections": None})})
        out = super().write(plain)
        scaling = out["rope_scaling"] or {"rope_type": "default", "type": "mrope"}
        return out | {
            "rope_scaling": scaling | sections,
            "rope_parameters": out["rope_parameters"] | sections,
        }


QWEN2_5_VL_TEXT = replace(
    QWEN2,
    name="qwen2_5_vl_text",
    architecture="Qwen2_5_VLTextModel",
    entries=tuple(
        SectionedRope(theta=1_000_000.0, aliases={"mrope": "none"}, scalings=frozenset({"none"}))
        if isinstance(entry, Rope)
        else entry
        for entry in QWEN2.entries
    ),
)


def tower_rules(vision: VisionConfig) -> tuple[Rule, ...]:
    """Where the tower's tensors are on disk, below its prefix."""
    assert vision.native is not None
    layer = {
        "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.o_proj": "attn.proj",
        **{f"mlp.{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }  # fmt: skip
    return (
        Rule("patch_embed.proj.weight", (f"{TOWER}embed_patches.weight",), Patches(frames=vision.native.frames)),
        *(
            Rule(f"blocks.{{i}}.{theirs}.{kind}", (f"{TOWER}layers.{{i}}.{ours}.{kind}",))
            for ours, theirs in layer.items()
            for kind in ("weight", "bias")
        ),
        *(
            Rule(
                f"blocks.{{i}}.attn.qkv.{kind}", tuple(f"{TOWER}layers.{{i}}.self_attn.{x}_proj.{kind}" for x in "qkv")
            )
            for kind in ("weight", "bias")
        ),
    )


@dataclass(frozen=True)
class OutHidden:
    """`out_hidden_size` of the tower, which is the text model's width."""

    keys: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing; MismatchError where the two differ."""
        out, text = (raw.get("vision_config") or {}).get("out_hidden_size"), raw.get("text_config") or raw
        if out is not None and out != text.get("hidden_size", out):
            raise MismatchError(f"vision_config.out_hidden_size = {out} is not hidden_size = {text['hidden_size']}")
        return {}

    def write(self, model: Any) -> dict[str, Any]:
        """Nothing."""
        return {}


_MERGER = {"ln_q": "norm", "mlp.0": "linear_1", "mlp.2": "linear_2"}
QWEN2_5_VL = SeeingFamily(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    text=QWEN2_5_VL_TEXT,
    entries=(
        Key("image_token_id", "image_token", 151_655),
        Key("vision_start_token_id", "begin_token", 151_652),
        Key("vision_end_token_id", "end_token", 151_653),
        OutHidden(),
    ),
    tower=tower_rules,
    styles=(
        Style("visual.", "visual.", "model.", "", ""),
        Style("model.visual.", "model.visual.", "model.language_model.", "", ""),
    ),
    flat=True,
    projector=tuple(
        Rule(f"merger.{theirs}.{kind}", (f"{PROJECTOR}{ours}.{kind}",))
        for theirs, ours in _MERGER.items()
        for kind in ("weight", "bias")
    ),
    buffers=r"(.*\.)?(rotary_emb|rotary_pos_emb)\.inv_freq",
    carried=words("initializer_range video_token_id vision_token_id"),
    towers=("qwen2_5_vl_vision", "qwen2_5_vl"),
    texts=("qwen2_5_vl_text",),
)

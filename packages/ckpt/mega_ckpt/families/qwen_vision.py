"""Vision-language models of Qwen, with a vision encoder for images of any shape and multimodal rotary positions (time,
row, column). Qwen2.5-VL (arXiv:2502.13923): Qwen 2.5, an encoder with RMS norms, gated feed-forward blocks and attention
within windows. Qwen3-VL (arXiv:2511.21631): Qwen 3, dense or with experts, an encoder with layer norms, learned positions
and full attention, and features of several of its layers in the first decoder layers (DeepStack, arXiv:2406.04334).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    llama_config_entries,
    split_words,
)
from mega_ckpt.families.disk_layouts import ConcatExpertsLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.llama_decoders import QWEN2
from mega_ckpt.families.moe_entries import MoeSectionEntry, QwenSparseStepConfigEntry, build_router_config_entries
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.vision_family import PatchConvLayout, VisionLanguageFamily, VisionLanguageTensorNaming
from mega_common.model_config import ModelConfig
from mega_common.vision_config import PROJECTOR, TOWER, VisionConfig

_SECTIONS, _INTERLEAVED = "mrope_section", "mrope_interleaved"


@dataclass(frozen=True)
class MultimodalRopeEntry(RopeEntry):
    """Translation to and from config.json of the multimodal rotary positions (M-RoPE) of Qwen's vision-language models.
    The rotary parameters have `mrope_section`. In Qwen2.5-VL before transformers 5, rope_type is mrope.

    Attributes:
        sections: transformers' default of `mrope_section`.
        alternates: the family's code alternates pairs of time, row and column; else sections follow each other.
    """

    sections: tuple[int, int, int] = (16, 24, 24)
    alternates: bool = False

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `rope`, whose `sections` come from `mrope_section`.
        Raises ConfigMismatchError if `mrope_interleaved` contradicts the family's code.
        """
        out = super().fields_from_config(raw)
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if given.get(_INTERLEAVED, self.alternates) is not self.alternates:
            raise ConfigMismatchError(f"{_INTERLEAVED} = {given[_INTERLEAVED]!r} must be {self.alternates}")
        sections = {"sections": given.get(_SECTIONS, list(self.sections)), "sections_interleaved": self.alternates}
        return {"rope": out["rope"] | sections}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of multimodal rotary positions for old and new transformers; ConfigMismatchError without sections.
        Each version's keys have `mrope_section`. Raises ConfigMismatchError for sections in another order, too.
        """
        if model.rope.sections is None:
            raise ConfigMismatchError("rope.sections is missing")
        if model.rope.sections_interleaved != self.alternates:
            raise ConfigMismatchError(f"rope.sections_interleaved must be {self.alternates}")
        sections: dict[str, Any] = {_SECTIONS: list(model.rope.sections)}
        sections |= {_INTERLEAVED: True} if self.alternates else {}
        rope = model.rope.model_copy(update={"sections": None, "sections_interleaved": False})
        out = super().config_from_fields(model.model_copy(update={"rope": rope}))
        scaling = out["rope_scaling"] or {"rope_type": "default", **({} if self.alternates else {"type": "mrope"})}
        return out | {
            "rope_scaling": scaling | sections,
            "rope_parameters": out["rope_parameters"] | sections,
        }


QWEN2_5_VL_TEXT = replace(
    QWEN2,
    name="qwen2_5_vl_text",
    architecture="Qwen2_5_VLTextModel",
    entries=tuple(
        MultimodalRopeEntry(theta=1_000_000.0, aliases={"mrope": "none"}, scalings=frozenset({"none"}))
        if isinstance(entry, RopeEntry)
        else entry
        for entry in QWEN2.entries
    ),
)


def qwen_vision_encoder_tensor_rules(vision: VisionConfig) -> tuple[TensorRule, ...]:
    """Return the tensor rules of the vision encoder of Qwen2.5-VL or Qwen3-VL, and of Qwen3-VL's DeepStack mergers.
    Disk names are without the encoder's prefix.
    """
    assert vision.native is not None
    plain = {"mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2"}
    gated = {f"mlp.{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    layer = {
        "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.o_proj": "attn.proj",
        **(gated if vision.activation == "swiglu" else plain),
    }  # fmt: skip
    stacked = [(f"deepstack_merger_list.{i}", f"{PROJECTOR}deepstack.{i}") for i in range(len(vision.deepstack_layers))]
    return (
        TensorRule(
            "patch_embed.proj.weight", (f"{TOWER}embed_patches.weight",), PatchConvLayout(frames=vision.native.frames)
        ),
        TensorRule("patch_embed.proj.bias", (f"{TOWER}embed_patches.bias",)),
        TensorRule("pos_embed.weight", (f"{TOWER}embed_positions.weight",)),
        *(
            rule
            for canonical, disk in layer.items()
            for rule in weight_bias_rules(f"blocks.{{i}}.{disk}", f"{TOWER}layers.{{i}}.{canonical}")
        ),
        *weight_bias_rules("blocks.{i}.attn.qkv", *(f"{TOWER}layers.{{i}}.self_attn.{name}_proj" for name in "qkv")),
        *(rule for disk, canonical in stacked for rule in patch_merger_tensor_rules(disk, canonical)),
    )


def patch_merger_tensor_rules(disk: str, canonical: str) -> tuple[TensorRule, ...]:
    """Return the tensor rules of a patch merger of Qwen3-VL from its prefixes on disk and in canonical names."""
    names = {"norm": "norm", "linear_fc1": "linear_1", "linear_fc2": "linear_2"}
    return tuple(
        rule for name, part in names.items() for rule in weight_bias_rules(f"{disk}.{name}", f"{canonical}.{part}")
    )


@dataclass(frozen=True)
class OutHiddenSizeEntry:
    """Check of a vision encoder's `out_hidden_size` in config.json, which must be the text model's width."""

    handled_config_keys: frozenset[str] = frozenset()
    handled_model_fields: frozenset[str] = frozenset()

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return no `VisionConfig` fields; ConfigMismatchError unless `out_hidden_size` is the text model's `hidden_size`."""
        out, text = (raw.get("vision_config") or {}).get("out_hidden_size"), raw.get("text_config") or raw
        if out is not None and out != text.get("hidden_size", out):
            raise ConfigMismatchError(
                f"vision_config.out_hidden_size = {out} must equal hidden_size = {text['hidden_size']}"
            )
        return {}

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return no config.json keys: this config entry only checks."""
        return {}


QWEN2_5_VL = VisionLanguageFamily(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    text=QWEN2_5_VL_TEXT,
    entries=(
        KeyEntry("image_token_id", "image_token", 151_655),
        KeyEntry("vision_start_token_id", "begin_token", 151_652),
        KeyEntry("vision_end_token_id", "end_token", 151_653),
        OutHiddenSizeEntry(),
    ),
    tower=qwen_vision_encoder_tensor_rules,
    styles=(
        VisionLanguageTensorNaming("visual.", "visual.", "model.", "", ""),
        VisionLanguageTensorNaming("model.visual.", "model.visual.", "model.language_model.", "", ""),
    ),
    flat=True,
    projector=(
        *weight_bias_rules("merger.ln_q", f"{PROJECTOR}norm"),
        *weight_bias_rules("merger.mlp.0", f"{PROJECTOR}linear_1"),
        *weight_bias_rules("merger.mlp.2", f"{PROJECTOR}linear_2"),
    ),
    buffers=r"(.*\.)?(rotary_emb|rotary_pos_emb)\.inv_freq",
    carried=split_words("initializer_range video_token_id vision_token_id"),
    towers=("qwen2_5_vl_vision", "qwen2_5_vl"),
    texts=("qwen2_5_vl_text",),
)


_ROPE = MultimodalRopeEntry(
    theta=500_000.0, scalings=frozenset({"none", "linear", "yarn", "llama3"}), sections=(24, 20, 20), alternates=True
)
# Keys that transformers' text models lack: a folder may have them only without effect.
_TEXT = (
    *llama_config_entries(),
    _ROPE,
    KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
    AllowedValuesEntry({"use_sliding_window": (False,), "sliding_window": (None,)}),
    FixedFieldsEntry({"mlp_bias": False, "qk_norm": True, "sliding_window": None}),
)
QWEN3_VL_TEXT = ModelFamily(
    name="qwen3_vl_text",
    architecture="Qwen3VLTextModel",
    entries=(*_TEXT, KeyValueHeadsEntry(kv_default=32, dim_default=128)),
)
_EXPERTS = "model.layers.{i}.mlp.experts"
QWEN3_VL_MOE_TEXT = ModelFamily(
    name="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeTextModel",
    entries=(
        *_TEXT,
        KeyValueHeadsEntry(kv_default=16),
        AllowedValuesEntry({"norm_topk_prob": (True,)}),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_experts num_local_experts", top_k=4, normalize=True, experts=60),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size", 1408),
            ),
            QwenSparseStepConfigEntry(),
        ),
    ),
    rules=(
        TensorRule(
            f"{_EXPERTS}.gate_up_proj",
            (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
            ConcatExpertsLayout(transposed=True),
        ),
        TensorRule(f"{_EXPERTS}.down_proj", (f"{_EXPERTS}.down_proj.weight",), ConcatExpertsLayout(transposed=True)),
    ),
)

QWEN3_VL = replace(
    QWEN2_5_VL,
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    text=QWEN3_VL_TEXT,
    styles=(VisionLanguageTensorNaming("model.visual.", "model.visual.", "model.language_model.", "", ""),),
    flat=False,
    ties_by_outer_key=True,
    projector=patch_merger_tensor_rules("merger", PROJECTOR.removesuffix(".")),
    towers=("qwen3_vl_vision", "qwen3_vl"),
    texts=("qwen3_vl_text",),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    text=QWEN3_VL_MOE_TEXT,
    towers=("qwen3_vl_moe_vision", "qwen3_vl_moe"),
    texts=("qwen3_vl_moe_text",),
)

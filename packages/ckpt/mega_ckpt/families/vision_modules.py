"""Vision-language models whose vision encoder and projector run as modules of transformers.

`get_image_features` of the module replaces the embeddings of the placeholder tokens; the text model is a family of mega.
Every setting of the encoder and the projector is followed, as transformers builds both from config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families.config_entries import ConfigDict, ConfigEntry
from mega_ckpt.families.disk_layouts import SingletonAxesLayout, TensorRule
from mega_ckpt.families.family import CARRIED
from mega_ckpt.families.qwen_hybrids import QWEN3_5, QWEN3_5_MOE
from mega_ckpt.families.qwen_vision import QWEN2_5_VL, QWEN2_5_VL_TEXT, MultimodalRopeEntry
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.vision_family import STYLES, VisionLanguageFamily, VisionLanguageTensorNaming, text_only_config
from mega_ckpt.transformers_library import build_vision_language_config, list_vision_tensors
from mega_common.errors import CheckpointError, ConfigError
from mega_common.layer_kinds import find_largest_divisor
from mega_common.model_config import ModelConfig
from mega_common.strict_config import format_setting_value
from mega_common.vision_config import PROJECTOR, TOWER, VisionConfig

_TIED = "tie_word_embeddings"
_AS_THEY_ARE = SingletonAxesLayout(before=0)  # tensors of any shape, also numbers
_CAP = "final_logit_softcapping"
# Text settings that transformers ignores in most of these models, which have an output layer alone; neutral values.
_NEUTRAL: Mapping[str, Any] = {
    _CAP: None, "logit_scale": 1.0, "logits_scaling": 1.0, "num_nextn_predict_layers": 0,
}  # fmt: skip
_SIZES = {
    "num_layers": ("num_hidden_layers", "depth"),
    "hidden_size": ("embed_dim", "hidden_size"),
    "ffn_hidden_size": ("intermediate_size", "mlp_dim"),
    "num_attention_heads": ("num_attention_heads", "num_heads"),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
}  # keys of a vision_config for sizes by which `mega plan` counts


@dataclass(frozen=True)
class VisionModuleFamily(VisionLanguageFamily):
    """Declaration of a HuggingFace family whose vision encoder runs as a module of transformers.

    Attributes:
        encoder: name of the vision encoder in transformers' model.
        decoder: name of the text model in transformers' model.
        caps_logits: the whole model has the text model's soft cap of logits.
    """

    encoder: str = "vision_tower"
    decoder: str = "language_model"
    caps_logits: bool = False

    @property
    def _ignored_text_settings(self) -> dict[str, Any]:
        """Text settings that transformers ignores in this model, with neutral values."""
        return {k: v for k, v in _NEUTRAL.items() if k != _CAP or not self.caps_logits}

    def read_config_json(self, raw: ConfigDict, source: str = "config.json") -> ModelConfig:
        """Return the model configuration that a vision-language model's config.json describes.
        Errors name `source`.

        Raises:
            CheckpointError: when transformers rejects a setting, or the text model is not supported.
        """
        text = self.text_family.read_config_json(self.text_config_of(raw), f"{source}: text_config")
        if text.embedding_multiplier != 1:
            raise CheckpointError(
                f"{source}: text_config.embedding_multiplier = {text.embedding_multiplier} is not supported with "
                f"model_type {self.name}, whose image features are multiplied, too",
                hint="use a text model without an embedding multiplier",
            )
        config = build_vision_language_config(raw)
        token = getattr(config, "image_token_id", None)
        inner = config.vision_config.to_dict()
        if dropout := [key for key in inner if "drop" in key and inner[key]]:
            raise CheckpointError(
                f"{source}: vision_config.{dropout[0]} = {inner[dropout[0]]} is not supported: dropout of a module of "
                "transformers would depend on the parallel layout",
                hint=f"set {dropout[0]} to 0",
            )
        sizes = {name: _find_size(inner, keys) for name, keys in _SIZES.items()}
        native = isqrt(_find_size(inner, ("num_patches",), 256))  # of encoders for images of any shape
        patches = sizes["image_size"] // sizes["patch_size"] or native
        sizes["image_size"] = patches * sizes["patch_size"]
        sizes["num_attention_heads"] = find_largest_divisor(sizes["hidden_size"], sizes["num_attention_heads"])
        positions = text.rope.sections is not None
        module = {"config": dict(raw), "tensors": list_vision_tensors(raw), "grid_positions": positions}
        fields = {**sizes, "image_token": token, "feature_layer": -1, "class_token": False, "module": module}
        try:
            vision = VisionConfig.parse(fields, source=f"{source}: vision_config")
            return ModelConfig.parse({**text.model_dump(exclude_unset=True), "vision": vision}, source=source)
        except ConfigError as error:
            raise CheckpointError(error.message, hint=error.hint) from None

    def text_config_of(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the text model's section of config.json, with transformers' defaults for absent keys.
        Whether embeddings are tied is a key of the whole model.
        """
        config = build_vision_language_config(raw)
        inner: dict[str, Any] = config.text_config.to_dict()
        found = inner | dict(raw.get("text_config") or {}) | {_TIED: bool(config.tie_word_embeddings)}
        return found | {key: value for key, value in self._ignored_text_settings.items() if key in found or not value}

    def unread_keys(self, raw: ConfigDict) -> list[str]:
        """Return the keys of a config.json that transformers does not read for its `model_type`.
        Keys with null are left out.
        """
        given = build_vision_language_config(raw)
        config, vision = type(given)(), type(given.vision_config)()
        outer = set(vars(config)) | set(config.attribute_map)
        outer |= set() if "text_config" in raw else set(config.text_config.to_dict())  # older folders, without sections
        inner = set(vision.to_dict()) | set(vars(vision))
        sections = [("", raw, outer), ("vision_config.", raw.get("vision_config") or {}, inner)]
        unread = [
            f"{prefix}{key}"
            for prefix, section, known in sections
            for key, value in section.items()
            if key not in known | CARRIED | {_TIED} and value is not None
        ]
        return sorted(unread) + self.text_family.unread_keys(dict(raw.get("text_config") or {}))

    def unsupported_settings(self, model: ModelConfig) -> list[str]:
        """Return descriptions of the settings of `model` that this family's config.json cannot express."""
        if model.vision is None or model.vision.module is None:
            return ["vision.module is missing"]
        if model.vision.module.model_type != self.name:
            return [f"vision.module is of model_type {model.vision.module.model_type}"]
        if self.text is None:
            return []
        read = self.read_config_json(model.vision.module.config).vision
        fields = [name for name in VisionConfig.model_fields if name != "module"]
        if changed := [name for name in fields if getattr(model.vision, name) != getattr(read, name)]:
            found, value = (format_setting_value(getattr(each, changed[0])) for each in (model.vision, read))
            return [f"vision.{changed[0]} = {found} must be {value}, as in vision.module.config"]
        return self.text.unsupported_settings(text_only_config(model))

    def write_config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Return the content of config.json for `model`: that of its vision module with the text model's settings."""
        assert model.vision is not None
        assert model.vision.module is not None
        raw = model.vision.module.config
        given, text = raw.get("text_config") or {}, self.text_family.write_config_json(text_only_config(model))
        ignored = {key: given[key] for key in self._ignored_text_settings if key in given}
        return {**raw, "text_config": {**given, **text, **ignored}, _TIED: model.tie_embeddings}

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return {name on disk: DiskTensor} of a vision-language model; vision tensors are stored as they are in `model`."""
        shapes = [name for name in canonical_tensors(model) if name.startswith((TOWER, PROJECTOR))]
        tower = [name.removeprefix(TOWER) for name in shapes if name.startswith(TOWER)]
        outer = [name.removeprefix(PROJECTOR) for name in shapes if name.startswith(PROJECTOR)]
        rules = replace(
            self,
            tower=lambda _: [TensorRule(name, (TOWER + name,), _AS_THEY_ARE) for name in tower],
            projector=tuple(TensorRule(name, (PROJECTOR + name,), _AS_THEY_ARE) for name in outer),
        )
        return VisionLanguageFamily.disk_tensor_table(rules, model, names)


@dataclass(frozen=True)
class OptionalVisionFamily(VisionModuleFamily):
    """Declaration of a vision-language model whose folders without `vision_config` are read as text models."""

    def reads_images_of(self, raw: ConfigDict) -> bool:
        """Return whether config.json has a vision encoder; without one it is read as that of a text model."""
        return raw.get("vision_config") is not None


@dataclass(frozen=True)
class Gemma4VisionFamily(OptionalVisionFamily):
    """Declaration of Gemma 4 with images; its audio encoder is carried.
    With `use_bidirectional_attention: vision` placeholders of an image attend to each other in the layers with a sliding window.
    """

    def read_config_json(self, raw: ConfigDict, source: str = "config.json") -> ModelConfig:
        """Return the model configuration of a config.json; see `VisionModuleFamily.read_config_json`.
        Placeholders have the per-layer inputs of the padding token. Raises CheckpointError if `pad_token_id` is
        missing.
        """
        model, text = super().read_config_json(raw, source), self.text_config_of(raw)
        padding = text.get("pad_token_id")
        together = text.get("use_bidirectional_attention") == "vision" and model.has_attention_windows
        if padding is None or model.vision is None:
            raise CheckpointError(
                f"{source}: text_config.pad_token_id is missing", hint="set it to the padding token, 0"
            )
        fields = {"layer_input_token": padding, "bidirectional": together, "bidirectional_windows": together}
        vision = model.vision.model_copy(update=fields)
        return model.model_copy(update={"vision": vision})

    def unread_keys(self, raw: ConfigDict) -> list[str]:
        """Return the keys of a config.json that are not read: those of transformers, and the audio encoder's section."""
        return [*super().unread_keys(raw), *(["audio_config"] if raw.get("audio_config") else [])]


@dataclass(frozen=True)
class PaliGemmaFamily(VisionModuleFamily):
    """Declaration of PaliGemma (arXiv:2407.07726, arXiv:2412.03555), in which all tokens of a prompt attend to each other."""

    def read_config_json(self, raw: ConfigDict, source: str = "config.json") -> ModelConfig:
        """Return the model configuration of a config.json; see `VisionModuleFamily.read_config_json`."""
        model = super().read_config_json(raw, source)
        assert model.vision is not None
        vision = model.vision.model_copy(update={"bidirectional": True, "bidirectional_prompt": True})
        return model.model_copy(update={"vision": vision})

    def text_config_of(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the text model's section of config.json; see `VisionModuleFamily.text_config_of`.
        Its `use_bidirectional_attention` is left out, which has no effect with the masks of the whole model.
        """
        return super().text_config_of(raw) | {"use_bidirectional_attention": None}

    def unread_keys(self, raw: ConfigDict) -> list[str]:
        """Return the keys of a config.json that are not read, without those that transformers writes and computes anew."""
        return [
            key for key in super().unread_keys(raw) if key not in ("vision_config.projection_dim", "num_image_tokens")
        ]


def _find_size(section: ConfigDict, keys: Sequence[str], default: int = 1) -> int:
    """Return the first of some sizes that a `vision_config` has, else `default`; of a list its first number."""
    values = (section.get(key) for key in keys)
    firsts = (value[0] if isinstance(value, list | tuple) and value else value for value in values)
    return next((value for value in firsts if isinstance(value, int) and value > 0), default)


def _styles(encoder: str, decoder: str, *, legacy: bool) -> tuple[VisionLanguageTensorNaming, ...]:
    """Return the styles of tensor names of a model, the one first that transformers writes."""
    renamed = tuple(
        replace(
            style,
            tower=style.tower.replace("vision_tower", encoder),
            body=style.body.replace("language_model", decoder),
            marker="",
        )
        for style in STYLES
    )
    return renamed if legacy else renamed[2:]


def vision_module_family(
    name: str,
    architecture: str,
    *,
    encoder: str = "vision_tower",
    decoder: str = "language_model",
    legacy: bool = False,
) -> VisionModuleFamily:
    """Return the declaration of a family from the names of its class and of its parts in transformers.
    With `legacy` there are folders with the names of older versions as well.
    """
    return VisionModuleFamily(
        name=name,
        architecture=f"{architecture}ForConditionalGeneration",
        entries=(),
        styles=_styles(encoder, decoder, legacy=legacy),
        buffers=r"(.*\.)?(rotary_emb\.inv_freq|position_ids)",
        encoder=encoder,
        decoder=decoder,
    )


def _with_rows_and_columns(entry: ConfigEntry) -> ConfigEntry:
    """Return the entry of Qwen3.5's text model, of rotary positions with those of rows and columns."""
    if not isinstance(entry, RopeEntry):
        return entry
    return MultimodalRopeEntry(
        theta=entry.theta, fraction=entry.fraction, partial=entry.partial, scalings=entry.scalings - {"dynamic", "longrope"},
        sections=(11, 11, 10), alternates=True,
    )  # fmt: skip


VISION_MODULE_FAMILIES: tuple[VisionModuleFamily, ...] = (
    vision_module_family("mistral3", "Mistral3", legacy=True),
    vision_module_family("internvl", "InternVL", legacy=True),
    vision_module_family("idefics3", "Idefics3", encoder="vision_model", decoder="text_model"),
    vision_module_family("smolvlm", "SmolVLM", encoder="vision_model", decoder="text_model"),
    vision_module_family("llava_onevision", "LlavaOnevision", legacy=True),
    vision_module_family("aya_vision", "AyaVision", legacy=True),
    vision_module_family("cohere2_vision", "Cohere2Vision"),
    vision_module_family("lfm2_vl", "Lfm2Vl"),
    vision_module_family("aria", "Aria", legacy=True),
    vision_module_family("got_ocr2", "GotOcr2", legacy=True),
    replace(
        vision_module_family("pp_chart2table", "PPChart2Table", legacy=True),
        architecture="GotOcr2ForConditionalGeneration",  # the class in transformers
    ),
    vision_module_family("video_llama_3", "VideoLlama3", encoder="vision_model"),
    vision_module_family("lighton_ocr", "LightOnOcr", encoder="vision_encoder"),
    vision_module_family("vipllava", "VipLlava", legacy=True),
    vision_module_family("exaone4_5", "Exaone4_5_", encoder="visual"),
    vision_module_family("deepseek_vl", "DeepseekVL", encoder="vision_model"),
    PaliGemmaFamily(
        name="paligemma",
        architecture="PaliGemmaForConditionalGeneration",
        entries=(),
        styles=_styles("vision_tower", "language_model", legacy=True),
        caps_logits=True,
        buffers=r"(.*\.)?(rotary_emb\.inv_freq|position_ids)",
    ),
    Gemma4VisionFamily(
        name="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        entries=(),
        styles=_styles("vision_tower", "language_model", legacy=False),
        caps_logits=True,
        buffers=r"(.*\.)?(rotary_emb\.inv_freq|position_ids)|(model\.)?(audio_tower|embed_audio)\..*",
    ),
    OptionalVisionFamily(
        name="llama4",
        architecture="Llama4ForConditionalGeneration",
        entries=(),
        styles=(VisionLanguageTensorNaming("vision_model.", "", "language_model.model.", "language_model.", ""),),
        buffers=r"(.*\.)?rotary_emb(edding)?\.(inv_freq|freqs_ci)",
    ),
    *(
        OptionalVisionFamily(
            name=text.outer_model_type,
            architecture=text.architecture.replace("ForCausalLM", "ForConditionalGeneration"),
            entries=(),
            text=replace(text, entries=tuple(map(_with_rows_and_columns, text.entries))),
            styles=_styles("visual", "language_model", legacy=False),
            buffers=r"(.*\.)?rotary_emb\.inv_freq|mtp\..*",
        )
        for text in (QWEN3_5, QWEN3_5_MOE)
    ),
    replace(
        vision_module_family("qwen2_vl", "Qwen2VL", encoder="visual"),
        text=replace(QWEN2_5_VL_TEXT, name="qwen2_vl_text", architecture="Qwen2VLTextModel"),
        styles=QWEN2_5_VL.styles,
    ),
)

# Types whose images enter in another way than by features in place of placeholders.
REFUSED: Mapping[str, str] = {
    "ovis2": "embeddings of visual indicator tokens come from the vision encoder",
}

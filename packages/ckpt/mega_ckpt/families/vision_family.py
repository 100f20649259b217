"""Shared declarations of vision-language models: a text model of some family, a vision encoder (CLIP, SigLIP) and a
projector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families.config_entries import ConfigDict, ConfigMismatchError, read_entry_fields, split_words
from mega_ckpt.families.disk_layouts import DiskTensor, TensorRule, expand_tensor_rules, weight_bias_rules
from mega_ckpt.families.family import CARRIED, ModelFamily
from mega_ckpt.families.vision_encoders import PIXELS, VISION_ENCODERS
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.vision_config import PROJECTOR, TOWER, VisionConfig

_CARRIED = split_words(
    "out_hidden_size spatial_patch_size tokens_per_second initializer_factor initializer_range projection_dim vision_use_head vocab_size"
)
# transformers' defaults for keys of a text_config that published folders leave out.
_TEXTS: Mapping[object, dict[str, float]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072,
    },
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "vocab_size": 262208, "max_position_embeddings": 131072,
    },
    "qwen2_5_vl_text": {
        "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    },
    "qwen3_vl_text": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 151936, "max_position_embeddings": 128000,
    },
    "qwen3_vl_moe_text": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "vocab_size": 151936, "max_position_embeddings": 128000,
    },
}  # fmt: skip
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class PatchConvLayout:
    """Disk layout of the patch embedding weight, stored as the weight of a convolution.
    The weight is [width, 3 * frames * size * size]. It is stored as [width, 3, size, size], or [width, 3, frames, size,
    size] if patches have several frames.
    """

    splits_on_first_axis: bool = False
    frames: int | None = None

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of the convolution weight on disk."""
        ((width, elements),) = parts
        size = isqrt(elements // (3 * (self.frames or 1)))
        return (width, 3, *(() if self.frames is None else (self.frames,)), size, size)

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return one view: the convolution weight flattened to [width, 3 * frames * size * size]."""
        return [disk.flatten(1)]


def clip_encoder_rules(vision: VisionConfig) -> tuple[TensorRule, ...]:
    """Return the tensor rules of a CLIP or SigLIP vision encoder; disk names are without the encoder's prefix."""
    layer = {
        "input_layernorm": "layer_norm1", "post_attention_layernorm": "layer_norm2", "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2", "self_attn.o_proj": "self_attn.out_proj",
        **{f"self_attn.{x}_proj": f"self_attn.{x}_proj" for x in "qkv"},
    }  # fmt: skip
    names = {f"layers.{{i}}.{canonical}": f"encoder.layers.{{i}}.{disk}" for canonical, disk in layer.items()}
    names |= {"pre_norm": "pre_layrnorm", "norm": "post_layernorm", "embed_positions": "embeddings.position_embedding"}
    return (
        TensorRule("embeddings.patch_embedding.weight", (f"{TOWER}embed_patches.weight",), PatchConvLayout()),
        TensorRule("embeddings.patch_embedding.bias", (f"{TOWER}embed_patches.bias",)),
        TensorRule("embeddings.class_embedding", (f"{TOWER}class_embedding",)),
        *(rule for canonical, disk in names.items() for rule in weight_bias_rules(disk, f"{TOWER}{canonical}")),
    )


@dataclass(frozen=True)
class VisionLanguageFamily(ModelFamily):
    """Declaration of a HuggingFace family of vision-language models.
    Its `text` model belongs to another family; `entries` map config.json to fields of a `VisionConfig`.

    Attributes:
        text: family of the text model; None until a config.json selects it.
        tower: rules of the vision encoder's tensors, without its prefix.
        styles: prefixes of tensor names; the first style is written.
        ties_by_outer_key: only the key of the whole model, not that of the text model, ties the embeddings.
        flat: older folders have the text model's keys next to `vision_config` instead of in a `text_config`.
        projector: rules of the projector's tensors.
        towers: allowed `model_type`s of the vision encoder.
        own_texts: families of text models that only occur in it, one of which config.json selects.
        texts: allowed `model_type`s of the text model; empty: any.
        pixels: preprocessing that differs from `PIXELS`.
    """

    text: ModelFamily | None = None
    tower: Callable[[VisionConfig], Sequence[TensorRule]] = clip_encoder_rules
    styles: tuple[VisionLanguageTensorNaming, ...] = field(default_factory=lambda: STYLES)
    flat: bool = False
    ties_by_outer_key: bool = False
    projector: tuple[TensorRule, ...] = ()
    towers: tuple[str, ...] = tuple(VISION_ENCODERS)
    own_texts: tuple[ModelFamily, ...] = ()
    texts: tuple[str, ...] = ()
    pixels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_family(self) -> ModelFamily:
        """Family of the text model; AssertionError until a config.json has selected it."""
        assert self.text is not None
        return self.text

    def find_own_text(self, name: object) -> ModelFamily | None:
        """Return the family of the text model if it only occurs in this family, from its `model_type` in config.json."""
        return self.text or next((family for family in self.own_texts if family.name == name), None)

    def reads_images_of(self, raw: ConfigDict) -> bool:
        """Return True: images are supported, unless a subclass reads some config.json files as those of text models."""
        return True

    @property
    def has_per_expert_tensors(self) -> bool:
        """True if every expert of the text model has its own disk tensors."""
        return self.text_family.has_per_expert_tensors

    def read_config_json(self, raw: ConfigDict, source: str = "config.json") -> ModelConfig:
        """Return the model configuration of a vision-language model's config.json; a CheckpointError for an unsupported setting.
        It has the text model and the vision encoder. Errors name `source`. Raises CheckpointError for another vision
        encoder or settings that are not supported.
        """
        text = self.text_family.read_config_json(self.text_config_of(raw), f"{source}: text_config")
        inner = raw.get("vision_config") or {}
        kind = inner.get("model_type", self.towers[0])
        if kind not in self.towers:
            raise CheckpointError(
                f"{source}: vision encoder {kind!r} is not supported", hint=f"supported: {', '.join(self.towers)}"
            )
        of_tower, tower_problems = read_entry_fields(VISION_ENCODERS[kind], inner)
        outer, outer_problems = read_entry_fields(self.entries, raw)
        fields = {**PIXELS[kind], **self.pixels, **of_tower, **outer}
        if found := [*self._text_family_problems(), *tower_problems, *outer_problems]:
            raise CheckpointError(f"{source}: this model is not supported: {'; '.join(found)}")
        try:
            vision = VisionConfig.parse(fields, source=f"{source}: vision_config")
            return ModelConfig.parse({**text.model_dump(exclude_unset=True), "vision": vision}, source=source)
        except ConfigError as error:
            raise CheckpointError(error.message, hint=error.hint) from None

    def text_config_of(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the text model's section of a vision-language model's config.json.
        The section is `text_config`, with transformers' defaults for absent keys and with tied embeddings if the whole
        model has them.
        """
        inner = dict(raw.get("text_config") or {})
        if not inner and self.flat:
            outer = frozenset({"vision_config", "model_type"}).union(
                *(entry.handled_config_keys for entry in self.entries)
            )
            inner = {key: value for key, value in raw.items() if key not in outer | self.carried}
            inner["model_type"] = self.text_family.name
        tied = {_TIED: bool(raw.get(_TIED))} if self.ties_by_outer_key or raw.get(_TIED) else {}
        return _TEXTS.get(inner.get("model_type"), {}) | inner | tied

    def unread_keys(self, raw: ConfigDict) -> list[str]:
        """Return the keys of a vision-language model's config.json that neither transformers nor mega reads.
        Keys with null are left out.
        """
        inner = raw.get("vision_config") or {}
        tower = VISION_ENCODERS.get(inner.get("model_type", self.towers[0]), ())
        vision_keys = CARRIED.union(_CARRIED, *(entry.handled_config_keys for entry in tower))
        outer_keys = CARRIED.union(
            self.carried,
            {"text_config", "vision_config", _TIED},
            *(entry.handled_config_keys for entry in self.entries),
        )
        unread = [
            f"vision_config.{key}" for key, value in inner.items() if key not in vision_keys and value is not None
        ]
        if "text_config" in raw or not self.flat:
            unread += [key for key, value in raw.items() if key not in outer_keys and value is not None]
        return sorted(unread) + self.text_family.unread_keys(self.text_config_of(raw))

    def unsupported_settings(self, model: ModelConfig) -> list[str]:
        """Return descriptions of the settings of `model` that this family's config.json cannot express.
        The result is empty if it can express the model.
        """
        if model.vision is None:
            return ["vision is missing"]
        try:
            self._write_vision_keys(model.vision)
        except ConfigMismatchError as error:
            return [*self._text_family_problems(), str(error)]
        return self._text_family_problems() + (
            [] if self.text is None else self.text.unsupported_settings(text_only_config(model))
        )

    def _text_family_problems(self) -> list[str]:
        """Return the problem of a text model whose family is not in `texts`; else an empty list."""
        if self.text is None or not self.texts or self.text.name in self.texts:
            return []
        return [f"the text model must be {' or '.join(self.texts)}, not {self.text.name}"]

    def write_config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Return the content of config.json for `model`, a vision-language model that the family can express."""
        assert model.vision is not None
        text = self.text_family.write_config_json(text_only_config(model))
        outer = {"architectures": [self.architecture], "model_type": self.name, _TIED: model.tie_embeddings}
        vision = self._write_vision_keys(model.vision)
        if model.vision.native is not None:  # a key of the encoder in transformers, which has its projector
            vision["vision_config"]["out_hidden_size"] = model.hidden_size
        return outer | vision | {"text_config": text}

    def _write_vision_keys(self, vision: VisionConfig) -> dict[str, Any]:
        """Return the keys of the vision encoder and the projector, `vision_config` included."""
        out = {key: value for entry in self.entries for key, value in entry.config_from_fields(vision).items()}  # type: ignore[arg-type]
        reasons: list[str] = []
        for kind in self.towers:
            try:
                inner = {k: v for entry in VISION_ENCODERS[kind] for k, v in entry.config_from_fields(vision).items()}  # type: ignore[arg-type]
                return out | {"vision_config": {"model_type": kind, **inner}}
            except ConfigMismatchError as error:
                reasons.append(f"{kind}: {error}")
        raise ConfigMismatchError("; ".join(reasons))

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """Return {name on disk: DiskTensor} of the tensors of a vision-language model.
        The names have the prefixes of the folder that has the tensors `names`.
        """
        names = None if names is None else set(names)
        style = VisionLanguageTensorNaming.detect_style(names, self.styles)
        text_names = None if names is None else {name for name in map(style.to_text_name, names) if name is not None}
        text = self.text_family.disk_tensor_table(text_only_config(model), text_names)
        shapes = {
            name: shape for name, shape in canonical_tensors(model).items() if name.startswith((TOWER, PROJECTOR))
        }
        assert model.vision is not None
        rules = (*_add_prefix(style.tower, self.tower(model.vision)), *_add_prefix(style.outer, self.projector))
        vision = expand_tensor_rules(rules, shapes, model.vision.num_layers)
        named = {style.to_disk_name(name): replace(disk, name=style.to_disk_name(name)) for name, disk in text.items()}
        return vision | named

    def duplicate_tensors(self, model: ModelConfig) -> dict[str, str]:
        """Return {disk name: canonical name} of disk tensors that repeat another one.
        An example is the stored copy of a tied output layer.
        """
        text = self.text_family.duplicate_tensors(text_only_config(model))
        return {style.to_disk_name(copy): name for style in self.styles for copy, name in text.items()}

    def is_buffer_tensor(self, name: str) -> bool:
        """Return whether a disk tensor of a vision-language model is a buffer and not a weight.
        The unused pooling head of a vision encoder counts as a buffer.
        """
        text = next((inner for style in self.styles if (inner := style.to_text_name(name)) is not None), "")
        return super().is_buffer_tensor(name) or self.text_family.is_buffer_tensor(text)


@dataclass(frozen=True)
class VisionLanguageTensorNaming:
    """Name prefixes of the tensors in a folder of a vision-language model.
    There is one each for the vision encoder, the projector, and the text model's body and head.

    Attributes:
        marker: continuation of the vision encoder's prefix, which distinguishes this style from others.
    """

    tower: str
    outer: str
    body: str
    head: str
    marker: str = "e"

    @staticmethod
    def detect_style(
        names: set[str] | None, styles: Sequence[VisionLanguageTensorNaming]
    ) -> VisionLanguageTensorNaming:
        """Return the style of tensor names that a vision-language folder uses.
        The style is one of `styles`, for a folder with tensors `names`. For a new folder it is the first style, as most
        software reads it.
        """
        matches = (
            style for style in styles if any(name.startswith(style.tower + style.marker) for name in names or ())
        )
        return next(matches, styles[0])

    def to_disk_name(self, name: str) -> str:
        """Return the disk name, within the vision-language model, of the text model's tensor `name`."""
        return self.body + name.removeprefix("model.") if name.startswith("model.") else self.head + name

    def to_text_name(self, name: str) -> str | None:
        """Return the text model's name of the disk tensor `name`, or None if it is not part of the text model."""
        if name.startswith(self.body):
            return "model." + name.removeprefix(self.body)
        return name.removeprefix(self.head) if name.startswith(f"{self.head}lm_head.") else None


# As published, as saved by transformers 5, and as named in its modules. The vision encoder's prefix is followed by
# `embeddings` or `encoder`: the marker "e".
STYLES: tuple[VisionLanguageTensorNaming, ...] = (
    VisionLanguageTensorNaming("vision_tower.vision_model.", "", "language_model.model.", "language_model."),
    VisionLanguageTensorNaming("vision_tower.", "", "language_model.model.", "language_model."),
    VisionLanguageTensorNaming("model.vision_tower.vision_model.", "model.", "model.language_model.", ""),
    VisionLanguageTensorNaming("model.vision_tower.", "model.", "model.language_model.", ""),
)


def text_only_config(model: ModelConfig) -> ModelConfig:
    """Return the configuration of a vision-language model's text model: `model` without the section `vision`."""
    return model.model_copy(update={"vision": None})


def _add_prefix(prefix: str, rules: Sequence[TensorRule]) -> list[TensorRule]:
    return [replace(rule, disk=prefix + rule.disk) for rule in rules]

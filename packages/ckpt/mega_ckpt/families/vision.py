"""What models that see have in common: a text model of some family within, a tower (CLIP, SigLIP) and a projector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from torch import Tensor

from mega_ckpt.families.base import CARRIED, Family, words
from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import DiskTensor, Rule, disk_tensors
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Shape
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.vision import PROJECTOR, TOWER, VisionConfig

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_HALF = (0.5, 0.5, 0.5)


def _tower(layers: int, heads: int, patch: int, activation: str, eps: float, **fixed: Any) -> tuple[Entry, ...]:
    """The keys of a `vision_config`, with what transformers takes for absent ones."""
    return (
        Key("num_hidden_layers", "num_layers", layers),
        Key("hidden_size", "hidden_size", 768),
        Key("intermediate_size", "ffn_hidden_size", 3072),
        Key("num_attention_heads", "num_attention_heads", heads),
        Key("image_size", "image_size", 224),
        Key("patch_size", "patch_size", patch),
        Key("hidden_act", "activation", activation, ACTIVATIONS),
        Key("layer_norm_eps", "norm_eps", eps),
        Only({"num_channels": (3,), "attention_dropout": (0.0,)}),
        Fixed(fixed),
    )


_NATIVE_SIZES = (
    Key("spatial_merge_size", "merge", 2),
    Key("temporal_patch_size", "frames", 2),
    Key("window_size", "window", 112),
    Key("fullatt_block_indexes", "full_layers", (7, 15, 23, 31)),
)


@dataclass(frozen=True)
class Windows:
    """The section `native`: what a tower makes of images of any shape."""

    keys: frozenset[str] = frozenset({"rope_parameters"}).union(*(entry.keys for entry in _NATIVE_SIZES))
    fields: frozenset[str] = frozenset({"native"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The section; MismatchError for a rotation of another kind."""
        rope = raw.get("rope_parameters") or {}
        if rope.get("rope_type", "axial") != "axial" or rope.get("rope_theta", 10_000) != 10_000:
            raise MismatchError(f"rope_parameters = {rope!r} is not axial with rope_theta = 10000")
        return {"native": {name: value for entry in _NATIVE_SIZES for name, value in entry.read(raw).items()}}

    def write(self, model: Any) -> dict[str, Any]:
        """As it would be read, of a `VisionConfig`."""
        if model.native is None:
            raise MismatchError("native must be given")
        return {key: value for entry in _NATIVE_SIZES for key, value in entry.write(model.native).items()}


# By the `model_type` of the vision_config.
_NATIVE = (
    Key("depth num_hidden_layers", "num_layers", 32),
    Key("hidden_size", "hidden_size", 3584),
    Key("intermediate_size", "ffn_hidden_size", 3420),
    Key("num_heads num_attention_heads", "num_attention_heads", 16),
    Key("patch_size", "patch_size", 14),
    Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
    Windows(),
    Only({"in_channels": (3,), "in_chans": (3,)}),
    Fixed({
        "norm_eps": 1e-6, "class_token": False, "pre_norm": False, "patch_bias": False, "feature_layer": -1, "projector": "merger",
        "feature_norm": False, "feature_class": False, "pool": 1, "bidirectional": False, "projector_bias": True,
        "projector_activation": "gelu", "pinpoints": None,
    }),
)  # fmt: skip
TOWERS: Mapping[str, tuple[Entry, ...]] = {
    "qwen2_5_vl_vision": _NATIVE, "qwen2_5_vl": _NATIVE,
    "clip_vision_model": _tower(
        12, 12, 32, "quick_gelu", 1e-5, class_token=True, patch_bias=False, pre_norm=True
    ),
    "siglip_vision_model": _tower(
        12, 12, 16, "gelu_pytorch_tanh", 1e-6, class_token=False, patch_bias=True, pre_norm=False
    ),
}  # fmt: skip
# How images are made ready for each, which no config.json says: see `VisionConfig`.
PIXELS: Mapping[str, dict[str, Any]] = {
    "qwen2_5_vl_vision": {}, "qwen2_5_vl": {},
    "clip_vision_model": {}, "siglip_vision_model": {"resize": "stretch", "mean": _HALF, "std": _HALF},
}  # fmt: skip
_CARRIED = words(
    "out_hidden_size spatial_patch_size tokens_per_second initializer_factor initializer_range projection_dim vision_use_head vocab_size"
)
# What transformers takes for absent keys of a text_config, where published folders leave some out.
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
}  # fmt: skip
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Patches:
    """The weight [C, 3 frames size size] of embedded patches, stored as that of a convolution: [C, 3, size, size], or where
    patches are of several frames [C, 3, frames, size, size].
    """

    by_slab: bool = False
    frames: int | None = None

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """The convolution's."""
        ((width, elements),) = parts
        size = isqrt(elements // (3 * (self.frames or 1)))
        return (width, 3, *(() if self.frames is None else (self.frames,)), size, size)

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """The convolution, flat."""
        return [disk.flatten(1)]


def tower_rules(vision: VisionConfig) -> tuple[Rule, ...]:
    """Where the tensors of a CLIP or SigLIP tower are on disk, below the tower's own prefix."""
    layer = {
        "input_layernorm": "layer_norm1", "post_attention_layernorm": "layer_norm2", "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2", "self_attn.o_proj": "self_attn.out_proj",
        **{f"self_attn.{x}_proj": f"self_attn.{x}_proj" for x in "qkv"},
    }  # fmt: skip
    names = {f"layers.{{i}}.{ours}": f"encoder.layers.{{i}}.{theirs}" for ours, theirs in layer.items()}
    names |= {"pre_norm": "pre_layrnorm", "norm": "post_layernorm", "embed_positions": "embeddings.position_embedding"}
    return (
        Rule("embeddings.patch_embedding.weight", (f"{TOWER}embed_patches.weight",), Patches()),
        Rule("embeddings.patch_embedding.bias", (f"{TOWER}embed_patches.bias",)),
        Rule("embeddings.class_embedding", (f"{TOWER}class_embedding",)),
        *(
            Rule(f"{theirs}.{kind}", (f"{TOWER}{ours}.{kind}",))
            for ours, theirs in names.items()
            for kind in ("weight", "bias")
        ),
    )


@dataclass(frozen=True)
class SeeingFamily(Family):
    """A family whose `text` model is of another; `entries` are of config.json itself and the fields of a `VisionConfig`.

    Attributes:
        text: the text model's family, where it is known.
        tower: where a tower's tensors are on disk, below its own prefix.
        styles: what names begin with; the first is written.
        flat: older folders have the text model's keys beside `vision_config`, in no `text_config`.
        projector: where the projector's tensors are on disk.
        towers: kinds of tower that it may have, by their `model_type`.
        texts: likewise of text models; empty: any.
        pixels: as `PIXELS`, where it is another.
    """

    text: Family | None = None
    tower: Callable[[VisionConfig], Sequence[Rule]] = tower_rules
    styles: tuple[Style, ...] = field(default_factory=lambda: STYLES)
    flat: bool = False
    projector: tuple[Rule, ...] = ()
    towers: tuple[str, ...] = tuple(TOWERS)
    texts: tuple[str, ...] = ()
    pixels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def within(self) -> Family:
        """The text model's family."""
        assert self.text is not None
        return self.text

    @property
    def by_expert(self) -> bool:
        """As the text model."""
        return self.within.by_expert

    def read_config(self, raw: Raw, source: str = "config.json") -> ModelConfig:
        """See `Family`."""
        text = self.within.read_config(self.text_of(raw), f"{source}: text_config")
        inner = raw.get("vision_config") or {}
        kind = inner.get("model_type", self.towers[0])
        if kind not in self.towers:
            raise CheckpointError(f"{source}: the vision tower {kind!r} is not known", hint=f"known: {self.towers}")
        fields: dict[str, Any] = {**PIXELS[kind], **self.pixels}
        found = self._wrong_text()
        for entry, keys in [*((one, inner) for one in TOWERS[kind]), *((one, raw) for one in self.entries)]:
            try:
                fields |= entry.read(keys)
            except MismatchError as error:
                found.append(str(error))
        if found:
            raise CheckpointError(f"{source}: this model cannot be expressed: {'; '.join(found)}")
        try:
            vision = VisionConfig.parse(fields, source=f"{source}: vision_config")
            return ModelConfig.parse({**text.model_dump(exclude_unset=True), "vision": vision}, source=source)
        except ConfigError as error:
            raise CheckpointError(error.message, hint=error.hint) from None

    def text_of(self, raw: Raw) -> dict[str, Any]:
        """The `text_config`, with what transformers takes for absent keys of it, and tied where the whole says so."""
        inner = dict(raw.get("text_config") or {})
        if not inner and self.flat:
            own = frozenset({"vision_config", "model_type"}).union(*(entry.keys for entry in self.entries))
            inner = {key: value for key, value in raw.items() if key not in own | self.carried}
            inner["model_type"] = self.within.name
        tied = {_TIED: True} if raw.get(_TIED) else {}
        return _TEXTS.get(inner.get("model_type"), {}) | inner | tied

    def unread_keys(self, raw: Raw) -> list[str]:
        """See `Family`."""
        inner = raw.get("vision_config") or {}
        tower = TOWERS.get(inner.get("model_type", self.towers[0]), ())
        known = CARRIED.union(_CARRIED, *(entry.keys for entry in tower))
        own = CARRIED.union(self.carried, {"text_config", "vision_config", _TIED}, *(one.keys for one in self.entries))
        unread = [f"vision_config.{key}" for key, value in inner.items() if key not in known and value is not None]
        if "text_config" in raw or not self.flat:
            unread += [key for key, value in raw.items() if key not in own and value is not None]
        return sorted(unread) + self.within.unread_keys(self.text_of(raw))

    def problems(self, model: ModelConfig) -> list[str]:
        """See `Family`."""
        if model.vision is None:
            return ["vision must be given"]
        try:
            self._written(model.vision)
        except MismatchError as error:
            return [*self._wrong_text(), str(error)]
        return self._wrong_text() + ([] if self.text is None else self.text.problems(text_model(model)))

    def _wrong_text(self) -> list[str]:
        """That the text model is of a family that this one never has, if so."""
        if self.text is None or not self.texts or self.text.name in self.texts:
            return []
        return [f"the text model must be {' or '.join(self.texts)}, not {self.text.name}"]

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """See `Family`."""
        assert model.vision is not None
        text = self.within.write_config(text_model(model))
        own = {"architectures": [self.architecture], "model_type": self.name, _TIED: model.tie_embeddings}
        return own | self._written(model.vision) | {"text_config": text}

    def _written(self, vision: VisionConfig) -> dict[str, Any]:
        """The keys that the tower and the projector are, `vision_config` among them."""
        out = {key: value for entry in self.entries for key, value in entry.write(vision).items()}  # type: ignore[arg-type]
        reasons: list[str] = []
        for kind in self.towers:
            try:
                inner = {k: v for entry in TOWERS[kind] for k, v in entry.write(vision).items()}  # type: ignore[arg-type]
                return out | {"vision_config": {"model_type": kind, **inner}}
            except MismatchError as error:
                reasons.append(f"{kind}: {error}")
        raise MismatchError("; ".join(reasons))

    def table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """See `Family`. Of the names that folders have had for the same, those that this one has."""
        held = None if names is None else set(names)
        style = Style.of(held, self.styles)
        theirs = None if held is None else {name for name in map(style.text_name, held) if name is not None}
        text = self.within.table(text_model(model), theirs)
        vision = {name: shape for name, shape in tensors_of(model).items() if name.startswith((TOWER, PROJECTOR))}
        assert model.vision is not None
        rules = (*_below(style.tower, self.tower(model.vision)), *_below(style.outer, self.projector))
        seen = disk_tensors(rules, vision, model.vision.num_layers)
        named = {style.disk_name(name): replace(disk, name=style.disk_name(name)) for name, disk in text.items()}
        return seen | named

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """See `Family`."""
        text = self.within.copies(text_model(model))
        return {style.disk_name(copy): name for style in self.styles for copy, name in text.items()}

    def is_buffer(self, name: str) -> bool:
        """See `Family`; so is the pooling head of a tower, which has no use here."""
        text = next((inner for style in self.styles if (inner := style.text_name(name)) is not None), "")
        return super().is_buffer(name) or self.within.is_buffer(text)


@dataclass(frozen=True)
class Style:
    """What the names of a folder's tensors begin with: of the tower, the projector, the text model's body and head.

    Attributes:
        further: what those of the tower go on with.
    """

    tower: str
    outer: str
    body: str
    head: str
    further: str = "e"

    @staticmethod
    def of(names: set[str] | None, styles: Sequence[Style]) -> Style:
        """That of a folder with these names; of a new one the first, what the most software reads."""
        fits = (one for one in styles if any(name.startswith(one.tower + one.further) for name in names or ()))
        return next(fits, styles[0])

    def disk_name(self, name: str) -> str:
        """What a tensor of the text model alone is called here."""
        return self.body + name.removeprefix("model.") if name.startswith("model.") else self.head + name

    def text_name(self, name: str) -> str | None:
        """What a tensor here is called in the text model alone, if it has it."""
        if name.startswith(self.body):
            return "model." + name.removeprefix(self.body)
        return name.removeprefix(self.head) if name.startswith(f"{self.head}lm_head.") else None


# As published, as transformers 5 saves them, and as it holds them. A tower's names go on with `embeddings` or `encoder`.
STYLES: tuple[Style, ...] = (
    Style("vision_tower.vision_model.", "", "language_model.model.", "language_model."),
    Style("vision_tower.", "", "language_model.model.", "language_model."),
    Style("model.vision_tower.vision_model.", "model.", "model.language_model.", ""),
    Style("model.vision_tower.", "model.", "model.language_model.", ""),
)


def text_model(model: ModelConfig) -> ModelConfig:
    """A model without its eyes."""
    return model.model_copy(update={"vision": None})


def _below(prefix: str, rules: Sequence[Rule]) -> list[Rule]:
    return [replace(rule, disk=prefix + rule.disk) for rule in rules]

"""Hybrid models in config.json and on disk: layers of Mamba-2 or gated delta nets next to attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from mega_ckpt.families.disk_layouts import LAYER, ConvLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.moe_entries import MoeFieldEntry
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.layer_kinds import MambaConfig
from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig

# Names of a layer's mixer in transformers; the first names are used by transformers 5.
ATTENTION = {"full_attention": "attention", "attention": "attention"}
RECURRENT = ("linear_attention", "mamba")
CONV1D = ConvLayout()
# No layer has a window: `layer_types`, which lists windows in other families, lists mixers in hybrids.
NO_WINDOW: tuple[ConfigEntry, ...] = (
    AllowedValuesEntry({"sliding_window": (None,)}),
    FixedFieldsEntry({"sliding_window": None}),
)


def parse_layer_mixers(
    kinds: Any, recurrent: str, layers: Sequence[int], names: Sequence[str] = RECURRENT
) -> list[str]:
    """Return the mixer of each layer, "attention" or `recurrent`, from `kinds`, a config.json's list of layer types.

    `names` are the names of the other mixer in config.json.

    Raises:
        ConfigMismatchError: for another type, or another number of layers.
    """
    mixers = ATTENTION | dict.fromkeys(names, recurrent)
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= mixers.keys():
        raise ConfigMismatchError(
            f"layer_types = {kinds!r:.80} is not supported (only a list of {' and '.join(mixers)})"
        )
    if len(kinds) != len(layers):
        raise ConfigMismatchError(f"layer_types has {len(kinds)} layers, but num_hidden_layers = {len(layers)}")
    return [mixers[kind] for kind in kinds]


def check_layer_mixers(model: ModelConfig, recurrent: str) -> list[str]:
    """Return the mixer of each layer of `model`, checked for a hybrid of attention and `recurrent`.

    Raises:
        ConfigMismatchError: unless each layer has attention or `recurrent`, and a feed-forward block.
    """
    kinds = model.layer_kinds[: model.num_layers]
    if not all(kind.mixer in ("attention", recurrent) and kind.feed_forward for kind in kinds):
        raise ConfigMismatchError(f"layers must each have attention or {recurrent}, and a feed-forward block")
    return [str(kind.mixer) for kind in kinds]


def to_transformers_layer_types(
    mixers: Sequence[str], attention: str = "full_attention", other: str = RECURRENT[0]
) -> list[str]:
    """Return transformers' layer types for mega's mixer names.
    The result has `attention` for attention layers and `other` for all others.
    """
    return [attention if mixer == "attention" else other for mixer in mixers]


@dataclass(frozen=True)
class UnusedFieldsEntry:
    """Translation to and from config.json of `ModelConfig` fields that no layer uses but that need a value.
    The value is a number, or that of a config.json key.
    """

    values: Mapping[str, int | str]
    handled_config_keys: frozenset[str] = field(default=frozenset())

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Names of the `ModelConfig` fields that are translated to and from config.json, or checked."""
        return frozenset(self.values)

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return {field: value} of the `ModelConfig` fields that no layer of the family uses."""
        return {name: raw.get(value, 1) if isinstance(value, str) else value for name, value in self.values.items()}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no config.json keys: the unused fields have no effect."""
        return {}


@dataclass(frozen=True)
class OptionalRopeEntry:
    """Translation to and from config.json of rotary positions or no positions (Granite 4).
    Config.json selects them by `position_embedding_type`; subclasses by other keys.
    """

    rope: RopeEntry

    def has_positions(self, raw: ConfigDict) -> bool:
        """Return whether a config.json selects rotary positions."""
        return raw.get("position_embedding_type") == "rope"

    def selection_keys(self, *, has_positions: bool) -> dict[str, Any]:
        """Return the keys of config.json that select rotary positions, or none: "nope", as in published folders."""
        return {"position_embedding_type": "rope" if has_positions else "nope"}

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.rope.handled_config_keys | {"position_embedding_type"}

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Names of the `ModelConfig` fields that are translated to and from config.json, or checked."""
        return frozenset({"position", "rope"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `position` and, if it is "rope", `rope`."""
        if not self.has_positions(raw):
            return {"position": "none"}
        return {"position": "rope", **self.rope.fields_from_config(raw)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of rotary positions; ConfigMismatchError for other kinds of positions."""
        if model.position not in ("rope", "none"):
            raise ConfigMismatchError(f"position must be rope or none, not {model.position}")
        selected = self.selection_keys(has_positions=model.position == "rope")
        return {**selected, **(self.rope.config_from_fields(model) if model.position == "rope" else {})}


@dataclass(frozen=True)
class MambaSectionEntry:
    """Translation to and from config.json of the section `mamba` of `ModelConfig`, the sizes of Mamba-2 layers.
    A model without Mamba layers may lack it.

    Attributes:
        entries: mapping between the keys and the section's fields.
        expand: the key of the ratio of the width of all heads to the model's width, which the family's class checks;
            None if the family has no such key.
        auto: the key of the head width whose value "auto" means that it follows from `expand`.
        expand_default: transformers' default for an absent `expand`.
    """

    entries: tuple[MoeFieldEntry, ...]
    expand: str | None = None
    auto: str | None = None
    expand_default: int = 2
    handled_model_fields: frozenset[str] = frozenset({"mamba"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset([self.expand] if self.expand else []).union(
            *(entry.handled_config_keys for entry in self.entries)
        )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `mamba`, the sizes of Mamba-2 layers, from config.json.
        Raises ConfigMismatchError if heads times head width is not the width that `expand` implies.
        """
        raw, section = dict(raw), dict[str, Any]()
        width = raw.get("hidden_size", 0) * raw.get(self.expand, self.expand_default) if self.expand else None
        if self.auto and raw.get(self.auto, "auto") == "auto":
            (heads,) = (
                entry.fields_from_config(raw)["num_heads"]
                for entry in self.entries
                if "num_heads" in entry.handled_model_fields
            )
            raw[self.auto] = (width or 0) // heads
        for entry in self.entries:
            section |= entry.fields_from_config(raw)
        if width not in (None, section["num_heads"] * section["head_dim"]):
            sizes = f"{section['num_heads']} heads x {section['head_dim']}"
            raise ConfigMismatchError(f"{self.expand} x hidden_size = {width} must equal {sizes}")
        return {"mamba": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of Mamba-2 sizes; those of a valid placeholder for a model without Mamba layers.
        The placeholder is one head, twice as wide as the model. Raises ConfigMismatchError for sizes, a norm or an epsilon
        that no key expresses.
        """
        section = model.mamba or MambaConfig(num_heads=1, head_dim=2 * model.hidden_size)
        out: dict[str, Any] = {}
        if self.expand:
            out[self.expand], rest = divmod(section.inner_size, model.hidden_size)
            if rest:
                raise ConfigMismatchError(
                    f"mamba.num_heads x mamba.head_dim must be a multiple of hidden_size = {model.hidden_size}"
                )
        if section.norm != "gated" and not any("norm" in entry.handled_model_fields for entry in self.entries):
            raise ConfigMismatchError(f"mamba.norm must be 'gated', not {section.norm!r}")
        if section.norm_eps not in (None, model.norm_eps):
            raise ConfigMismatchError(f"mamba.norm_eps must be norm_eps = {model.norm_eps}, not {section.norm_eps}")
        for entry in self.entries:
            out |= entry.config_from_fields(section)
        return out


@dataclass(frozen=True)
class TimeStepLimitEntry:
    """Translation to and from config.json of the limits of Mamba-2's time step.
    The upper limit may be infinite, which config.json spells in one of three ways.
    """

    key: str = "time_step_limit"
    handled_model_fields: frozenset[str] = frozenset({"dt_limit"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset(self.key.split())

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `dt_limit`, (lower, upper), with None for an infinite upper limit; an empty result if the key is absent.
        Raises ConfigMismatchError if it is not two numbers.
        """
        given = next((raw[key] for key in self.key.split() if raw.get(key) is not None), None)
        if given is None:
            return {}
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise ConfigMismatchError(f"time_step_limit = {given!r} must be two numbers")
        low, high = map(_parse_number, given)
        return {"dt_limit": (low, None if math.isinf(high) else high)}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return the config.json key of the limits of Mamba-2's time step; no key for the default (0, infinite).
        So no program needs to parse infinity for a model with the default.
        """
        assert isinstance(model, MambaConfig)
        low, high = model.dt_limit
        if (low, high) == (0.0, None):
            return {}
        return {self.key.split()[0]: [low, {"__float__": "Infinity"} if high is None else high]}


def _parse_number(value: Any) -> float:
    """Parse a number as in JSON, or as transformers and others spell values that JSON lacks."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigMismatchError(f"time_step_limit: {value!r} must be a number") from None


# Keys of Bamba and Granite.
MAMBA = MambaSectionEntry(
    (
        KeyEntry("mamba_n_heads", "num_heads", 128),
        KeyEntry("mamba_d_head", "head_dim", "auto"),
        KeyEntry("mamba_n_groups", "num_groups", 1),
        KeyEntry("mamba_d_state", "state_size", 256),
        KeyEntry("mamba_d_conv", "conv_kernel", 4),
        KeyEntry("mamba_chunk_size", "chunk_size", 256),
        KeyEntry("mamba_conv_bias", "conv_bias", True),
        KeyEntry("mamba_proj_bias", "bias", False),
        TimeStepLimitEntry(),
    ),
    expand="mamba_expand",
    auto="mamba_d_head",
)


def mamba_tensor_rules(module: str) -> tuple[TensorRule, ...]:
    """Return the tensor rules of Mamba-2 layers with fused projection and convolution.
    One projection yields z|x|B|C|dt, and one convolution covers x|B|C. `module` is the Mamba module's disk name, with
    `{i}` for the layer number.
    """
    mamba = f"{LAYER}.mamba"
    channels = [f"{mamba}.conv1d.{part}" for part in ("x", "B", "C")]
    unfused = ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight", "out_proj.bias")
    return (
        *weight_bias_rules(f"{module}.in_proj", *(f"{mamba}.in_proj.{part}" for part in ("z", "x", "B", "C", "dt"))),
        TensorRule(f"{module}.conv1d.weight", tuple(f"{part}.weight" for part in channels), CONV1D),
        TensorRule(f"{module}.conv1d.bias", tuple(f"{part}.bias" for part in channels)),
        *(TensorRule(f"{module}.{name}", (f"{mamba}.{name}",)) for name in unfused),
    )

"""Layers of several kinds in config.json and on disk: Mamba-2, and gated delta nets, beside attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_ckpt.families.experts import Section
from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import Rule, Taps
from mega_ckpt.families.rope import Rope
from mega_common.config import Config
from mega_common.layers import MambaConfig
from mega_common.model_config import ModelConfig

# What transformers calls the mixer of a layer; the first names are those of transformers 5.
ATTENTION = {"full_attention": "attention", "attention": "attention"}
RECURRENT = ("linear_attention", "mamba")
TAPS = Taps()
# No layer has a window. The lists of kinds, which elsewhere tell of windows, here tell of mixers.
NO_WINDOW: tuple[Entry, ...] = (Only({"sliding_window": (None,)}), Fixed({"sliding_window": None}))


def mixers_named(kinds: Any, recurrent: str, layers: Sequence[int]) -> list[str]:
    """The mixers that a list of kinds names, one for each of `layers`; `recurrent` is what is no attention.

    Raises:
        MismatchError: for another kind, or another number of layers.
    """
    names = ATTENTION | dict.fromkeys(RECURRENT, recurrent)
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= names.keys():
        raise MismatchError(f"layer_types = {kinds!r:.80} is not supported (only a list of {' and '.join(names)})")
    if len(kinds) != len(layers):
        raise MismatchError(f"layer_types names {len(kinds)} layers, but num_hidden_layers = {len(layers)}")
    return [names[kind] for kind in kinds]


def check_mixers(model: ModelConfig, recurrent: str) -> list[str]:
    """The mixer of each layer of `model`, all of which have one and a feed-forward.

    Raises:
        MismatchError: when they have not, or one that is neither attention nor `recurrent`.
    """
    kinds = model.kinds[: model.num_layers]
    if not all(kind.mixer in ("attention", recurrent) and kind.feed for kind in kinds):
        raise MismatchError(f"layers must each be attention or {recurrent}, and a feed-forward")
    return [str(kind.mixer) for kind in kinds]


def names_of(mixers: Sequence[str], attention: str = "full_attention", other: str = RECURRENT[0]) -> list[str]:
    """What transformers calls them."""
    return [attention if mixer == "attention" else other for mixer in mixers]


@dataclass(frozen=True)
class Unused:
    """Fields that no layer of the family asks for; some value they must have: a number, or that of a key."""

    values: Mapping[str, int | str]
    keys: frozenset[str] = field(default=frozenset())

    @property
    def fields(self) -> frozenset[str]:
        """The fields."""
        return frozenset(self.values)

    def read(self, raw: Raw) -> dict[str, Any]:
        """The values."""
        return {name: raw.get(value, 1) if isinstance(value, str) else value for name, value in self.values.items()}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class RopeOrNone:
    """Rotary positions where a key says so, else none: Granite 4."""

    rope: Rope

    @property
    def keys(self) -> frozenset[str]:
        """Those of the rotary settings, and the switch."""
        return self.rope.keys | {"position_embedding_type"}

    @property
    def fields(self) -> frozenset[str]:
        """Both."""
        return frozenset({"position", "rope"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The rotary settings only where they count."""
        if raw.get("position_embedding_type") != "rope":
            return {"position": "none"}
        return {"position": "rope", **self.rope.read(raw)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """`nope` is the hub's word for none."""
        if model.position == "learned":
            raise MismatchError("position must be rope or none, not learned")
        kind = "rope" if model.position == "rope" else "nope"
        return {"position_embedding_type": kind, **(self.rope.write(model) if kind == "rope" else {})}


@dataclass(frozen=True)
class Mamba:
    """The section `mamba`; a model without such layers may lack it.

    Attributes:
        entries: how the keys and the section's fields correspond.
        expand: the key of how many times the model's width all heads together are wide, which the family's class insists
            on; none where it does not.
        auto: the key of the heads' width where "auto" leaves it to `expand`.
        expand_default: what transformers takes where that key is absent.
    """

    entries: tuple[Section, ...]
    expand: str | None = None
    auto: str | None = None
    expand_default: int = 2
    fields: frozenset[str] = frozenset({"mamba"})

    @property
    def keys(self) -> frozenset[str]:
        """Those of all entries."""
        return frozenset([self.expand] if self.expand else []).union(*(entry.keys for entry in self.entries))

    def read(self, raw: Raw) -> dict[str, Any]:
        """The section."""
        raw, section = dict(raw), dict[str, Any]()
        width = raw.get("hidden_size", 0) * raw.get(self.expand, self.expand_default) if self.expand else None
        if self.auto and raw.get(self.auto, "auto") == "auto":
            (heads,) = (entry.read(raw)["num_heads"] for entry in self.entries if "num_heads" in entry.fields)
            raw[self.auto] = (width or 0) // heads
        for entry in self.entries:
            section |= entry.read(raw)
        if width not in (None, section["num_heads"] * section["head_dim"]):
            sizes = f"{section['num_heads']} heads of {section['head_dim']}"
            raise MismatchError(f"{self.expand} x hidden_size = {width} must be that of {sizes}")
        return {"mamba": section}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The section's keys. Sizes that no layer asks for must still fit: one head, twice as wide as the model."""
        section = model.mamba or MambaConfig(num_heads=1, head_dim=2 * model.hidden_size)
        out: dict[str, Any] = {}
        if self.expand:
            out[self.expand], rest = divmod(section.inner_size, model.hidden_size)
            if rest:
                raise MismatchError(f"mamba: the heads' width must be a multiple of hidden_size = {model.hidden_size}")
        if section.norm_eps not in (None, model.norm_eps):
            raise MismatchError(f"mamba.norm_eps must be norm_eps = {model.norm_eps}, not {section.norm_eps}")
        for entry in self.entries:
            out |= entry.write(section)
        return out


@dataclass(frozen=True)
class TimeLimit:
    """Limits of a step's length. An upper one may be infinite, which config.json says in one of three ways."""

    key: str = "time_step_limit"
    fields: frozenset[str] = frozenset({"dt_limit"})

    @property
    def keys(self) -> frozenset[str]:
        """The key, and after spaces others that mean the same."""
        return frozenset(self.key.split())

    def read(self, raw: Raw) -> dict[str, Any]:
        """Both limits; None for an upper one that is infinite."""
        given = next((raw[key] for key in self.key.split() if raw.get(key) is not None), None)
        if given is None:
            return {}
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise MismatchError(f"time_step_limit = {given!r} is no pair of numbers")
        low, high = map(_number, given)
        return {"dt_limit": (low, None if math.isinf(high) else high)}

    def write(self, model: Config) -> dict[str, Any]:
        """Nothing where there is no limit: that is the default, and no reader has to know a word for infinity."""
        assert isinstance(model, MambaConfig)
        low, high = model.dt_limit
        if (low, high) == (0.0, None):
            return {}
        return {self.key.split()[0]: [low, {"__float__": "Infinity"} if high is None else high]}


def _number(value: Any) -> float:
    """A number as JSON has it, or as transformers and others write what JSON has not."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MismatchError(f"time_step_limit: {value!r} is no number") from None


# The spelling of Bamba and Granite.
MAMBA = Mamba(
    (
        Key("mamba_n_heads", "num_heads", 128),
        Key("mamba_d_head", "head_dim", "auto"),
        Key("mamba_n_groups", "num_groups", 1),
        Key("mamba_d_state", "state_size", 256),
        Key("mamba_d_conv", "conv_kernel", 4),
        Key("mamba_chunk_size", "chunk_size", 256),
        Key("mamba_conv_bias", "conv_bias", True),
        Key("mamba_proj_bias", "bias", False),
        TimeLimit(),
    ),
    expand="mamba_expand",
    auto="mamba_d_head",
)


def mamba_rules(module: str) -> tuple[Rule, ...]:
    """One projection z|x|B|C|dt, one convolution over x|B|C; `module` is the layer's, with `{i}` for its number."""
    ours = "model.layers.{i}.mamba"
    into, taps = ([f"{ours}.{name}.{part}" for part in parts] for name, parts in (
        ("in_proj", ("z", "x", "B", "C", "dt")), ("conv1d", ("x", "B", "C")),
    ))  # fmt: skip
    own = ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight", "out_proj.bias")
    return (
        Rule(f"{module}.in_proj.weight", tuple(f"{part}.weight" for part in into)),
        Rule(f"{module}.in_proj.bias", tuple(f"{part}.bias" for part in into)),
        Rule(f"{module}.conv1d.weight", tuple(f"{part}.weight" for part in taps), TAPS),
        Rule(f"{module}.conv1d.bias", tuple(f"{part}.bias" for part in taps)),
        *(Rule(f"{module}.{name}", (f"{ours}.{name}",)) for name in own),
    )

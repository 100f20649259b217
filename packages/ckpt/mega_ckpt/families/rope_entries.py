"""Rotary position embeddings in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling`
before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_ckpt.families.config_entries import ConfigDict, ConfigMismatchError
from mega_common.model_config import ModelConfig, RopeConfig

# Parameters of each rope_type: {key: field of RopeConfig}. Others are ignored with a warning, as in transformers.
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ORIGINAL_KEY = "original_max_position_embeddings"
_ORIGINAL = {_ORIGINAL_KEY: "original_max_position"}
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")} | _ORIGINAL,
    "yarn": {key: key for key in ("factor", *_YARN)} | _ORIGINAL,
    "proportional": {"factor": "factor"},
    "longrope": {key: key for key in ("factor", "short_factor", "long_factor", "attention_factor")} | _ORIGINAL,
}
EVERY_SCALING = frozenset(_PARAMETERS) - {"proportional"}
_SETS = ("full_attention", "sliding_attention")
_DEFAULTS = {"truncate": True, "factor": 1.0}  # keys that are left out at these values
_COVERED = {"theta", "fraction", "interleaved", "clockwise", "scaling"}.union(
    *(fields.values() for fields in _PARAMETERS.values())
)
_MULTIMODAL = {"mrope_section", "mrope_interleaved"}  # without effect on text, whose tokens have one position each
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"}) | _MULTIMODAL


@dataclass(frozen=True)
class RopeEntry:
    """Translation to and from config.json of all keys of config.json about rotary position embeddings (RoPE).

    Attributes:
        theta, fraction: transformers' defaults for absent keys.
        partial: the family's code applies the fraction of a file; else it is always `fraction`.
        theta_key, fraction_key: names of their keys in older folders of the family.
        scalings: values of `rope_type` that the family's configuration accepts.
        aliases: older names of values of `rope_type`.
        absent: parameters of a folder that has none.
        original: default of the original length in families that have its key outside the parameters, where it takes
            precedence.
        interleaved: the family's code rotates adjacent elements.
        query_scaling: the family's code scales queries by position, by the parameter `llama_4_scaling_beta`.
        clockwise: the family's code rotates by negative angles.
        ntk_alpha: rope_type "dynamic" with a parameter `alpha` means a larger base frequency, as in Hunyuan.
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    partial: bool = False
    theta_key: str = "rope_theta"
    fraction_key: str = "partial_rotary_factor"
    scalings: frozenset[str] = EVERY_SCALING - {"longrope"}
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    original: int | None = None
    interleaved: bool = False
    query_scaling: bool = False
    clockwise: bool = False
    ntk_alpha: bool = False
    handled_model_fields: frozenset[str] = frozenset({"rope"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        usual = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _ORIGINAL_KEY}
        return frozenset({*usual, self.theta_key, self.fraction_key})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `rope` (theta, fraction, scaling), from `rope_scaling` if given, else from `rope_parameters`.
        Absent keys have the defaults of the family. Raises ConfigMismatchError for a scaling that the family does not have,
        sets per layer type, and conflicts.
        """
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or self.absent
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ConfigMismatchError(f"rope_parameters = {given!r} must be one set of parameters for all layers")
        kind = given.get("rope_type", given.get("type", "default"))
        stretched = bool(self.ntk_alpha and kind == "dynamic" and given.get("alpha"))
        kind = "default" if stretched else kind
        scaling = "none" if kind == "default" else self.aliases.get(kind, kind)
        if scaling not in self.scalings:
            supported = ", ".join(["default", *(name for name in _PARAMETERS if name in self.scalings - {"none"})])
            raise ConfigMismatchError(f"rope_type = {kind!r} is not supported (only {supported})")
        out = {
            "theta": given.get("rope_theta") or raw.get(self.theta_key) or self.theta,
            "fraction": given.get("partial_rotary_factor") or raw.get(self.fraction_key) or self.fraction,
            "scaling": scaling,
            "interleaved": self.interleaved,
            "clockwise": self.clockwise,
            **_read_parameters(scaling, given, raw),
        }
        if self.query_scaling:
            if not given.get("llama_4_scaling_beta"):
                raise ConfigMismatchError("llama_4_scaling_beta of rope_parameters is missing")
            out["query_scaling"] = given["llama_4_scaling_beta"]
        if stretched:
            out["theta"] *= _ntk_growth(given["alpha"], raw)
        if self.original and scaling == "longrope":
            out["original_max_position"] = raw.get(_ORIGINAL_KEY, self.original)
        given_theta = out["theta"] if not stretched else raw.get("rope_theta")
        for key, value in (("rope_theta", given_theta), ("partial_rotary_factor", out["fraction"])):
            if raw.get(key) not in (None, value) and key not in (self.theta_key, self.fraction_key):
                raise ConfigMismatchError(f"{key} = {raw[key]!r} must be {value}")
        self._check_fraction(out["fraction"])
        return {"rope": out}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of rotary positions for old and new transformers; ConfigMismatchError for settings the family lacks.
        They are `rope_parameters` for new versions, and `rope_scaling` and `rope_theta` for old ones.
        """
        rope = model.rope
        self._check_fraction(rope.fraction)
        if rope.interleaved != self.interleaved:
            raise ConfigMismatchError(f"rope.interleaved must be {self.interleaved}")
        if rope.clockwise != self.clockwise:
            raise ConfigMismatchError(f"rope.clockwise must be {self.clockwise}")
        if rope.scaling not in self.scalings:
            raise ConfigMismatchError(
                f"rope.scaling must be {' or '.join(sorted(self.scalings))}, not {rope.scaling!r}"
            )
        kind = "default" if rope.scaling == "none" else rope.scaling
        if self.query_scaling and rope.query_scaling is None:
            raise ConfigMismatchError("rope.query_scaling is missing (queries of this family are scaled by position)")
        scaled = {"llama_4_scaling_beta": rope.query_scaling} if self.query_scaling else {}
        unscaled = rope.model_copy(update={"query_scaling": None}) if self.query_scaling else rope
        parameters = {"rope_type": kind, **_write_parameters(unscaled), **scaled}
        partial = {"partial_rotary_factor": rope.fraction} if self.partial else {}
        separate = self.original is not None and rope.scaling == "longrope"
        return {
            **({_ORIGINAL_KEY: rope.original_max_position} if separate else {}),
            self.theta_key: rope.theta,
            **({self.fraction_key: rope.fraction} if self.partial else {}),
            "rope_scaling": None if kind == "default" else dict(parameters),
            "rope_parameters": {**parameters, "rope_theta": rope.theta, **partial},
        }

    def _check_fraction(self, fraction: float) -> None:
        if fraction != self.fraction and not self.partial:
            raise ConfigMismatchError(f"rope.fraction (partial_rotary_factor) must be {self.fraction}, not {fraction}")


def _ntk_growth(alpha: float, raw: ConfigDict) -> float:
    """Return the factor on the base frequency of NTK-aware scaling by a fixed `alpha`."""
    size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return float(alpha ** (size / (size - 2)))


def _read_parameters(scaling: str, given: ConfigDict, raw: ConfigDict) -> dict[str, Any]:
    names = _PARAMETERS[scaling]
    out = {field: given[key] for key, field in names.items() if given.get(key) is not None}
    longest = raw.get("max_position_embeddings")
    if "original_max_position" in names.values():  # the key outside the parameters takes precedence
        out["original_max_position"] = raw.get(_ORIGINAL_KEY) or out.get("original_max_position", longest)
    if scaling == "yarn" and "factor" not in out and longest and out["original_max_position"]:
        out["factor"] = longest / out["original_max_position"]
    if "factor" in names and "factor" not in out and scaling not in ("longrope", "proportional"):  # longrope derives it
        raise ConfigMismatchError(f"factor of rope_type {scaling!r} is missing")
    return out


def find_unused_rope_keys(raw: ConfigDict) -> list[str]:
    """Return the RoPE keys of a config.json that their rope_type does not use.
    They are keys of `rope_scaling` and `rope_parameters`, returned as `rope_scaling.key` or `rope_parameters.key`.
    """
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name)
        sets = [given, *given.values()] if isinstance(given, Mapping) else []
        for each in (part for part in sets if isinstance(part, Mapping)):
            used = _PARAMETERS.get(str(each.get("rope_type", each.get("type"))), {})
            unused = each.keys() - used.keys() - _COMMON - {*_SETS, "main", "compress"}
            found += [f"{name}.{key}" for key in sorted(unused) if each[key] is not None]
    return found


def _write_parameters(rope: RopeConfig) -> dict[str, Any]:
    for name, info in RopeConfig.model_fields.items():
        if name not in _COVERED and getattr(rope, name) != info.default:
            raise ConfigMismatchError(f"rope.{name} = {getattr(rope, name)!r} has no key in config.json")
    found = {key: getattr(rope, field) for key, field in _PARAMETERS[rope.scaling].items()}
    return {key: value for key, value in found.items() if value is not None and _DEFAULTS.get(key) != value}


@dataclass(frozen=True)
class RotaryDimEntry:
    """Translation to and from config.json of rotary positions with a key for the number of rotated elements of a head.
    The key is used instead of or in addition to `partial_rotary_factor`.

    Attributes:
        rope: entry of all other keys.
        key: key of the number.
        sizes: keys of the head dimension, the width and the number of heads.
        default: the number if the key is absent; None: the fraction of `rope`.
    """

    rope: RopeEntry
    key: str = "rotary_dim"
    sizes: tuple[str, str, str] = ("head_dim", "hidden_size", "num_attention_heads")
    default: int | None = None
    handled_model_fields: frozenset[str] = frozenset({"rope"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.rope.handled_config_keys | {self.key}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `rope` from config.json, with the number of rotated elements of a head.
        The rotary fraction follows from that number if its key is given. Raises ConfigMismatchError if it is not from 1
        to the head dimension.
        """
        size, width, heads = (raw.get(key) for key in self.sizes)
        size = size or (width // heads if width and heads else None)
        rotated = raw.get(self.key, self.default)
        given = raw.get("partial_rotary_factor") or (raw.get("rope_parameters") or {}).get("partial_rotary_factor")
        if rotated is None or not size or given:
            return self.rope.fields_from_config(raw)
        if not 0 < rotated <= size:
            raise ConfigMismatchError(f"{self.key} = {rotated!r} must be between 1 and the head size {size}")
        return self.rope.fields_from_config({**raw, "partial_rotary_factor": rotated / size})

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of rotary positions, and the number of rotated elements of a head."""
        return {**self.rope.config_from_fields(model), self.key: model.rotary_dim}


@dataclass(frozen=True)
class GlobalLocalRopeEntry:
    """Translation to and from config.json of two sets of rotary parameters, as in Gemma 3.
    One is for full-attention layers, the other for sliding-window layers.

    Attributes:
        rope, local: entries of the two sets.
        local_key: key of the second set's base frequency in older folders, which do not scale the second set; None: they
            have no such key.
        old_form: the keys of older folders are written too.
    """

    rope: RopeEntry
    local: RopeEntry
    local_key: str | None = "rope_local_base_freq"
    old_form: bool = True
    handled_model_fields: frozenset[str] = frozenset({"rope", "local_rope"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.rope.handled_config_keys | ({self.local_key} if self.local_key else set())

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of two sets of rotary parameters from config.json.
        They are `rope` (full-attention layers) and `local_rope` (sliding-window layers). The key `rope_scaling` applies
        to `rope` only. Raises ConfigMismatchError if `rope_parameters` are not sets per layer type.
        """
        given = raw.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or not given.keys() <= set(_SETS):
            raise ConfigMismatchError(f"rope_parameters = {given!r} must be one set of parameters for each of {_SETS}")
        full, local = (given.get(name) or {} for name in _SETS)
        rest = {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_scaling")}
        base = (raw.get(self.local_key) if self.local_key else None) or self.local.theta
        rope = self.rope.fields_from_config({**rest, "rope_parameters": {**full, **(raw.get("rope_scaling") or {})}})
        windowed = self.local.fields_from_config({**rest, "rope_parameters": local, "rope_theta": base})
        return {**rope, "local_rope": windowed["rope"]}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's keys of two sets of rotary parameters.
        They are written for new versions of transformers (`rope_parameters`) and for old ones.
        """
        full = self.rope.config_from_fields(model)
        local = self.local.config_from_fields(model.model_copy(update={"rope": model.local_rope or model.rope}))
        sets = zip(_SETS, (full["rope_parameters"], local["rope_parameters"]), strict=True)
        base = {self.local_key: local["rope_theta"]} if self.local_key else {}
        full = full if self.old_form else {}
        return {**full, **base, "rope_parameters": dict(sets)}

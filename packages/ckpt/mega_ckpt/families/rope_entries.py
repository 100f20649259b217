"""Rotary position embeddings in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling`
before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_ckpt.families.config_entries import ConfigMismatchError, HfConfigDict
from mega_common.model_config import ModelConfig, RopeConfig

# Parameters of each rope_type: {key: field of RopeConfig}. transformers warns of others and ignores them, and so do we.
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ORIGINAL_KEY = "original_max_position_embeddings"
_ORIGINAL = {_ORIGINAL_KEY: "original_max_position"}
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")} | _ORIGINAL,
    "yarn": {key: key for key in ("factor", *_YARN)} | _ORIGINAL,
    "longrope": {key: key for key in ("factor", "short_factor", "long_factor", "attention_factor")} | _ORIGINAL,
}
EVERY_SCALING = frozenset(_PARAMETERS)
_SETS = ("full_attention", "sliding_attention")
_UNSAID = {"truncate": True, "factor": 1.0}  # not written at these values, which are what an absent key means
_ANSWERED = {"theta", "fraction", "interleaved", "scaling"}.union(*(fields.values() for fields in _PARAMETERS.values()))
_OF_IMAGES = {"mrope_section", "mrope_interleaved"}  # places of an image's parts; in a text they are those of tokens
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"}) | _OF_IMAGES


@dataclass(frozen=True)
class RopeEntry:
    """All keys about rotary position embeddings.

    Attributes:
        theta, fraction: what transformers takes where the keys are absent.
        partial: whether the family's model code goes by the fraction; else it is always the one of above.
        theta_key, fraction_key: what older folders of the family call them.
        scalings: the kinds that the family's configuration accepts.
        aliases: older names of kinds.
        absent: parameters that a folder without any stands for.
        original: the original length, where the family has a key beside the parameters for it, which then is the one
            that counts.
        interleaved: whether the family's model code rotates neighbours.
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    partial: bool = False
    theta_key: str = "rope_theta"
    fraction_key: str = "partial_rotary_factor"
    scalings: frozenset[str] = frozenset(_PARAMETERS) - {"longrope"}
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    original: int | None = None
    interleaved: bool = False
    covered_fields: frozenset[str] = frozenset({"rope"})

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""
        usual = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _ORIGINAL_KEY}
        return frozenset({*usual, self.theta_key, self.fraction_key})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return `rope` from either form; from the older one if both are there, like transformers."""
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or self.absent
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ConfigMismatchError(f"rope_parameters = {given!r} is not one set of parameters for all layers")
        kind = given.get("rope_type", given.get("type", "default"))
        scaling = "none" if kind == "default" else self.aliases.get(kind, kind)
        if scaling not in self.scalings:
            known = ", ".join(["default", *(name for name in _PARAMETERS if name in self.scalings - {"none"})])
            raise ConfigMismatchError(f"rope_type = {kind!r} is not supported (known: {known})")
        out = {
            "theta": given.get("rope_theta") or raw.get(self.theta_key) or self.theta,
            "fraction": given.get("partial_rotary_factor") or raw.get(self.fraction_key) or self.fraction,
            "scaling": scaling,
            "interleaved": self.interleaved,
            **_read_parameters(scaling, given, raw),
        }
        if self.original and scaling == "longrope":
            out["original_max_position"] = raw.get(_ORIGINAL_KEY, self.original)
        for key, value in (("rope_theta", out["theta"]), ("partial_rotary_factor", out["fraction"])):
            if raw.get(key) not in (None, value) and key not in (self.theta_key, self.fraction_key):
                raise ConfigMismatchError(f"{key} = {raw[key]!r} must be {value}")
        self._check_fraction(out["fraction"])
        return {"rope": out}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return both forms, so that old and new software reads the model: each ignores or confirms the other."""
        rope = model.rope
        self._check_fraction(rope.fraction)
        if rope.interleaved != self.interleaved:
            raise ConfigMismatchError(f"rope.interleaved must be {self.interleaved}")
        if rope.scaling not in self.scalings:
            raise ConfigMismatchError(
                f"rope.scaling must be {' or '.join(sorted(self.scalings))}, not {rope.scaling!r}"
            )
        kind = "default" if rope.scaling == "none" else rope.scaling
        parameters = {"rope_type": kind, **_write_parameters(rope)}
        partial = {"partial_rotary_factor": rope.fraction} if self.partial else {}
        beside = self.original is not None and rope.scaling == "longrope"
        original = {_ORIGINAL_KEY: rope.original_max_position} if beside else {}
        return {
            **original,
            self.theta_key: rope.theta,
            **({self.fraction_key: rope.fraction} if self.partial else {}),
            "rope_scaling": None if kind == "default" else dict(parameters),
            "rope_parameters": {**parameters, "rope_theta": rope.theta, **partial},
        }

    def _check_fraction(self, fraction: float) -> None:
        if fraction != self.fraction and not self.partial:
            raise ConfigMismatchError(f"rope.fraction (partial_rotary_factor) must be {self.fraction}, not {fraction}")


def _read_parameters(scaling: str, given: HfConfigDict, raw: HfConfigDict) -> dict[str, Any]:
    names = _PARAMETERS[scaling]
    out = {field: given[key] for key, field in names.items() if given.get(key) is not None}
    longest = raw.get("max_position_embeddings")
    if "original_max_position" in names.values():  # beside the parameters it counts before the one among them
        out["original_max_position"] = raw.get(_ORIGINAL_KEY) or out.get("original_max_position", longest)
    if scaling == "yarn" and "factor" not in out and longest and out["original_max_position"]:
        out["factor"] = longest / out["original_max_position"]
    if "factor" in names and "factor" not in out and scaling != "longrope":  # which derives it from the two lengths
        raise ConfigMismatchError(f"factor of rope_type {scaling!r} is missing")
    return out


def unread_rope_keys(raw: HfConfigDict) -> list[str]:
    """Return the keys of `rope_scaling` and `rope_parameters` that their rope_type does not use, as `rope_scaling.key`."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name)
        sets = [given, *given.values()] if isinstance(given, Mapping) else []
        for each in (part for part in sets if isinstance(part, Mapping)):
            asked = _PARAMETERS.get(str(each.get("rope_type", each.get("type"))), {})
            unasked = each.keys() - asked.keys() - _COMMON - set(_SETS)
            found += [f"{name}.{key}" for key in sorted(unasked) if each[key] is not None]
    return found


def _write_parameters(rope: RopeConfig) -> dict[str, Any]:
    for name, info in RopeConfig.model_fields.items():
        if name not in _ANSWERED and getattr(rope, name) != info.default:
            raise ConfigMismatchError(f"rope.{name} = {getattr(rope, name)!r} has no counterpart")
    found = {key: getattr(rope, field) for key, field in _PARAMETERS[rope.scaling].items()}
    return {key: value for key, value in found.items() if value is not None and _UNSAID.get(key) != value}


@dataclass(frozen=True)
class GlobalLocalRopeEntry:
    """One set of rotary parameters for full-attention layers and one for sliding-window layers, as in Gemma 3.

    Attributes:
        rope, local: what each set's keys are and stand for.
        local_key: what older folders call the base of the second, which they only have without scaling; None: they have
            no key for it.
    """

    rope: RopeEntry
    local: RopeEntry
    local_key: str | None = "rope_local_base_freq"
    covered_fields: frozenset[str] = frozenset({"rope", "local_rope"})

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""
        return self.rope.covered_keys | ({self.local_key} if self.local_key else set())

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return both sets; `rope_scaling` applies to full-attention layers only."""
        given = raw.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or not given.keys() <= set(_SETS):
            raise ConfigMismatchError(f"rope_parameters = {given!r} is not one set of parameters for each of {_SETS}")
        full, local = (given.get(name) or {} for name in _SETS)
        rest = {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_scaling")}
        base = (raw.get(self.local_key) if self.local_key else None) or self.local.theta
        rope = self.rope.read_config_keys({**rest, "rope_parameters": {**full, **(raw.get("rope_scaling") or {})}})
        windowed = self.local.read_config_keys({**rest, "rope_parameters": local, "rope_theta": base})
        return {**rope, "local_rope": windowed["rope"]}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return both forms, like `RopeEntry.write_config_keys`."""
        full = self.rope.write_config_keys(model)
        local = self.local.write_config_keys(model.model_copy(update={"rope": model.local_rope or model.rope}))
        sets = zip(_SETS, (full["rope_parameters"], local["rope_parameters"]), strict=True)
        base = {self.local_key: local["rope_theta"]} if self.local_key else {}
        return {**full, **base, "rope_parameters": dict(sets)}

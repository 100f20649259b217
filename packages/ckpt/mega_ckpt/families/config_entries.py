"""Entries that map keys of a HuggingFace config.json to fields of `ModelConfig` and back, one declaration for both
directions.

A family is a list of `Entry`s. Each names the keys and the fields it answers for, so that a key or a field that nobody
answers for is noticed, and refused rather than dropped. `Key`, `Fixed` and `AllowedValuesEntry` serve sections such as `moe` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig

HfConfigDict = Mapping[str, Any]


MOST_LAYERS = 10_000  # a pattern is a list as long as the model: no number in a file may make it take all memory


class ConfigMismatchError(ValueError):
    """A setting that one side has and the other cannot express; the message names it."""


class ConfigEntry(Protocol):
    """Interface of a mapping between some keys of config.json and fields of the configuration."""

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""

    @property
    def covered_fields(self) -> frozenset[str]:
        """Fields of `ModelConfig` that the entry covers."""

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return fields from keys of config.json; ConfigMismatchError if a value has no counterpart."""

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return keys of config.json from fields; ConfigMismatchError if a value has no counterpart."""


@dataclass(frozen=True)
class KeyEntry:
    """One key for one field, or for several fields that must be equal.

    Attributes:
        key: the key's name, and after spaces others that mean the same.
        field_names: the fields' names, separated by spaces.
        default: what transformers takes for an absent key. `...` marks a key that must be there.
        values: how values are called there and here; by default they are the same. The first match is written.
        forbids_null: neither side may be null.
        must_agree: where several of the key's names are there, they must say the same; else the first counts.
    """

    key: str
    field_names: str
    default: Any = ...
    values: Mapping[str, str] | None = None
    forbids_null: bool = False
    must_agree: bool = True

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""
        return frozenset(self.key.split())

    @property
    def covered_fields(self) -> frozenset[str]:
        """Fields of the configuration that the entry covers."""
        return frozenset(self.field_names.split())

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the key's value for each field."""
        written, *_ = self.key.split()
        there = [key for key in self.key.split() if key in raw]
        value = raw[there[0]] if there else self.default
        for key in there[1:]:
            if self.must_agree and raw[key] != value:
                raise ConfigMismatchError(f"{there[0]} = {value!r} and {key} = {raw[key]!r} must be the same")
        if value is ...:
            raise ConfigMismatchError(f"{written} is missing")
        if value is None and self.forbids_null:
            raise ConfigMismatchError(f"{written} = None is not supported")
        if self.values is not None:
            if not isinstance(value, str) or value not in self.values:
                raise ConfigMismatchError(f"{written} = {value!r} is not supported (only {_join_values(self.values)})")
            value = self.values[value]
        return dict.fromkeys(self.field_names.split(), value)

    def write_config_keys(self, model: StrictConfig) -> dict[str, Any]:
        """Return the common value of the fields under the key."""
        first, *others = self.field_names.split()
        value = getattr(model, first)
        for other in others:
            if getattr(model, other) != value:
                raise ConfigMismatchError(
                    f"{first} = {value!r} and {other} = {getattr(model, other)!r} must be the same"
                )
        if value is None and self.forbids_null:
            raise ConfigMismatchError(f"{first} must be given")
        if self.values is not None:
            there = [name for name, here in self.values.items() if here == value]
            if not there:
                raise ConfigMismatchError(f"{first} must be {_join_values(self.values.values())}, not {value!r}")
            value = there[0]
        return {self.key.split()[0]: value}


@dataclass(frozen=True)
class HeadsEntry:
    """Number of key/value heads and head dimension: keys that may be absent or null.

    Attributes:
        kv_default: key/value heads when the key is absent; None is every head its own.
        dim_default: the same for the width of a head; None is hidden_size / num_attention_heads.
        explicit_dim: whether transformers' class of the family has the key `head_dim`.
        divisible: whether that class insists that the heads divide hidden_size.
        derived: whether the family's code insists that all heads together are as wide as the model.
        dim_key: what the width of a head is called, and after spaces other names of it.
    """

    kv_default: int | None = None
    dim_default: int | None = None
    explicit_dim: bool = True
    divisible: bool = False
    derived: bool = False
    dim_key: str = "head_dim"
    covered_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""
        return frozenset({"num_key_value_heads", *self.dim_key.split()})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return both values unresolved; `ModelConfig` interprets None."""
        return {
            "num_kv_heads": raw.get("num_key_value_heads", self.kv_default),
            **KeyEntry(self.dim_key, "head_dim", self.dim_default).read_config_keys(raw),
        }

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return both values resolved; the head dimension is left out if the family's class has no such key and the
        default applies.
        """
        if self.divisible and model.hidden_size % model.num_attention_heads:
            raise ConfigMismatchError(f"hidden_size must be a multiple of {model.num_attention_heads} heads")
        derived = model.query_key_head_dim * model.num_attention_heads == model.hidden_size
        if self.derived:
            check_head_size(model)
        out = {"num_key_value_heads": model.key_value_heads}
        return out if derived and not self.explicit_dim else {**out, "head_dim": model.query_key_head_dim}


@dataclass(frozen=True)
class FixedFieldsEntry:
    """Fields that have one value in every model of the family, without a key."""

    values: Mapping[str, Any]
    covered_keys: frozenset[str] = field(default=frozenset())

    @property
    def covered_fields(self) -> frozenset[str]:
        """Fields of the configuration that the entry covers."""
        return frozenset(self.values)

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the fixed values."""
        return dict(self.values)

    def write_config_keys(self, model: StrictConfig) -> dict[str, Any]:
        """Return no keys, after checking that the model has the fixed values."""
        wrong = [
            f"{name} must be {value!r}, not {getattr(model, name)!r}"
            for name, value in self.values.items()
            if getattr(model, name) != value
        ]
        if wrong:
            raise ConfigMismatchError("; ".join(wrong))
        return {}


@dataclass(frozen=True)
class AllowedValuesEntry:
    """Keys that are accepted only with values that change nothing."""

    values: Mapping[str, tuple[Any, ...]]
    covered_fields: frozenset[str] = field(default=frozenset())

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""
        return frozenset(self.values)

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return no fields, after checking that each key is absent or harmless."""
        wrong = [
            f"{key} = {raw[key]!r} is not supported (only {_join_values(allowed)})"
            for key, allowed in self.values.items()
            if key in raw and raw[key] not in allowed
        ]
        if wrong:
            raise ConfigMismatchError("; ".join(wrong))
        return {}

    def write_config_keys(self, model: StrictConfig) -> dict[str, Any]:
        """Return no keys."""
        return {}


@dataclass(frozen=True)
class PerHeadNormEntry:
    """A key that gives each head of queries and keys its own LayerNorm, without bias."""

    key: str

    @property
    def covered_keys(self) -> frozenset[str]:
        """Keys of config.json that the entry covers."""
        return frozenset({self.key})

    @property
    def covered_fields(self) -> frozenset[str]:
        """Fields of the configuration that the entry covers."""
        return frozenset({"qk_norm", "qk_norm_span"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the norm fields; absent and null mean false."""
        return {"qk_norm": True, "qk_norm_span": "each"} if raw.get(self.key) else {}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key; ConfigMismatchError for norms over another span."""
        if model.qk_norm and model.qk_norm_span != "each":
            raise ConfigMismatchError(f"qk_norm_span must be 'each', not {model.qk_norm_span!r}")
        return {self.key: model.qk_norm}


def check_head_dim(raw: HfConfigDict) -> None:
    """Check that a head dimension, if given, is hidden_size / num_attention_heads.

    Raises:
        MismatchError: when it is not.
    """
    width, heads, size = (raw.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if size is not None and width and heads and size != width // heads:
        raise ConfigMismatchError(f"head_dim = {size!r} must be {width // heads}")


def check_head_size(model: ModelConfig) -> None:
    """Check that all heads together are as wide as the model.

    Raises:
        MismatchError: when they are not.
    """
    if model.query_key_head_dim * model.num_attention_heads != model.hidden_size:
        raise ConfigMismatchError(f"head_dim must be hidden_size / num_attention_heads, not {model.query_key_head_dim}")


def layer_indices(raw: HfConfigDict, mtp_layers: int = 0) -> range:
    """Return the indices of a model's layers, and of `further` MTP layers behind them.

    Raises:
        MismatchError: when they are too many to be listed.
    """
    layers = raw.get("num_hidden_layers", 0)
    if layers + mtp_layers > MOST_LAYERS:
        raise ConfigMismatchError(f"num_hidden_layers = {layers + mtp_layers} is more than {MOST_LAYERS}")
    return range(layers + mtp_layers)


def _join_values(values: Any) -> str:
    return " or ".join(repr(value) for value in values)

"""How keys of a HuggingFace config.json and fields of `ModelConfig` say the same thing, one declaration for both directions.

A family is a list of `Entry`s. Each names the keys and the fields it answers for, so that a key or a field that nobody
answers for is noticed, and refused rather than dropped. `Key`, `Fixed` and `Only` serve sections such as `moe` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mega_common.config import Config
from mega_common.model_config import ModelConfig

Raw = Mapping[str, Any]


MOST_LAYERS = 10_000  # a pattern is a list as long as the model: no number in a file may make it take all memory


class MismatchError(ValueError):
    """A setting that one side has and the other cannot express; the message names it."""


class Entry(Protocol):
    """Some keys and the fields that mean the same."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json it answers for."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of `ModelConfig` it answers for."""

    def read(self, raw: Raw) -> dict[str, Any]:
        """Fields from keys; MismatchError when a value has no counterpart."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys from fields; MismatchError when a value has no counterpart."""


@dataclass(frozen=True)
class Key:
    """One key that is one field, or several fields which then must agree.

    Attributes:
        key: the key's name, and after spaces others that mean the same.
        names: the fields' names, separated by spaces.
        default: what transformers takes for an absent key. `...` marks a key that must be there.
        values: how values are called there and here; by default they are the same. The first match is written.
        given: neither side may be null.
        agreed: where several of the key's names are there, they must say the same; else the first counts.
    """

    key: str
    names: str
    default: Any = ...
    values: Mapping[str, str] | None = None
    given: bool = False
    agreed: bool = True

    @property
    def keys(self) -> frozenset[str]:
        """The key and its other names."""
        return frozenset(self.key.split())

    @property
    def fields(self) -> frozenset[str]:
        """The fields."""
        return frozenset(self.names.split())

    def read(self, raw: Raw) -> dict[str, Any]:
        """The key's value in each field."""
        written, *_ = self.key.split()
        there = [key for key in self.key.split() if key in raw]
        value = raw[there[0]] if there else self.default
        for key in there[1:]:
            if self.agreed and raw[key] != value:
                raise MismatchError(f"{there[0]} = {value!r} and {key} = {raw[key]!r} must be the same")
        if value is ...:
            raise MismatchError(f"{written} is missing")
        if value is None and self.given:
            raise MismatchError(f"{written} = None is not supported")
        if self.values is not None:
            if not isinstance(value, str) or value not in self.values:
                raise MismatchError(f"{written} = {value!r} is not supported (only {_list(self.values)})")
            value = self.values[value]
        return dict.fromkeys(self.names.split(), value)

    def write(self, model: Config) -> dict[str, Any]:
        """The fields' common value under the key."""
        first, *others = self.names.split()
        value = getattr(model, first)
        for other in others:
            if getattr(model, other) != value:
                raise MismatchError(f"{first} = {value!r} and {other} = {getattr(model, other)!r} must be the same")
        if value is None and self.given:
            raise MismatchError(f"{first} must be given")
        if self.values is not None:
            there = [name for name, here in self.values.items() if here == value]
            if not there:
                raise MismatchError(f"{first} must be {_list(self.values.values())}, not {value!r}")
            value = there[0]
        return {self.key.split()[0]: value}


@dataclass(frozen=True)
class Heads:
    """Key/value heads and the width of a head: keys that may be absent or null.

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
    fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    @property
    def keys(self) -> frozenset[str]:
        """The keys and their other names."""
        return frozenset({"num_key_value_heads", *self.dim_key.split()})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Both, as they are; `ModelConfig` knows what None means."""
        return {
            "num_kv_heads": raw.get("num_key_value_heads", self.kv_default),
            **Key(self.dim_key, "head_dim", self.dim_default).read(raw),
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both resolved; the width of a head is left out where the family's class has no such key and needs none."""
        if self.divisible and model.hidden_size % model.num_attention_heads:
            raise MismatchError(f"hidden_size must be a multiple of {model.num_attention_heads} heads")
        derived = model.head_size * model.num_attention_heads == model.hidden_size
        if self.derived:
            check_head_size(model)
        out = {"num_key_value_heads": model.kv_heads}
        return out if derived and not self.explicit_dim else {**out, "head_dim": model.head_size}


@dataclass(frozen=True)
class Fixed:
    """Fields that every model of the family has at this value; no key speaks of them."""

    values: Mapping[str, Any]
    keys: frozenset[str] = field(default=frozenset())

    @property
    def fields(self) -> frozenset[str]:
        """The fields."""
        return frozenset(self.values)

    def read(self, raw: Raw) -> dict[str, Any]:
        """The fixed values."""
        return dict(self.values)

    def write(self, model: Config) -> dict[str, Any]:
        """Nothing, when the model agrees."""
        wrong = [
            f"{name} must be {value!r}, not {getattr(model, name)!r}"
            for name, value in self.values.items()
            if getattr(model, name) != value
        ]
        if wrong:
            raise MismatchError("; ".join(wrong))
        return {}


@dataclass(frozen=True)
class Only:
    """Keys that may be there, but only with a value that changes nothing."""

    values: Mapping[str, tuple[Any, ...]]
    fields: frozenset[str] = field(default=frozenset())

    @property
    def keys(self) -> frozenset[str]:
        """The keys."""
        return frozenset(self.values)

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing, when each key is absent or harmless."""
        wrong = [
            f"{key} = {raw[key]!r} is not supported (only {_list(allowed)})"
            for key, allowed in self.values.items()
            if key in raw and raw[key] not in allowed
        ]
        if wrong:
            raise MismatchError("; ".join(wrong))
        return {}

    def write(self, model: Config) -> dict[str, Any]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class NormedHeads:
    """A key that gives each head of queries and keys a LayerNorm of its own, without bias."""

    key: str

    @property
    def keys(self) -> frozenset[str]:
        """The key."""
        return frozenset({self.key})

    @property
    def fields(self) -> frozenset[str]:
        """Whether there are norms, and over what."""
        return frozenset({"qk_norm", "qk_norm_span"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Absent and null are false."""
        return {"qk_norm": True, "qk_norm_span": "each"} if raw.get(self.key) else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """MismatchError for norms over anything else."""
        if model.qk_norm and model.qk_norm_span != "each":
            raise MismatchError(f"qk_norm_span must be 'each', not {model.qk_norm_span!r}")
        return {self.key: model.qk_norm}


def check_head_dim(raw: Raw) -> None:
    """See that a width of a head, where there is one, is what follows from the others.

    Raises:
        MismatchError: when it is not.
    """
    width, heads, size = (raw.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if size is not None and width and heads and size != width // heads:
        raise MismatchError(f"head_dim = {size!r} must be {width // heads}")


def check_head_size(model: ModelConfig) -> None:
    """See that all heads together are as wide as the model.

    Raises:
        MismatchError: when they are not.
    """
    if model.head_size * model.num_attention_heads != model.hidden_size:
        raise MismatchError(f"head_dim must be hidden_size / num_attention_heads, not {model.head_size}")


def layer_numbers(raw: Raw, further: int = 0) -> range:
    """The numbers of a model's layers, and of so many behind them.

    Raises:
        MismatchError: when they are too many to be listed.
    """
    layers = raw.get("num_hidden_layers", 0)
    if layers + further > MOST_LAYERS:
        raise MismatchError(f"num_hidden_layers = {layers + further} is more than {MOST_LAYERS}")
    return range(layers + further)


def _list(values: Any) -> str:
    return " or ".join(repr(value) for value in values)

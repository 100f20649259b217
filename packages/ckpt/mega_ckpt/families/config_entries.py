"""Entries that map keys of a HuggingFace config.json to fields of `ModelConfig` and back, one declaration for both
directions.

A family is a list of `ConfigEntry`s. Each names the keys and fields that it covers, so that a setting without an entry is
an error and never silently dropped. `KeyEntry`, `FixedFieldsEntry` and `AllowedValuesEntry` also serve sections such as
`moe`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mega_common.layer_kinds import MOST_LAYERS
from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig, format_setting_value

ConfigDict = Mapping[str, Any]
_JSON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_CONSTANT = re.compile(r"\b(True|False|None)\b")


def split_words(text: str) -> frozenset[str]:
    """Return the set of words in a text, split at white space."""
    return frozenset(text.split())


class ConfigMismatchError(ValueError):
    """Error for a setting of config.json or of mega's `ModelConfig` that the other one cannot express.
    The message names the setting, and writes values as JSON does: true, false, null.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_PYTHON_CONSTANT.sub(lambda found: _JSON_CONSTANTS[found[0]], message))


class ConfigEntry(Protocol):
    """Interface of a two-way mapping between keys of a model's config.json and fields of mega's `ModelConfig`."""

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of a model's config.json that this mapping translates or checks.
        A key that no mapping handles is reported as unread.
        """

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Fields of mega's `ModelConfig` that this mapping translates or checks.
        A field that no mapping handles must have its default.
        """

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return {field: value} of `ModelConfig` from a config.json; ConfigMismatchError for a value without a counterpart."""

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return {key: value} of config.json from `model`; ConfigMismatchError for a value without a counterpart."""


def read_entry_fields(entries: Iterable[ConfigEntry], raw: ConfigDict) -> tuple[dict[str, Any], list[str]]:
    """Return the `ModelConfig` fields of all `entries` from a config.json, and the problems of the entries that have none.
    A value of the wrong type is a problem like a value without a counterpart.
    """
    fields: dict[str, Any] = {}
    problems: list[str] = []
    for entry in entries:
        try:
            fields |= entry.fields_from_config(raw)
        except ConfigMismatchError as error:
            problems.append(str(error))
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
            given = sorted(entry.handled_config_keys & raw.keys())
            found = ", ".join(f"{key} = {format_setting_value(raw[key]):.60}" for key in given)
            problems.append(
                f"{found}: {'the' if len(given) == 1 else 'a'} value has the wrong type, or is out of range"
            )
    return fields, list(dict.fromkeys(problems))


class FieldEntry(Protocol):
    """Interface of an entry for fields of a configuration class, such as a `ConfigEntry`."""

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Fields that this entry translates or checks."""


Entry = TypeVar("Entry", bound=FieldEntry)


def exclude_entries_of_fields(entries: Iterable[Entry], *fields: str) -> tuple[Entry, ...]:
    """Return the entries that handle none of these fields."""
    return tuple(entry for entry in entries if not entry.handled_model_fields & set(fields))


@dataclass(frozen=True)
class KeyEntry:
    """Config entry that maps one key of config.json to one or more fields of `ModelConfig`.
    Several fields must be equal.

    Attributes:
        key: the key's name, and after spaces its aliases.
        field_names: the fields' names, separated by spaces.
        default: transformers' default for an absent key. `...` marks a required key.
        values: {value of the key: value of the field}; None: values are equal. The first match is written.
        forbids_null: neither side may be null.
        must_agree: values of several aliases in one file must be equal; else the first alias counts.
    """

    key: str
    field_names: str
    default: Any = ...
    values: Mapping[str, str] | None = None
    forbids_null: bool = False
    must_agree: bool = True

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates: its key and the key's aliases."""
        return frozenset(self.key.split())

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Names of the `ModelConfig` fields that are translated to and from config.json, or checked."""
        return frozenset(self.field_names.split())

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return {field: value} of `ModelConfig` from the entry's key or default; ConfigMismatchError for an unsupported value.
        Raises ConfigMismatchError also if a required key is missing, or aliases disagree.
        """
        written, *_ = self.key.split()
        present = [key for key in self.key.split() if key in raw]
        value = raw[present[0]] if present else self.default
        for key in present[1:]:
            if self.must_agree and raw[key] != value:
                raise ConfigMismatchError(f"{present[0]} = {value!r} and {key} = {raw[key]!r} must be equal")
        if value is ...:
            raise ConfigMismatchError(f"{written} is missing")
        if value is None and self.forbids_null:
            raise ConfigMismatchError(f"{written} = None is not supported")
        if self.values is not None:
            if not isinstance(value, str) or value not in self.values:
                raise ConfigMismatchError(f"{written} = {value!r} is not supported (only {_join_values(self.values)})")
            value = self.values[value]
        return dict.fromkeys(self.field_names.split(), value)

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return {key: value} of config.json, the common value of the entry's fields; ConfigMismatchError if they differ."""
        first, *others = self.field_names.split()
        value = getattr(model, first)
        for other in others:
            if getattr(model, other) != value:
                raise ConfigMismatchError(f"{first} = {value!r} and {other} = {getattr(model, other)!r} must be equal")
        if value is None and self.forbids_null:
            raise ConfigMismatchError(f"{first} is missing")
        if self.values is not None:
            matches = [name for name, field_value in self.values.items() if field_value == value]
            if not matches:
                raise ConfigMismatchError(f"{first} must be {_join_values(self.values.values())}, not {value!r}")
            value = matches[0]
        return {self.key.split()[0]: value}


@dataclass(frozen=True)
class KeyValueHeadsEntry:
    """Translation to and from config.json of the number of key/value heads and the head dimension.
    The keys of both in config.json may be absent or null.

    Attributes:
        kv_default: number of key/value heads if the key is absent; None: as many as attention heads.
        dim_default: head dimension if the key is absent; None: hidden_size / num_attention_heads.
        explicit_dim: transformers' class of the family has the key `head_dim`.
        divisible: that class requires that hidden_size is a multiple of num_attention_heads.
        derived: the family's code requires that all heads together are as wide as the model.
        dim_key: key of the head dimension, and after spaces its aliases.
    """

    kv_default: int | None = None
    dim_default: int | None = None
    explicit_dim: bool = True
    divisible: bool = False
    derived: bool = False
    dim_key: str = "head_dim"
    handled_model_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({"num_key_value_heads", *self.dim_key.split()})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `num_kv_heads` and `head_dim` from config.json: the family's default if a key is absent, None if it is null."""
        return {
            "num_kv_heads": raw.get("num_key_value_heads", self.kv_default),
            **KeyEntry(self.dim_key, "head_dim", self.dim_default).fields_from_config(raw),
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys for the number of key/value heads and for the size of a head.
        The head dimension is left out if the family's class has no such key and the default applies. Raises
        ConfigMismatchError if heads do not divide the width, where the family requires it.
        """
        if self.divisible and model.hidden_size % model.num_attention_heads:
            raise ConfigMismatchError(
                f"hidden_size must be a multiple of num_attention_heads = {model.num_attention_heads}"
            )
        derived = model.query_key_head_dim * model.num_attention_heads == model.hidden_size
        if self.derived:
            check_heads_fill_hidden_size(model)
        out = {"num_key_value_heads": model.key_value_heads}
        return out if derived and not self.explicit_dim else {**out, "head_dim": model.query_key_head_dim}


@dataclass(frozen=True)
class FixedFieldsEntry:
    """Translation to and from config.json of fields of `ModelConfig` that have one value in every model of the family.
    They have no key in config.json.
    """

    values: Mapping[str, Any]
    handled_config_keys: frozenset[str] = field(default=frozenset())

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Names of the `ModelConfig` fields that are translated to and from config.json, or checked."""
        return frozenset(self.values)

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return {field: value} of the `ModelConfig` fields that are constant in the model family.
        The argument `raw`, the config.json, is ignored.
        """
        return dict(self.values)

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return no config.json keys; ConfigMismatchError if `model` has other values than those constant in the family."""
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
    """Check of config.json keys without a `ModelConfig` field, which may have only values that change nothing."""

    values: Mapping[str, tuple[Any, ...]]
    handled_model_fields: frozenset[str] = field(default=frozenset())

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset(self.values)

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return no `ModelConfig` fields; ConfigMismatchError if a key of config.json has another value than the allowed ones."""
        wrong = [
            f"{key} = {raw[key]!r} is not supported (only {_join_values(allowed)})"
            for key, allowed in self.values.items()
            if key in raw and raw[key] not in allowed
        ]
        if wrong:
            raise ConfigMismatchError("; ".join(wrong))
        return {}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return no config.json keys: the only allowed values are transformers' defaults, which need no key."""
        return {}


@dataclass(frozen=True)
class PerHeadNormEntry:
    """Translation to and from config.json of a boolean key of config.json that gives each head of queries and keys a LayerNorm.

    Attributes:
        key: the key.
        span: `qk_norm_span` of the norms: "each" (each head has its own, without bias) or "layernorm".
        default: value if the key is absent.
    """

    key: str
    span: str = "each"
    default: bool = False

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({self.key})

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Names of the `ModelConfig` fields that are translated to and from config.json, or checked."""
        return frozenset({"qk_norm", "qk_norm_span"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `qk_norm` and `qk_norm_span` if the boolean key of config.json is true, and no fields otherwise."""
        return {"qk_norm": True, "qk_norm_span": self.span} if raw.get(self.key, self.default) else {}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the boolean config.json key of per-head query/key norms from the `ModelConfig` field `qk_norm`.
        Raises ConfigMismatchError for norms that span more or less than a head (`qk_norm_span`).
        """
        if model.qk_norm and model.qk_norm_span != self.span:
            raise ConfigMismatchError(f"qk_norm_span must be {self.span!r}, not {model.qk_norm_span!r}")
        return {self.key: model.qk_norm}


def check_config_json_head_dim(raw: ConfigDict) -> None:
    """Raise ConfigMismatchError if `head_dim` in a config.json is given and not hidden_size / num_attention_heads."""
    width, heads, size = (raw.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if size is not None and width and heads and size != width // heads:
        raise ConfigMismatchError(f"head_dim = {size!r} must be {width // heads}")


def check_heads_fill_hidden_size(model: ModelConfig) -> None:
    """Raise ConfigMismatchError if head_dim * num_attention_heads of a model is not its hidden_size."""
    if model.query_key_head_dim * model.num_attention_heads != model.hidden_size:
        raise ConfigMismatchError(f"head_dim must be hidden_size / num_attention_heads, not {model.query_key_head_dim}")


def layer_indices(raw: ConfigDict, mtp_layers: int = 0) -> range:
    """Return the indices of a model's layers, multi-token prediction (MTP) layers included.
    The `num_hidden_layers` in `raw`, a config.json, are followed by `mtp_layers` MTP layers.

    Raises:
        ConfigMismatchError: when there are more than `MOST_LAYERS`, or it is not a whole number.
    """
    layers = raw.get("num_hidden_layers", 0)
    if not isinstance(layers, int):
        raise ConfigMismatchError(f"num_hidden_layers = {layers!r:.40} must be a whole number")
    if layers + mtp_layers > MOST_LAYERS:
        raise ConfigMismatchError(f"num_hidden_layers = {layers + mtp_layers} must be at most {MOST_LAYERS}")
    return range(layers + mtp_layers)


def _join_values(values: Any) -> str:
    return " or ".join(dict.fromkeys(map(repr, values)))


# Keys of nearly every model, and of nearly every decoder.
CORE_SIZES: tuple[ConfigEntry, ...] = (
    KeyEntry("vocab_size", "vocab_size"),
    KeyEntry("hidden_size", "hidden_size"),
    KeyEntry("intermediate_size", "ffn_hidden_size"),
    KeyEntry("num_hidden_layers", "num_layers"),
    KeyEntry("num_attention_heads", "num_attention_heads"),
)
SIZES: tuple[ConfigEntry, ...] = (
    *CORE_SIZES,
    KeyEntry("max_position_embeddings", "max_position"),
    KeyEntry("initializer_range", "init_std", 0.02),
    KeyEntry("attention_dropout", "attention_dropout", 0.0),
)
SILU = {"silu": "swiglu"}
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
TIED = KeyEntry("tie_word_embeddings", "tie_embeddings", False)


def llama_config_entries(norm_eps: float = 1e-6, hidden_act: Mapping[str, str] = SILU) -> tuple[ConfigEntry, ...]:
    """Return the config entries that translate config.json of Llama and models of its architecture.

    `norm_eps` and the first key of `hidden_act` are transformers' defaults for absent keys.
    """
    return (
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", next(iter(hidden_act)), hidden_act),
        KeyEntry("rms_norm_eps", "norm_eps", norm_eps),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "rope"}),
    )


DECODER = llama_config_entries()


@dataclass(frozen=True)
class MultiHeadEntry:
    """Config entry that requires multi-head attention without grouped queries.
    Each head has its own key and value, and all heads together are as wide as the model.
    """

    handled_config_keys: frozenset[str] = frozenset({"head_dim"})
    handled_model_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return no `ModelConfig` fields; ConfigMismatchError if `head_dim` is not hidden_size / num_attention_heads.
        Multi-head attention is the default of `ModelConfig`.
        """
        check_config_json_head_dim(raw)
        return {}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no config.json keys; ConfigMismatchError if the model has fewer key/value heads or another head dimension."""
        if model.key_value_heads != model.num_attention_heads:
            raise ConfigMismatchError(f"num_kv_heads must be num_attention_heads, not {model.key_value_heads}")
        check_heads_fill_hidden_size(model)
        return {}

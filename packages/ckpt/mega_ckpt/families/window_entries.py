"""Sliding windows in config.json: which layers have one, and its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import ConfigDict, ConfigMismatchError, layer_indices
from mega_common.model_config import ModelConfig

_FULL, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class UniformWindowEntry:
    """Translation to and from config.json of one sliding window in every layer, or none.
    A list of layer types, which transformers' caches use, must agree.

    Attributes:
        size: the window if the key is absent.
        supports_windows: the family's code supports windows.
    """

    size: int | None = None
    supports_windows: bool = True
    handled_config_keys: frozenset[str] = frozenset({"sliding_window", "layer_types"})
    handled_model_fields: frozenset[str] = frozenset({"sliding_window"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `sliding_window`, one for all layers, from config.json.
        Raises ConfigMismatchError if the family does not support windows or a list of layer types disagrees.
        """
        size = raw.get("sliding_window", self.size)
        if size is not None and not self.supports_windows:
            if raw.get("use_sliding_window", True):
                raise ConfigMismatchError(f"sliding_window = {size!r} is not supported (only None)")
            size = None
        check_layer_types(raw, size)
        return {"sliding_window": size}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `sliding_window`; no key if the family has no windows, and then ConfigMismatchError for a window."""
        if self.supports_windows:
            return {"sliding_window": model.sliding_window}
        if model.sliding_window is not None:
            raise ConfigMismatchError(f"sliding_window must be None, not {model.sliding_window!r}")
        return {}


@dataclass(frozen=True)
class LayerTypesEntry:
    """Translation to and from config.json of a window size and layer types; by default every n-th is full.

    Attributes:
        size: the window if the key is absent.
        every: layers `every - 1`, `2 every - 1`, ... have no window; None: all layers have one.
        every_keys: aliases of the key of `every`; empty if the family has no such key.
        first: index of the first layer without a window; None: `every - 1`.
    """

    size: int | None
    every: int | None
    every_keys: tuple[str, ...] = ()
    first: int | None = None
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({"sliding_window", "layer_types", *self.every_keys})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `sliding_window` and `full_attention_layers`."""
        layers, size = layer_indices(raw), raw.get("sliding_window", self.size)
        every = next((raw[key] for key in self.every_keys if raw.get(key)), self.every)
        shift = 1 if self.first is None else -self.first
        full = [(layer + shift) % every == 0 if every else not size for layer in layers]
        return build_sliding_window_fields(raw.get("layer_types") or build_window_layer_types(full), size, layers)

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `layer_types` and `sliding_window`.
        The window has a size even if no layer uses it, since some transformers classes require one.
        """
        return {"sliding_window": model.sliding_window or self.size, "layer_types": get_transformers_layer_types(model)}


@dataclass(frozen=True)
class QwenWindowEntry:
    """Translation to and from config.json of Qwen's sliding window, which some of the layers have.
    In config.json it is a switch, a size, the first layer that has the window, and the redundant list of layer types.

    Attributes:
        size, first: transformers' defaults for absent keys.
        alternating: without a list, every second layer *before* `max_window_layers` has a window instead.
        switched: `use_sliding_window` switches windows on; else any size does.
    """

    size: int = 4096
    first: int = 28
    alternating: bool = False
    switched: bool = True
    handled_config_keys: frozenset[str] = frozenset(
        {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
    )
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `sliding_window` and `full_attention_layers`."""
        layers, first = layer_indices(raw), raw.get("max_window_layers", self.first)
        used = not self.switched or raw.get("use_sliding_window")
        size = raw.get("sliding_window", self.size) if used else None
        full = [layer % 2 == 1 or layer >= first if self.alternating else layer < first for layer in layers]
        return build_sliding_window_fields(
            raw.get("layer_types") or build_window_layer_types([each or not size for each in full]), size, layers
        )

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of Qwen's sliding window.
        They are `use_sliding_window`, `sliding_window`, `max_window_layers` (the first layer with a window) and
        `layer_types`.
        """
        kinds = get_transformers_layer_types(model)
        used = _LOCAL in kinds
        return {
            "use_sliding_window": used,
            "sliding_window": model.sliding_window if used else None,
            "max_window_layers": kinds.index(_LOCAL) if used else model.num_layers,
            "layer_types": kinds,
        }


@dataclass(frozen=True)
class OptionalWindowConfigEntry:
    """Translation to and from config.json of one sliding window in all layers or none (`use_sliding_window`)."""

    size: int = 4096
    handled_config_keys: frozenset[str] = frozenset(
        {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
    )
    handled_model_fields: frozenset[str] = frozenset({"sliding_window"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `sliding_window` from config.json, None if windows are switched off.
        Windows are on if `use_sliding_window` is true. The key `max_window_layers` is ignored as in transformers.
        """
        size = raw.get("sliding_window", self.size) if raw.get("use_sliding_window") else None
        check_layer_types(raw, size)
        return {"sliding_window": size}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `use_sliding_window` and `sliding_window`."""
        return {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}


@dataclass(frozen=True)
class RopeInWindowsEntry:
    """Translation to and from config.json of sliding windows with rotary positions in most layers (Command R7B).
    Every n-th layer has full attention without positions.

    Attributes:
        every_key: the key of `every`, read without a list of layer types; empty: there is none.
        none_rotates_all: in a model without windows, all layers have rotary positions, as in EXAONE 4.
    """

    every_key: str = ""
    none_rotates_all: bool = False
    size: int = 4096
    every: int = 4
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers", "no_rope_layers"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({"sliding_window", "layer_types", *self.every_key.split()})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of sliding-window layers with rotary positions from config.json.
        They are `sliding_window`, `full_attention_layers` and `no_rope_layers`; the latter two list the same layers.
        Raises ConfigMismatchError if the layers are given as neither a list nor a number.
        """
        layers, size = layer_indices(raw), raw.get("sliding_window", self.size)
        if size is None and self.none_rotates_all:
            check_layer_types(raw, size)
            return {"sliding_window": None, "full_attention_layers": None, "no_rope_layers": None}
        kinds, every = raw.get("layer_types"), raw.get(self.every_key, self.every)
        if not kinds and not isinstance(every, int):
            raise ConfigMismatchError(f"{self.every_key} = {every!r} is not supported (only a number)")
        kinds = kinds or build_window_layer_types([(layer + 1) % every == 0 for layer in layers])
        fields = build_sliding_window_fields(kinds, size, layers)
        return {**fields, "no_rope_layers": [layer for layer, kind in enumerate(kinds) if kind == _FULL] or None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `layer_types` and `sliding_window`; ConfigMismatchError unless exactly the full-attention layers lack RoPE."""
        layers = range(model.num_layers)
        full = [layer for layer in layers if model.get_attention_window(layer) is None]
        unrotated = [layer for layer in layers if not model.has_rotary_positions(layer)]
        if self.none_rotates_all and not unrotated and len(full) == len(layers):
            return {"sliding_window": None, "layer_types": get_transformers_layer_types(model)}
        if unrotated != full:
            raise ConfigMismatchError(f"no_rope_layers must be the layers without a window, {full}, not {unrotated}")
        return {"sliding_window": model.sliding_window or self.size, "layer_types": get_transformers_layer_types(model)}


def check_layer_types(raw: ConfigDict, size: int | None) -> None:
    """Raise ConfigMismatchError if a config.json's `layer_types` disagrees with one window, or none, in all layers.

    The family has a window of `size`, or none, in every layer. The list may be absent from `raw`, the config.json.
    """
    kind = _LOCAL if size else _FULL
    if any(each != kind for each in raw.get("layer_types") or ()):
        raise ConfigMismatchError(f"layer_types is not supported with layers other than {kind}")


def get_transformers_layer_types(model: ModelConfig) -> list[str]:
    """Return transformers' `layer_types` for `model`: "full_attention" or "sliding_attention" per layer."""
    return build_window_layer_types([model.get_attention_window(layer) is None for layer in range(model.num_layers)])


def build_window_layer_types(full: Sequence[bool]) -> list[str]:
    """Return transformers' `layer_types`: "full_attention" for each True in `full`, "sliding_attention" for each False."""
    return [_FULL if each else _LOCAL for each in full]


def build_sliding_window_fields(kinds: Any, size: int | None, layers: Sequence[int]) -> dict[str, Any]:
    """Return `sliding_window` and `full_attention_layers` for transformers' layer types, the list `kinds`.
    Raises ConfigMismatchError for other types, another number of layers, and windows without a size.
    """
    if not isinstance(kinds, list) or not set(kinds) <= {_FULL, _LOCAL}:
        unsupported = sorted(set(map(str, kinds)) - {_FULL, _LOCAL}) if isinstance(kinds, list) else kinds
        raise ConfigMismatchError(f"layer_types: {unsupported} is not supported (only {_FULL} and {_LOCAL})")
    if len(kinds) != len(layers):
        raise ConfigMismatchError(f"layer_types has {len(kinds)} layers, but num_hidden_layers = {len(layers)}")
    if _LOCAL not in kinds:
        return {"sliding_window": None}
    if not size:
        raise ConfigMismatchError(f"layer_types with {_LOCAL} requires sliding_window")
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    return {"sliding_window": size, "full_attention_layers": full or None}

"""Sliding windows in config.json: which layers have one, and how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MismatchError, Raw, layer_numbers
from mega_common.model_config import ModelConfig

_FULL, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class SameWindow:
    """One window in every layer, or none. transformers' caches go by the list of kinds, if there is one: it must agree.

    Attributes:
        size: the window where the key is absent.
        knows: whether the family's code has windows at all.
    """

    size: int | None = None
    knows: bool = True
    keys: frozenset[str] = frozenset({"sliding_window", "layer_types"})
    fields: frozenset[str] = frozenset({"sliding_window"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window."""
        size = raw.get("sliding_window", self.size)
        if size is not None and not self.knows:
            if raw.get("use_sliding_window", True):
                raise MismatchError(f"sliding_window = {size!r} is not supported (only None)")
            size = None
        check_kinds(raw, size)
        return {"sliding_window": size}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The size, where the family has the key."""
        if self.knows:
            return {"sliding_window": model.sliding_window}
        if model.sliding_window is not None:
            raise MismatchError(f"sliding_window must be None, not {model.sliding_window!r}")
        return {}


@dataclass(frozen=True)
class LayerTypes:
    """A window's size, and a list of the layers' kinds; where that is absent, every so many layers one is full.

    Attributes:
        size: the window where the key is absent.
        every: layers `every - 1`, `2 every - 1`, ... have no window; None: all have.
        every_keys: keys that say so, if the family has one.
    """

    size: int | None
    every: int | None
    every_keys: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    @property
    def keys(self) -> frozenset[str]:
        """Size, kinds and pattern."""
        return frozenset({"sliding_window", "layer_types", *self.every_keys})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window and the layers without."""
        layers, size = layer_numbers(raw), raw.get("sliding_window", self.size)
        every = next((raw[key] for key in self.every_keys if raw.get(key)), self.every)
        full = [(layer + 1) % every == 0 if every else not size for layer in layers]
        return window_fields(raw.get("layer_types") or kinds_of(full), size, layers)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The kinds of all layers; a size even where no layer uses it, since some classes insist."""
        return {"sliding_window": model.sliding_window or self.size, "layer_types": layer_kinds(model)}


@dataclass(frozen=True)
class QwenWindow:
    """Qwen's sliding window: a switch, a size, the first layer that has it, and the list of layers that says it again.

    Attributes:
        size, first: what transformers takes where the keys are absent.
        alternating: without a list, every second of the layers *before* `max_window_layers` has a window instead.
    """

    size: int = 4096
    first: int = 28
    alternating: bool = False
    keys: frozenset[str] = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
    fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window and the layers without."""
        layers, first = layer_numbers(raw), raw.get("max_window_layers", self.first)
        size = raw.get("sliding_window", self.size) if raw.get("use_sliding_window") else None
        full = [layer % 2 == 1 or layer >= first if self.alternating else layer < first for layer in layers]
        return window_fields(raw.get("layer_types") or kinds_of([each or not size for each in full]), size, layers)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The kinds of all layers, and the first with a window."""
        kinds = layer_kinds(model)
        used = _LOCAL in kinds
        return {
            "use_sliding_window": used,
            "sliding_window": model.sliding_window if used else None,
            "max_window_layers": kinds.index(_LOCAL) if used else model.num_layers,
            "layer_types": kinds,
        }


@dataclass(frozen=True)
class SwitchedWindow:
    """A window in every layer or none, with Qwen's switch before it."""

    size: int = 4096
    keys: frozenset[str] = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
    fields: frozenset[str] = frozenset({"sliding_window"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window, if it is switched on; transformers does nothing with `max_window_layers`."""
        size = raw.get("sliding_window", self.size) if raw.get("use_sliding_window") else None
        check_kinds(raw, size)
        return {"sliding_window": size}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Switch and size."""
        return {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}


@dataclass(frozen=True)
class RotatedWindows:
    """A window in most layers, which alone rotate; every so many layers one sees all and does not: Command R7B.

    Attributes:
        every_key: the key that says how many, where there is no list of kinds.
        none_rotates_all: without any window all layers rotate, as in EXAONE 4.
    """

    every_key: str
    none_rotates_all: bool = False
    size: int = 4096
    every: int = 4
    fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers", "no_rope_layers"})

    @property
    def keys(self) -> frozenset[str]:
        """Size, kinds and pattern."""
        return frozenset({"sliding_window", "layer_types", self.every_key})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window, and the layers that neither have one nor rotate."""
        layers, size = layer_numbers(raw), raw.get("sliding_window", self.size)
        if size is None and self.none_rotates_all:
            check_kinds(raw, size)
            return {"sliding_window": None, "full_attention_layers": None, "no_rope_layers": None}
        kinds, every = raw.get("layer_types"), raw.get(self.every_key, self.every)
        if not kinds and not isinstance(every, int):
            raise MismatchError(f"{self.every_key} = {every!r} is not supported (only a number)")
        kinds = kinds or kinds_of([(layer + 1) % every == 0 for layer in layers])
        fields = window_fields(kinds, size, layers)
        return {**fields, "no_rope_layers": [layer for layer, kind in enumerate(kinds) if kind == _FULL] or None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The kinds of all layers, and a size even where no layer uses it."""
        layers = range(model.num_layers)
        full = [layer for layer in layers if model.window(layer) is None]
        unrotated = [layer for layer in layers if not model.rotates(layer)]
        if self.none_rotates_all and not unrotated and len(full) == len(layers):
            return {"sliding_window": None, "layer_types": layer_kinds(model)}
        if unrotated != full:
            raise MismatchError(f"no_rope_layers must be the layers without a window, {full}, not {unrotated}")
        return {"sliding_window": model.sliding_window or self.size, "layer_types": layer_kinds(model)}


def check_kinds(raw: Raw, size: int | None) -> None:
    """See that a list of kinds, which the family does not ask, says of each layer what the family makes it.

    Raises:
        MismatchError: when it does not.
    """
    kind = _LOCAL if size else _FULL
    if any(each != kind for each in raw.get("layer_types") or ()):
        raise MismatchError(f"layer_types is not supported where it names layers other than {kind}")


def layer_kinds(model: ModelConfig) -> list[str]:
    """What transformers calls each layer of `model`."""
    return kinds_of([model.window(layer) is None for layer in range(model.num_layers)])


def kinds_of(full: Sequence[bool]) -> list[str]:
    """What transformers calls layers without (True) and with a window."""
    return [_FULL if each else _LOCAL for each in full]


def window_fields(kinds: Any, size: int | None, layers: Sequence[int]) -> dict[str, Any]:
    """`ModelConfig`'s fields for layers of these kinds."""
    if not isinstance(kinds, list) or not set(kinds) <= {_FULL, _LOCAL}:
        strange = sorted(set(map(str, kinds)) - {_FULL, _LOCAL}) if isinstance(kinds, list) else kinds
        raise MismatchError(f"layer_types: {strange} is not supported (only {_FULL} and {_LOCAL})")
    if len(kinds) != len(layers):
        raise MismatchError(f"layer_types names {len(kinds)} layers, but num_hidden_layers = {len(layers)}")
    if _LOCAL not in kinds:
        return {"sliding_window": None}
    if not size:
        raise MismatchError(f"layer_types has layers of {_LOCAL}, but there is no sliding_window")
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    return {"sliding_window": size, "full_attention_layers": full or None}

"""Sliding windows in config.json: which layers have one, and how long it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MismatchError, Raw
from mega_common.model_config import ModelConfig

_FULL, _LOCAL = "full_attention", "sliding_attention"
_MOST_LAYERS = 10_000  # a pattern is a list as long as the model: no number in a file may make it take all memory


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
        layers, size = raw.get("num_hidden_layers", 0), raw.get("sliding_window", self.size)
        every = next((raw[key] for key in self.every_keys if raw.get(key)), self.every)

        def full(layer: int) -> bool:
            return (layer + 1) % every == 0 if every else not size

        return window_fields(raw.get("layer_types") or kinds_of(layers, full), size, layers)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The kinds of all layers; a size even where no layer uses it, since some classes insist."""
        return {"sliding_window": model.sliding_window or self.size, "layer_types": layer_kinds(model)}


@dataclass(frozen=True)
class QwenWindow:
    """Qwen's sliding window: a switch, a size, the first layer that has it, and the list of layers that says it again.

    Attributes:
        size, first: what transformers takes where the keys are absent.
        alternating: without a list, every second of the layers *before* `max_window_layers` has a window instead.
        unused: the size that is written when no layer has a window.
    """

    size: int = 4096
    first: int = 28
    alternating: bool = False
    unused: int | None = None
    keys: frozenset[str] = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
    fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window and the layers without."""
        layers, first = raw.get("num_hidden_layers", 0), raw.get("max_window_layers", self.first)
        size = raw.get("sliding_window", self.size) if raw.get("use_sliding_window") else None

        def full(layer: int) -> bool:
            return not size or (layer % 2 == 1 or layer >= first if self.alternating else layer < first)

        return window_fields(raw.get("layer_types") or kinds_of(layers, full), size, layers)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The kinds of all layers, and the first with a window."""
        kinds = layer_kinds(model)
        used = _LOCAL in kinds
        return {
            "use_sliding_window": used,
            "sliding_window": model.sliding_window if used else self.unused,
            "max_window_layers": kinds.index(_LOCAL) if used else model.num_layers,
            "layer_types": kinds,
        }


def layer_kinds(model: ModelConfig) -> list[str]:
    """What transformers calls each layer of `model`."""
    return [_FULL if model.window(layer) is None else _LOCAL for layer in range(model.num_layers)]


def kinds_of(layers: int, full: Callable[[int], bool]) -> list[str]:
    """The kinds of so many layers, of which those that are `full` have no window."""
    if layers > _MOST_LAYERS:
        raise MismatchError(f"num_hidden_layers = {layers} is more than {_MOST_LAYERS}")
    return [_FULL if full(layer) else _LOCAL for layer in range(layers)]


def window_fields(kinds: Any, size: int | None, layers: int) -> dict[str, Any]:
    """`ModelConfig`'s fields for layers of these kinds."""
    if not isinstance(kinds, list) or not set(kinds) <= {_FULL, _LOCAL}:
        strange = sorted(set(map(str, kinds)) - {_FULL, _LOCAL}) if isinstance(kinds, list) else kinds
        raise MismatchError(f"layer_types: {strange} is not supported (only {_FULL} and {_LOCAL})")
    if len(kinds) != layers:
        raise MismatchError(f"layer_types names {len(kinds)} layers, but num_hidden_layers = {layers}")
    if _LOCAL not in kinds:
        return {"sliding_window": None}
    if not size:
        raise MismatchError(f"layer_types has layers of {_LOCAL}, but there is no sliding_window")
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    return {"sliding_window": size, "full_attention_layers": full or None}

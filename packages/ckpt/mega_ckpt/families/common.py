"""Entries that several families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Raw
from mega_common.model_config import ModelConfig

# The keys that nearly every decoder has.
SIZES: tuple[Entry, ...] = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "hidden_size"),
    Key("intermediate_size", "ffn_hidden_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("max_position_embeddings", "max_position"),
    Key("tie_word_embeddings", "tie_embeddings", False),
    Key("initializer_range", "init_std", 0.02),
    Key("attention_dropout", "attention_dropout", 0.0),
)


def decoder(norm_eps: float = 1e-6) -> tuple[Entry, ...]:
    """The keys of Llama and everything shaped like it; `norm_eps` is what transformers takes for an absent one."""
    return (
        *SIZES,
        Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
        Key("rms_norm_eps", "norm_eps", norm_eps),
        Fixed({"norm": "rmsnorm", "position": "rope", "moe": None}),
    )


DECODER = decoder()


@dataclass(frozen=True)
class OwnHeads:
    """Every head has its own key and value, and together they are as wide as the model: no key speaks of them."""

    keys: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing: these are the defaults."""
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing, when the model agrees."""
        if model.kv_heads != model.num_attention_heads:
            raise MismatchError(f"num_kv_heads must be num_attention_heads, not {model.kv_heads}")
        if model.head_size * model.num_attention_heads != model.hidden_size:
            raise MismatchError(f"head_dim must be hidden_size / num_attention_heads, not {model.head_size}")
        return {}


@dataclass(frozen=True)
class QwenWindow:
    """Qwen's sliding window: a switch, a size, the first layer that has it, and the list of layers that says it again."""

    size: int = 4096
    first: int = 28
    keys: frozenset[str] = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
    fields: frozenset[str] = frozenset({"sliding_window"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """One window for all layers, or none."""
        layers, first = raw.get("num_hidden_layers", 0), raw.get("max_window_layers", self.first)
        size = raw.get("sliding_window", self.size) if raw.get("use_sliding_window") else None
        kinds = raw.get("layer_types") or _kinds(first if size and first < layers else layers, layers)
        if set(kinds) == {"full_attention"}:
            return {"sliding_window": None}
        if set(kinds) == {"sliding_attention"} and size:
            return {"sliding_window": size}
        raise MismatchError(
            f"layer_types of several kinds ({', '.join(sorted(set(kinds)))}) with sliding_window = {size}"
        )

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The same for every layer."""
        size = model.sliding_window
        return {
            "use_sliding_window": size is not None,
            "sliding_window": size,
            "max_window_layers": 0 if size else model.num_layers,
            "layer_types": ["sliding_attention" if size else "full_attention"] * model.num_layers,
        }


def _kinds(full: int, layers: int) -> list[str]:
    """Which kinds of layers there are when the first `full` of `layers` have no window."""
    return ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < layers)

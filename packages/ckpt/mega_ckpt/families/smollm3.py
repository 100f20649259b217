"""SmolLM 3: Llama with every fourth layer left without rotary positions (arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads, Key, MismatchError, Raw, layer_numbers
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import kinds_of, layer_kinds, window_fields
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class UnrotatedLayers:
    """Which layers rotate (1) and which do not (0); where windows are switched on, the latter have them."""

    every: int = 4
    keys: frozenset[str] = frozenset(
        {"no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"}
    )
    fields: frozenset[str] = frozenset({"no_rope_layers", "sliding_window", "full_attention_layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The layers without rotation, and the windows."""
        layers, every = layer_numbers(raw), raw.get("no_rope_layer_interval", self.every)
        rotated = raw.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
        if not isinstance(rotated, list) or len(rotated) < len(layers):
            raise MismatchError(f"no_rope_layers = {rotated!r} must have a number for each of {len(layers)} layers")
        unrotated = [layer for layer in layers if not rotated[layer]]
        size = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        kinds = raw.get("layer_types") or kinds_of([not size or layer not in unrotated for layer in layers])
        return {"no_rope_layers": unrotated or None, **window_fields(kinds, size, layers)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """A number and a kind for each layer."""
        return {
            "no_rope_layers": [int(model.rotates(layer)) for layer in range(model.num_layers)],
            "no_rope_layer_interval": self.every,
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
            "layer_types": layer_kinds(model),
        }


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    entries=(
        *DECODER,
        Key("tie_word_embeddings", "tie_embeddings", True),
        Heads(kv_default=4, explicit_dim=False),
        Rope(theta=2_000_000.0),
        UnrotatedLayers(),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Fixed({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id", "pad_token_id"),
)

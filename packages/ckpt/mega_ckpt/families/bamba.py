"""Bamba (IBM, Princeton, CMU, UIUC): Mamba-2 in most layers and attention in a few, an MLP in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.hybrid import MAMBA, NO_WINDOW, check_mixers, mamba_rules, mixers_named
from mega_ckpt.families.keys import Fixed, Heads, Key, MismatchError, Raw, layer_numbers
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_common.model_config import ModelConfig

_LAYER = "model.layers.{i}"


@dataclass(frozen=True)
class AttentionAt:
    """The layers that have attention; the others are Mamba-2."""

    keys: frozenset[str] = frozenset({"attn_layer_indices", "layers_block_type", "layer_types"})
    fields: frozenset[str] = frozenset({"layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The kinds; a list of them, where there is one, must say the same."""
        layers, at = layer_numbers(raw), raw.get("attn_layer_indices") or ()
        mixers = ["attention" if layer in at else "mamba" for layer in layers]
        kinds = raw.get("layers_block_type") or raw.get("layer_types")
        if kinds and mixers_named(kinds, "mamba", layers) != mixers:
            raise MismatchError(f"layer_types and attn_layer_indices = {at!r} must say the same")
        return {"layers": [f"{mixer}+mlp" for mixer in mixers]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The numbers."""
        mixers = check_mixers(model, "mamba")
        if model.moe is not None:
            raise MismatchError("moe must be None")
        return {"attn_layer_indices": [layer for layer, mixer in enumerate(mixers) if mixer == "attention"]}


BAMBA = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(kv_default=8, explicit_dim=False, derived=True),
        Rope(fraction=0.5),
        AttentionAt(),
        MAMBA,
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        *NO_WINDOW,
        Fixed({"qk_norm": False}),
    ),
    rules=(
        *mamba_rules(f"{_LAYER}.mamba"),
        Rule(f"{_LAYER}.pre_ff_layernorm.weight", (f"{_LAYER}.post_attention_layernorm.weight",)),
        *(
            Rule(f"{_LAYER}.feed_forward.{name}_proj.{kind}", (f"{_LAYER}.mlp.{name}_proj.{kind}",))
            for name in ("gate", "up", "down")
            for kind in ("weight", "bias")
        ),
        Rule("model.final_layernorm.weight", ("model.norm.weight",)),
    ),
    carried=frozenset({"num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"}),
)

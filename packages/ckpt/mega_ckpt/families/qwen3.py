"""Qwen 3 without experts (arXiv:2505.09388): queries and keys are normalised per head, and a head has its own width."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import EVERY_SCALING, Rope
from mega_ckpt.families.windows import QwenWindow

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=32, dim_default=128),
        Rope(scalings=EVERY_SCALING),
        QwenWindow(),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Fixed({"mlp_bias": False, "qk_norm": True}),
    ),
)

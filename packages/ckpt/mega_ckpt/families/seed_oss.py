"""Seed-OSS (ByteDance): Llama with heads of their own width and biases where one asks for them."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

SEED_OSS = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=8, dim_default=128),
        Rope(),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_out_bias", "attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Key("attention_dropout", "attention_dropout", 0.1),
        Key("residual_dropout", "residual_dropout", 0.1),
        SameWindow(knows=False),
        Fixed({"qk_norm": False}),
    ),
)

"""Ministral: Mistral with a sliding window in some of its layers. transformers takes a Mistral folder with kinds for one."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import LayerTypes

MINISTRAL = Family(
    name="ministral",
    architecture="MinistralForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=8),
        Rope(),
        LayerTypes(size=4096, every=None),
        Fixed({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
)

"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783), and the many models that use its architecture."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import EVERY_SCALING, Rope
from mega_ckpt.families.windows import SameWindow

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    entries=(
        *DECODER,
        Heads(divisible=True),
        Rope(scalings=EVERY_SCALING),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        SameWindow(knows=False),
        Fixed({"qk_norm": False}),
    ),
)

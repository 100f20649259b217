"""Mistral 7B and its successors without experts (arXiv:2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads
from mega_ckpt.families.rope import EVERY_SCALING, Rope
from mega_ckpt.families.windows import SameWindow

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=8),
        Rope(scalings=EVERY_SCALING),
        SameWindow(4096),
        Fixed({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
)

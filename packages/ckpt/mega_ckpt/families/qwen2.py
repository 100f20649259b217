"""Qwen 2 and 2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.keys import Fixed, Heads
from mega_ckpt.families.rope import EVERY_SCALING, Rope
from mega_ckpt.families.windows import QwenWindow

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=32, explicit_dim=False),
        Rope(scalings=EVERY_SCALING),
        QwenWindow(),
        Fixed({"qkv_bias": True, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
)

"""ERNIE 4.5 without experts (Baidu): Llama that rotates neighbours."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

ERNIE4_5 = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Heads(kv_default=2, dim_default=128),
        Rope(theta=500_000.0, interleaved=True),
        Key("use_bias", "qkv_bias attention_out_bias mlp_bias", False),
        SameWindow(knows=False),
        Fixed({"qk_norm": False}),
    ),
)

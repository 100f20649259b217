"""Helium (Kyutai, arXiv:2410.00037): Llama that rotates neighbours, with the heads' width together that of the model."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

HELIUM = Family(
    name="helium",
    architecture="HeliumForCausalLM",
    entries=(
        *decoder(norm_eps=1e-8),
        Heads(kv_default=20, dim_default=128, derived=True),
        Rope(theta=100_000.0, interleaved=True),
        Key("attention_bias", "qkv_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        SameWindow(knows=False),
        Fixed({"attention_out_bias": False, "qk_norm": False}),
    ),
)

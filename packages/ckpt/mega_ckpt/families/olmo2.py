"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all heads of queries and keys together."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(explicit_dim=False),
        Rope(),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        SameWindow(knows=False),
        Fixed({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
)

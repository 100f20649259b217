"""AFM (Arcee): Llama with a squared ReLU and no gate."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

ARCEE = Family(
    name="arcee",
    architecture="ArceeForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5, hidden_act={"relu2": "relu2"}),
        Heads(divisible=True),
        Rope(),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        SameWindow(knows=False),
        Fixed({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)

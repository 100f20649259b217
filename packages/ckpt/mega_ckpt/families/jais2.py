"""Jais 2: LayerNorms, biases and a squared ReLU without a gate."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES, TIED
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

JAIS2 = Family(
    name="jais2",
    architecture="Jais2ForCausalLM",
    entries=(
        *SIZES,
        TIED,
        Key("hidden_act", "activation", "relu2", {"relu2": "relu2"}),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Heads(),
        Rope(),
        Key("attention_bias", "qkv_bias attention_out_bias", True),
        Key("mlp_bias", "mlp_bias", True),
        SameWindow(knows=False),
        Fixed({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    tokens=("eos_token_id",),
)

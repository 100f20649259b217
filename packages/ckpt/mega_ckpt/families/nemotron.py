"""Nemotron and Minitron, dense (arXiv:2402.16819): squared ReLU, LayerNorms that multiply by 1 + weight, a partial rotation."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES, TIED
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

NEMOTRON = Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    entries=(
        *SIZES,
        TIED,
        Key("initializer_range", "init_std", 0.0134),
        Key("hidden_act", "activation", "relu2", {"relu2": "relu2"}),
        Key("norm_eps", "norm_eps", 1e-5),
        Heads(),
        Rope(fraction=0.5, partial=True, scalings=frozenset({"none"})),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        SameWindow(knows=False),
        Fixed({"norm": "layernorm", "zero_centered_norm": True, "position": "rope", "qk_norm": False}),
    ),
)

"""Gemma 1 (arXiv:2403.08295): norms that multiply by 1 + weight, scaled embeddings, a GELU as gate."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES
from mega_ckpt.families.keys import Fixed, Heads, Key, Only
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    entries=(
        *SIZES,
        Key("tie_word_embeddings", "tie_embeddings", True),
        # "gelu" of early folders too means the tanh form, as transformers takes it
        Key("hidden_act", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Heads(kv_default=16, dim_default=256, divisible=True),
        Rope(),
        SameWindow(knows=False),
        Only({"use_bidirectional_attention": (None, False), "hidden_activation": (None, "gelu_pytorch_tanh")}),
        Fixed(
            {"norm": "rmsnorm", "position": "rope", "zero_centered_norm": True, "scale_embeddings": True,
             "mlp_bias": False, "qk_norm": False}
        ),
    ),
)  # fmt: skip

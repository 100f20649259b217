"""StarCoder 2 (arXiv:2402.19173): LayerNorms and biases, grouped queries, an MLP without a gate."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

_MLP = "model.layers.{i}.mlp"

STARCODER2 = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    entries=(
        *SIZES,
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("initializer_range", "init_std", 0.018042),
        Key("hidden_act", "activation", "gelu_pytorch_tanh",
            {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}),
        Key("norm_epsilon", "norm_eps", 1e-5),
        Key("use_bias", "qkv_bias attention_out_bias mlp_bias", True),
        Key("embedding_dropout", "embedding_dropout", 0.0),
        Key("residual_dropout", "residual_dropout", 0.0),
        Heads(kv_default=2, explicit_dim=False),
        Rope(),
        SameWindow(),
        Fixed({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    rules=tuple(
        Rule(f"{_MLP}.{disk}.{kind}", (f"{_MLP}.{name}.{kind}",))
        for disk, name in (("c_fc", "up_proj"), ("c_proj", "down_proj"))
        for kind in ("weight", "bias")
    ),
)  # fmt: skip

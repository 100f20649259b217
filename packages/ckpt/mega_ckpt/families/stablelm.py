"""StableLM (arXiv:2402.17834): Llama with LayerNorms and a quarter of each head rotated.

The 12B of StableLM 2 has one norm before attention and MLP, and one for each head of queries and keys.
"""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES, TIED
from mega_ckpt.families.keys import Fixed, Heads, Key, NormedHeads
from mega_ckpt.families.layouts import OneSlab, Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

STABLELM = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    entries=(
        *SIZES,
        TIED,
        Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("hidden_dropout", "residual_dropout", 0.0),
        Key("use_qkv_bias", "qkv_bias", False),
        Key("use_parallel_residual", "parallel_residual shared_norm", False),
        Heads(kv_default=32, explicit_dim=False, derived=True),
        Rope(fraction=0.25, partial=True),
        SameWindow(knows=False),
        NormedHeads("qk_layernorm"),
        Fixed({"norm": "layernorm", "position": "rope", "attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=tuple(
        Rule(
            f"model.layers.{{i}}.self_attn.{x}_layernorm.norms.{{e}}.weight",
            (f"model.layers.{{i}}.self_attn.{x}_norm.weight",),
            OneSlab(),
        )
        for x in "qk"
    ),
)

"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with its projections fused on disk, a partial rotation and long rope."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads, Key, Only
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

_ATTENTION, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"

PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(explicit_dim=False),
        Rope(partial=True, scalings=frozenset({"none", "longrope"}), aliases={"su": "longrope"}, original=4096),
        SameWindow(),
        Key("embd_pdrop", "embedding_dropout", 0.0),
        Key("resid_pdrop", "residual_dropout", 0.0),
        Only({"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)}),
        Fixed({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        Rule(f"{_ATTENTION}.qkv_proj.weight", tuple(f"{_ATTENTION}.{name}_proj.weight" for name in "qkv")),
        Rule(f"{_MLP}.gate_up_proj.weight", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    ),
    tokens=("eos_token_id", "pad_token_id"),
)

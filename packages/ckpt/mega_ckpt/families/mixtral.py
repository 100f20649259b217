"""Mixtral (arXiv:2401.04088): Mistral with experts in every layer, whose projections have names of their own on disk."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.experts import Everywhere, Experts, expert_rules, router
from mega_ckpt.families.keys import Fixed, Heads, Key, Only
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

_MOE = "model.layers.{i}.block_sparse_moe"

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(kv_default=8),
        Rope(theta=1_000_000.0),
        SameWindow(),
        Experts(
            (
                *router("num_local_experts num_experts", top_k=2, normalize=True),
                Key("intermediate_size", "ffn_hidden_size"),
            ),
            Everywhere(),
        ),
        Only({"router_jitter_noise": (0.0,)}),
        Fixed({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        Rule(f"{_MOE}.gate.weight", ("model.layers.{i}.mlp.gate.weight",)),
        *expert_rules(f"{_MOE}.experts", ("w1", "w3", "w2")),
    ),
)

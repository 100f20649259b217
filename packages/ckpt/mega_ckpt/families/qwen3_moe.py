"""Qwen 3 with experts (arXiv:2505.09388)."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.experts import Experts, SparseSteps, expert_rules, router
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SwitchedWindow

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=4),
        Rope(),
        SwitchedWindow(),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Experts(
            (
                *router("num_experts num_local_experts", top_k=8, normalize=False),
                Key("moe_intermediate_size", "ffn_hidden_size"),
            ),
            SparseSteps(),
        ),
        Fixed({"mlp_bias": False, "qk_norm": True}),
    ),
    rules=expert_rules("model.layers.{i}.mlp.experts"),
)

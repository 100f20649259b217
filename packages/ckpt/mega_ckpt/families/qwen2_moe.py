"""Qwen 1.5 and 2 with experts: Qwen 2 with many small experts and a gated one for all tokens."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.experts import Experts, SparseSteps, expert_rules, router
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import QwenWindow

QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    entries=(
        *DECODER,
        Heads(kv_default=16, explicit_dim=False),
        Rope(),
        QwenWindow(alternating=True),
        Key("qkv_bias", "qkv_bias", True),
        Experts(
            (
                *router("num_experts num_local_experts", top_k=4, normalize=False),
                Key("moe_intermediate_size", "ffn_hidden_size"),
                Key("shared_expert_intermediate_size", "shared_ffn_hidden_size"),
                Fixed({"shared_gate": True}),
            ),
            SparseSteps(),
        ),
        Fixed({"attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=expert_rules("model.layers.{i}.mlp.experts"),
)

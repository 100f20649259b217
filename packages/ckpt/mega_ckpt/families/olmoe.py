"""OLMoE (arXiv:2409.02060): many small experts, and norms over all heads of queries and keys together."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.experts import Everywhere, Experts, expert_rules, router
from mega_ckpt.families.keys import Fixed, Heads, Key, Only
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(explicit_dim=False),
        Rope(),
        SameWindow(knows=False),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Experts(
            (
                *router("num_experts num_local_experts", top_k=8, normalize=False, experts=64, aux_loss=0.01),
                Key("intermediate_size", "ffn_hidden_size"),
            ),
            Everywhere(),
        ),
        Only({"clip_qkv": (None,)}),
        Fixed({"qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
    rules=expert_rules("model.layers.{i}.mlp.experts"),
)

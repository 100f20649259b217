"""GLM 4 (arXiv:2406.12793): 9B of 2024 (`glm`), with norms before and after of 2025 (`glm4`), and 4.5 with experts.

GLM 4.5 (`glm4_moe`, arXiv:2508.06471) has the router and the further predictors of DeepSeek-V3.
"""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.deepseek import FURTHER, SHARED_EXPERT_RULES, Groups
from mega_ckpt.families.experts import AfterDense, Experts, SharedExperts, expert_rules
from mega_ckpt.families.keys import Entry, Fixed, Heads, Key
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

_LAYER = "model.layers.{i}"
_SHARED: tuple[Entry, ...] = (
    *decoder(norm_eps=1.5625e-7),
    Heads(kv_default=2, dim_default=128),
    Rope(fraction=0.5, partial=True, interleaved=True),
    Key("attention_bias", "qkv_bias", True),
    SameWindow(knows=False),
    Fixed({"attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
)
_GATE_UP = Rule(f"{_LAYER}.mlp.gate_up_proj.weight", (f"{_LAYER}.mlp.gate_proj.weight", f"{_LAYER}.mlp.up_proj.weight"))

GLM = Family(name="glm", architecture="GlmForCausalLM", entries=_SHARED, rules=(_GATE_UP,), tokens=("pad_token_id",))

GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    entries=(*_SHARED, Fixed({"norm_position": "both"})),
    rules=(
        _GATE_UP,
        Rule(f"{_LAYER}.post_self_attn_layernorm.weight", (f"{_LAYER}.post_attention_layernorm.weight",)),
        Rule(f"{_LAYER}.post_attention_layernorm.weight", (f"{_LAYER}.pre_feedforward_layernorm.weight",)),
        Rule(f"{_LAYER}.post_mlp_layernorm.weight", (f"{_LAYER}.post_feedforward_layernorm.weight",)),
    ),
    tokens=("pad_token_id",),
)

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(kv_default=8, explicit_dim=False),
        Rope(fraction=0.5, partial=True),
        Key("attention_bias", "qkv_bias", False),
        Key("use_qk_norm", "qk_norm", False),
        Experts(
            (
                Key("n_routed_experts num_local_experts", "num_experts", 128),
                Key("moe_intermediate_size", "ffn_hidden_size"),
                Key("num_experts_per_tok", "top_k", 8),
                Key("routed_scaling_factor", "scaling", 1.0),
                Key("norm_topk_prob", "normalize", True),
                SharedExperts(1),
                Groups(("noaux_tc", "noaux_tc"), "top2", (1, 1)),
                Fixed({"score": "sigmoid", "selection_bias": True}),
            ),
            AfterDense(1, further=FURTHER),
        ),
        FURTHER,
        SameWindow(knows=False),
        Fixed({"attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=(*expert_rules(f"{_LAYER}.mlp.experts"), *SHARED_EXPERT_RULES),
)

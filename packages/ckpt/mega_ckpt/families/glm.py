"""GLM 4 (arXiv:2406.12793), 9B of 2024 (`glm`) and with norms before and after, 9B and 32B of 2025 (`glm4`)."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
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

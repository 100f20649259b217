"""GPT-OSS (arXiv:2508.10925): sinks, a window in every second layer, experts with biases that are fused on disk.

On disk the rows of gate and up projection take turns, and every expert's matrix is stored (in, out).
"""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.experts import Everywhere, Experts, router
from mega_ckpt.families.keys import Fixed, Heads, Key, Only
from mega_ckpt.families.layouts import InTurns, Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import LayerTypes

_MLP = "model.layers.{i}.mlp"
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _fused(disk: str, kind: str, *parts: str) -> Rule:
    return Rule(f"{_MLP}.experts.{disk}", tuple(f"{_MLP}.experts.{part}.{kind}" for part in parts), InTurns())


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(kv_default=8, dim_default=64),
        Rope(theta=150_000.0, absent=_YARN),
        LayerTypes(size=128, every=2),
        Key("swiglu_limit", "activation_limit", 7.0, given=True),
        Key("attention_bias", "qkv_bias attention_out_bias", True),
        Experts(
            (
                *router("num_local_experts num_experts", top_k=4, normalize=True),
                Key("intermediate_size", "ffn_hidden_size"),
                Fixed({"router_bias": True}),
            ),
            Everywhere(),
        ),
        Only({"swiglu_alpha": (1.702,)}),
        Fixed({"attention_sinks": True, "mlp_bias": True, "qk_norm": False}),
    ),
    rules=(
        Rule(f"{_MLP}.router.weight", (f"{_MLP}.gate.weight",)),
        Rule(f"{_MLP}.router.bias", (f"{_MLP}.gate.bias",)),
        _fused("gate_up_proj", "weight", "gate_proj", "up_proj"),
        _fused("gate_up_proj_bias", "bias", "gate_proj", "up_proj"),
        _fused("down_proj", "weight", "down_proj"),
        Rule(f"{_MLP}.experts.down_proj_bias", (f"{_MLP}.experts.down_proj.bias",)),
    ),
    carried=frozenset({"experts_per_token", "initial_context_length"}),
)

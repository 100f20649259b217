"""OLMo 3 (arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers, whose rotary positions stay unstretched."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads, Key
from mega_ckpt.families.rope import Rope, TwoRopes
from mega_ckpt.families.windows import LayerTypes

_ROPE = Rope(theta=500_000.0, scalings=frozenset({"none", "linear", "llama3", "yarn"}))

OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(explicit_dim=False),
        TwoRopes(_ROPE, _ROPE, local_key=None),
        LayerTypes(size=4096, every=4),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Fixed({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
)

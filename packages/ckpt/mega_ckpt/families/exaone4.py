"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP; where it has windows, only layers with one rotate."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.keys import Fixed, Heads
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import RotatedWindows

EXAONE4 = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    entries=(
        *decoder(norm_eps=1e-5),
        Heads(kv_default=32),
        Rope(),
        RotatedWindows(every_key="sliding_window_pattern", none_rotates_all=True),
        Fixed(
            {
                "norm_position": "post",
                "qk_norm": True,
                "qkv_bias": False,
                "attention_out_bias": False,
                "mlp_bias": False,
            }
        ),
    ),
)

"""Gemma 3, its text models (arXiv:2503.19786): Gemma 2 with query-key norms for soft caps, five windows to a full layer."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import gemma
from mega_ckpt.families.keys import Fixed, Key, Only
from mega_ckpt.families.rope import Rope, TwoRopes
from mega_ckpt.families.windows import LayerTypes

_SCALINGS = frozenset({"none", "linear", "llama3", "yarn"})

GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    entries=(
        *gemma(),
        TwoRopes(Rope(theta=1_000_000.0, scalings=_SCALINGS), Rope(scalings=_SCALINGS)),
        LayerTypes(size=4096, every=6, every_keys=("sliding_window_pattern", "_sliding_window_pattern")),
        Only({"attn_logit_softcapping": (None,)}),  # transformers has the key, and does nothing with it
        Key("final_logit_softcapping", "logit_softcap", None),
        Fixed({"qk_norm": True}),
    ),
    carried=frozenset({"cache_implementation"}),
)

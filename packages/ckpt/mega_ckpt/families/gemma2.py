"""Gemma 2 (arXiv:2408.00118): norms before and after, soft caps, a window in every second layer, scaled embeddings."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import gemma
from mega_ckpt.families.keys import Fixed, Key
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import LayerTypes

GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    entries=(
        *gemma(),
        Rope(),
        LayerTypes(size=4096, every=2),
        Key("attn_logit_softcapping", "attention_softcap", 50.0),
        Key("final_logit_softcapping", "logit_softcap", 30.0),
        Fixed({"qk_norm": False}),
    ),
    carried=frozenset({"cache_implementation", "sliding_window_size"}),
)

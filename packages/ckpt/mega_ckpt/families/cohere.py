"""Command R (Cohere): attention and MLP side by side after one LayerNorm without bias, scaled logits, neighbours rotated.
Command R+ normalises each head of queries and keys by itself.

Command R7B and A (`cohere2`, arXiv:2504.00698) have a window in three of four layers and rotate in these alone.
"""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES
from mega_ckpt.families.keys import Entry, Fixed, Heads, Key, NormedHeads
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import RotatedWindows, SameWindow

_SHARED: tuple[Entry, ...] = (
    *SIZES,
    Key("tie_word_embeddings", "tie_embeddings", True),
    Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
    Key("layer_norm_eps", "norm_eps", 1e-5),
    Key("logit_scale", "logit_scale", 0.0625, given=True),
    Key("attention_bias", "qkv_bias attention_out_bias", False),
    Fixed(
        {"norm": "layernorm", "norm_bias": False, "position": "rope", "parallel_residual": True, "shared_norm": True,
         "mlp_bias": False}
    ),
)  # fmt: skip

COHERE = Family(
    name="cohere",
    architecture="CohereForCausalLM",
    entries=(
        *_SHARED,
        Heads(explicit_dim=False, divisible=True),
        Rope(theta=500_000.0, interleaved=True),
        SameWindow(knows=False),
        NormedHeads("use_qk_norm"),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)

COHERE2 = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    entries=(
        *_SHARED,
        Heads(explicit_dim=False),
        Rope(interleaved=True),
        RotatedWindows(every_key="sliding_window_pattern"),
        Fixed({"qk_norm": False}),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)

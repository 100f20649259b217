"""Gemma 1 to 3, text models: norms that multiply by 1 + weight, scaled embeddings, GeGLU. Gemma 2 (arXiv:2408.00118):
norms before and after, soft caps, a window in every second layer. Gemma 3 (arXiv:2503.19786): query-key norms instead
of soft caps, five windowed layers per full-attention layer. Gemma 1: arXiv:2403.08295.
"""

from __future__ import annotations

from mega_ckpt.families.common_entries import SIZES, gemma_entries
from mega_ckpt.families.config_entries import AllowedValuesEntry, FixedFieldsEntry, HeadsEntry, KeyEntry
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import LayerTypesEntry, UniformWindowEntry

GEMMA = ModelFamily(
    name="gemma",
    architecture="GemmaForCausalLM",
    entries=(
        *SIZES,
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        # "gelu" of early folders too means the tanh form, as transformers takes it
        KeyEntry("hidden_act", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        HeadsEntry(kv_default=16, dim_default=256, divisible=True),
        RopeEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"use_bidirectional_attention": (None, False), "hidden_activation": (None, "gelu_pytorch_tanh")}),
        FixedFieldsEntry(
            {"norm": "rmsnorm", "position": "rope", "zero_centered_norm": True, "scale_embeddings": True,
             "mlp_bias": False, "qk_norm": False}
        ),
    ),
)  # fmt: skip


GEMMA2 = ModelFamily(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    entries=(
        *gemma_entries(),
        RopeEntry(),
        LayerTypesEntry(size=4096, every=2),
        KeyEntry("attn_logit_softcapping", "attention_softcap", 50.0),
        KeyEntry("final_logit_softcapping", "logit_softcap", 30.0),
        FixedFieldsEntry({"qk_norm": False}),
    ),
    carried=frozenset({"cache_implementation", "sliding_window_size"}),
)


_SCALINGS = frozenset({"none", "linear", "llama3", "yarn"})

GEMMA3 = ModelFamily(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    entries=(
        *gemma_entries(),
        GlobalLocalRopeEntry(RopeEntry(theta=1_000_000.0, scalings=_SCALINGS), RopeEntry(scalings=_SCALINGS)),
        LayerTypesEntry(size=4096, every=6, every_keys=("sliding_window_pattern", "_sliding_window_pattern")),
        AllowedValuesEntry({"attn_logit_softcapping": (None,)}),  # transformers has the key, and does nothing with it
        KeyEntry("final_logit_softcapping", "logit_softcap", None),
        FixedFieldsEntry({"qk_norm": True}),
    ),
    carried=frozenset({"cache_implementation"}),
)

"""GPT-NeoX and Pythia (arXiv:2204.06745): attention and MLP side by side, a partial rotation, heads interleaved on disk."""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import SIZES, TIED, OwnHeads
from mega_ckpt.families.keys import Fixed, Key
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow

_LAYER, _NEOX = "model.layers.{i}", "gpt_neox.layers.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")


def _both(disk: str, *names: str, by: str = "") -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{disk}.{kind}", tuple(f"{name}.{kind}" for name in names), by=by) for kind in ("weight", "bias")
    )


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    head="embed_out.weight",
    buffers=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    entries=(
        *SIZES,
        TIED,
        Key("hidden_act", "activation", "gelu",
            {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
        Key("layer_norm_eps", "norm_eps", 1e-5),
        Key("hidden_dropout", "embedding_dropout residual_dropout", 0.0),
        Key("use_parallel_residual", "parallel_residual", True),
        Key("attention_bias", "qkv_bias attention_out_bias", True),
        OwnHeads(),
        Rope(fraction=0.25, partial=True, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
        SameWindow(knows=False),
        Fixed({"norm": "layernorm", "position": "rope", "mlp_bias": True, "qk_norm": False}),
    ),
    rules=(
        Rule("gpt_neox.embed_in.weight", ("model.embed_tokens.weight",)),
        *_both(f"{_NEOX}.input_layernorm", f"{_LAYER}.input_layernorm"),
        *_both(f"{_NEOX}.attention.query_key_value", *_QKV, by="kv"),
        *_both(f"{_NEOX}.attention.dense", f"{_LAYER}.self_attn.o_proj"),
        *_both(f"{_NEOX}.post_attention_layernorm", f"{_LAYER}.post_attention_layernorm"),
        *_both(f"{_NEOX}.mlp.dense_h_to_4h", f"{_LAYER}.mlp.up_proj"),
        *_both(f"{_NEOX}.mlp.dense_4h_to_h", f"{_LAYER}.mlp.down_proj"),
        *_both("gpt_neox.final_layer_norm", "model.norm"),
        Rule("embed_out.weight", ("lm_head.weight",)),
    ),
    carried=frozenset({"classifier_dropout"}),
)  # fmt: skip

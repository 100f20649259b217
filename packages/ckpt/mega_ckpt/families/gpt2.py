"""GPT-2 (Radford et al. 2019). Its linear layers are stored (in, out), queries, keys and values in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import OwnHeads
from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import PLAIN, TRANSPOSED, Layout, Rule
from mega_ckpt.families.windows import SameWindow
from mega_common.model_config import ModelConfig

_LAYER, _H = "model.layers.{i}", "transformer.h.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class Gpt2Sizes:
    """The width of the MLP, four times the model's unless given, and a second name for the longest sequence."""

    keys: frozenset[str] = frozenset({"n_inner", "n_ctx"})
    fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """`n_ctx` is an older name of `n_positions`, so they must agree."""
        if raw.get("n_ctx", raw.get("n_positions")) != raw.get("n_positions"):
            raise MismatchError(f"n_ctx = {raw['n_ctx']!r} differs from n_positions = {raw.get('n_positions')!r}")
        return {"ffn_hidden_size": raw.get("n_inner") or 4 * raw.get("n_embd", 0)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Only `n_inner`, null for the usual size."""
        return {"n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size}


def gpt2_entries(activation: str) -> tuple[Entry, ...]:
    """The keys that GPT-2 and GPT-BigCode share; `activation` is what transformers takes for an absent one."""
    return (
        Key("vocab_size", "vocab_size"),
        Key("n_embd hidden_size", "hidden_size"),
        Key("n_layer num_hidden_layers", "num_layers"),
        Key("n_head num_attention_heads", "num_attention_heads"),
        Key("n_positions max_position_embeddings", "max_position"),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key(
            "activation_function",
            "activation",
            activation,
            {activation: "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("embd_pdrop", "embedding_dropout", 0.1),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("resid_pdrop", "residual_dropout", 0.1),
        Key("initializer_range", "init_std", 0.02),
        Gpt2Sizes(),
        SameWindow(knows=False),
        Fixed(
            {
                "norm": "layernorm",
                "position": "learned",
                "qkv_bias": True,
                "attention_out_bias": True,
                "mlp_bias": True,
                "qk_norm": False,
            }
        ),
    )


def gpt2_rules(layout: Layout, *, by: str = "") -> tuple[Rule, ...]:
    """The names that they share: `layout` is that of linear layers, `by` how queries, keys and values are joined."""

    def both(disk: str, *names: str, layout: Layout = PLAIN, by: str = "") -> tuple[Rule, Rule]:
        weights, biases = (tuple(f"{name}.{kind}" for name in names) for kind in ("weight", "bias"))
        return (
            Rule(f"{disk}.weight", weights, layout, by=by),
            Rule(f"{disk}.bias", biases, by=by),
        )

    return (
        Rule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        Rule("transformer.wpe.weight", ("model.embed_positions.weight",)),
        *both(f"{_H}.ln_1", f"{_LAYER}.input_layernorm"),
        *both(f"{_H}.attn.c_attn", *_QKV, layout=layout, by=by),
        *both(f"{_H}.attn.c_proj", f"{_LAYER}.self_attn.o_proj", layout=layout),
        *both(f"{_H}.ln_2", f"{_LAYER}.post_attention_layernorm"),
        *both(f"{_H}.mlp.c_fc", f"{_LAYER}.mlp.up_proj", layout=layout),
        *both(f"{_H}.mlp.c_proj", f"{_LAYER}.mlp.down_proj", layout=layout),
        *both("transformer.ln_f", "model.norm"),
    )


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    entries=(
        *gpt2_entries(activation="gelu_new"),
        OwnHeads(),
        Only({"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
              "reorder_and_upcast_attn": (False, True)}),
    ),
    rules=gpt2_rules(TRANSPOSED),
    carried=frozenset(
        {"classifier_dropout", "hidden_dropout", "summary_activation", "summary_first_dropout", "summary_last_dropout",
         "summary_proj_to_labels", "summary_type", "summary_use_proj"}
    ),
)  # fmt: skip

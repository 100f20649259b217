"""ModernBERT (arXiv:2412.13663): norms before, none before the first attention; windows to both sides in two layers of three."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.common import OwnHeads
from mega_ckpt.families.encoders import (
    GELUS,
    LAYER,
    OUTPUT_BIAS,
    EncoderFamily,
    LocalAttention,
    both,
    class_of,
)
from mega_ckpt.families.keys import Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope, TwoRopes
from mega_common.model_config import MaskedLmConfig, ModelConfig

_DISK = "model.layers.{i}"
_QKV = tuple(f"{LAYER}.self_attn.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class _Head:
    """What guesses masked tokens; its keys are called after classifiers."""

    keys: frozenset[str] = frozenset({"classifier_activation", "classifier_bias", "decoder_bias"})
    fields: frozenset[str] = frozenset({"masked_lm", "pooler", "sentence_pairs"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Whatever the class: `as_held` looks."""
        activation = raw.get("classifier_activation", "gelu")
        if activation not in GELUS:
            raise MismatchError(f"classifier_activation = {activation!r} is not supported (only {', '.join(GELUS)})")
        biases = {"dense_bias": raw.get("classifier_bias", False), "bias": raw.get("decoder_bias", True)}
        return {"masked_lm": {"activation": GELUS[activation], **biases}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys, and the class."""
        if model.pooler:
            raise MismatchError("pooler must be False")
        head = model.masked_lm or MaskedLmConfig(dense_bias=False)
        return {
            "architectures": [class_of("ModernBert", model)],
            "classifier_activation": next(there for there, here in GELUS.items() if here == head.activation),
            "classifier_bias": head.dense_bias,
            "decoder_bias": head.bias,
        }


MODERNBERT = EncoderFamily(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    head="decoder.weight",
    entries=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_attention_heads"),
        Key("max_position_embeddings", "max_position", 8192),
        Key("initializer_range", "init_std", 0.02),
        Key("hidden_activation", "activation", "gelu",
            {"gelu": "geglu_erf", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu"}),
        Key("norm_eps", "norm_eps", 1e-5),
        Key("norm_bias", "norm_bias", False),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("embedding_dropout", "embedding_dropout", 0.0),
        Key("tie_word_embeddings", "tie_embeddings", True),
        TwoRopes(
            Rope(theta=160_000.0, theta_key="global_rope_theta", scalings=frozenset({"none"})),
            Rope(scalings=frozenset({"none"})),
            local_key="local_rope_theta",
        ),
        LocalAttention(),
        OwnHeads(),
        _Head(),
        Only({"position_embedding_type": ("absolute",), "sliding_window": (None,)}),
        Fixed({"causal": False, "norm": "layernorm", "position": "rope", "norm_position": "pre", "first_norm": False,
               "embedding_norm": True, "qk_norm": False, "token_types": 0}),
    ),
    rules=(
        Rule("model.embeddings.tok_embeddings.weight", ("model.embed_tokens.weight",)),
        *both("model.embeddings.norm", "model.embed_norm"),
        *both(f"{_DISK}.attn_norm", f"{LAYER}.input_layernorm"),
        *both(f"{_DISK}.attn.Wqkv", *_QKV),
        *both(f"{_DISK}.attn.Wo", f"{LAYER}.self_attn.o_proj"),
        *both(f"{_DISK}.mlp_norm", f"{LAYER}.post_attention_layernorm"),
        *both(f"{_DISK}.mlp.Wi", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        *both(f"{_DISK}.mlp.Wo", f"{LAYER}.mlp.down_proj"),
        *both("model.final_norm", "model.norm"),
        *both("head.dense", "lm_head.dense"),
        *both("head.norm", "lm_head.norm"),
        Rule("decoder.bias", (OUTPUT_BIAS,)),
        Rule("decoder.weight", ("lm_head.weight",)),
    ),
    carried=frozenset(
        {"classifier_dropout", "classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor",
         "layer_norm_eps", "mlp_dropout", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
         "sparse_prediction"}
    ),
)  # fmt: skip

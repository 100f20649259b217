"""Decoders of GPT-2's line, with layer norms and biases: GPT-2, GPT-BigCode, GPT-Neo, GPT-J and CodeGen.

GPT-2 (Radford et al. 2019): linear layers stored (in, out), fused query-key-value. GPT-BigCode: SantaCoder and StarCoder
(arXiv:2305.06161), with multi-query attention. GPT-Neo: unscaled scores, a window in every second layer. GPT-J: partial interleaved rotation, one norm for attention and MLP in
parallel. CodeGen (arXiv:2203.13474): GPT-J with queries, values and keys fused in four parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    MultiHeadEntry,
    check_config_json_head_dim,
    check_heads_fill_hidden_size,
)
from mega_ckpt.families.disk_layouts import LAYER, PLAIN, QKV, TRANSPOSED, DiskLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import RopeEntry, RotaryDimEntry
from mega_ckpt.families.window_entries import (
    UniformWindowEntry,
    build_sliding_window_fields,
    get_transformers_layer_types,
)
from mega_common.model_config import ModelConfig

_BLOCK = "transformer.h.{i}"


@dataclass(frozen=True)
class Gpt2SizesEntry:
    """Translation to and from config.json of GPT-2's MLP width and its second key for the maximum sequence length.
    The MLP width `n_inner` is four times the hidden size by default; the second key is `n_ctx`.
    """

    has_length: bool = True
    handled_config_keys: frozenset[str] = frozenset({"n_inner", "n_ctx"})
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `ffn_hidden_size`; ConfigMismatchError if `n_ctx` differs from `n_positions`."""
        if self.has_length and raw.get("n_ctx", raw.get("n_positions")) != raw.get("n_positions"):
            raise ConfigMismatchError(f"n_ctx = {raw['n_ctx']!r} differs from n_positions = {raw.get('n_positions')!r}")
        return {"ffn_hidden_size": raw.get("n_inner") or 4 * raw.get("n_embd", 0)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `n_inner` of config.json with its value (null for the default width), without `n_ctx`."""
        return {"n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size}


def gpt2_config_entries(activation: str) -> tuple[ConfigEntry, ...]:
    """Return the config entries that GPT-2 and GPT-BigCode share.
    `activation` is transformers' default activation function.
    """
    return (
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("n_embd hidden_size", "hidden_size"),
        KeyEntry("n_layer num_hidden_layers", "num_layers"),
        KeyEntry("n_head num_attention_heads", "num_attention_heads"),
        KeyEntry("n_positions max_position_embeddings", "max_position"),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry(
            "activation_function",
            "activation",
            activation,
            {activation: "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("embd_pdrop", "embedding_dropout", 0.1),
        KeyEntry("attn_pdrop", "attention_dropout", 0.1),
        KeyEntry("resid_pdrop", "residual_dropout", 0.1),
        KeyEntry("initializer_range", "init_std", 0.02),
        Gpt2SizesEntry(),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry(
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


def gpt2_tensor_rules(layout: DiskLayout, *, per_head: str = "") -> tuple[TensorRule, ...]:
    """Return the tensor rules that GPT-2 and GPT-BigCode share.
    `layout` is the layout of linear layers, `per_head` the kind of heads by which queries, keys and values are
    interleaved.
    """
    return (
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        TensorRule("transformer.wpe.weight", ("model.embed_positions.weight",)),
        *weight_bias_rules(f"{_BLOCK}.ln_1", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.attn.c_attn", *QKV, layout=layout, per_head=per_head),
        *weight_bias_rules(f"{_BLOCK}.attn.c_proj", f"{LAYER}.self_attn.o_proj", layout=layout),
        *weight_bias_rules(f"{_BLOCK}.ln_2", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj", layout=layout),
        *weight_bias_rules(f"{_BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj", layout=layout),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    )


_DROPOUTS = {"embd": "embedding", "attn": "attention", "resid": "residual"}


@dataclass(frozen=True)
class FourfoldFfnWidthConfigEntry:
    """Translation to and from config.json of a feed-forward width of four times the model's.

    Attributes:
        key: key of another width, which may be absent or null; empty: the family has none.
    """

    key: str = ""
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({self.key} if self.key else ())

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `ffn_hidden_size` from config.json: the key's value, or four times the hidden size."""
        width = 4 * next((raw[key] for key in ("hidden_size", "n_embed", "d_model") if key in raw), 0)
        return {"ffn_hidden_size": (self.key and raw.get(self.key)) or width}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key of the width, if there is one; else ConfigMismatchError for another width."""
        if self.key:
            fourfold = model.ffn_hidden_size == 4 * model.hidden_size
            return {self.key: None if fourfold else model.ffn_hidden_size}
        if model.ffn_hidden_size != 4 * model.hidden_size:
            raise ConfigMismatchError(f"ffn_hidden_size must be {4 * model.hidden_size}, not {model.ffn_hidden_size}")
        return {}


GPT2 = ModelFamily(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    entries=(
        *gpt2_config_entries(activation="gelu_new"),
        MultiHeadEntry(),
        AllowedValuesEntry({"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
              "reorder_and_upcast_attn": (False, True)}),
    ),
    rules=gpt2_tensor_rules(TRANSPOSED),
    carried=frozenset(
        {"classifier_dropout", "hidden_dropout", "summary_activation", "summary_first_dropout", "summary_last_dropout",
         "summary_proj_to_labels", "summary_type", "summary_use_proj"}
    ),
)  # fmt: skip


@dataclass(frozen=True)
class MultiQueryEntry:
    """Translation to and from config.json of GPT-BigCode's `multi_query`: multi-query or multi-head attention."""

    handled_config_keys: frozenset[str] = frozenset({"multi_query", "head_dim"})
    handled_model_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `num_kv_heads` from config.json: 1 for multi-query attention, else None (multi-head)."""
        check_config_json_head_dim(raw)
        return {"num_kv_heads": 1 if raw.get("multi_query", True) else None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `multi_query` of config.json with its value; ConfigMismatchError for grouped-query attention."""
        if model.key_value_heads not in (1, model.num_attention_heads):
            raise ConfigMismatchError(f"num_kv_heads must be 1 or num_attention_heads, not {model.key_value_heads}")
        check_heads_fill_hidden_size(model)
        return {"multi_query": model.key_value_heads == 1}


GPT_BIGCODE = ModelFamily(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    entries=(
        *gpt2_config_entries(activation="gelu_pytorch_tanh"),
        MultiQueryEntry(),
        AllowedValuesEntry({"scale_attn_weights": (True,)}),
    ),
    rules=gpt2_tensor_rules(PLAIN, per_head="kv"),
    carried=frozenset(
        {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "classifier_dropout", "hidden_dropout"}
    ),
)


@dataclass(frozen=True)
class AttentionTypesEntry:
    """Translation to and from config.json of GPT-Neo's `attention_types`: "global" and "local" layers.
    They are lists with a number of repetitions. `window_size` is the window of local layers.
    """

    handled_config_keys: frozenset[str] = frozenset({"attention_types", "attention_layers", "window_size"})
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `sliding_window` and `full_attention_layers`.

        Raises:
            ConfigMismatchError: for unknown kinds of layers, and for more or fewer kinds than layers.
        """
        layers = range(raw.get("num_layers", 24))
        try:
            types = raw.get("attention_types") or [[["global", "local"], 12]]
            kinds = [_LAYER_TYPES[kind] for names, times in types for kind in list(names) * min(times, len(layers))]
        except (KeyError, TypeError, ValueError):
            raise ConfigMismatchError(
                f"attention_types = {raw.get('attention_types')!r:.80} is not supported (only lists of global and local)"
            ) from None
        return build_sliding_window_fields(kinds, raw.get("window_size", 256), layers)

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `attention_types`, `attention_layers` and `window_size`."""
        names = {kind: name for name, kind in _LAYER_TYPES.items()}
        kinds = [names[kind] for kind in get_transformers_layer_types(model)]
        return {
            "attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": model.sliding_window or 256,
        }  # fmt: skip


_LAYER_TYPES = {"global": "full_attention", "local": "sliding_attention"}
_NEO_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}

GPT_NEO = ModelFamily(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("num_layers num_hidden_layers", "num_layers"),
        KeyEntry("num_heads num_attention_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position", 2048),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("activation_function", "activation", "gelu_new", _NEO_ACTIVATIONS),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("embed_dropout", "embedding_dropout", 0.0),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("resid_dropout", "residual_dropout", 0.0),
        KeyEntry("initializer_range", "init_std", 0.02),
        FourfoldFfnWidthConfigEntry(key="intermediate_size"),
        MultiHeadEntry(),
        AttentionTypesEntry(),
        AllowedValuesEntry({"sliding_window": (None,), "layer_types": (None,)}),
        FixedFieldsEntry(
            {"norm": "layernorm", "position": "learned", "attention_scale": 1.0, "qkv_bias": False, "attention_out_bias": True,
             "mlp_bias": True, "qk_norm": False}
        ),
    ),
    rules=(
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        TensorRule("transformer.wpe.weight", ("model.embed_positions.weight",)),
        *weight_bias_rules(f"{_BLOCK}.ln_1", f"{LAYER}.input_layernorm"),
        *(TensorRule(f"{_BLOCK}.attn.attention.{x}_proj.weight", (f"{LAYER}.self_attn.{x}_proj.weight",)) for x in "qkv"),
        *weight_bias_rules(f"{_BLOCK}.attn.attention.out_proj", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_BLOCK}.ln_2", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    ),
    carried=frozenset(
        {"classifier_dropout", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
         "summary_use_proj", "gradient_checkpointing"}
    ),
)  # fmt: skip


GPTJ = ModelFamily(
    name="gptj",
    architecture="GPTJForCausalLM",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
    entries=(
        *(entry for entry in gpt2_config_entries("gelu_new") if not isinstance(entry, FixedFieldsEntry)),
        KeyEntry("tie_word_embeddings", "tie_embeddings", False),
        *(KeyEntry(f"{key}_pdrop", f"{name}_dropout", 0.0) for key, name in _DROPOUTS.items()),
        MultiHeadEntry(),
        RotaryDimEntry(
            RopeEntry(partial=True, interleaved=True), sizes=("head_dim", "n_embd", "n_head"), default=64
        ),
        FixedFieldsEntry(
            {
                "norm": "layernorm",
                "position": "rope",
                "parallel_residual": True,
                "shared_norm": True,
                "head_bias": True,
                "qkv_bias": False,
                "attention_out_bias": False,
                "mlp_bias": True,
                "qk_norm": False,
            }
        ),
    ),
    rules=(
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        *weight_bias_rules(f"{_BLOCK}.ln_1", f"{LAYER}.input_layernorm"),
        *(TensorRule(f"{_BLOCK}.attn.{x}_proj.weight", (f"{LAYER}.self_attn.{x}_proj.weight",)) for x in "qkv"),
        TensorRule(f"{_BLOCK}.attn.out_proj.weight", (f"{LAYER}.self_attn.o_proj.weight",)),
        *weight_bias_rules(f"{_BLOCK}.mlp.fc_in", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_BLOCK}.mlp.fc_out", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    ),
    carried=frozenset(
        {"rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
         "summary_type", "summary_use_proj"}
    ),
)  # fmt: skip


# Each of four parts has queries, values and keys of a quarter of the heads.
_CODEGEN_QKV = tuple(f"{LAYER}.self_attn.{x}_proj.weight" for x in "qvk")
CODEGEN = replace(
    GPTJ,
    name="codegen",
    architecture="CodeGenForCausalLM",
    entries=tuple(Gpt2SizesEntry(has_length=False) if isinstance(e, Gpt2SizesEntry) else e for e in GPTJ.entries),
    rules=(
        *(rule for rule in GPTJ.rules if rule.parts[0] not in _CODEGEN_QKV),
        TensorRule(f"{_BLOCK}.attn.qkv_proj.weight", _CODEGEN_QKV, per_head="quarter"),
    ),
    buffers=r"(transformer\.)?h\.\d+\.attn\.(causal_mask|bias|masked_bias|embed_positions)",
)

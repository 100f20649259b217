"""The family GPT-Neo (EleutherAI 2021), which mega does not know: HuggingFace folders are read, trained and written.

A GPT-2 with separate query, key and value projections without biases, scores that are not scaled, and a sliding window in every
other layer. A family is a declaration of how config.json and the tensors on disk map to mega's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_trainer.extend import (
    ConfigMismatchError,
    Extension,
    FixedFieldsEntry,
    KeyEntry,
    ModelConfig,
    ModelFamily,
    MultiHeadEntry,
    TensorRule,
    weight_bias_rules,
)

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True)
class AttentionTypesEntry:
    """Layers with a sliding window: `attention_types` is a list of [pattern, repetitions], and `attention_layers` the
    pattern of all layers.
    """

    handled_config_keys: frozenset[str] = frozenset({"attention_types", "attention_layers", "window_size"})
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the window and the layers without it."""
        kinds = [kind for pattern, times in raw.get("attention_types", ()) for kind in pattern * times]
        kinds = kinds or ["global", "local"] * (raw.get("num_layers", 24) // 2)
        if raw.get("attention_layers", kinds) != kinds or not {*kinds} <= {"global", "local"}:
            raise ConfigMismatchError("attention_layers must be those of attention_types, each global or local")
        if "local" not in kinds:
            return {"sliding_window": None, "full_attention_layers": None}
        whole = [layer for layer, kind in enumerate(kinds) if kind == "global"]
        return {"sliding_window": raw.get("window_size", 256), "full_attention_layers": whole or None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the pattern of all layers, and the window."""
        layers = range(model.num_layers)
        kinds = ["global" if model.get_attention_window(layer) is None else "local" for layer in layers]
        return {
            "attention_types": [[kinds, 1]], "attention_layers": kinds, "window_size": model.sliding_window or 256,
        }  # fmt: skip


@dataclass(frozen=True)
class WidthEntry:
    """Width of the feed-forward block, `intermediate_size`: null is four times the model's."""

    handled_config_keys: frozenset[str] = frozenset({"intermediate_size"})
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the width."""
        return {"ffn_hidden_size": raw.get("intermediate_size") or 4 * raw.get("hidden_size", 0)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the width, or null for four times the model's."""
        return {"intermediate_size": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size}


LAYER, BLOCK = "model.layers.{i}", "transformer.h.{i}"
GPT_NEO = ModelFamily(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)",
    carried=frozenset({"classifier_dropout"}),
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("num_layers", "num_layers"),
        KeyEntry("num_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position", 2048),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("activation_function", "activation", "gelu_new", ACTIVATIONS),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("embed_dropout", "embedding_dropout", 0.0),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("resid_dropout", "residual_dropout", 0.0),
        KeyEntry("initializer_range", "init_std", 0.02),
        MultiHeadEntry(),
        AttentionTypesEntry(),
        WidthEntry(),
        FixedFieldsEntry(
            {
                "norm": "layernorm", "position": "learned", "attention_scale": 1.0, "qkv_bias": False,
                "attention_out_bias": True, "mlp_bias": True, "qk_norm": False,
            }
        ),
    ),
    rules=(
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        TensorRule("transformer.wpe.weight", ("model.embed_positions.weight",)),
        *weight_bias_rules(f"{BLOCK}.ln_1", f"{LAYER}.input_layernorm"),
        *(
            TensorRule(f"{BLOCK}.attn.attention.{part}_proj.weight", (f"{LAYER}.self_attn.{part}_proj.weight",))
            for part in "qkv"
        ),
        *weight_bias_rules(f"{BLOCK}.attn.attention.out_proj", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{BLOCK}.ln_2", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    ),
)  # fmt: skip

EXTENSION = Extension(name="gpt-neo", version="1.0", api=1, families=(GPT_NEO,))

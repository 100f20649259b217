"""OPT (arXiv:2205.01068): a decoder with ReLU, layer norms, biases, and learned positions with an offset of 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    MultiHeadEntry,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class OptBiasEntry:
    """Translation to and from config.json of OPT's switch of all biases, and of the embedding width.
    Models with projections around the decoder (OPT-350M) are not supported.
    """

    handled_config_keys: frozenset[str] = frozenset({"word_embed_proj_dim", "enable_bias"})
    handled_model_fields: frozenset[str] = frozenset({"qkv_bias", "attention_out_bias", "mlp_bias"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of biases; ConfigMismatchError unless the embedding is as wide as the model."""
        if raw.get("word_embed_proj_dim") not in (None, raw.get("hidden_size")):
            raise ConfigMismatchError(f"word_embed_proj_dim = {raw['word_embed_proj_dim']!r} must be hidden_size")
        return dict.fromkeys(self.handled_model_fields, raw.get("enable_bias", True))

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's `enable_bias` and `word_embed_proj_dim`; ConfigMismatchError if only some layers have biases."""
        biases = {name: getattr(model, name) for name in sorted(self.handled_model_fields)}
        if len(set(biases.values())) > 1:
            raise ConfigMismatchError(f"{', '.join(biases)} must be equal")
        return {"enable_bias": model.mlp_bias, "word_embed_proj_dim": model.hidden_size}


_OPT = "model.decoder.layers.{i}"
_OPT_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"}

OPT = ModelFamily(
    name="opt",
    architecture="OPTForCausalLM",
    prefix="model.",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("ffn_dim", "ffn_hidden_size", 3072),
        KeyEntry("num_hidden_layers", "num_layers"),
        KeyEntry("num_attention_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position", 2048),
        KeyEntry("activation_function", "activation", "relu", _OPT_ACTIVATIONS),
        KeyEntry("dropout", "embedding_dropout residual_dropout", 0.1),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("init_std", "init_std", 0.02),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        MultiHeadEntry(),
        OptBiasEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry(
            {
                "do_layer_norm_before": (True,),
                "_remove_final_layer_norm": (False,),
                "layer_norm_elementwise_affine": (True,),
            }
        ),
        FixedFieldsEntry(
            {"norm": "layernorm", "norm_eps": 1e-5, "position": "learned", "position_offset": 2, "qk_norm": False}
        ),
    ),
    rules=(
        TensorRule("model.decoder.embed_tokens.weight", ("model.embed_tokens.weight",)),
        TensorRule("model.decoder.embed_positions.weight", ("model.embed_positions.weight",)),
        *(
            rule
            for x in "qkv"
            for rule in weight_bias_rules(f"{_OPT}.self_attn.{x}_proj", f"{LAYER}.self_attn.{x}_proj")
        ),
        *weight_bias_rules(f"{_OPT}.self_attn.out_proj", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_OPT}.self_attn_layer_norm", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_OPT}.fc1", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_OPT}.fc2", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules(f"{_OPT}.final_layer_norm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules("model.decoder.final_layer_norm", "model.norm"),
    ),
    carried=frozenset({"layerdrop", "activation_dropout"}),
)

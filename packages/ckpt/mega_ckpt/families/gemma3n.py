"""Gemma 3n, text models: residual streams of which a layer computes one (AltUp), residuals of low rank (LAuReL), inputs of each
layer from a table with fewer rows than the vocabulary, sparse gates in the first MLPs, last layers that share keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    SIZES,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
)
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.gemma import SCALINGS
from mega_ckpt.families.gemma4 import GEMMA4
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import LayerTypesEntry
from mega_common.model_config import ModelConfig

_STREAMS: Mapping[str, tuple[str, Any]] = {
    "altup_num_inputs": ("streams", 4), "altup_active_idx": ("active", 0), "altup_coef_clip": ("coefficient_clip", 120.0),
    "laurel_rank": ("laurel_rank", 64),
}  # fmt: skip
_ROWS, _SPARSE_LAYERS, _SPARSITY = 262_144, 10, 0.95  # transformers' defaults


@dataclass(frozen=True)
class AltUpEntry:
    """Translation to and from config.json of residual streams, residuals of low rank and the inputs of layers."""

    handled_config_keys: frozenset[str] = frozenset(
        {*_STREAMS, "hidden_size_per_layer_input", "vocab_size_per_layer_input"}
    )
    handled_model_fields: frozenset[str] = frozenset({"altup", "per_layer_input_size", "per_layer_vocab_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of AltUp and layer inputs; ConfigMismatchError for more table rows than tokens."""
        rows, tokens = raw.get("vocab_size_per_layer_input", _ROWS), raw.get("vocab_size", _ROWS)
        if rows > tokens:
            raise ConfigMismatchError(f"vocab_size_per_layer_input = {rows} must be at most vocab_size = {tokens}")
        return {
            "altup": {field: raw.get(key, default) for key, (field, default) in _STREAMS.items()},
            "per_layer_input_size": raw.get("hidden_size_per_layer_input", 256),
            "per_layer_vocab_size": rows if rows < tokens else None,
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of AltUp and per-layer inputs; ConfigMismatchError for a model without them."""
        if model.altup is None or not model.per_layer_input_size:
            raise ConfigMismatchError("altup is missing (all models of this family have several streams)")
        return {
            **{key: getattr(model.altup, field) for key, (field, _) in _STREAMS.items()},
            "hidden_size_per_layer_input": model.per_layer_input_size,
            "vocab_size_per_layer_input": model.per_layer_vocab_size or model.vocab_size,
        }


@dataclass(frozen=True)
class LayerWidthsEntry:
    """Translation to and from config.json of the MLPs' width, one for all layers, and of the share of gates that are zero."""

    handled_config_keys: frozenset[str] = frozenset({"intermediate_size", "activation_sparsity_pattern"})
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size", "ffn_sparsity"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of MLP width and sparsity; ConfigMismatchError for widths that differ by layer."""
        layers, widths = len(layer_indices(raw)), raw.get("intermediate_size", 16_384)
        widths = widths if isinstance(widths, list) else [widths] * layers
        if len(set(widths)) != 1 or len(widths) != layers:
            raise ConfigMismatchError(f"intermediate_size = {widths!r:.60} must be one width for all {layers} layers")
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        sparsity = raw.get("activation_sparsity_pattern")
        sparsity = [_SPARSITY] * sparse + [0.0] * (layers - sparse) if sparsity is None else sparsity
        return {"ffn_hidden_size": widths[0], "ffn_sparsity": sparsity if any(sparsity) else None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of MLP width and sparsity, each with a value for each layer."""
        layers = model.num_layers
        return {
            "intermediate_size": [model.ffn_hidden_size] * layers,
            "activation_sparsity_pattern": model.ffn_sparsity or [0.0] * layers,
        }


GEMMA3N = ModelFamily(
    name="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    entries=(
        *exclude_entries_of_fields(SIZES, "max_position", "ffn_hidden_size"),
        KeyEntry("max_position_embeddings", "max_position", 32_768),
        LayerWidthsEntry(),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("final_logit_softcapping", "logit_softcap", 30.0),
        KeyEntry("num_kv_shared_layers", "shared_kv_layers", 15),
        KeyValueHeadsEntry(kv_default=2, dim_default=256, divisible=True),
        GlobalLocalRopeEntry(RopeEntry(theta=1_000_000.0, scalings=SCALINGS), RopeEntry(scalings=SCALINGS)),
        LayerTypesEntry(size=512, every=5),
        AltUpEntry(),
        AllowedValuesEntry({"altup_correct_scale": (True,), "use_bidirectional_attention": (None, False)}),
        FixedFieldsEntry(
            {"norm": "rmsnorm", "position": "rope", "norm_position": "both", "scale_embeddings": True, "mlp_bias": False,
             "qk_norm": True, "value_norm": True, "attention_scale": 1.0}
        ),
    ),
    buffers=GEMMA4.buffers,
    outer_model_type="gemma3n",
)  # fmt: skip

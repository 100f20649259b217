"""Llama 4 (Meta), the text model: in most layers rotary positions and attention within chunks of the text, in every
fourth layer full attention without positions and with queries scaled by position; experts that weight their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    SILU,
    TIED,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    split_words,
)
from mega_ckpt.families.disk_layouts import LAYER, ConcatExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import MoeSectionEntry, moe_layer_indices
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import build_sliding_window_fields, get_transformers_layer_types
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.model_config import ModelConfig

_FULL, _WINDOW, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Llama4AttentionEntry:
    """Translation to and from config.json of Llama 4's attention: chunks, rotary positions, scaling and norms.
    Layers without rotary positions have scaled queries, and no norms of queries and keys.
    """

    handled_config_keys: frozenset[str] = split_words(
        """no_rope_layers no_rope_layer_interval layer_types attention_chunk_size attn_temperature_tuning floor_scale
        attn_scale use_qk_norm"""
    )
    handled_model_fields: frozenset[str] = split_words(
        """sliding_window full_attention_layers chunked_window no_rope_layers no_rope_scaling qk_norm qk_norm_span
        qk_norm_after_rope"""
    )

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the fields of Llama 4's attention; ConfigMismatchError for sliding windows and lists that are too short.
        A 1 in the list `no_rope_layers` marks a layer that has rotary positions.
        """
        layers, every = layer_indices(raw), raw.get("no_rope_layer_interval", 4)
        rotates = raw.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        kinds = raw.get("layer_types") or [_CHUNKED if rotates[layer] else _FULL for layer in layers]
        if _WINDOW in kinds or len(rotates) < len(layers):
            raise ConfigMismatchError(
                "layer_types and no_rope_layers must name chunked or full attention for each layer"
            )
        kinds = [_WINDOW if kind == _CHUNKED else kind for kind in kinds]
        window = build_sliding_window_fields(kinds, raw.get("attention_chunk_size", 8192), layers)
        unrotated = [layer for layer in layers if not rotates[layer]]
        scaled = unrotated and raw.get("attn_temperature_tuning", True)
        norm = {"qk_norm": True, "qk_norm_span": "plain", "qk_norm_after_rope": True}
        return {
            **window,
            "chunked_window": window["sliding_window"] is not None,
            "no_rope_layers": unrotated or None,
            "no_rope_scaling": [raw.get("attn_scale", 0.1), raw.get("floor_scale", 8192)] if scaled else None,
            **(norm if raw.get("use_qk_norm", True) else {"qk_norm": False}),
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of Llama 4's attention; ConfigMismatchError for sliding windows and other query/key norms."""
        if model.sliding_window and not model.chunked_window:
            raise ConfigMismatchError("chunked_window must be True")
        if model.qk_norm and (model.qk_norm_span, model.qk_norm_after_rope) != ("plain", True):
            raise ConfigMismatchError("qk_norm_span must be 'plain', with qk_norm_after_rope")
        scale, length = model.no_rope_scaling or (0.1, 8192)
        return {
            "attention_chunk_size": model.sliding_window,
            "layer_types": [_CHUNKED if kind == _WINDOW else kind for kind in get_transformers_layer_types(model)],
            "no_rope_layers": [int(model.has_rotary_positions(layer)) for layer in range(model.num_layers)],
            "attn_temperature_tuning": model.no_rope_scaling is not None,
            "attn_scale": scale,
            "floor_scale": length,
            "use_qk_norm": model.qk_norm,
        }


@dataclass(frozen=True)
class MoeLayerListConfigEntry:
    """Translation to and from config.json of Llama 4's layers with experts: a list of them, or every n-th layer."""

    handled_config_keys: frozenset[str] = frozenset({"moe_layers", "interleave_moe_layer_step"})

    def fields_from_config(self, raw: ConfigDict) -> list[int] | None:
        """Return, from config.json, the indices of the layers with experts; None if all layers have them."""
        step, given = raw.get("interleave_moe_layer_step", 1), raw.get("moe_layers")
        found = list(layer_indices(raw)[step - 1 :: step]) if given is None else given
        return None if len(found) == len(layer_indices(raw)) else found

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json list of the layers with experts."""
        return {"moe_layers": moe_layer_indices(model)}


@dataclass(frozen=True)
class InOutExpertsLayout(ConcatExpertsLayout):
    """Disk layout of Llama 4, where stacked experts are concatenated and each matrix is stored as (in, out)."""

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the disk shape [experts, columns, rows of all tensors] for parts [experts, rows, columns]."""
        experts, rows, columns = super().disk_shape(parts)
        return (experts, columns, rows)

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a view of each concatenated tensor: a block of the columns of each expert's matrix."""
        return list(torch.split(disk.mT, [part[1] for part in parts], dim=1))


_FEED, _MLP = f"{LAYER}.feed_forward", f"{LAYER}.mlp"
_EXPERTS, _PROJECTIONS = f"{_MLP}.experts", ("gate_proj", "up_proj", "down_proj")

LLAMA4 = ModelFamily(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    entries=(
        *exclude_entries_of_fields(CORE_SIZES, "ffn_hidden_size"),
        KeyEntry("intermediate_size_mlp", "ffn_hidden_size", 16384),
        KeyEntry("max_position_embeddings", "max_position", 131_072),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("hidden_act", "activation", "silu", SILU),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-5),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        TIED,
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RopeEntry(theta=500_000.0, interleaved=True),
        Llama4AttentionEntry(),
        AllowedValuesEntry({"sliding_window": (None,)}),
        MoeSectionEntry(
            (
                KeyEntry("num_local_experts", "num_experts", 16),
                KeyEntry("num_experts_per_tok", "top_k", 1),
                KeyEntry("router_aux_loss_coef", "aux_loss", 0.001),
                KeyEntry("intermediate_size", "ffn_hidden_size shared_ffn_hidden_size", 8192),
                FixedFieldsEntry({"score": "sigmoid", "normalize": False, "weighted_inputs": True}),
            ),
            MoeLayerListConfigEntry(),
        ),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "rope", "mlp_bias": False}),
    ),
    rules=(
        *(TensorRule(f"{_FEED}.{part}.weight", (f"{_MLP}.{part}.weight",)) for part in _PROJECTIONS),
        TensorRule(f"{_FEED}.router.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(
            f"{_FEED}.experts.gate_up_proj", tuple(f"{_EXPERTS}.{part}.weight" for part in _PROJECTIONS[:2]),
            InOutExpertsLayout(),
        ),
        TensorRule(f"{_FEED}.experts.down_proj", (f"{_EXPERTS}.down_proj.weight",), InOutExpertsLayout()),
        *(
            TensorRule(f"{_FEED}.shared_expert.{part}.weight", (f"{_MLP}.shared_expert.{part}.weight",))
            for part in _PROJECTIONS
        ),
    ),
    buffers=r"(vision_model|multi_modal_projector)\..*|(.*\.)?rotary_emb\.inv_freq",
    carried=frozenset({"router_jitter_noise"}),
    outer_model_type="llama4",
    inner_prefix=("", "language_model."),
)  # fmt: skip

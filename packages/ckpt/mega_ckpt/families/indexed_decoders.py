"""Decoders with DeepSeek's sparse attention (DSA): DeepSeek-V3.2, and GLM-5 (`glm_moe_dsa`, arXiv:2602.15763).

Both have DeepSeek-V3's latent attention and experts. A lightning indexer in each layer selects the tokens that a query attends to;
its rotary pairs are halves in DeepSeek-V3.2 and neighbors in GLM-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    exclude_entries_of_fields,
    layer_indices,
)
from mega_ckpt.families.deepseek_glm import SHARED_EXPERT_RULES, ExpertGroupsEntry, LatentAttentionEntry
from mega_ckpt.families.disk_layouts import LAYER
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import (
    MlpLayerTypesEntry,
    MoeSectionEntry,
    SharedExpertsEntry,
    build_per_expert_tensor_rules,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.model_config import ModelConfig

_KEYS = {"index_n_heads": "num_heads", "index_head_dim": "head_dim", "index_topk": "top_k"}
_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
_MTP = KeyEntry("num_nextn_predict_layers num_mtp_layers", "mtp_layers", 0)


@dataclass(frozen=True)
class IndexedAttentionEntry(LatentAttentionEntry):
    """Translation to and from config.json of latent attention with an indexer in every layer (section `mla`).
    `heads` are the index heads if the key is absent; `interleaved` is the order of rotary pairs, which no key has.
    """

    heads: int = 64
    interleaved: bool = False

    handled_config_keys: frozenset[str] = LatentAttentionEntry.handled_config_keys | {
        *_KEYS, *_SHARING, "layer_types", "sliding_window",
    }  # fmt: skip
    handled_model_fields: frozenset[str] = LatentAttentionEntry.handled_model_fields | {"sliding_window"}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `mla` with its indexer; ConfigMismatchError if a layer has no indexer of its own."""
        kinds = raw.get("layer_types") or ["indexed_attention"]
        if set(kinds) != {"indexed_attention"}:
            raise ConfigMismatchError(f"layer_types = {kinds!r:.80} is not supported (only indexed_attention)")
        if raw.get("sliding_window") is not None:
            raise ConfigMismatchError(f"sliding_window = {raw['sliding_window']!r} is not supported (only None)")
        shared = [] if not self.interleaved else _layers_with_shared_indices(raw)
        if shared:
            rule = f"layers that share the selection of an earlier layer, such as {shared[0]}, are not supported"
            raise ConfigMismatchError(f"{rule} (indexer_types or index_topk_freq)")
        defaults = {"index_n_heads": self.heads, "index_head_dim": 128, "index_topk": 2048}
        indexer = {field: raw.get(key, defaults[key]) for key, field in _KEYS.items()}
        (mla,) = super().fields_from_config(raw).values()
        return {"mla": {**mla, "indexer": indexer | {"interleaved": self.interleaved}}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of latent attention and of its indexer; those of its training are left out.
        Raises ConfigMismatchError without an indexer, for another order of rotary pairs, and for windows.
        """
        indexer = None if model.mla is None else model.mla.indexer
        if indexer is None or model.mla is None:
            raise ConfigMismatchError("mla.indexer is missing (all models of this family have one)")
        if indexer.interleaved != self.interleaved:
            raise ConfigMismatchError(f"mla.indexer.interleaved must be {str(self.interleaved).lower()}")
        if model.sliding_window is not None:
            raise ConfigMismatchError(f"sliding_window must be None, not {model.sliding_window!r}")
        without = model.model_copy(update={"mla": model.mla.model_copy(update={"indexer": None})})
        keys = {key: getattr(indexer, field) for key, field in _KEYS.items()}
        return super().config_from_fields(without) | keys


def _layers_with_shared_indices(raw: ConfigDict) -> list[int]:
    """Return the layers that use the selection of an earlier layer, by the keys of GLM-5's config.json."""
    pattern = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if pattern is not None:
        return [layer for layer, kind in enumerate(pattern) if kind not in ("full", "F")]
    every, offset = max(raw.get("index_topk_freq") or 1, 1), raw.get("index_skip_topk_offset", 2)
    return [layer for layer in layer_indices(raw) if max(layer - offset + 1, 0) % every]


def _indexed_family(
    name: str, architecture: str, attention: IndexedAttentionEntry, groups: tuple[int, int], norm_eps: float
) -> ModelFamily:
    """Return the family of a model type with sparse attention. `groups` are the expert groups, and those of a token, if
    the keys are absent, `norm_eps` the epsilon.
    """
    return ModelFamily(
        name=name,
        architecture=architecture,
        entries=(
            *exclude_entries_of_fields(DECODER, "norm_eps"),
            KeyEntry("rms_norm_eps", "norm_eps", norm_eps),
            RopeEntry(scalings=frozenset({"none", "yarn"}), interleaved=True),
            attention,
            KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
            MoeSectionEntry(
                (
                    KeyEntry("n_routed_experts num_local_experts num_experts", "num_experts", 256),
                    KeyEntry("moe_intermediate_size", "ffn_hidden_size", 2048),
                    KeyEntry("num_experts_per_tok", "top_k", 8),
                    KeyEntry("routed_scaling_factor", "scaling", 2.5),
                    KeyEntry("norm_topk_prob", "normalize", True),
                    SharedExpertsEntry(1, width_default=2048),
                    ExpertGroupsEntry(("noaux_tc", "noaux_tc"), "top2", groups),
                    AllowedValuesEntry({"scoring_func": ("sigmoid",), "moe_layer_freq": (1,)}),
                    FixedFieldsEntry({"score": "sigmoid", "selection_bias": True}),
                ),
                MlpLayerTypesEntry(3, "first_k_dense_replace", _MTP),
            ),
            _MTP,
            AllowedValuesEntry({"rope_interleave": (True,), "indexer_rope_interleave": (attention.interleaved,)}),
            FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
        ),
        rules=(*build_per_expert_tensor_rules(f"{LAYER}.mlp.experts"), *SHARED_EXPERT_RULES),
        carried=frozenset({"ep_size", "seq_aux", "mlp_bias"}),
    )


DEEPSEEK_V32 = _indexed_family("deepseek_v32", "DeepseekV32ForCausalLM", IndexedAttentionEntry(), (8, 4), 1e-6)
GLM_MOE_DSA = _indexed_family(
    "glm_moe_dsa", "GlmMoeDsaForCausalLM", IndexedAttentionEntry(heads=32, interleaved=True), (1, 1), 1e-5
)

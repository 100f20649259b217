"""Mixture-of-experts decoders. Mixtral (arXiv:2401.04088): Mistral with experts in every layer, with its own projection
names on disk. Qwen 1.5 and 2: many small experts and a gated shared one. Qwen 3 (arXiv:2505.09388). OLMoE
(arXiv:2409.02060): many small experts, norms over all heads of queries and keys together. GPT-OSS (arXiv:2508.10925):
attention sinks, a window in every second layer, experts with biases and with gate and up projections interleaved on
disk. FlexOlmo (arXiv:2507.07024): OLMo 2 with experts. Mellum 2 (JetBrains): Qwen 3 with windows. ERNIE 4.5 with experts
(Baidu): interleaved rotation, a selection bias.

In GPT-OSS, on disk the rows of gate and up projection take turns, and every expert's matrix is stored (in, out).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.deepseek_glm import SHARED_EXPERT_RULES
from mega_ckpt.families.disk_layouts import InterleavedExpertsLayout, SingletonAxesLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import (
    MlpLayerTypesEntry,
    MoeInAllLayersEntry,
    MoeSectionEntry,
    QwenSparseStepConfigEntry,
    SharedExpertsEntry,
    build_per_expert_tensor_rules,
    build_router_config_entries,
    moe_layer_indices,
)
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import (
    LayerTypesEntry,
    OptionalWindowConfigEntry,
    QwenWindowEntry,
    UniformWindowEntry,
)
from mega_common.model_config import ModelConfig

_MOE = "model.layers.{i}.block_sparse_moe"
_SCALINGS = frozenset({"none", "linear", "llama3", "yarn"})

MIXTRAL = ModelFamily(
    name="mixtral",
    architecture="MixtralForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8),
        RopeEntry(theta=1_000_000.0),
        UniformWindowEntry(),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_local_experts num_experts", top_k=2, normalize=True),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        AllowedValuesEntry({"router_jitter_noise": (0.0,)}),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        TensorRule(f"{_MOE}.gate.weight", ("model.layers.{i}.mlp.gate.weight",)),
        *build_per_expert_tensor_rules(f"{_MOE}.experts", ("w1", "w3", "w2")),
    ),
)


QWEN2_MOE = ModelFamily(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=16, explicit_dim=False),
        RopeEntry(),
        QwenWindowEntry(alternating=True),
        KeyEntry("qkv_bias", "qkv_bias", True),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_experts num_local_experts", top_k=4, normalize=False),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
                KeyEntry("shared_expert_intermediate_size", "shared_ffn_hidden_size"),
                FixedFieldsEntry({"shared_gate": True}),
            ),
            QwenSparseStepConfigEntry(),
        ),
        FixedFieldsEntry({"attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=build_per_expert_tensor_rules("model.layers.{i}.mlp.experts"),
)


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=4),
        RopeEntry(),
        OptionalWindowConfigEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_experts num_local_experts", top_k=8, normalize=False),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
            ),
            QwenSparseStepConfigEntry(),
        ),
        FixedFieldsEntry({"mlp_bias": False, "qk_norm": True}),
    ),
    rules=build_per_expert_tensor_rules("model.layers.{i}.mlp.experts"),
)


OLMOE = ModelFamily(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(),
        UniformWindowEntry(supports_windows=False),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        MoeSectionEntry(
            (
                *build_router_config_entries(
                    "num_experts num_local_experts", top_k=8, normalize=False, experts=64, aux_loss=0.01
                ),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        AllowedValuesEntry({"clip_qkv": (None,)}),
        FixedFieldsEntry({"qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
    rules=build_per_expert_tensor_rules("model.layers.{i}.mlp.experts"),
)


FLEX_OLMO = ModelFamily(
    name="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-6),
        KeyValueHeadsEntry(explicit_dim=False),
        RopeEntry(theta=500_000.0),
        UniformWindowEntry(supports_windows=False),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        MoeSectionEntry(
            (
                *build_router_config_entries(
                    "num_experts num_local_experts", top_k=5, normalize=False, experts=7, aux_loss=0.01
                ),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        FixedFieldsEntry({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
    rules=build_per_expert_tensor_rules("model.layers.{i}.mlp.experts"),
    tokens=("eos_token_id", "pad_token_id"),
)


MELLUM = ModelFamily(
    name="mellum",
    architecture="MellumForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=4, dim_default=128),
        GlobalLocalRopeEntry(
            RopeEntry(theta=500_000.0, scalings=_SCALINGS), RopeEntry(scalings=_SCALINGS), None, old_form=False
        ),
        LayerTypesEntry(size=1024, every=1),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_experts num_local_experts", top_k=8, normalize=False, experts=64),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size", 896),
                KeyEntry("norm_topk_prob", "normalize", True),
            ),
            MlpLayerTypesEntry(0),
        ),
        AllowedValuesEntry({"num_mtp_layers": (None, 0), "num_nextn_predict_layers": (None, 0)}),
        FixedFieldsEntry({"mlp_bias": False, "qk_norm": True}),
    ),
    rules=build_per_expert_tensor_rules("model.layers.{i}.mlp.experts"),
    buffers=r"mtp\..*|(.*\.)?rotary_emb\.inv_freq",
    carried=frozenset({"mtp_layer_types", "mtp_mlp_layer_types"}),
)


@dataclass(frozen=True)
class ErnieMoeLayersConfigEntry:
    """Translation to and from config.json of ERNIE 4.5's expert layers: every n-th between a first and a last."""

    handled_config_keys: frozenset[str] = frozenset(
        {"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"}
    )

    def fields_from_config(self, raw: ConfigDict) -> list[int] | None:
        """Return the indices of the layers with experts, from the first, last and interval in config.json.
        Raises ConfigMismatchError if they are not numbers.
        """
        layers = layer_indices(raw)
        first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
        step, last = raw.get("moe_layer_interval", 1), len(layers) - 1 if last == -1 else last
        if not all(isinstance(each, int) for each in (first, last, step)) or step < 1:
            raise ConfigMismatchError("moe_layer_start_index, moe_layer_end_index, moe_layer_interval must be numbers")
        return [layer for layer in layers if first <= layer <= last and (layer + 1) % step == 0]

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys that give the first and last layer with experts and their interval.
        Raises ConfigMismatchError unless the layers are consecutive or at even distances that an interval expresses.
        """
        sparse = moe_layer_indices(model)
        for step, last in itertools.product(range(1, model.num_layers + 1), (model.num_layers - 1, sparse[-1])):
            keys = {"moe_layer_start_index": sparse[0], "moe_layer_end_index": last, "moe_layer_interval": step}
            if self.fields_from_config({**keys, "num_hidden_layers": model.num_layers}) == sparse:
                return keys
        raise ConfigMismatchError(f"moe.layers must be every n-th layer, not {sparse}")


ERNIE4_5_MOE = ModelFamily(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyValueHeadsEntry(kv_default=4),
        RopeEntry(theta=500_000.0, interleaved=True),
        UniformWindowEntry(supports_windows=False),
        MoeSectionEntry(
            (
                KeyEntry("moe_num_experts num_experts", "num_experts", 64),
                KeyEntry("moe_k num_experts_per_tok", "top_k", 6),
                KeyEntry("router_aux_loss_coef", "aux_loss", 0.001),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
                SharedExpertsEntry(2, "moe_num_shared_experts", may_be_absent=True),
                FixedFieldsEntry({"normalize": True, "selection_bias": True}),
            ),
            ErnieMoeLayersConfigEntry(),
        ),
        AllowedValuesEntry({"use_bias": (False,), "moe_norm_min": (1e-12,)}),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        *build_per_expert_tensor_rules("model.layers.{i}.mlp.experts"),
        *SHARED_EXPERT_RULES,
        TensorRule(
            "model.layers.{i}.mlp.moe_statics.e_score_correction_bias",
            ("model.layers.{i}.mlp.gate.e_score_correction_bias",),
            SingletonAxesLayout(),
        ),
    ),
    buffers=r"mtp.*|model\.mtp.*|(.*\.)?rotary_emb\.inv_freq",
)


_MLP = "model.layers.{i}.mlp"
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _interleaved_rule(disk: str, kind: str, *parts: str) -> TensorRule:
    return TensorRule(
        f"{_MLP}.experts.{disk}", tuple(f"{_MLP}.experts.{part}.{kind}" for part in parts), InterleavedExpertsLayout()
    )


GPT_OSS = ModelFamily(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8, dim_default=64),
        RopeEntry(theta=150_000.0, absent=_YARN),
        LayerTypesEntry(size=128, every=2),
        KeyEntry("swiglu_limit", "activation_limit", 7.0, forbids_null=True),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", True),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_local_experts num_experts", top_k=4, normalize=True),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
                FixedFieldsEntry({"router_bias": True}),
            ),
            MoeInAllLayersEntry(),
        ),
        AllowedValuesEntry({"swiglu_alpha": (1.702,)}),
        FixedFieldsEntry({"attention_sinks": True, "mlp_bias": True, "qk_norm": False}),
    ),
    rules=(
        TensorRule(f"{_MLP}.router.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(f"{_MLP}.router.bias", (f"{_MLP}.gate.bias",)),
        _interleaved_rule("gate_up_proj", "weight", "gate_proj", "up_proj"),
        _interleaved_rule("gate_up_proj_bias", "bias", "gate_proj", "up_proj"),
        _interleaved_rule("down_proj", "weight", "down_proj"),
        TensorRule(f"{_MLP}.experts.down_proj_bias", (f"{_MLP}.experts.down_proj.bias",)),
    ),
    carried=frozenset({"experts_per_token", "initial_context_length"}),
)

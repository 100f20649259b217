"""Mixture-of-experts decoders. Mixtral (arXiv:2401.04088): Mistral with experts in every layer, with its own projection
names on disk. Qwen 1.5 and 2: many small experts and a gated shared one. Qwen 3 (arXiv:2505.09388). OLMoE
(arXiv:2409.02060): many small experts, norms over all heads of queries and keys together. GPT-OSS (arXiv:2508.10925):
attention sinks, a window in every second layer, experts with biases and with gate and up projections interleaved on
disk.

On disk the rows of gate and up projection take turns, and every expert's matrix is stored (in, out).
"""

from __future__ import annotations

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import InterleavedExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import (
    MoeInAllLayersEntry,
    MoeSectionEntry,
    SparseStepEntry,
    per_expert_rules,
    router_entries,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import LayerTypesEntry, QwenWindowEntry, SwitchedWindowEntry, UniformWindowEntry

_MOE = "model.layers.{i}.block_sparse_moe"

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
                *router_entries("num_local_experts num_experts", top_k=2, normalize=True),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        AllowedValuesEntry({"router_jitter_noise": (0.0,)}),
        FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=(
        TensorRule(f"{_MOE}.gate.weight", ("model.layers.{i}.mlp.gate.weight",)),
        *per_expert_rules(f"{_MOE}.experts", ("w1", "w3", "w2")),
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
                *router_entries("num_experts num_local_experts", top_k=4, normalize=False),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
                KeyEntry("shared_expert_intermediate_size", "shared_ffn_hidden_size"),
                FixedFieldsEntry({"shared_gate": True}),
            ),
            SparseStepEntry(),
        ),
        FixedFieldsEntry({"attention_out_bias": False, "mlp_bias": False, "qk_norm": False}),
    ),
    rules=per_expert_rules("model.layers.{i}.mlp.experts"),
)


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(kv_default=4),
        RopeEntry(),
        SwitchedWindowEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        MoeSectionEntry(
            (
                *router_entries("num_experts num_local_experts", top_k=8, normalize=False),
                KeyEntry("moe_intermediate_size", "ffn_hidden_size"),
            ),
            SparseStepEntry(),
        ),
        FixedFieldsEntry({"mlp_bias": False, "qk_norm": True}),
    ),
    rules=per_expert_rules("model.layers.{i}.mlp.experts"),
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
                *router_entries("num_experts num_local_experts", top_k=8, normalize=False, experts=64, aux_loss=0.01),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        AllowedValuesEntry({"clip_qkv": (None,)}),
        FixedFieldsEntry({"qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}),
    ),
    rules=per_expert_rules("model.layers.{i}.mlp.experts"),
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
                *router_entries("num_local_experts num_experts", top_k=4, normalize=True),
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

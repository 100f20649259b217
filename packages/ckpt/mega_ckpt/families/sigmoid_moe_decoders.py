"""Mixture-of-experts decoders whose router scores experts by sigmoid and selects them with a bias, as DeepSeek-V3.

MiniMax-M2: grouped queries, norms over all heads of queries and keys. GLM-4.7-Flash (`glm4_moe_lite`): DeepSeek-V3's
latent attention. dots.llm1 (arXiv:2506.05767): Qwen 3's attention. K-EXAONE (`exaone_moe`): EXAONE 4's attention with
pre-norms. Solar Open (Upstage): experts in every layer. Hunyuan 3 (`hy_v3`). Trinity (Arcee, `afmoe`): gated attention,
norms before and after, rotary positions in windowed layers only.
"""

from __future__ import annotations

from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    SILU,
    TIED,
    AllowedValuesEntry,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    llama_config_entries,
)
from mega_ckpt.families.deepseek_glm import SHARED_EXPERT_RULES, ExpertGroupsEntry, LatentAttentionEntry
from mega_ckpt.families.disk_layouts import LAYER, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import UnusedFieldsEntry
from mega_ckpt.families.moe_entries import (
    SHARED_MLP_RULES,
    FirstKDenseConfigEntry,
    MlpLayerTypesEntry,
    MoeFieldEntry,
    MoeInAllLayersEntry,
    MoeSectionEntry,
    SharedExpertsEntry,
    build_per_expert_tensor_rules,
    build_router_config_entries,
)
from mega_ckpt.families.rope_entries import RopeEntry, RotaryDimEntry
from mega_ckpt.families.window_entries import QwenWindowEntry, RopeInWindowsEntry, UniformWindowEntry

_MLP, _MIXTRAL = f"{LAYER}.mlp", f"{LAYER}.block_sparse_moe"
_EXPERTS = build_per_expert_tensor_rules(f"{_MLP}.experts")
_BIAS = f"{_MLP}.gate.e_score_correction_bias"
_SIGMOID_WITH_BIAS = FixedFieldsEntry({"score": "sigmoid", "selection_bias": True})
_NORMALIZED_SIGMOID_WITH_BIAS = FixedFieldsEntry({"score": "sigmoid", "selection_bias": True, "normalize": True})
_NO_BIASES = FixedFieldsEntry({"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False})
_BOTH_BIASES = KeyEntry("attention_bias", "qkv_bias attention_out_bias", False)
_WIDTH = KeyEntry("moe_intermediate_size", "ffn_hidden_size")


def build_sigmoid_router_config_entries(
    experts: int | None,
    top_k: int | None,
    scaling: float,
    normalize: bool,
    key: str = "n_routed_experts",
    groups: tuple[int, int] = (1, 1),
) -> tuple[MoeFieldEntry, ...]:
    """Return the entries of DeepSeek-V3's router, with transformers' defaults of absent keys.
    None marks a required key. `key` has the number of experts; `groups`: groups of experts, and groups per token.
    """
    return (
        KeyEntry(f"{key} num_local_experts", "num_experts", ... if experts is None else experts),
        KeyEntry("num_experts_per_tok", "top_k", ... if top_k is None else top_k),
        KeyEntry("routed_scaling_factor", "scaling", scaling),
        KeyEntry("norm_topk_prob", "normalize", normalize),
        ExpertGroupsEntry(("noaux_tc", "noaux_tc"), "top2", groups),
        _WIDTH,
        _SIGMOID_WITH_BIAS,
    )


MINIMAX_M2 = ModelFamily(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-6),
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RotaryDimEntry(RopeEntry(theta=5_000_000.0, partial=True)),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_local_experts num_experts", top_k=8, normalize=True, experts=256),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
                _SIGMOID_WITH_BIAS,
            ),
            MoeInAllLayersEntry(),
        ),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"router_jitter_noise": (0.0,)}),
        FixedFieldsEntry({"qk_norm": True, "qk_norm_span": "all"}),
        _NO_BIASES,
    ),
    rules=(
        TensorRule(f"{_MIXTRAL}.gate.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(f"{_MIXTRAL}.e_score_correction_bias", (_BIAS,)),
        *build_per_expert_tensor_rules(f"{_MIXTRAL}.experts", ("w1", "w3", "w2")),
    ),
)

_GLM_MTP = KeyEntry("num_nextn_predict_layers num_mtp_layers", "mtp_layers", 0)

GLM4_MOE_LITE = ModelFamily(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        RopeEntry(interleaved=True),
        LatentAttentionEntry(),
        _BOTH_BIASES,
        MoeSectionEntry(
            (*build_sigmoid_router_config_entries(64, 4, 1.8, True), SharedExpertsEntry(1)),
            MlpLayerTypesEntry(1, mtp_entry=_GLM_MTP),
        ),
        _GLM_MTP,
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"rope_interleave": (True,)}),
        FixedFieldsEntry({"qk_norm": False, "mlp_bias": False}),
    ),
    rules=(*_EXPERTS, *SHARED_EXPERT_RULES),
)

DOTS1 = ModelFamily(
    name="dots1",
    architecture="Dots1ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-6),
        KeyValueHeadsEntry(kv_default=32, explicit_dim=False),
        RopeEntry(),
        QwenWindowEntry(first=62, switched=False),
        _BOTH_BIASES,
        MoeSectionEntry(
            (*build_sigmoid_router_config_entries(None, None, 1.0, False), SharedExpertsEntry(...)),
            FirstKDenseConfigEntry(0),
        ),
        FixedFieldsEntry({"qk_norm": True, "mlp_bias": False}),
    ),
    rules=(*_EXPERTS, *SHARED_EXPERT_RULES),
)

EXAONE_MOE = ModelFamily(
    name="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=32),
        RopeEntry(),
        RopeInWindowsEntry(every_key="sliding_window_pattern"),
        MoeSectionEntry(
            (
                *build_sigmoid_router_config_entries(64, 8, 2.5, True, "num_experts"),
                SharedExpertsEntry(1, "num_shared_experts"),
            ),
            MlpLayerTypesEntry(1, "first_k_dense_replace"),
        ),
        FixedFieldsEntry({"qk_norm": True}),
        _NO_BIASES,
    ),
    rules=(*_EXPERTS, *SHARED_EXPERT_RULES, TensorRule(f"{_MLP}.e_score_correction_bias", (_BIAS,))),
    buffers=r"mtp\..*|(.*\.)?rotary_emb\.inv_freq",
)

SOLAR_OPEN = ModelFamily(
    name="solar_open",
    architecture="SolarOpenForCausalLM",
    entries=(
        *(entry for entry in CORE_SIZES if entry.handled_config_keys != {"intermediate_size"}),
        UnusedFieldsEntry({"ffn_hidden_size": "intermediate_size"}),
        KeyEntry("max_position_embeddings", "max_position"),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        TIED,
        KeyEntry("hidden_act", "activation", "silu", SILU),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "rope"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-5),
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RopeEntry(theta=1_000_000.0),
        KeyEntry("attention_bias", "qkv_bias", False),
        MoeSectionEntry(
            (*build_sigmoid_router_config_entries(128, 8, 1.0, True), SharedExpertsEntry(1)), MoeInAllLayersEntry()
        ),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"qk_norm": False, "attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=(*_EXPERTS, *SHARED_EXPERT_RULES),
    carried=frozenset({"intermediate_size"}),
)

_HY_ROUTER: tuple[MoeFieldEntry, ...] = (
    KeyEntry("num_experts num_local_experts", "num_experts", 192),
    KeyEntry("num_experts_per_tok", "top_k", 8),
    KeyEntry("router_scaling_factor", "scaling", 2.826),
    SharedExpertsEntry(1, "num_shared_experts"),
    _WIDTH,
    _NORMALIZED_SIGMOID_WITH_BIAS,
)

HY_V3 = ModelFamily(
    name="hy_v3",
    architecture="HYV3ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyEntry("initializer_range", "init_std", 0.006),
        KeyValueHeadsEntry(kv_default=8, dim_default=128),
        RopeEntry(theta=11_158_840.0),
        _BOTH_BIASES,
        MoeSectionEntry(_HY_ROUTER, MlpLayerTypesEntry(1)),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"mlp_bias": (False,)}),
        FixedFieldsEntry({"qk_norm": True, "mlp_bias": False}),
    ),
    rules=(
        *_EXPERTS,
        TensorRule(f"{_MLP}.router.gate.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(f"{_MLP}.expert_bias", (_BIAS,)),
        *SHARED_MLP_RULES,
    ),
    carried=frozenset({"enable_moe_fp32_combine"}),
)

_AFMOE_ROUTER: tuple[MoeFieldEntry, ...] = (
    KeyEntry("num_experts num_local_experts", "num_experts", 64),
    KeyEntry("num_experts_per_tok", "top_k", 6),
    KeyEntry("route_scale", "scaling", 1.0),
    SharedExpertsEntry(2, "num_shared_experts"),
    _WIDTH,
    _NORMALIZED_SIGMOID_WITH_BIAS,
)

AFMOE = ModelFamily(
    name="afmoe",
    architecture="AfmoeForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(dim_default=128),
        RopeEntry(),
        RopeInWindowsEntry(every_key="global_attn_every_n_layers", size=1024),
        KeyEntry("mup_enabled", "scale_embeddings", False),
        MoeSectionEntry(_AFMOE_ROUTER, FirstKDenseConfigEntry(1, key="num_dense_layers")),
        AllowedValuesEntry({"attention_bias": (False,)}),
        FixedFieldsEntry({"qk_norm": True, "attention_gate": True, "norm_position": "both"}),
        _NO_BIASES,
    ),
    rules=(
        *_EXPERTS,
        *SHARED_EXPERT_RULES,
        TensorRule(f"{_MLP}.router.gate.weight", (f"{_MLP}.gate.weight",)),
        TensorRule(f"{_MLP}.expert_bias", (_BIAS,)),
        TensorRule(f"{LAYER}.self_attn.gate_proj.weight", (f"{LAYER}.self_attn.g_proj.weight",)),
        TensorRule(f"{LAYER}.pre_mlp_layernorm.weight", (f"{LAYER}.pre_feedforward_layernorm.weight",)),
        TensorRule(f"{LAYER}.post_mlp_layernorm.weight", (f"{LAYER}.post_feedforward_layernorm.weight",)),
    ),
)

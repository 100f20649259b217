"""Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3: one norm and one mixer or feed-forward block per
layer.

mega limits time steps by `time_step_limit` (by default unlimited), like Megatron and NVIDIA's code. transformers 5.23
also clamps them to at least `time_step_min`, so the two differ for short time steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    TIED,
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    split_words,
)
from mega_ckpt.families.deepseek_glm import ExpertGroupsEntry
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import (
    ATTENTION,
    NO_WINDOW,
    RECURRENT,
    MambaSectionEntry,
    TimeStepLimitEntry,
    mamba_tensor_rules,
)
from mega_ckpt.families.moe_entries import MoeInLayerPatternEntry, MoeSectionEntry, build_per_expert_tensor_rules
from mega_common.layer_kinds import LETTERS, MOST_LAYERS
from mega_common.model_config import ModelConfig

_DISK_LAYER = "backbone.layers.{i}"
_KINDS = ATTENTION | dict.fromkeys(RECURRENT, "mamba") | {"mlp": "mlp", "moe": "moe"}
_DISK_KINDS = {"attention": "full_attention", "mamba": "linear_attention", "mlp": "mlp", "moe": "moe"}


@dataclass(frozen=True)
class NemotronLayersEntry:
    """Translation to and from config.json of the kind of each layer of a Nemotron-H model and the number of layers.
    In config.json it is a list of names or a string of Megatron's letters; the number of layers follows from it.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers"}
    )
    handled_model_fields: frozenset[str] = frozenset({"num_layers", "layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `layers` and `num_layers` from a list of names or a string of letters; `num_hidden_layers` is ignored.
        Raises ConfigMismatchError for other kinds of layers, and for none.
        """
        kinds = raw.get("layers_block_type") or raw.get("layer_types")
        pattern = raw.get("hybrid_override_pattern")
        if kinds is None and pattern is not None:
            layers = [LETTERS.get(letter, letter) for letter in str(pattern)]
        else:
            kinds = kinds or ["linear_attention", "moe", "full_attention", "mlp"]
            layers = [_KINDS.get(str(kind), str(kind)) for kind in kinds]
        unsupported = sorted(set(layers) - set(_DISK_KINDS))
        if unsupported:
            raise ConfigMismatchError(f"layers_block_type: {unsupported} is not supported (only {sorted(_KINDS)})")
        if not 0 < len(layers) <= MOST_LAYERS:
            raise ConfigMismatchError(f"layers_block_type must have 1 to {MOST_LAYERS} layers, not {len(layers)}")
        return {"num_layers": len(layers), "layers": layers}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of layer kinds, as names (new software) and as letters (old), and `num_hidden_layers`.
        Raises ConfigMismatchError for layers with a mixer and a feed-forward block, or of other kinds.
        """
        halves = [[half for half in kind if half] for kind in model.layer_kinds]
        if not all(len(half) == 1 and half[0] in _DISK_KINDS for half in halves):
            raise ConfigMismatchError("layers must each be one of mamba, attention, mlp and moe")
        letters = {kind: letter for letter, kind in LETTERS.items()}
        return {
            "layers_block_type": [_DISK_KINDS[half] for (half,) in halves],
            "hybrid_override_pattern": "".join(letters[half] for (half,) in halves),
            "num_hidden_layers": len(halves),
        }


@dataclass(frozen=True)
class OptionalMoeEntry:
    """Translation to and from config.json of `mlp_bias`, and of the section `moe` if some layer has experts.
    With experts, `mlp_bias` must be false.
    """

    experts: MoeSectionEntry
    handled_model_fields: frozenset[str] = frozenset({"moe", "mlp_bias"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.experts.handled_config_keys | {"mlp_bias"}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `mlp_bias` and `moe`, None if no layer has experts; ConfigMismatchError for `mlp_bias` with experts."""
        biased = bool(raw.get("mlp_bias", False))
        if "moe" not in NemotronLayersEntry().fields_from_config(raw)["layers"]:
            return {"moe": None, "mlp_bias": biased}
        if biased:
            raise ConfigMismatchError("mlp_bias = True is not supported with experts")
        return {**self.experts.fields_from_config(raw), "mlp_bias": False}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `mlp_bias` and, with experts, the keys of experts and router; ConfigMismatchError for a bias with experts."""
        if model.moe is None:
            return {"mlp_bias": model.mlp_bias}
        if model.mlp_bias:
            raise ConfigMismatchError("mlp_bias must be False with experts")
        return {"mlp_bias": False, **self.experts.config_from_fields(model)}


def _mixer_rules(disk: str, *names: str) -> tuple[TensorRule, ...]:
    """Return the rules of modules of a layer, given as `parent/module`; on disk the parent is `disk`."""
    return tuple(
        rule
        for name in names
        for rule in weight_bias_rules(
            f"{_DISK_LAYER}.mixer.{disk}{name.rpartition('/')[2]}", f"{LAYER}.{name.replace('/', '.')}"
        )
    )


_EXPERTS = MoeSectionEntry(
    (
        KeyEntry("n_routed_experts num_local_experts", "num_experts", 8),
        KeyEntry("num_experts_per_tok", "top_k", 2),
        KeyEntry("moe_intermediate_size", "ffn_hidden_size", 7688),
        KeyEntry("moe_shared_expert_intermediate_size", "shared_ffn_hidden_size", 7688),
        KeyEntry("moe_latent_size", "latent_size", None),
        KeyEntry("routed_scaling_factor", "scaling", 1.0),
        KeyEntry("norm_topk_prob", "normalize", True),
        ExpertGroupsEntry(("noaux_tc", "noaux_tc"), "top2", (1, 1)),
        AllowedValuesEntry({"n_shared_experts": (1,)}),
        FixedFieldsEntry({"score": "sigmoid", "selection_bias": True}),
    ),
    MoeInLayerPatternEntry(),
)
_ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

NEMOTRON_H = ModelFamily(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("intermediate_size", "ffn_hidden_size"),
        KeyEntry("num_attention_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position"),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        NemotronLayersEntry(),
        KeyValueHeadsEntry(kv_default=8, dim_default=128, dim_key="head_dim attention_head_dim"),
        MambaSectionEntry(
            (
                KeyEntry("mamba_num_heads", "num_heads", 128),
                KeyEntry("mamba_head_dim", "head_dim", 64),
                KeyEntry("ssm_state_size", "state_size", 128),
                KeyEntry("n_groups mamba_n_groups", "num_groups", 8),
                KeyEntry("conv_kernel mamba_d_conv", "conv_kernel", 4),
                KeyEntry("chunk_size mamba_chunk_size", "chunk_size", 128),
                KeyEntry("use_conv_bias mamba_conv_bias", "conv_bias", True),
                KeyEntry("use_bias", "bias", False),
                TimeStepLimitEntry("time_step_limit mamba_dt_limit"),
            )
        ),
        OptionalMoeEntry(_EXPERTS),
        TIED,
        KeyEntry("mlp_hidden_act", "activation", "relu2", _ACTIVATIONS),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        *NO_WINDOW,
        AllowedValuesEntry({"mamba_hidden_act": ("silu", "swish"), "attention_bias": (False,)}),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "none"}),
        FixedFieldsEntry({"qk_norm": False, "qkv_bias": False, "attention_out_bias": False}),
    ),
    prefix="backbone.",
    rules=(
        TensorRule("backbone.embeddings.weight", ("model.embed_tokens.weight",)),
        TensorRule(f"{_DISK_LAYER}.norm.weight", (f"{LAYER}.input_layernorm.weight",)),
        TensorRule(f"{_DISK_LAYER}.norm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
        *mamba_tensor_rules(f"{_DISK_LAYER}.mixer"),
        *_mixer_rules("", *(f"self_attn/{name}_proj" for name in "qkvo"), "mlp/up_proj", "mlp/down_proj", "mlp/gate"),
        *_mixer_rules("", "mlp/fc1_latent_proj", "mlp/fc2_latent_proj"),
        TensorRule(f"{_DISK_LAYER}.mixer.gate.e_score_correction_bias", (f"{LAYER}.mlp.gate.e_score_correction_bias",)),
        *build_per_expert_tensor_rules(f"{_DISK_LAYER}.mixer.experts"),
        *_mixer_rules("shared_experts.", "mlp.shared_expert/up_proj", "mlp.shared_expert/down_proj"),
        TensorRule("backbone.norm_f.weight", ("model.norm.weight",)),
    ),
    buffers=r"mtp\..*",
    carried=split_words(
        """expand mamba_expand mamba_proj_bias mamba_ssm_cache_dtype rescale_prenorm_residual residual_in_fp32 hidden_dropout
        num_logits_to_keep use_mamba_kernels moe_shared_expert_overlap time_step_min time_step_max time_step_floor
        mamba_dt_min mamba_dt_max mamba_dt_init_floor num_nextn_predict_layers mtp_layers_block_type
        mtp_hybrid_override_pattern"""
    ),
)

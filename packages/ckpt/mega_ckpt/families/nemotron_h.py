"""Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3: one norm and one mixer or feed-forward in each layer.

transformers 5.23 keeps the length of a step at or above `time_step_min`, where Megatron and NVIDIA's own code have the limits
of `time_step_limit`, by default none; mega goes by these, and so differs from transformers where steps are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family, words
from mega_ckpt.families.common import TIED
from mega_ckpt.families.deepseek import Groups
from mega_ckpt.families.experts import Experts, InPattern, expert_rules
from mega_ckpt.families.hybrid import ATTENTION, NO_WINDOW, RECURRENT, Mamba, TimeLimit, mamba_rules
from mega_ckpt.families.keys import MOST_LAYERS, Fixed, Heads, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import Rule
from mega_common.layers import LETTERS
from mega_common.model_config import ModelConfig

_LAYER, _OURS = "backbone.layers.{i}", "model.layers.{i}"
_NAMES = ATTENTION | dict.fromkeys(RECURRENT, "mamba") | {"mlp": "mlp", "moe": "moe"}
_THEIRS = {"attention": "full_attention", "mamba": "linear_attention", "mlp": "mlp", "moe": "moe"}


@dataclass(frozen=True)
class OneHalfEach:
    """The kinds of layers, as a list of names or as Megatron's letters; their number follows."""

    keys: frozenset[str] = frozenset(
        {"layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers"}
    )
    fields: frozenset[str] = frozenset({"num_layers", "layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The kinds; `num_hidden_layers` says nothing beside them."""
        kinds = raw.get("layers_block_type") or raw.get("layer_types")
        pattern = raw.get("hybrid_override_pattern")
        if kinds is None and pattern is not None:
            layers = [LETTERS.get(letter, letter) for letter in str(pattern)]
        else:
            kinds = kinds or ["linear_attention", "moe", "full_attention", "mlp"]
            layers = [_NAMES.get(str(kind), str(kind)) for kind in kinds]
        strange = sorted(set(layers) - set(_THEIRS))
        if strange or not 0 < len(layers) <= MOST_LAYERS:
            raise MismatchError(f"layers_block_type: {strange or len(layers)} is not supported (only {sorted(_NAMES)})")
        return {"num_layers": len(layers), "layers": layers}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both forms: software of either age reads one."""
        halves = [[half for half in kind if half] for kind in model.kinds]
        if not all(len(half) == 1 and half[0] in _THEIRS for half in halves):
            raise MismatchError("layers must each be mamba, attention, mlp or moe, and only one of them")
        letters = {kind: letter for letter, kind in LETTERS.items()}
        return {
            "layers_block_type": [_THEIRS[half] for (half,) in halves],
            "hybrid_override_pattern": "".join(letters[half] for (half,) in halves),
            "num_hidden_layers": len(halves),
        }


@dataclass(frozen=True)
class SomeExperts:
    """The section `moe`, where some layer has experts. Biases there are those of the expert for all tokens alone."""

    experts: Experts
    fields: frozenset[str] = frozenset({"moe", "mlp_bias"})

    @property
    def keys(self) -> frozenset[str]:
        """Those of the section, and the one about biases."""
        return self.experts.keys | {"mlp_bias"}

    def read(self, raw: Raw) -> dict[str, Any]:
        """The section where the layers ask for it."""
        biased = bool(raw.get("mlp_bias", False))
        if "moe" not in OneHalfEach().read(raw)["layers"]:
            return {"moe": None, "mlp_bias": biased}
        if biased:
            raise MismatchError("mlp_bias = True is not supported where layers have experts")
        return {**self.experts.read(raw), "mlp_bias": False}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The section's keys."""
        if model.moe is None:
            return {"mlp_bias": model.mlp_bias}
        if model.mlp_bias:
            raise MismatchError("mlp_bias must be False where layers have experts")
        return {"mlp_bias": False, **self.experts.write(model)}


def _same(disk: str, *names: str) -> tuple[Rule, ...]:
    """Rules for the tensors `names` of a layer, called the same inside `disk`."""
    return tuple(
        Rule(f"{_LAYER}.mixer.{disk}{name.rpartition('/')[2]}.{kind}", (f"{_OURS}.{name.replace('/', '.')}.{kind}",))
        for name in names
        for kind in ("weight", "bias")
    )


_EXPERTS = Experts(
    (
        Key("n_routed_experts num_local_experts", "num_experts", 8),
        Key("num_experts_per_tok", "top_k", 2),
        Key("moe_intermediate_size", "ffn_hidden_size", 7688),
        Key("moe_shared_expert_intermediate_size", "shared_ffn_hidden_size", 7688),
        Key("moe_latent_size", "latent_size", None),
        Key("routed_scaling_factor", "scaling", 1.0),
        Key("norm_topk_prob", "normalize", True),
        Groups(("noaux_tc", "noaux_tc"), "top2", (1, 1)),
        Only({"n_shared_experts": (1,)}),
        Fixed({"score": "sigmoid", "selection_bias": True}),
    ),
    InPattern(),
)
_ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    entries=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_attention_heads", "num_attention_heads"),
        Key("max_position_embeddings", "max_position"),
        Key("initializer_range", "init_std", 0.02),
        Key("attention_dropout", "attention_dropout", 0.0),
        OneHalfEach(),
        Heads(kv_default=8, dim_default=128, dim_key="head_dim attention_head_dim"),
        Mamba(
            (
                Key("mamba_num_heads", "num_heads", 128),
                Key("mamba_head_dim", "head_dim", 64),
                Key("ssm_state_size", "state_size", 128),
                Key("n_groups mamba_n_groups", "num_groups", 8),
                Key("conv_kernel mamba_d_conv", "conv_kernel", 4),
                Key("chunk_size mamba_chunk_size", "chunk_size", 128),
                Key("use_conv_bias mamba_conv_bias", "conv_bias", True),
                Key("use_bias", "bias", False),
                TimeLimit("time_step_limit mamba_dt_limit"),
            )
        ),
        SomeExperts(_EXPERTS),
        TIED,
        Key("mlp_hidden_act", "activation", "relu2", _ACTIVATIONS),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        *NO_WINDOW,
        Only({"mamba_hidden_act": ("silu", "swish"), "attention_bias": (False,)}),
        Fixed({"norm": "rmsnorm", "position": "none"}),
        Fixed({"qk_norm": False, "qkv_bias": False, "attention_out_bias": False}),
    ),
    prefix="backbone.",
    rules=(
        Rule("backbone.embeddings.weight", ("model.embed_tokens.weight",)),
        Rule(f"{_LAYER}.norm.weight", (f"{_OURS}.input_layernorm.weight",)),
        Rule(f"{_LAYER}.norm.weight", (f"{_OURS}.post_attention_layernorm.weight",)),
        *mamba_rules(f"{_LAYER}.mixer"),
        *_same("", *(f"self_attn/{name}_proj" for name in "qkvo"), "mlp/up_proj", "mlp/down_proj", "mlp/gate"),
        *_same("", "mlp/fc1_latent_proj", "mlp/fc2_latent_proj"),
        Rule(f"{_LAYER}.mixer.gate.e_score_correction_bias", (f"{_OURS}.mlp.gate.e_score_correction_bias",)),
        *expert_rules(f"{_LAYER}.mixer.experts"),
        *_same("shared_experts.", "mlp.shared_expert/up_proj", "mlp.shared_expert/down_proj"),
        Rule("backbone.norm_f.weight", ("model.norm.weight",)),
    ),
    buffers=r"mtp\..*",
    carried=words(
        """expand mamba_expand mamba_proj_bias mamba_ssm_cache_dtype rescale_prenorm_residual residual_in_fp32 hidden_dropout
        num_logits_to_keep use_mamba_kernels moe_shared_expert_overlap time_step_min time_step_max time_step_floor
        mamba_dt_min mamba_dt_max mamba_dt_init_floor num_nextn_predict_layers mtp_layers_block_type
        mtp_hybrid_override_pattern"""
    ),
)

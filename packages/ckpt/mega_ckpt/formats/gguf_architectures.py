"""Mapping of GGUF architectures to model families: metadata keys to config.json keys, tensor names to canonical names.

An architecture corresponds to a HuggingFace family with other names. Unknown metadata keys of it are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mega_ckpt.families.disk_layouts import LAYER, QKV, TensorRule, weight_bias_rules
from mega_ckpt.formats.gguf_file import GgufModel
from mega_common.errors import CheckpointError

GgufMetadata = dict[str, Any]

_KEYS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "attention.key_length": "head_dim",
}  # fmt: skip
_EXPERTS = {
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_WINDOW = {"attention.sliding_window": "sliding_window"}
_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
# Redundant keys, which are checked against the others.
_IMPLIED = {
    "vocab_size": "vocab_size", "attention.value_length": "head_dim", "rope.dimension_count": "head_dim",
}  # fmt: skip
_UNUSED = frozenset({"rope.scaling.finetuned"})
_SCALING = {
    "rope.scaling.type": "rope_type", "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow",
}  # fmt: skip
_REQUIRED = (
    "block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_EMBEDDING = "token_embd.weight"
_BOOLEANS, _STRINGS = frozenset({"rope.scaling.finetuned"}), frozenset({"rope.scaling.type"})
_FLOATS = frozenset(
    [
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.freq_base_swa",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope.scaling.factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.attn_factor",
    ]
)
_MAY_BE_ZERO = frozenset({"expert_count", "expert_used_count", "attention.sliding_window", "vocab_size"})

_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FUSED = (
    TensorRule("blk.{i}.attn_qkv.weight", tuple(f"{name}.weight" for name in QKV)),
    TensorRule("blk.{i}.ffn_up.weight", tuple(f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up"))),
)


@dataclass(frozen=True)
class GgufArchitecture:
    """Mapping of one architecture of GGUF files to a HuggingFace family: metadata keys and tensor names.

    Attributes:
        family: `model_type` of these models in HuggingFace.
        keys: {metadata key: config.json key}, in addition to those of every architecture.
        fixed: keys of config.json without metadata key.
        derive_config: function that derives further keys of config.json from the file.
        derived_keys: metadata keys that `derive_config` reads.
        norms: {name: canonical name} of layer norms other than the first.
        fused: rules for tensors that contain several canonical ones.
        interleaves_rotary: the two halves of each head's rotated query and key rows are interleaved.
        stores_norm_plus_one: zero-centered norms are stored as one plus the weight.
    """

    family: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derive_config: Callable[[GgufModel, GgufMetadata], GgufMetadata] = lambda _, __: {}
    derived_keys: frozenset[str] = frozenset()
    norms: Mapping[str, str] = field(default_factory=lambda: {"ffn_norm": "post_attention_layernorm"})
    fused: tuple[TensorRule, ...] = ()
    interleaves_rotary: bool = False
    stores_norm_plus_one: bool = False

    def tensor_rules(self) -> tuple[TensorRule, ...]:
        """Return the rules that map canonical tensors to the tensors in a GGUF file of the architecture."""
        layer = {f"blk.{{i}}.{disk}": f"{LAYER}.{name}" for disk, name in {**_LAYER, **self.norms}.items()}
        plain = [rule for disk, name in {**_ENDS, **layer}.items() for rule in weight_bias_rules(disk, name)]
        replaced = {part for rule in self.fused for part in rule.parts}
        sinks = TensorRule("blk.{i}.attn_sinks.weight", (f"{LAYER}.self_attn.sinks",))
        return (*(rule for rule in plain if rule.parts[0] not in replaced), sinks, *self.fused)


def _llama_config(file: GgufModel, raw: GgufMetadata) -> GgufMetadata:
    experts = file.metadata.get("llama.expert_count", 0)
    out: GgufMetadata = (
        {"model_type": "mixtral", "num_local_experts": experts} if experts else {**_bias_config(file, raw)}
    )
    if not experts:
        out |= {"num_experts_per_tok": None, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    factors = file.tensors.get("rope_freqs.weight")
    return out | ({"rope_scaling": _llama3_scaling(file, factors.read(), raw)} if factors else {})


def _llama3_scaling(file: GgufModel, factors: torch.Tensor, raw: GgufMetadata) -> GgufMetadata:
    """Return Llama 3.1's rope scaling: the factor from the stored per-frequency factors, the other parameters as
    published.
    """
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    found = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    size = 2 * factors.numel()
    lengths = 2 * math.pi * raw["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    smooth = ((original / lengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), factors.flatten().double(), rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight must be Llama 3's frequency scaling",
            hint="use the HuggingFace folder of the model",
        )
    return found


def _bias_config(file: GgufModel, _: GgufMetadata) -> GgufMetadata:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _gemma_config(large: int) -> Callable[[GgufModel, GgufMetadata], GgufMetadata]:
    """Return a function for Gemma's query scale: the head dimension, or hidden_size / heads in the model with `large`
    layers.
    """

    def query_scale_config(_: GgufModel, raw: GgufMetadata) -> GgufMetadata:
        share = raw["hidden_size"] // raw["num_attention_heads"]
        return {"query_pre_attn_scalar": share if raw["num_hidden_layers"] == large else raw["head_dim"]}

    return query_scale_config


def _phi3_config(file: GgufModel, raw: GgufMetadata) -> GgufMetadata:
    out: GgufMetadata = {"partial_rotary_factor": file.metadata["phi3.rope.dimension_count"] / raw["head_dim"]}
    kinds = {kind: file.tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
    if not all(kinds.values()):
        return out
    factors: GgufMetadata = {
        f"{kind}_factor": [float(str(n)) for n in stored.read().numpy()] for kind, stored in kinds.items() if stored
    }
    attention = file.metadata.get("phi3.rope.scaling.attn_factor")
    original = file.metadata["phi3.rope.scaling.original_context_length"]
    longer = max(raw["max_position_embeddings"] / original, 1)
    default = math.sqrt(1 + math.log(longer) / math.log(original))
    if attention is not None and not math.isclose(attention, default, rel_tol=1e-4):
        factors["attention_factor"] = attention
    return out | {"rope_scaling": {"rope_type": "longrope", **factors}, "original_max_position_embeddings": original}


def _gpt_oss_config(_: GgufModel, raw: GgufMetadata) -> GgufMetadata:
    """Add `truncate: false`, which the file does not store but which holds for every GPT-OSS."""
    return {"rope_scaling": {**raw["rope_scaling"], "truncate": False}} if "rope_scaling" in raw else {}


_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "llama", {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        derive_config=_llama_config, interleaves_rotary=True,
    ),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3", derive_config=_bias_config),
    "qwen2moe": GgufArchitecture("qwen2_moe", {**_EXPERTS, "expert_count": "num_experts"}, {"norm_topk_prob": False}),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe", {**_EXPERTS, "expert_count": "num_experts"}, {"norm_topk_prob": True}, derive_config=_bias_config,
    ),
    "gemma2": GgufArchitecture(
        "gemma2",
        {**_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        derive_config=_gemma_config(46), norms=_GEMMA_NORMS, stores_norm_plus_one=True,
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text", {**_WINDOW, "rope.freq_base_swa": "rope_local_base_freq"}, {"rope_local_base_freq": 10_000.0},
        derive_config=_gemma_config(62), norms=_GEMMA_NORMS, stores_norm_plus_one=True,
    ),
    "phi3": GgufArchitecture(
        "phi3", _WINDOW, {"sliding_window": None}, derive_config=_phi3_config,
        derived_keys=frozenset({"rope.dimension_count", "rope.scaling.attn_factor"}), fused=_FUSED,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss", {**_WINDOW, **_EXPERTS, "expert_count": "num_local_experts"}, derive_config=_gpt_oss_config,
        norms={"post_attention_norm": "post_attention_layernorm"},
    ),
}  # fmt: skip


def map_gguf_config_keys(architecture: GgufArchitecture) -> dict[str, str]:
    """Return {GGUF metadata key: config.json key} for keys whose values carry over unchanged.
    The metadata keys are without the architecture's name.
    """
    return {**_KEYS, **architecture.keys}


def detect_gguf_architecture(file: GgufModel) -> GgufArchitecture:
    """Return the supported architecture of a GGUF file, by its metadata; CheckpointError if it has none."""
    if "general.architecture" not in file.metadata:
        raise CheckpointError(f"{file.path}: the metadata key general.architecture is missing")
    name = str(file.metadata["general.architecture"])
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: the GGUF architecture {name!r} is not supported",
            hint=f"supported: {', '.join(ARCHITECTURES)}; for others use the HuggingFace folder of the model",
        )
    return ARCHITECTURES[name]


def build_config_json_from_gguf(file: GgufModel, architecture: GgufArchitecture) -> GgufMetadata:
    """Return the content of a HuggingFace config.json for the model in a GGUF file, from its metadata.

    Raises:
        CheckpointError: when a key or its value is not supported.
    """
    name = file.metadata["general.architecture"]
    given = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    keys = map_gguf_config_keys(architecture)
    for key in given:
        if key not in {*keys, *_IMPLIED, *_SCALING, *_UNUSED, *architecture.derived_keys}:
            raise CheckpointError(
                f"{file.path}: the metadata key {name}.{key} = {given[key]!r:.80} is not supported",
                hint="use the HuggingFace folder of the model",
            )
    _check_metadata(file, name, given, architecture)
    tokens = _token_ids(file)
    raw: GgufMetadata = {
        "model_type": architecture.family,
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **architecture.fixed,
        **{config_key: given[key] for key, config_key in keys.items() if key in given},
        **{key: value for key, value in tokens.items() if value is not None},
    }
    # Defaults of llama.cpp.
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("rope_theta", 10_000.0)
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    for key, config_key in _IMPLIED.items():
        if key not in architecture.derived_keys and given.get(key, raw[config_key]) != raw[config_key]:
            raise CheckpointError(f"{file.path}: {name}.{key} = {given[key]!r} must be {raw[config_key]}")
    scaling = {config_key: given[key] for key, config_key in _SCALING.items() if key in given}
    if scaling.get("rope_type", "none") not in ("none", "longrope"):
        raw["rope_scaling"] = scaling
    return {key: value for key, value in {**raw, **architecture.derive_config(file, raw)}.items() if value is not None}


def _check_metadata(file: GgufModel, name: str, given: Mapping[str, Any], architecture: GgufArchitecture) -> None:
    """Check that metadata and tensors of every model exist, and that values have the right type.

    Raises:
        CheckpointError: naming the key or the tensor.
    """
    dimension = "rope.dimension_count"
    for key in (*_REQUIRED, *([dimension] if dimension in architecture.derived_keys else [])):
        if key not in given:
            raise CheckpointError(f"{file.path}: the metadata key {name}.{key} is missing")
    for key, value in given.items():
        if not _is_valid_value(key, value):
            raise CheckpointError(
                f"{file.path}: {name}.{key} = {value!r:.80} is not supported: {_describe_expected(key)}"
            )
    if _EMBEDDING not in file.tensors:
        raise CheckpointError(
            f"{file.path}: the tensor {_EMBEDDING} (the embedding) is missing",
            hint="use the file of the whole model, not of a LoRA adapter, a vision projector or one part",
        )


def _is_valid_value(key: str, value: Any) -> bool:
    if key in _BOOLEANS:
        return isinstance(value, bool)
    if key in _STRINGS:
        return isinstance(value, str)
    if key in _FLOATS:
        return isinstance(value, float | int) and math.isfinite(value) and value >= 0
    return isinstance(value, int) and value >= (key not in _MAY_BE_ZERO)


def _describe_expected(key: str) -> str:
    if key in _BOOLEANS | _STRINGS:
        return "it must be a boolean" if key in _BOOLEANS else "it must be a string"
    return "it must be one positive number, the same for all layers"


def _token_ids(file: GgufModel) -> GgufMetadata:
    out: GgufMetadata = {}
    for name, config_name in _TOKENS.items():
        key = f"tokenizer.ggml.{name}_token_id"
        value = file.metadata.get(key)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise CheckpointError(f"{file.path}: {key} = {value!r:.80} must be a token id")
        out[f"{config_name}_token_id"] = value
    return out

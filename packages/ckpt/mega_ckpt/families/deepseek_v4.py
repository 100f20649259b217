"""DeepSeek-V4: attention with compressed entries in layers of three kinds, several residual streams, and experts of the first
layers by token id.

Tensors have DeepSeek's names, as transformers saves them; folders with the published names of keys' norms and of the head's
streams, and without a prefix, are read too. MTP layers are left out, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    layer_indices,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import MoeSectionEntry, SharedExpertsEntry, build_per_expert_tensor_rules
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.layer_kinds import IndexerConfig
from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig, format_setting_value

_KINDS = {"sliding_attention": "swa", "compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca"}
_RATIOS = {0: "swa", 4: "csa", 128: "hca"}  # of older folders
_RATES = {
    "csa_rate": ("compressed_sparse_attention", "compress_rate_csa", 4),
    "hca_rate": ("heavily_compressed_attention", "compress_rate_hca", 128),
}
_SIZES = {
    "q_lora_rank": ("q_lora_rank", 1024),
    "sliding_window": ("window", 128),
    "o_groups": ("output_groups", 8),
    "o_lora_rank": ("output_rank", 1024),
}
_INDEXER = {"index_n_heads": ("num_heads", 64), "index_head_dim": ("head_dim", 128), "index_topk": ("top_k", 512)}
_STREAMS = {"hc_mult": ("streams", 4), "hc_sinkhorn_iters": ("iterations", 20), "hc_eps": ("eps", 1e-6)}


@dataclass(frozen=True)
class CompressedAttentionEntry:
    """Translation to and from config.json of DeepSeek-V4's kinds of layers and sizes of its compressed attention."""

    handled_config_keys: frozenset[str] = frozenset({
        "layer_types", "compress_ratios", "compress_rates", "compress_rate_csa", "compress_rate_hca", *_SIZES, *_INDEXER,
    })  # fmt: skip
    handled_model_fields: frozenset[str] = frozenset({"layers", "compressed"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `layers` ("mixer+moe" of each layer) and `compressed` from config.json."""
        kinds, rates = _read_layer_kinds(raw), raw.get("compress_rates") or {}
        section = {field: raw.get(key, default) for key, (field, default) in _SIZES.items()}
        section |= {field: raw.get(old, rates.get(new, default)) for field, (new, old, default) in _RATES.items()}
        indexer = {field: raw.get(key, default) for key, (field, default) in _INDEXER.items()}
        return {
            "layers": [f"{kind}+moe" for kind in kinds],
            "compressed": section | {"indexer": {**indexer, "interleaved": True}},
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of layer kinds and compressed attention; ConfigMismatchError for others, or settings without a key."""
        section, names = model.compressed, {kind: name for name, kind in _KINDS.items()}
        if section is None:
            raise ConfigMismatchError("compressed is missing (all models of this family have compressed attention)")
        if any(kind.mixer not in names or kind.feed_forward != "moe" for kind in model.layer_kinds):
            raise ConfigMismatchError(f"layers must be one of {', '.join(names)} and have experts, such as csa+moe")
        indexer = section.indexer or IndexerConfig(interleaved=True, top_k=512)
        if indexer != IndexerConfig(
            interleaved=True, **{field: getattr(indexer, field) for field, _ in _INDEXER.values()}
        ):
            raise ConfigMismatchError(
                f"compressed.indexer = {format_setting_value(indexer)} has settings without a key in config.json"
            )
        return {
            "layer_types": [names[kind.mixer or ""] for kind in model.layer_kinds],
            "compress_rates": {new: getattr(section, field) for field, (new, _, _) in _RATES.items()},
            **{key: getattr(section, field) for key, (field, _) in _SIZES.items()},
            **{key: getattr(indexer, field) for key, (field, _) in _INDEXER.items()},
        }


def _read_layer_kinds(raw: ConfigDict) -> list[str]:
    """Return the mixer of each layer: by name, by the ratios of older folders, or alternating as in transformers."""
    layers = layer_indices(raw)
    if (names := raw.get("layer_types")) is None and (ratios := raw.get("compress_ratios")) is not None:
        kinds = [_RATIOS.get(ratio) for ratio in ratios[: len(layers)]]
    elif names is None:
        return ["csa" if layer > 2 and layer % 2 else "hca" for layer in layers]
    else:
        kinds = [_KINDS.get(name) for name in names[: len(layers)]]
    if len(kinds) < len(layers) or None in kinds:
        raise ConfigMismatchError(
            f"layer_types or compress_ratios must have {' or '.join(_KINDS)} for each of {len(layers)} layers"
        )
    return [str(kind) for kind in kinds]


@dataclass(frozen=True)
class HyperConnectionsEntry:
    """Translation to and from config.json of hyper-connections, which all DeepSeek-V4 models have."""

    handled_config_keys: frozenset[str] = frozenset(_STREAMS)
    handled_model_fields: frozenset[str] = frozenset({"hyper_connections"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `hyper_connections` from config.json."""
        return {"hyper_connections": {field: raw.get(key, default) for key, (field, default) in _STREAMS.items()}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of hyper-connections; ConfigMismatchError for a model without them."""
        if model.hyper_connections is None:
            raise ConfigMismatchError("hyper_connections is missing (all models of this family have several streams)")
        return {key: getattr(model.hyper_connections, field) for key, (field, _) in _STREAMS.items()}


@dataclass(frozen=True)
class HashLayersEntry:
    """Translation to and from config.json of the layers whose experts are chosen by token id; all layers have experts.
    It writes `moe.hash_layers`, which `HashTableEntry` reads.
    """

    handled_config_keys: frozenset[str] = frozenset({"mlp_layer_types", "num_hash_layers"})

    def fields_from_config(self, raw: ConfigDict) -> None:
        """Return None for `MoeConfig.layers`: `layers` names all layers with experts."""

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `mlp_layer_types` of config.json: "hash_moe" if token ids choose a layer's experts, else "moe"."""
        hashed = map(model.is_hash_layer, range(model.num_layers))
        return {"mlp_layer_types": ["hash_moe" if each else "moe" for each in hashed]}


@dataclass(frozen=True)
class HashTableEntry:
    """Reading of `moe.hash_layers` from config.json; `HashLayersEntry` writes it."""

    handled_config_keys: frozenset[str] = HashLayersEntry.handled_config_keys
    handled_model_fields: frozenset[str] = frozenset({"hash_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` field `hash_layers` from config.json, by default the first three layers.
        Raises ConfigMismatchError if `mlp_layer_types` is not a list of hash_moe and moe for all layers.
        """
        layers, kinds = layer_indices(raw), raw.get("mlp_layer_types")
        if kinds is None:
            count = raw.get("num_hash_layers", 3)
            if count < 0:
                raise ConfigMismatchError(f"num_hash_layers = {count} must be at least 0")
            return {"hash_layers": list(layers[:count]) or None}
        if len(kinds) < len(layers) or not {*kinds} <= {"hash_moe", "moe"}:
            raise ConfigMismatchError(f"mlp_layer_types must have hash_moe or moe for each of {len(layers)} layers")
        return {"hash_layers": [layer for layer in layers if kinds[layer] == "hash_moe"] or None}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return no keys: `HashLayersEntry` writes them."""
        return {}


@dataclass(frozen=True)
class CompressedRopeEntry:
    """Translation to and from config.json of DeepSeek-V4's rotary parameters.
    There are two sets: `main` for layers without compressed entries and `compress` for those with.
    """

    rope: RopeEntry
    local: RopeEntry
    handled_model_fields: frozenset[str] = frozenset({"rope", "local_rope"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.rope.handled_config_keys | self.local.handled_config_keys | {"qk_rope_head_dim"}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `rope` (layers with entries) and `local_rope` from config.json.
        Parameters that are not in sets are of layers with entries, where YaRN has no factor on cosine and sine.
        """
        given, fraction = raw.get("rope_scaling") or raw.get("rope_parameters") or {}, raw.get("partial_rotary_factor")
        if fraction is None and "qk_rope_head_dim" in raw:
            fraction = raw["qk_rope_head_dim"] / raw.get("head_dim", 512)
        rest = {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_scaling")}
        rest |= {} if fraction is None else {"partial_rotary_factor": fraction}
        if isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping):
            main, compress = given["main"], given["compress"]
        else:
            one = {key: value for key, value in given.items() if key not in ("main", "compress", "rope_theta")}
            yarn = one.get("rope_type", one.get("type")) == "yarn"
            main, compress = {}, ({"attention_factor": 1.0} if yarn else {}) | one
        without = {key: value for key, value in rest.items() if key != "rope_theta"}
        rope = self.rope.fields_from_config({**without, "rope_parameters": compress})["rope"]
        return {"rope": rope, "local_rope": self.local.fields_from_config({**rest, "rope_parameters": main})["rope"]}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of both sets of rotary parameters."""
        local = model.model_copy(update={"rope": model.local_rope or model.rope})
        main, compress = self.local.config_from_fields(local), self.rope.config_from_fields(model)
        sets = {"main": main["rope_parameters"], "compress": compress["rope_parameters"]}
        rest = {key: value for key, value in (main | compress).items() if key != "rope_scaling"}
        return rest | {"rope_parameters": sets, "qk_rope_head_dim": model.rotary_dim}


_ATTENTION, _FEED = f"{LAYER}.self_attn", f"{LAYER}.mlp"
_NAMES = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{disk}_{part}": f"{disk}_hc.{part}" for disk in ("attn", "ffn") for part in ("fn", "base", "scale")},
    **{f"attn.{disk}.weight": f"self_attn.{name}.weight" for disk, name in {
        "wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj", "wkv": "kv_proj", "norm": "kv_norm", "wo_a": "o_a_proj",
        "wo_b": "o_b_proj", "indexer.wq_b": "indexer.q_b_proj", "indexer.weights_proj": "indexer.weights_proj",
    }.items()},
    **{f"attn.{disk}.{part}": f"self_attn.{module}.{name}"
       for disk, module in (("compressor", "compressor"), ("indexer.compressor", "indexer"))
       for part, name in {"wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight", "ape": "position_bias",
                          "norm.weight": "kv_norm.weight"}.items()},
    "attn.attn_sink": "self_attn.sinks", "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn.shared_experts.{disk}.weight": f"mlp.shared_expert.{name}_proj.weight"
       for disk, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
}  # fmt: skip

DEEPSEEK_V4 = ModelFamily(
    name="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    head="head.weight",
    entries=(
        KeyEntry("vocab_size", "vocab_size", 129_280),
        KeyEntry("hidden_size", "hidden_size", 4096),
        KeyEntry("moe_intermediate_size intermediate_size", "ffn_hidden_size", 2048),
        KeyEntry("num_hidden_layers", "num_layers"),
        KeyEntry("num_attention_heads", "num_attention_heads", 64),
        KeyEntry("num_key_value_heads", "num_kv_heads", 1),
        KeyEntry("head_dim", "head_dim", 512),
        KeyEntry("max_position_embeddings", "max_position", 1_048_576),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("tie_word_embeddings", "tie_embeddings", False),
        KeyEntry("hidden_act", "activation", "silu", {"silu": "clamped_swiglu"}),
        KeyEntry("swiglu_limit", "activation_limit", 10.0, forbids_null=True),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        CompressedRopeEntry(
            RopeEntry(
                theta=160_000.0, fraction=64 / 512, partial=True, interleaved=True, theta_key="compress_rope_theta",
                scalings=frozenset({"none", "linear", "yarn", "llama3"}),
            ),
            RopeEntry(fraction=64 / 512, partial=True, interleaved=True, scalings=frozenset({"none"})),
        ),
        CompressedAttentionEntry(),
        HyperConnectionsEntry(),
        MoeSectionEntry(
            (
                KeyEntry("n_routed_experts num_local_experts", "num_experts", 256),
                KeyEntry("moe_intermediate_size intermediate_size", "ffn_hidden_size", 2048),
                KeyEntry("num_experts_per_tok", "top_k", 6),
                KeyEntry("routed_scaling_factor", "scaling", 1.5),
                KeyEntry("scoring_func", "score", "sqrtsoftplus", {name: name for name in ("sqrtsoftplus", "softmax", "sigmoid")}),
                KeyEntry("router_aux_loss_coef", "aux_loss", 0.001),
                SharedExpertsEntry(1, width_default=2048),
                HashTableEntry(),
                FixedFieldsEntry({"selection_bias": True, "normalize": True}),
            ),
            HashLayersEntry(),
        ),
        AllowedValuesEntry({
            "num_key_value_heads": (1,), "n_shared_experts": (1,), "norm_topk_prob": (True,), "attention_bias": (False,),
            "mlp_bias": (False,), "attention_dropout": (0.0,), "topk_method": ("noaux_tc",),
        }),
        FixedFieldsEntry({
            "norm": "rmsnorm", "position": "rope", "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False,
        }),
    ),
    rules=(
        TensorRule("head.weight", ("lm_head.weight",)),
        *(TensorRule(f"{LAYER}.{disk}", (f"{LAYER}.{name}",)) for disk, name in _NAMES.items()),
        *build_per_expert_tensor_rules(f"{LAYER}.ffn.experts", ("w1", "w3", "w2")),
    ),
    buffers=r"(.*\.)?rotary_emb\..*|(model\.)?mtp\..*",  # MTP layers, as in transformers
    carried=frozenset({"num_nextn_predict_layers", "router_jitter_noise", "expert_dtype"}),
    supports_peft=False,
    other_names=((".attn.norm.", ".attn.kv_norm."), ("hc_head.hc_", "hc_head_"), ("embed_tokens.", "embed.")),
)  # fmt: skip

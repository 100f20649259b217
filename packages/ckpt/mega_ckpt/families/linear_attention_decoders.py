"""Decoders with linear attention in most layers and softmax attention in the others, both with experts.

Kimi Linear (Moonshot AI, arXiv:2510.26692): Kimi Delta Attention next to DeepSeek's latent attention without rotary
positions. Ling 3 (inclusionAI): the same with rotary positions, a gate for each head of latent attention, and bounded decays. MiniMax-Text-01 (arXiv:2501.08313): lightning attention; the residual is the normalized stream, and residual and
addend have a factor each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    SILU,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.deepseek_glm import SHARED_EXPERT_RULES, ExpertGroupsEntry, LatentAttentionEntry
from mega_ckpt.families.disk_layouts import (
    LAYER,
    ConcatLayout,
    ConvLayout,
    DiskLayout,
    SingletonAxesLayout,
    TensorRule,
    weight_bias_rules,
)
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import (
    NO_WINDOW,
    check_layer_mixers,
    parse_layer_mixers,
    to_transformers_layer_types,
)
from mega_ckpt.families.moe_entries import (
    MlpLayerTypesEntry,
    MoeInAllLayersEntry,
    MoeInLayerPatternEntry,
    MoeSectionEntry,
    SharedExpertsEntry,
    build_per_expert_tensor_rules,
    build_router_config_entries,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.layer_kinds import KimiDeltaConfig, LightningConfig
from mega_common.model_config import ModelConfig

_SIZES = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}  # of `linear_attn_config`, and their defaults
_FIELDS = {"num_heads": "num_heads", "head_dim": "head_dim", "short_conv_kernel_size": "conv_kernel"}
_LATER_NAMES = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
_FEEDS = MlpLayerTypesEntry(1, "first_k_dense_replace")


@dataclass(frozen=True)
class KimiLayersEntry:
    """Translation to and from config.json of Kimi Linear's layer kinds and the sizes of Kimi Delta Attention.

    Published folders have both in `linear_attn_config`, with layers counted from 1; transformers also reads `layer_types`
    and one key per size. Without either, layers 4, 8, .. (counted from 0) have attention.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"layer_types", "linear_attn_config", *_LATER_NAMES.values()} | _FEEDS.handled_config_keys
    )
    handled_model_fields: frozenset[str] = frozenset({"layers", "kda"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers` ("mixer+feed" of each layer) and `kda`."""
        layers, given = layer_indices(raw), raw.get("linear_attn_config") or {}
        kinds = raw.get("layer_types") or self._listed_layer_types(given, len(layers))
        mixers = parse_layer_mixers(kinds, "kda", layers, names=("linear_attention",))
        sparse = _FEEDS.fields_from_config(raw)
        feeds = ["moe" if sparse is None or layer in sparse else "mlp" for layer in layers]
        sizes = {_FIELDS[key]: given.get(key, raw.get(_LATER_NAMES[key], default)) for key, default in _SIZES.items()}
        return {"layers": [f"{mixer}+{feed}" for mixer, feed in zip(mixers, feeds, strict=True)], "kda": sizes}

    def _listed_layer_types(self, given: Mapping[str, Any], count: int) -> list[str]:
        if "full_attn_layers" not in given or "kda_layers" not in given:
            return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
        full, kda = given["full_attn_layers"], given["kda_layers"]
        if sorted([*full, *kda]) != list(range(1, count + 1)):
            raise ConfigMismatchError(
                f"linear_attn_config: full_attn_layers and kda_layers must together be the layers 1 to {count}"
            )
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `linear_attn_config`, with layers counted from 1, and the keys of layers with experts.

        Raises:
            ConfigMismatchError: for other mixers, and for another epsilon of the output norm than the model's.
        """
        mixers = check_layer_mixers(model, "kda")
        kda = model.kda or KimiDeltaConfig(num_heads=1, head_dim=1)
        if kda.norm_eps not in (None, model.norm_eps):
            raise ConfigMismatchError(f"kda.norm_eps must be norm_eps = {model.norm_eps}, not {kda.norm_eps}")
        if not kda.low_rank_gates or kda.gate_floor is not None:
            raise ConfigMismatchError("kda must have low_rank_gates, and no gate_floor")
        listed = {
            "full_attn_layers": [i + 1 for i, mixer in enumerate(mixers) if mixer == "attention"],
            "kda_layers": [i + 1 for i, mixer in enumerate(mixers) if mixer == "kda"],
        }
        section = {**listed, **{key: getattr(kda, name) for key, name in _FIELDS.items()}}
        return {"linear_attn_config": section, **_feed_forward_keys(model)}


def _feed_forward_keys(model: ModelConfig) -> dict[str, Any]:
    """Return config.json's list of feed-forward blocks, and the number of dense layers if these are the first ones."""
    listed = _FEEDS.config_from_fields(model)
    kinds = listed["mlp_layer_types"]
    dense = kinds.count("dense")
    return {**listed, **({} if "sparse" in kinds[:dense] else {"first_k_dense_replace": dense})}


_LING_FEEDS = MlpLayerTypesEntry(2, "first_k_dense_replace")


@dataclass(frozen=True)
class LingLayersEntry:
    """Translation to and from config.json of Ling 3's layer kinds, and sizes and gate of Kimi Delta Attention.

    By default the last layer of each `layer_group_size` has attention. Published folders give the head size of Kimi Delta
    Attention as `head_dim`; transformers saves that of the rotated part there, and its own in `linear_head_dim`.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"layer_types", "layer_group_size", "short_conv_kernel_size", "kda_safe_gate", "kda_lower_bound"}
        | set(_LATER_NAMES.values())
        | _LING_FEEDS.handled_config_keys
    )
    handled_model_fields: frozenset[str] = frozenset({"layers", "kda"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers` ("mixer+feed" of each layer) and `kda`."""
        layers, every = layer_indices(raw), raw.get("layer_group_size", 6)
        default = ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
        mixers = parse_layer_mixers(raw.get("layer_types") or default, "kda", layers, names=("linear_attention",))
        sparse = _LING_FEEDS.fields_from_config(raw)
        feeds = ["moe" if sparse is None or layer in sparse else "mlp" for layer in layers]
        section = {
            "num_heads": raw.get("linear_num_heads", raw["num_attention_heads"]),
            "head_dim": raw.get("linear_head_dim", raw.get("head_dim", 128)),
            "conv_kernel": raw.get("linear_conv_kernel_dim", raw.get("short_conv_kernel_size", 4)),
            "gate_floor": raw.get("kda_lower_bound", -5.0) if raw.get("kda_safe_gate", True) else None,
            "low_rank_gates": False,
        }
        return {"layers": [f"{mixer}+{feed}" for mixer, feed in zip(mixers, feeds, strict=True)], "kda": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return config.json's keys of the layers' kinds, and of the sizes and the forget gate of Kimi Delta Attention.

        Raises:
            ConfigMismatchError: for other mixers, low-rank gates, another number of heads than that of attention, and another
                epsilon of the output norm than the model's.
        """
        mixers, heads = check_layer_mixers(model, "kda"), model.num_attention_heads
        kda = model.kda or KimiDeltaConfig(num_heads=heads, head_dim=1, low_rank_gates=False)
        if kda.low_rank_gates or kda.num_heads != heads or kda.norm_eps not in (None, model.norm_eps):
            raise ConfigMismatchError(f"kda must have {heads} heads, low_rank_gates = false and the model's norm_eps")
        sizes = {"linear_num_heads": heads, "linear_head_dim": kda.head_dim, "linear_conv_kernel_dim": kda.conv_kernel}
        gate = {"kda_safe_gate": kda.gate_floor is not None}
        floor = {} if kda.gate_floor is None else {"kda_lower_bound": kda.gate_floor}
        return {
            "layer_types": to_transformers_layer_types(mixers), **_feed_forward_keys(model), **sizes, **gate, **floor,
            "head_dim": kda.head_dim, "short_conv_kernel_size": kda.conv_kernel,
        }  # fmt: skip


_FULL, _LINEAR, _MLP = "full_attn", "linear_attn", "mlp"


@dataclass(frozen=True)
class MiniMaxLayersEntry:
    """Translation to and from config.json of the kinds of layers of MiniMax-Text-01.
    Heads of lightning attention are like those of attention. Without a list, every second layer has lightning
    attention.
    """

    handled_config_keys: frozenset[str] = frozenset({"layer_types", "block_size"})
    handled_model_fields: frozenset[str] = frozenset({"layers", "lightning"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers` ("mixer+moe" of each layer) and `lightning`."""
        layers, heads = layer_indices(raw), raw["num_attention_heads"]
        default = ["linear_attention" if i % 2 else "full_attention" for i in layers]
        mixers = parse_layer_mixers(raw.get("layer_types") or default, "lightning", layers, names=("linear_attention",))
        size = raw.get("head_dim") or raw["hidden_size"] // heads
        section = {"num_heads": heads, "head_dim": size, "chunk_size": raw.get("block_size", 256)}
        return {"layers": [f"{mixer}+moe" for mixer in mixers], "lightning": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `layer_types` and `block_size`; ConfigMismatchError for layers without experts, or heads unlike attention's.
        Raises ConfigMismatchError for other mixers and norms, too.
        """
        mixers = check_layer_mixers(model, "lightning")
        if any(kind.feed_forward != "moe" for kind in model.layer_kinds):
            raise ConfigMismatchError("layers must all have experts")
        heads, size = model.num_attention_heads, model.query_key_head_dim
        lightning = model.lightning or LightningConfig(num_heads=heads, head_dim=size)
        if lightning != LightningConfig(num_heads=heads, head_dim=size, chunk_size=lightning.chunk_size):
            raise ConfigMismatchError(f"lightning must have {heads} heads of size {size}, and norm_eps = 1e-6")
        return {"layer_types": to_transformers_layer_types(mixers), "block_size": lightning.chunk_size}


@dataclass(frozen=True)
class ResidualFactorsEntry:
    """Translation to and from config.json of MiniMax-Text-01's factors on residual (alpha) and addend (beta).
    They depend on the kind of half layer.
    """

    kinds: Mapping[str, str] = field(default_factory=lambda: {_FULL: "attention", _LINEAR: "lightning", _MLP: "moe"})
    handled_config_keys: frozenset[str] = frozenset(
        f"{kind}_{factor}_factor" for kind in (_FULL, _LINEAR, _MLP) for factor in ("alpha", "beta")
    )
    handled_model_fields: frozenset[str] = frozenset({"residual_factors"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `residual_factors`."""
        factors = {
            kind: (raw.get(f"{key}_alpha_factor", 1.0), raw.get(f"{key}_beta_factor", 1.0))
            for key, kind in self.kinds.items()
        }
        return {"residual_factors": {kind: pair for kind, pair in factors.items() if pair != (1, 1)}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of the factors on residual and addend of each kind of half layer."""
        out: dict[str, Any] = {}
        for key, kind in self.kinds.items():
            alpha, beta = model.residual_factors.get(kind, (1.0, 1.0))
            out |= {f"{key}_alpha_factor": alpha, f"{key}_beta_factor": beta}
        return out


_ATTENTION, _KDA, _LIGHTNING = f"{LAYER}.self_attn", f"{LAYER}.kda", f"{LAYER}.lightning"
_MIXTRAL, _FEED = f"{LAYER}.block_sparse_moe", f"{LAYER}.mlp"
_EXPERTS = (
    TensorRule(f"{_MIXTRAL}.gate.weight", (f"{_FEED}.gate.weight",)),
    *build_per_expert_tensor_rules(f"{_MIXTRAL}.experts", ("w1", "w3", "w2")),
)
_GATES = tuple(f"{gate}_{half}_proj" for gate in "fg" for half in "ab")
_NO_BIASES = {"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}


def _kimi_experts(experts: int, width: int, scaling: float, groups: tuple[int, int]) -> MoeSectionEntry:
    """Return the config entry of DeepSeek-V3's experts with Kimi's names of keys; the arguments are transformers' defaults."""
    return MoeSectionEntry(
        (
            KeyEntry("num_experts num_local_experts", "num_experts", experts),
            KeyEntry("num_experts_per_token num_experts_per_tok", "top_k", 8),
            KeyEntry("moe_intermediate_size", "ffn_hidden_size", width),
            KeyEntry("routed_scaling_factor", "scaling", scaling),
            KeyEntry("moe_renormalize norm_topk_prob", "normalize", True),
            SharedExpertsEntry(1, "num_shared_experts n_shared_experts", width_default=width),
            ExpertGroupsEntry(("noaux_tc", "noaux_tc"), "top2", groups, key="num_expert_group n_group"),
            FixedFieldsEntry({"score": "sigmoid", "selection_bias": True}),
        ),
        MoeInLayerPatternEntry(),
    )


def _kimi_entries(max_position: int, norm_eps: float) -> tuple[ConfigEntry, ...]:
    """Return the config entries that Kimi Linear and Ling 3 share; the arguments are transformers' defaults."""
    return (
        *CORE_SIZES,
        KeyEntry("model_max_length max_position_embeddings", "max_position", max_position),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("hidden_act", "activation", "silu", SILU),
        KeyEntry("rms_norm_eps", "norm_eps", norm_eps),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        AllowedValuesEntry({"tie_word_embeddings": (False,)}),
        *NO_WINDOW,
        FixedFieldsEntry({"norm": "rmsnorm", "tie_embeddings": False, "mlp_bias": False, "qk_norm": False}),
    )


def _kda_rules(module: str, parts: tuple[str, ...], out: str, a_log: DiskLayout) -> tuple[TensorRule, ...]:
    """Return the tensor rules of Kimi Delta Attention, whose disk module is `module`, with the output projection `out`.
    `parts` are the projections that have one matrix, and `a_log` is the layout of A.
    """
    return (
        *(TensorRule(f"{module}.{part}_proj.weight", (f"{_KDA}.in_proj.{part}.weight",)) for part in parts),
        *(
            TensorRule(f"{module}.{part}_conv1d.weight", (f"{_KDA}.conv1d.{part}.weight",), ConvLayout())
            for part in "qkv"
        ),
        *(TensorRule(f"{module}.{gate}.weight", (f"{_KDA}.{gate}.weight",)) for gate in _GATES),
        TensorRule(f"{module}.dt_bias", (f"{_KDA}.dt_bias",)),
        TensorRule(f"{module}.A_log", (f"{_KDA}.A_log",), a_log),
        TensorRule(f"{module}.o_norm.weight", (f"{_KDA}.norm.weight",)),
        TensorRule(f"{module}.{out}.weight", (f"{_KDA}.out_proj.weight",)),
    )


KIMI_LINEAR = ModelFamily(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    entries=(
        *_kimi_entries(1_048_576, 1e-5),
        LatentAttentionEntry(any_head_dim=True),
        KimiLayersEntry(),
        _kimi_experts(256, 1024, 2.446, (1, 1)),
        # Settings of the first code of the family, which transformers does not read, at the values that it implies.
        AllowedValuesEntry({
            "mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,),
            "num_nextn_predict_layers": (0, None), "moe_layer_freq": (1,),
        }),
        FixedFieldsEntry({"position": "none"}),
    ),
    rules=(
        *_kda_rules(_ATTENTION, ("q", "k", "v", "b"), "o_proj", SingletonAxesLayout(before=2, after=1)),
        *_EXPERTS,
        TensorRule(f"{_MIXTRAL}.gate.e_score_correction_bias", (f"{_FEED}.gate.e_score_correction_bias",)),
        *(
            TensorRule(f"{_MIXTRAL}.shared_experts.{part}.weight", (f"{_FEED}.shared_expert.{part}.weight",))
            for part in ("gate_proj", "up_proj", "down_proj")
        ),
    ),
    other_names=((".mlp.", ".block_sparse_moe."),),  # of dense layers, in folders that transformers saved
    carried=frozenset({"rope_theta", "rope_scaling", "rope_parameters"}),
    tokens=("pad_token_id", "bos_token_id", "eos_token_id"),
)  # fmt: skip

_LING = f"{LAYER}.attention"
_LATENTS = ("q_proj", "g_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")

BAILING_HYBRID = ModelFamily(
    name="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    entries=(
        *_kimi_entries(262_144, 1e-6),
        LatentAttentionEntry(any_head_dim=True, query_latent=False),
        RopeEntry(theta=6_000_000.0, scalings=frozenset({"none", "yarn"}), interleaved=True),
        LingLayersEntry(),
        _kimi_experts(512, 768, 2.5, (8, 4)),
        FixedFieldsEntry({"position": "rope", "attention_gate": True}),
    ),
    rules=(
        TensorRule("model.word_embeddings.weight", ("model.embed_tokens.weight",)),
        *_kda_rules(_LING, tuple("qkvbfg"), "dense", ConcatLayout()),
        *(rule for part in _LATENTS for rule in weight_bias_rules(f"{_LING}.{part}", f"{_ATTENTION}.{part}")),
        *weight_bias_rules(f"{_LING}.dense", f"{_ATTENTION}.o_proj"),
        TensorRule(f"{_FEED}.gate.expert_bias", (f"{_FEED}.gate.e_score_correction_bias",)),
        *build_per_expert_tensor_rules(f"{_FEED}.experts"),
        *SHARED_EXPERT_RULES,
    ),
    buffers=r"(.*\.)?rotary_emb\.inv_freq|model\.layers\.42\..*",  # the MTP layer of Ling 3 Flash, as in transformers
    carried=frozenset({"num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor"}),
    tokens=("pad_token_id", "bos_token_id", "eos_token_id"),
)  # fmt: skip

MINIMAX = ModelFamily(
    name="minimax",
    architecture="MiniMaxForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8),
        RopeEntry(theta=1_000_000.0),
        KeyEntry("sliding_window", "sliding_window", None),
        MiniMaxLayersEntry(),
        ResidualFactorsEntry(),
        MoeSectionEntry(
            (
                *build_router_config_entries("num_local_experts num_experts", top_k=2, normalize=True, experts=8),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        AllowedValuesEntry({"router_jitter_noise": (0.0,)}),
        FixedFieldsEntry({"norm_position": "stream", **_NO_BIASES}),
    ),
    rules=(
        TensorRule(
            f"{_ATTENTION}.qkv_proj.weight", tuple(f"{_LIGHTNING}.in_proj.{part}.weight" for part in "qkv"), per_head="lightning"
        ),
        TensorRule(f"{_ATTENTION}.output_gate.weight", (f"{_LIGHTNING}.in_proj.z.weight",)),
        *(TensorRule(f"{_ATTENTION}.{name}.weight", (f"{_LIGHTNING}.{name}.weight",)) for name in ("norm", "out_proj")),
        *_EXPERTS,
    ),
    # decays, which follow from the number of the layer
    buffers=r"(.*\.)?rotary_emb\.inv_freq|.*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",
)  # fmt: skip

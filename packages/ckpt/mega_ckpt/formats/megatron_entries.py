"""Megatron settings that map several arguments or several fields of `ModelConfig`; `megatron_args` has the full table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import ConfigDict, ConfigMismatchError, split_words
from mega_common.layer_kinds import MOST_LAYERS
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class MegatronMultiKeyEntry:
    """Base of config entries that map several of Megatron's arguments to several fields of `ModelConfig`."""

    handled_config_keys: frozenset[str]
    handled_model_fields: frozenset[str]


@dataclass(frozen=True)
class MegatronSizesEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's MLP width, key/value heads, head dimension and vocabulary, whose defaults are computed at startup."""

    handled_config_keys: frozenset[str] = split_words(
        "ffn_hidden_size group_query_attention num_query_groups kv_channels vocab_size padded_vocab_size"
    )
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size", "num_kv_heads", "head_dim", "vocab_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the MLP width, key/value heads, head dimension and vocabulary from Megatron's arguments.
        `vocab_size` is the padded one if only that is given.
        """
        vocab = raw.get("vocab_size") or raw.get("padded_vocab_size")
        grouped = raw.get("num_query_groups") if raw.get("group_query_attention") else None
        found = {"ffn_hidden_size": get_megatron_ffn_size(raw), "head_dim": raw.get("kv_channels"), "vocab_size": vocab}
        return {"num_kv_heads": grouped} | {field: value for field, value in found.items() if value is not None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments of MLP width, key/value heads, head dimension and vocabulary, with defaults filled in."""
        return {
            "ffn_hidden_size": model.ffn_hidden_size,
            "group_query_attention": model.key_value_heads != model.num_attention_heads,
            "num_query_groups": model.key_value_heads,
            "kv_channels": model.query_key_head_dim,
            "vocab_size": model.vocab_size,
        }


def get_megatron_ffn_size(raw: ConfigDict) -> int | None:
    """Return the feed-forward width of Megatron's arguments, None if they have neither it nor the hidden size.
    The default is 4 times the hidden size, for SwiGLU two thirds of that in multiples of 64.
    """
    given, hidden = raw.get("ffn_hidden_size"), raw.get("hidden_size")
    if given or not hidden:
        return given
    return int((4 * hidden * 2 / 3) / 64) * 64 if raw.get("swiglu") else 4 * int(hidden)


@dataclass(frozen=True)
class MegatronActivationEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's arguments that together select the activation function."""

    handled_config_keys: frozenset[str] = split_words(
        """swiglu squared_relu quick_geglu openai_gelu bias_gelu_fusion activation_func_clamp_value glu_linear_offset"""
    )
    handled_model_fields: frozenset[str] = frozenset({"activation", "activation_limit"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `activation` and `activation_limit` from Megatron's arguments.
        GELU has the tanh form if fused with a bias, and the sigmoid form as a gate (GPT-OSS). Raises
        ConfigMismatchError for a clamp or offset that the activation does not have in mega.
        """
        limit, offset = raw.get("activation_func_clamp_value"), raw.get("glu_linear_offset") or 0.0
        quick = raw.get("quick_geglu") and not (raw.get("swiglu") or raw.get("squared_relu"))
        if quick and not (limit and offset == 1.0):
            raise ConfigMismatchError("quick_geglu requires activation_func_clamp_value and glu_linear_offset = 1")
        if raw.get("swiglu") and (limit is not None or offset):
            raise ConfigMismatchError("swiglu is not supported with activation_func_clamp_value or glu_linear_offset")
        fused = raw.get("bias_gelu_fusion") and raw.get("add_bias_linear", True)
        kinds = {
            "swiglu": raw.get("swiglu") or quick,
            "relu2": raw.get("squared_relu"),
            "gelu_tanh": raw.get("openai_gelu") or fused,
        }
        kind = next((kind for kind, chosen in kinds.items() if chosen), "gelu")
        return {"activation": kind, "activation_limit": limit if quick else None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments for the model's activation function."""
        limit = model.activation_limit
        return {
            "swiglu": model.activation == "swiglu" and limit is None,
            "squared_relu": model.activation == "relu2",
            "openai_gelu": model.activation == "gelu_tanh",
            "quick_geglu": limit is not None,
            "activation_func_clamp_value": limit,
            "glu_linear_offset": 0.0 if limit is None else 1.0,
            "bias_gelu_fusion": model.activation == "gelu_tanh" and model.mlp_bias,
        }


@dataclass(frozen=True)
class MegatronBiasesEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's arguments of biases in linear layers.
    They are `add_bias_linear`, for the biases of all projections, and `add_qkv_bias`, for queries, keys and values
    only.
    """

    handled_config_keys: frozenset[str] = frozenset({"add_bias_linear", "add_qkv_bias"})
    handled_model_fields: frozenset[str] = frozenset({"qkv_bias", "attention_out_bias", "mlp_bias"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of biases in linear layers from Megatron's arguments.
        They are `qkv_bias`, `attention_out_bias` and `mlp_bias`. Megatron's default is biases everywhere.
        """
        every = bool(raw.get("add_bias_linear", True))
        return {"qkv_bias": every or bool(raw.get("add_qkv_bias")), "attention_out_bias": every, "mlp_bias": every}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments `add_bias_linear` and `add_qkv_bias`."""
        return {"add_bias_linear": model.mlp_bias, "add_qkv_bias": model.qkv_bias}


@dataclass(frozen=True)
class MegatronAttentionWindowEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's attention window, and of the layers with full attention.
    Megatron's argument `window_size` is (tokens before the query, tokens after it).
    """

    handled_config_keys: frozenset[str] = frozenset({"window_size", "window_attn_skip_freq"})
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of attention windows from Megatron's arguments.
        They are `sliding_window` (None: unlimited) from `window_size`, and `full_attention_layers` from
        `window_attn_skip_freq`: flags per layer, or n for full attention in every n-th layer. Raises
        ConfigMismatchError for windows that include tokens after the query.
        """
        given = raw.get("window_size")
        sizes = [int(number) for number in re.findall(r"-?\d+", str(given or ""))]
        if len(sizes) != 2 or sizes[0] < 0:
            return {"sliding_window": None, "full_attention_layers": None}
        if sizes[1] != 0:
            raise ConfigMismatchError(f"window_size = {given!r} is not supported: tokens after the query must be 0")
        key, layers = "window_attn_skip_freq", (raw.get("num_layers") or 0) + count_mtp_layers(raw)
        windowed = [] if raw.get(key) is None else _layer_flags(raw, key, layers, lambda layer, n: (layer + 1) % n != 0)
        full = [layer for layer, has_window in enumerate(windowed) if not has_window]
        return {"sliding_window": sizes[0] + 1, "full_attention_layers": full or None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's `window_size`, and `window_attn_skip_freq` as a list: 1 for layers with a window, 0 for others."""
        pattern = [
            int(model.get_attention_window(layer) is not None) for layer in range(model.num_layers + model.mtp_layers)
        ]
        return {
            "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
            "window_attn_skip_freq": pattern if model.full_attention_layers else None,
        }


def count_mtp_layers(raw: ConfigDict) -> int:
    """Return the number of multi-token prediction (MTP) layers in Megatron's arguments.
    MTP layers follow the last decoder layer. Raises ConfigMismatchError if it is negative or too large.
    """
    count: int = raw.get("mtp_num_layers") or 0
    if not 0 <= count <= MOST_LAYERS:
        raise ConfigMismatchError(f"mtp_num_layers = {count!r} must be from 0 to {MOST_LAYERS}")
    return count


def _layer_flags(raw: ConfigDict, key: str, layers: int, every: Callable[[int, int], bool]) -> list[bool]:
    """Return a flag per layer: from a list, or by `every(layer, n)` for a number n."""
    given = raw.get(key)
    if isinstance(given, int) and given > 0 and layers <= MOST_LAYERS:
        return [every(layer, given) for layer in range(layers)]
    if isinstance(given, list) and len(given) == layers:
        return [bool(kind) for kind in given]
    raise ConfigMismatchError(f"{key} = {given!r:.60} conflicts with {layers} layers")


SCOPES = {"batch": "aux_loss", "sequence": "seq_aux_loss"}
ROUTER_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class MegatronMoeEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's mixture-of-experts (MoE) arguments.
    Scores are a softmax over the selected experts, unless `moe_router_pre_softmax` is set.

    Multi-token prediction (MTP) layers have experts if the last layer has.
    """

    handled_config_keys: frozenset[str] = split_words(
        """num_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_layer_freq moe_latent_size moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type moe_expert_capacity_factor"""
    )
    handled_model_fields: frozenset[str] = frozenset({"moe"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `moe` from Megatron's arguments, None without experts.
        In a hybrid model the layer pattern selects the layers with experts. Raises ConfigMismatchError for another
        score than softmax or sigmoid.
        """
        if not raw.get("num_experts"):
            return {"moe": None}
        top, score = raw.get("moe_router_topk", 2), raw.get("moe_router_score_function", "softmax")
        shared, capacity = raw.get("moe_shared_expert_intermediate_size") or 0, raw.get("moe_expert_capacity_factor")
        scope, loss = _aux_loss_settings(raw)
        if sinkhorn := raw.get("moe_router_load_balancing_type") == "sinkhorn":
            score = "sigmoid" if top == 1 else "softmax"  # overrides moe_router_score_function
        if score not in ROUTER_SCORES:
            raise ConfigMismatchError(f"moe_router_score_function must be softmax or sigmoid, not {score!r:.40}")
        bias = bool(raw.get("moe_router_enable_expert_bias"))
        return {
            "moe": {
                "num_experts": raw["num_experts"],
                "top_k": top,
                "ffn_hidden_size": raw.get("moe_ffn_hidden_size") or get_megatron_ffn_size(raw),
                "layers": _moe_layers(raw),
                "latent_size": raw.get("moe_latent_size") or None,
                "shared_ffn_hidden_size": shared,
                "shared_gate": bool(shared and raw.get("moe_shared_expert_gate")),
                "score": score,
                "normalize": not sinkhorn
                and (top > 1 if score == "sigmoid" else not raw.get("moe_router_pre_softmax")),
                "scaling": 1.0 if sinkhorn else raw.get("moe_router_topk_scaling_factor") or 1.0,
                "router_bias": bool(raw.get("add_bias_linear", True)),
                **(
                    {}
                    if sinkhorn
                    else _expert_groups(raw, top, logits=score == "softmax" and not raw.get("moe_router_pre_softmax"))
                ),
                "selection_bias": bias,
                "bias_rate": raw.get("moe_router_bias_update_rate", 1e-3) if bias else 0.0,
                "aux_loss": loss,
                "aux_loss_scope": scope,
                "z_loss": raw.get("moe_z_loss_coeff") or 0.0,
                "sinkhorn": sinkhorn,
                "capacity_factor": capacity if (capacity or -1) > 0 else None,
            }
        }

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's mixture-of-experts arguments; only `num_experts` as None for a model without experts.
        Raises ConfigMismatchError for another score than softmax or sigmoid.
        """
        moe = model.moe
        if moe is None:
            return {"num_experts": None}
        if moe.score not in ROUTER_SCORES:
            raise ConfigMismatchError(f"moe.score must be softmax or sigmoid, not {moe.score}")
        return {
            "num_experts": moe.num_experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_layer_freq": 1 if moe.layers is None else [int(i in moe.layers) for i in range(model.num_layers)],
            "moe_latent_size": moe.latent_size,
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_router_score_function": moe.score,
            "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalize,
            "moe_router_topk_scaling_factor": None if moe.scaling == 1.0 else moe.scaling,
            "moe_router_num_groups": None if moe.groups == 1 else moe.groups,
            "moe_router_group_topk": None if moe.groups == 1 else moe.top_groups,
            "moe_router_enable_expert_bias": moe.selection_bias,
            "moe_router_bias_update_rate": moe.bias_rate if moe.selection_bias else 1e-3,
            "moe_router_load_balancing_type": "sinkhorn" if moe.sinkhorn else SCOPES[moe.aux_loss_scope],
            "moe_aux_loss_coeff": moe.aux_loss,
            "moe_z_loss_coeff": moe.z_loss or None,
            "moe_expert_capacity_factor": moe.capacity_factor,
        }


_HYBRID = split_words(
    "is_hybrid_model hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio"
)


def _moe_layers(raw: ConfigDict) -> list[int] | None:
    """Return the layers with experts; None for all layers, or if a pattern of layer kinds selects them."""
    if any(raw.get(key) for key in _HYBRID):
        return None
    freq, layers = {"moe_layer_freq": 1, **raw}, raw.get("num_layers") or 0
    sparse = _layer_flags(freq, "moe_layer_freq", layers, lambda layer, n: layer % n == 0)
    sparse += sparse[-1:] * count_mtp_layers(raw)
    return None if all(sparse) else [layer for layer, has in enumerate(sparse) if has]


def _expert_groups(raw: ConfigDict, top: int, *, logits: bool) -> dict[str, Any]:
    """Return the fields of expert groups, which apply only with a number of groups per token; the score of a group is
    that of its best one or two experts.
    """
    groups, top_groups = raw.get("moe_router_num_groups") or 1, raw.get("moe_router_group_topk") or 0
    if groups == 1 or not top_groups:
        return {}
    counted = top // top_groups
    if counted not in (1, 2):
        raise ConfigMismatchError(f"moe_router_topk = {top} is not supported with moe_router_group_topk = {top_groups}")
    if counted == 2 and logits:
        raise ConfigMismatchError(
            f"moe_router_group_topk = {top_groups} requires moe_router_pre_softmax with moe_router_topk = {top}"
        )
    return {"groups": groups, "top_groups": top_groups, "group_score": "top2" if counted == 2 else "max"}


def _aux_loss_settings(raw: ConfigDict) -> tuple[str, float]:
    """Return the scope and the weight of the first supported auxiliary loss with a weight."""
    kinds, losses = raw.get("moe_router_load_balancing_type", "aux_loss"), raw.get("moe_aux_loss_coeff", 0.0)
    kinds, losses = (value if isinstance(value, list) else [value] for value in (kinds, losses))
    scopes = {kind: scope for scope, kind in SCOPES.items()}
    supported = [(scopes[kind], float(loss)) for kind, loss in zip(kinds, losses, strict=False) if kind in scopes]
    return next((pair for pair in supported if pair[1]), supported[0] if supported else ("sequence", 0.0))


@dataclass(frozen=True)
class MegatronMtpEntry(MegatronMultiKeyEntry):
    """Mapping of Megatron's multi-token prediction (MTP) layers, as in DeepSeek-V3, and the weight of their mean loss."""

    handled_config_keys: frozenset[str] = split_words(
        """mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hsm
        mtp_hybrid_override_pattern"""
    )
    handled_model_fields: frozenset[str] = frozenset({"mtp_layers", "mtp_loss"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `mtp_layers` and `mtp_loss` from Megatron's arguments; empty without MTP layers.
        Raises ConfigMismatchError for other arguments of multi-token prediction (MTP).
        """
        if not (count := count_mtp_layers(raw)):
            return {}
        others = sorted(self.handled_config_keys - {"mtp_num_layers", "mtp_loss_scaling_factor"})
        if wrong := [f"{key} = {raw[key]!r}" for key in others if raw.get(key)]:
            raise ConfigMismatchError(f"{', '.join(wrong)} is not supported with mtp_num_layers = {count}")
        return {"mtp_layers": count, "mtp_loss": raw.get("mtp_loss_scaling_factor", 0.1)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return Megatron's arguments `mtp_num_layers` and `mtp_loss_scaling_factor`.
        Raises ConfigMismatchError if MTP layers have another feed-forward block than the last layer.
        """
        if not model.mtp_layers:
            return {"mtp_num_layers": None}
        last, layers = model.num_layers - 1, range(model.num_layers, model.num_layers + model.mtp_layers)
        if model.moe and any(model.is_moe_layer(layer) != model.is_moe_layer(last) for layer in layers):
            raise ConfigMismatchError(
                f"moe.layers = {model.moe.layers} must include the MTP layers if, and only if, it includes layer {last}"
            )
        return {"mtp_num_layers": model.mtp_layers, "mtp_loss_scaling_factor": model.mtp_loss}


@dataclass(frozen=True)
class MegatronInvertedSwitchEntry:
    """Mapping of a boolean Megatron argument to the negation of a boolean field of `ModelConfig`."""

    key: str
    field: str

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Name of the boolean Megatron argument that is translated to a `ModelConfig` field."""
        return frozenset({self.key})

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Name of the boolean `ModelConfig` field that is translated to a Megatron argument."""
        return frozenset({self.field})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the boolean field `field` of `ModelConfig`: the negation of the Megatron argument `key`."""
        return {self.field: not raw.get(self.key, False)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the boolean Megatron argument `key`: the negation of `ModelConfig`'s field `field`."""
        return {self.key: not getattr(model, self.field)}

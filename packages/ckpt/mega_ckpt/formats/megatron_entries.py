"""Settings of Megatron's that are several arguments or several fields of `ModelConfig`; `megatron_args` has the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MOST_LAYERS, MismatchError, Raw
from mega_ckpt.formats.pickles import words
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class Several:
    """What entries of several keys and fields have in common."""

    keys: frozenset[str]
    fields: frozenset[str]


@dataclass(frozen=True)
class Sizes(Several):
    """Sizes that Megatron fills in when it starts: width of the MLP, heads, vocabulary."""

    keys: frozenset[str] = words(
        "ffn_hidden_size group_query_attention num_query_groups kv_channels vocab_size padded_vocab_size"
    )
    fields: frozenset[str] = frozenset({"ffn_hidden_size", "num_kv_heads", "head_dim", "vocab_size"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The sizes; a vocabulary that only says its padded size is that."""
        vocab = raw.get("vocab_size") or raw.get("padded_vocab_size")
        grouped = raw.get("num_query_groups") if raw.get("group_query_attention") else None
        found = {"ffn_hidden_size": feed_forward(raw), "head_dim": raw.get("kv_channels"), "vocab_size": vocab}
        return {"num_kv_heads": grouped} | {field: value for field, value in found.items() if value is not None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """All of them, filled in."""
        return {
            "ffn_hidden_size": model.ffn_hidden_size,
            "group_query_attention": model.kv_heads != model.num_attention_heads,
            "num_query_groups": model.kv_heads,
            "kv_channels": model.head_size,
            "vocab_size": model.vocab_size,
        }


def feed_forward(raw: Raw) -> int | None:
    """Megatron's feed-forward width: by default 4 times the hidden size, for SwiGLU two thirds of that in 64s."""
    given, hidden = raw.get("ffn_hidden_size"), raw.get("hidden_size")
    if given or not hidden:
        return given
    return int((4 * hidden * 2 / 3) / 64) * 64 if raw.get("swiglu") else 4 * int(hidden)


@dataclass(frozen=True)
class Activation(Several):
    """Several switches that make one function."""

    keys: frozenset[str] = words(
        """swiglu squared_relu quick_geglu openai_gelu bias_gelu_fusion activation_func_clamp_value glu_linear_offset"""
    )
    fields: frozenset[str] = frozenset({"activation", "activation_limit"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """GELU is the tanh form where it is fused with a bias, and by a sigmoid where it is a gate, as in GPT-OSS."""
        limit, offset = raw.get("activation_func_clamp_value"), raw.get("glu_linear_offset") or 0.0
        quick = raw.get("quick_geglu") and not (raw.get("swiglu") or raw.get("squared_relu"))
        if quick and not (limit and offset == 1.0):
            raise MismatchError(
                "quick_geglu is not supported but with activation_func_clamp_value, glu_linear_offset = 1"
            )
        if raw.get("swiglu") and (limit is not None or offset):
            raise MismatchError("swiglu with activation_func_clamp_value or glu_linear_offset is not supported")
        fused = raw.get("bias_gelu_fusion") and raw.get("add_bias_linear", True)
        kinds = {
            "swiglu": raw.get("swiglu") or quick,
            "relu2": raw.get("squared_relu"),
            "gelu_tanh": raw.get("openai_gelu") or fused,
        }
        kind = next((kind for kind, chosen in kinds.items() if chosen), "gelu")
        return {"activation": kind, "activation_limit": limit if quick else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The switches."""
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
class Biases(Several):
    """One switch for the biases of all projections, one for those of queries, keys and values alone."""

    keys: frozenset[str] = frozenset({"add_bias_linear", "add_qkv_bias"})
    fields: frozenset[str] = frozenset({"qkv_bias", "attention_out_bias", "mlp_bias"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Megatron's default is biases everywhere."""
        every = bool(raw.get("add_bias_linear", True))
        return {"qkv_bias": every or bool(raw.get("add_qkv_bias")), "attention_out_bias": every, "mlp_bias": every}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both switches."""
        return {"add_bias_linear": model.mlp_bias, "add_qkv_bias": model.qkv_bias}


@dataclass(frozen=True)
class Window(Several):
    """How far back a query sees, (tokens before it, tokens after it), and the layers where it sees everything."""

    keys: frozenset[str] = frozenset({"window_size", "window_attn_skip_freq"})
    fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """None where the window is endless. Every n-th layer is without it."""
        given = raw.get("window_size")
        sizes = [int(number) for number in re.findall(r"-?\d+", str(given or ""))]
        if len(sizes) != 2 or sizes[0] < 0:
            return {"sliding_window": None, "full_attention_layers": None}
        if sizes[1] != 0:
            raise MismatchError(f"window_size = {given!r} is not supported: it looks ahead")
        every, layers = raw.get("window_attn_skip_freq") is None, (raw.get("num_layers") or 0) + further(raw)
        narrow = [] if every else _pattern(raw, "window_attn_skip_freq", layers, lambda layer, n: (layer + 1) % n != 0)
        whole = [layer for layer, has in enumerate(narrow) if not has]
        return {"sliding_window": sizes[0] + 1, "full_attention_layers": whole or None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The pair, and a list of zeros and ones."""
        pattern = [int(model.window(layer) is not None) for layer in range(model.num_layers + model.mtp_layers)]
        return {
            "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
            "window_attn_skip_freq": pattern if model.full_attention_layers else None,
        }


def further(raw: Raw) -> int:
    """How many layers behind the last predict further tokens."""
    count: int = raw.get("mtp_num_layers") or 0
    if not 0 <= count <= MOST_LAYERS:
        raise MismatchError(f"mtp_num_layers = {count!r} is not between 0 and {MOST_LAYERS}")
    return count


def _pattern(raw: Raw, key: str, layers: int, every: Callable[[int, int], bool]) -> list[bool]:
    """For each layer whether it is of a kind: as a list has it, or by what a number n means, `every(layer, n)`."""
    given = raw.get(key)
    if isinstance(given, int) and given > 0 and layers <= MOST_LAYERS:
        return [every(layer, given) for layer in range(layers)]
    if isinstance(given, list) and len(given) == layers:
        return [bool(kind) for kind in given]
    raise MismatchError(f"{key} = {given!r:.60} does not fit {layers} layers")


SCOPES = {"batch": "aux_loss", "sequence": "seq_aux_loss"}


@dataclass(frozen=True)
class Experts(Several):
    """The mixture of experts. Scores are a softmax over the chosen ones, unless `moe_router_pre_softmax` is set.

    Layers that predict further tokens are of the kind of the last layer.
    """

    keys: frozenset[str] = words(
        """num_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_layer_freq moe_latent_size moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type moe_expert_capacity_factor"""
    )
    fields: frozenset[str] = frozenset({"moe"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """`moe`, or None. Of a hybrid the pattern says which layers have experts."""
        if not raw.get("num_experts"):
            return {"moe": None}
        top, score = raw.get("moe_router_topk", 2), raw.get("moe_router_score_function", "softmax")
        shared, capacity = raw.get("moe_shared_expert_intermediate_size") or 0, raw.get("moe_expert_capacity_factor")
        scope, loss = _balance(raw)
        if sinkhorn := raw.get("moe_router_load_balancing_type") == "sinkhorn":
            score = "sigmoid" if top == 1 else "softmax"  # whatever else is given
        bias = bool(raw.get("moe_router_enable_expert_bias"))
        return {
            "moe": {
                "num_experts": raw["num_experts"],
                "top_k": top,
                "ffn_hidden_size": raw.get("moe_ffn_hidden_size") or feed_forward(raw),
                "layers": _sparse(raw),
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
                    else _groups(raw, top, logits=score == "softmax" and not raw.get("moe_router_pre_softmax"))
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

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The settings; `num_experts` None where there are none."""
        moe = model.moe
        if moe is None:
            return {"num_experts": None}
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


_HYBRID = words("is_hybrid_model hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio")


def _sparse(raw: Raw) -> list[int] | None:
    """The layers that have experts; None for all, or where a pattern of kinds says it."""
    if any(raw.get(key) for key in _HYBRID):
        return None
    freq, layers = {"moe_layer_freq": 1, **raw}, raw.get("num_layers") or 0
    sparse = _pattern(freq, "moe_layer_freq", layers, lambda layer, n: layer % n == 0)
    sparse += sparse[-1:] * further(raw)
    return None if all(sparse) else [layer for layer, has in enumerate(sparse) if has]


def _groups(raw: Raw, top: int, *, logits: bool) -> dict[str, Any]:
    """Groups, which only count where their number for each token is given; one's score is that of its best experts."""
    groups, top_groups = raw.get("moe_router_num_groups") or 1, raw.get("moe_router_group_topk") or 0
    if groups == 1 or not top_groups:
        return {}
    counted = top // top_groups
    if counted not in (1, 2):
        raise MismatchError(f"moe_router_topk = {top} with moe_router_group_topk = {top_groups} is not supported")
    if counted == 2 and logits:
        raise MismatchError(
            "groups chosen by the sum of two logits are not supported (only with moe_router_pre_softmax)"
        )
    return {"groups": groups, "top_groups": top_groups, "group_score": "top2" if counted == 2 else "max"}


def _balance(raw: Raw) -> tuple[str, float]:
    """What the auxiliary loss counts over, and its weight, of the first of Megatron's that has one and is here too."""
    kinds, losses = raw.get("moe_router_load_balancing_type", "aux_loss"), raw.get("moe_aux_loss_coeff", 0.0)
    kinds, losses = (value if isinstance(value, list) else [value] for value in (kinds, losses))
    scopes = {kind: scope for scope, kind in SCOPES.items()}
    known = [(scopes[kind], float(loss)) for kind, loss in zip(kinds, losses, strict=False) if kind in scopes]
    return next((one for one in known if one[1]), known[0] if known else ("sequence", 0.0))


@dataclass(frozen=True)
class Further(Several):
    """Layers that predict further tokens as DeepSeek-V3's do, and the weight of their mean loss."""

    keys: frozenset[str] = words(
        """mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hsm
        mtp_hybrid_override_pattern"""
    )
    fields: frozenset[str] = frozenset({"mtp_layers", "mtp_loss"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing where there are none: the weight is that of no loss then."""
        if not (count := further(raw)):
            return {}
        others = sorted(self.keys - {"mtp_num_layers", "mtp_loss_scaling_factor"})
        if wrong := [f"{key} = {raw[key]!r}" for key in others if raw.get(key)]:
            raise MismatchError(f"{', '.join(wrong)}: multi-token prediction of this kind is not supported")
        return {"mtp_layers": count, "mtp_loss": raw.get("mtp_loss_scaling_factor", 0.1)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Number and weight."""
        if not model.mtp_layers:
            return {"mtp_num_layers": None}
        last, layers = model.num_layers - 1, range(model.num_layers, model.num_layers + model.mtp_layers)
        if model.moe and any(model.has_experts(layer) != model.has_experts(last) for layer in layers):
            rule = f"its layers that predict further tokens have experts if layer {last} has"
            raise MismatchError(f"moe.layers = {model.moe.layers}, but {rule}")
        return {"mtp_num_layers": model.mtp_layers, "mtp_loss_scaling_factor": model.mtp_loss}


@dataclass(frozen=True)
class Not:
    """A switch that is off where the field is on."""

    key: str
    field: str

    @property
    def keys(self) -> frozenset[str]:
        """The one key."""
        return frozenset({self.key})

    @property
    def fields(self) -> frozenset[str]:
        """The one field."""
        return frozenset({self.field})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The opposite."""
        return {self.field: not raw.get(self.key, False)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The opposite."""
        return {self.key: not getattr(model, self.field)}

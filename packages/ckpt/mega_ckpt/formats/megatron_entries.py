"""Settings of Megatron's that are several arguments or several fields of `ModelConfig`; `megatron_args` has the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MismatchError, Raw
from mega_ckpt.formats.pickles import words
from mega_common.model_config import ModelConfig, RopeConfig


@dataclass(frozen=True)
class _Several:
    """What entries of several keys and fields have in common."""

    keys: frozenset[str]
    fields: frozenset[str]


@dataclass(frozen=True)
class Sizes(_Several):
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
class Activation(_Several):
    """Several switches that make one function."""

    keys: frozenset[str] = words("swiglu squared_relu quick_geglu openai_gelu bias_gelu_fusion")
    fields: frozenset[str] = frozenset({"activation"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """GELU is the tanh form where it is fused with a bias."""
        if raw.get("quick_geglu"):
            raise MismatchError("quick_geglu is not supported: a GELU by a sigmoid")
        fused = raw.get("bias_gelu_fusion") and raw.get("add_bias_linear", True)
        kinds = {
            "swiglu": raw.get("swiglu"),
            "relu2": raw.get("squared_relu"),
            "gelu_tanh": raw.get("openai_gelu") or fused,
        }
        return {"activation": next((kind for kind, chosen in kinds.items() if chosen), "gelu")}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The switches."""
        return {
            "swiglu": model.activation == "swiglu",
            "squared_relu": model.activation == "relu2",
            "openai_gelu": model.activation == "gelu_tanh",
            "quick_geglu": False,
            "bias_gelu_fusion": False,
        }


@dataclass(frozen=True)
class Biases(_Several):
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
class Window(_Several):
    """How far back a query sees: (tokens before it, tokens after it)."""

    keys: frozenset[str] = frozenset({"window_size"})
    fields: frozenset[str] = frozenset({"sliding_window"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """None where the window is endless."""
        given = raw.get("window_size")
        sizes = [int(number) for number in re.findall(r"-?\d+", str(given or ""))]
        if len(sizes) != 2 or sizes[0] < 0:
            return {"sliding_window": None}
        if sizes[1] != 0:
            raise MismatchError(f"window_size = {given!r} is not supported: it looks ahead")
        return {"sliding_window": sizes[0] + 1}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The pair."""
        return {"window_size": (model.sliding_window - 1, 0) if model.sliding_window else None}


POSITIONS: Mapping[str, str] = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}


@dataclass(frozen=True)
class Positions(_Several):
    """The kind of positions, and the rotary settings."""

    keys: frozenset[str] = words(
        """position_embedding_type use_rotary_position_embeddings rotary_base rotary_percent use_rope_scaling
        rope_scaling_factor rotary_scaling_factor rotary_seq_len_interpolation_factor mscale mscale_all_dim
        yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow rotary_interleaved"""
    )
    fields: frozenset[str] = frozenset({"position", "rope"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """`position`, and `rope` where it is rotary."""
        rotary = raw.get("use_rotary_position_embeddings")
        kind = "rope" if rotary else raw.get("position_embedding_type", "learned_absolute")
        if kind not in POSITIONS or raw.get("rotary_interleaved"):
            raise MismatchError(f"positions of kind {kind!r} are not supported (rotary_interleaved neither)")
        position = POSITIONS[kind]
        return {"position": position} | ({"rope": _rope(raw, yarn=kind == "yarn")} if position == "rope" else {})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both."""
        names = {ours: theirs for theirs, ours in POSITIONS.items() if theirs != "yarn"}
        yarn = model.rope.scaling == "yarn" and model.position == "rope"
        return _write_rope(model.rope) | {"position_embedding_type": "yarn" if yarn else names[model.position]}


def _rope(raw: Raw, *, yarn: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "theta": float(raw.get("rotary_base", 10_000)), "fraction": float(raw.get("rotary_percent", 1.0)),
    }  # fmt: skip
    stretch = raw.get("rotary_seq_len_interpolation_factor")
    if yarn:
        out |= {"scaling": "yarn", "factor": raw.get("rotary_scaling_factor", 1.0)}
        names = ("yarn_original_max_position_embeddings", "original_max_position_embeddings")
        out["original_max_position"] = next((raw[name] for name in names if raw.get(name)), 4096)
        out |= {"beta_fast": raw.get("yarn_beta_fast") or 32.0, "beta_slow": raw.get("yarn_beta_slow") or 1.0}
        out |= _mscale(raw)
    elif raw.get("use_rope_scaling"):
        out |= LLAMA3 | {"scaling": "llama3", "factor": raw.get("rope_scaling_factor", 8.0)}
    elif stretch:
        out |= {"scaling": "linear", "factor": float(stretch)}
    return out


def _mscale(raw: Raw) -> dict[str, float]:
    """YaRN's two factors, which only count together."""
    one, every = raw.get("mscale", 1.0), raw.get("mscale_all_dim", 0.0)
    if one and every:
        return {"mscale": one, "mscale_all_dim": every}
    if one not in (None, 1.0):
        raise MismatchError(f"mscale = {one} without mscale_all_dim is not supported")
    return {}


# What Megatron's rope scaling has built in; only the factor can be given.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    out: dict[str, Any] = {
        "rotary_base": int(rope.theta), "rotary_percent": rope.fraction, "use_rope_scaling": rope.scaling == "llama3",
        "rope_scaling_factor": rope.factor if rope.scaling == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": int(rope.factor) if rope.scaling == "linear" else None,
        "rotary_interleaved": False,
    }  # fmt: skip
    if rope.scaling == "yarn":
        out |= {
            "rotary_scaling_factor": rope.factor, "mscale": rope.mscale or 1.0, "mscale_all_dim": rope.mscale_all_dim or 0.0,
            "yarn_beta_fast": rope.beta_fast, "yarn_beta_slow": rope.beta_slow,
            "yarn_original_max_position_embeddings": rope.original_max_position,
        }  # fmt: skip
    return out


@dataclass(frozen=True)
class Experts(_Several):
    """The mixture of experts. Scores are a softmax over the chosen ones, unless `moe_router_pre_softmax` is set."""

    keys: frozenset[str] = words(
        """num_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_layer_freq moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type moe_expert_capacity_factor"""
    )
    fields: frozenset[str] = frozenset({"moe"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """`moe`, or None."""
        if not raw.get("num_experts"):
            return {"moe": None}
        top, groups = raw.get("moe_router_topk", 2), raw.get("moe_router_num_groups") or 1
        top_groups = raw.get("moe_router_group_topk") or 1
        counted = top // top_groups if groups > 1 else 1  # experts whose scores are the score of their group
        if counted > 2:
            raise MismatchError(f"moe_router_topk = {top} with moe_router_group_topk = {top_groups} is not supported")
        score = raw.get("moe_router_score_function", "softmax")
        scope, loss = balance(raw)
        bias = bool(raw.get("moe_router_enable_expert_bias"))
        return {
            "moe": {
                "num_experts": raw["num_experts"],
                "top_k": top,
                "ffn_hidden_size": raw.get("moe_ffn_hidden_size") or feed_forward(raw),
                "layers": _expert_layers(raw.get("moe_layer_freq", 1), raw.get("num_layers", 0)),
                "shared_ffn_hidden_size": raw.get("moe_shared_expert_intermediate_size") or 0,
                "shared_gate": bool(raw.get("moe_shared_expert_gate")),
                "score": score,
                "normalize": top > 1 if score == "sigmoid" else not raw.get("moe_router_pre_softmax"),
                "scaling": raw.get("moe_router_topk_scaling_factor") or 1.0,
                "router_bias": bool(raw.get("add_bias_linear", True)),
                "groups": groups,
                "top_groups": top_groups,
                "group_score": "top2" if counted == 2 else "max",
                "selection_bias": bias,
                "bias_rate": raw.get("moe_router_bias_update_rate", 1e-3) if bias else 0.0,
                "aux_loss": loss,
                "aux_loss_scope": scope,
                "z_loss": raw.get("moe_z_loss_coeff") or 0.0,
                "capacity_factor": raw.get("moe_expert_capacity_factor"),
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
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_router_score_function": moe.score,
            "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalize,
            "moe_router_topk_scaling_factor": None if moe.scaling == 1.0 else moe.scaling,
            "moe_router_num_groups": None if moe.groups == 1 else moe.groups,
            "moe_router_group_topk": None if moe.groups == 1 else moe.top_groups,
            "moe_router_enable_expert_bias": moe.selection_bias,
            "moe_router_bias_update_rate": moe.bias_rate if moe.selection_bias else 1e-3,
            "moe_router_load_balancing_type": {"batch": "aux_loss", "sequence": "seq_aux_loss"}[moe.aux_loss_scope],
            "moe_aux_loss_coeff": moe.aux_loss,
            "moe_z_loss_coeff": moe.z_loss or None,
            "moe_expert_capacity_factor": moe.capacity_factor,
        }


def _expert_layers(given: int | list[int], layers: int) -> list[int] | None:
    """Layers with experts, from every n-th or a list of zeros and ones; None for all."""
    pattern = given if isinstance(given, list) else [int(i % given == 0) for i in range(layers)]
    return None if all(pattern) else [i for i, has in enumerate(pattern) if has]


def balance(raw: Raw) -> tuple[str, float]:
    """What the auxiliary loss counts over, and its weight; Megatron has one kind, or several with a weight each."""
    kinds, losses = raw.get("moe_router_load_balancing_type", "aux_loss"), raw.get("moe_aux_loss_coeff", 0.0)
    kinds, losses = (value if isinstance(value, list) else [value] for value in (kinds, losses))
    for kind, scope in (("aux_loss", "batch"), ("seq_aux_loss", "sequence")):
        if kind in kinds[: len(losses)]:
            return scope, float(losses[kinds.index(kind)])
    return "sequence", 0.0


@dataclass(frozen=True)
class Latent(_Several):
    """Multi-head latent attention, which has head sizes, norms and a default of YaRN of its own."""

    keys: frozenset[str] = words(
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
    )
    fields: frozenset[str] = frozenset({"mla"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """`mla`, and what goes with it."""
        if not raw.get("multi_latent_attention"):
            return {}
        if not raw.get("qk_layernorm"):
            raise MismatchError("multi_latent_attention without qk_layernorm is not supported")
        mla = {
            "q_lora_rank": raw.get("q_lora_rank"),
            "kv_lora_rank": raw.get("kv_lora_rank", 32),
            "qk_nope_head_dim": raw.get("qk_head_dim", 128),
            "qk_rope_head_dim": raw.get("qk_pos_emb_head_dim", 64),
            "v_head_dim": raw.get("v_head_dim", 128),
            "norm_eps": raw.get("norm_epsilon", 1e-5),
        }
        rope = _rope(raw, yarn=raw.get("rope_type", "yarn") == "yarn") | {"interleaved": True}
        alone = {"qk_norm": False, "head_dim": None, "num_kv_heads": None, "position": "rope"}
        return {"mla": mla, "rope": rope, **alone}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The sizes."""
        mla = model.mla
        if mla is None:
            return {"multi_latent_attention": False}
        return {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "group_query_attention": False,
            "q_lora_rank": mla.q_lora_rank,
            "kv_lora_rank": mla.kv_lora_rank,
            "qk_head_dim": mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
            "rope_type": "yarn" if model.rope.scaling == "yarn" else "rope",
            "position_embedding_type": "rope",
            "original_max_position_embeddings": model.rope.original_max_position or 4096,
        }


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

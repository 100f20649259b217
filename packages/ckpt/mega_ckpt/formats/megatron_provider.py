"""The settings of a model where NeMo and Megatron-Bridge keep them, beside Megatron's `torch_dist` files, as Megatron's `args`.

    iter_0000100/run_config.yaml                      Megatron-Bridge: `model`
    checkpoint/context/model.yaml, checkpoint/weights NeMo 2: `config`

Both hold the fields of Megatron-Core's TransformerConfig, which are mostly called as the arguments are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_common.config import load_yaml
from mega_common.errors import CheckpointError

BRIDGE, NEMO = "run_config.yaml", "context/model.yaml"
_RENAMED = {
    "num_moe_experts": "num_experts",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "norm_epsilon",
}
_GATED = {"silu": {"swiglu": True}, "quick_gelu": {"quick_geglu": True}}
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"bias_gelu_fusion": False}, "squared_relu": {"squared_relu": True}, "openai_gelu": {"openai_gelu": True},
}  # fmt: skip


def provider_args(folder: Path) -> dict[str, Any]:
    """The `args` of the model in the folder of one iteration; empty where neither file is there.

    Raises:
        CheckpointError: when the model has an activation that Megatron's arguments cannot say.
    """
    for path, section in ((folder / BRIDGE, "model"), (folder.parent / NEMO, "config")):
        if path.is_file():
            said = load_yaml(path).get(section)
            return _args(said, path) if isinstance(said, Mapping) else {}
    return {}


def _args(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    out = {_RENAMED.get(key, key): value for key, value in said.items() if not isinstance(value, Mapping)}
    heads, groups = said.get("num_attention_heads"), said.get("num_query_groups")
    return out | _activation(said, path) | {
        "group_query_attention": groups is not None and groups != heads,
        "untie_embeddings_and_output_weights": not said.get("share_embeddings_and_output_weights", True),
    }  # fmt: skip


def _activation(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    value = said.get("activation_func") or "gelu"
    name = str(value.get("_target_") if isinstance(value, Mapping) else value).rpartition(".")[2].strip("'<> ")
    known = _GATED if said.get("gated_linear_unit") else _PLAIN
    if name not in known:
        gate = " as a gate" if said.get("gated_linear_unit") else ""
        raise CheckpointError(f"{path}: activation_func {name}{gate} has no counterpart among Megatron's arguments")
    return dict(known[name])

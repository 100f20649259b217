"""Structured pruning of a dense model: fewer layers, feed-forward neurons, heads, or a narrower residual stream
(Minitron, arXiv:2407.14679). The remaining parts keep their weights; the model needs training afterwards, best by
distillation from the larger one.

Legend: L layers, D model width, F feed-forward width, H query heads, K key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.derive_checkpoint import create_new_checkpoint_folder
from mega_ckpt.stream_checkpoint import write_weights_as_checkpoint
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor
from mega_ckpt.weight_source import DerivedWeightSource, WeightSource
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class PartImportance:
    """Importance scores (fp64) of a model's layers, MLP neurons, query heads and residual channels.
    They decide the parts that `shrink_model` keeps.

    Attributes:
        layers: scores [L].
        neurons: scores [L, F].
        heads: scores [L, H].
        channels: scores [D] of the residual stream.
    """

    layers: Tensor
    neurons: Tensor
    heads: Tensor
    channels: Tensor


@dataclass(frozen=True)
class KeptModelParts:
    """Ascending int64 indices of the parts of a model that a shrunk model keeps.
    They are layers [layers], channels [hidden], and per kept layer neurons [layers, ffn], query heads [layers, heads]
    and key/value heads [layers, kv_heads].
    """

    layers: Tensor
    neurons: Tensor
    heads: Tensor
    kv_heads: Tensor
    channels: Tensor


def check_shrinkable(model: ModelConfig) -> None:
    """Raise ConfigError for a model that `shrink_model` does not support: anything but a dense decoder.
    Examples are models with experts, recurrent layers or a vision encoder.

    Raises:
        ConfigError: naming one.
    """
    parts = {
        "experts": model.moe, "latent attention": model.mla, "a recurrent mixer": model.is_recurrent,
        "a vision encoder": model.vision, "an encoder": model.encoder or not model.causal,
        "relative positions": model.has_position_bias, "a reward head": model.score,
        "norms before output projections": model.output_input_norms, "a transform before the output layer": model.masked_lm,
        "hyper-connections": model.hyper_connections, "MTP layers": model.mtp_layers, "layers of several kinds": model.layers,
        "factors of its MLP": model.mlp_multipliers,
        "heads that differ by layer": model.full_attention, "keys as values": model.keys_are_values,
        "values of another size than keys, scaled values or a softplus gate": model.has_asymmetric_attention,
        "sparse gates": model.ffn_sparsity, "inputs of each layer": model.per_layer_input_size, "shared keys and values": model.shared_kv_layers,
    }  # fmt: skip
    for part, present in parts.items():
        if present:
            raise ConfigError(f"pruning a model with {part} is not supported (only dense decoders)")


@dataclass(frozen=True)
class ShrinkSizes:
    """Target sizes of a shrunk model.
    They are the number of layers, MLP width, number of query heads and hidden size; None keeps the current size.
    """

    layers: int | None = None
    ffn: int | None = None
    heads: int | None = None
    hidden: int | None = None


def shrunk_config(model: ModelConfig, sizes: ShrinkSizes, layers: Sequence[int] | None = None) -> ModelConfig:
    """Return the configuration of a shrunk model with the target `sizes`.
    The original is `model`; `layers` are the indices of the kept layers, if known.

    Raises:
        ConfigError: when the model does not support a size.
    """
    check_shrinkable(model)
    current = ShrinkSizes(model.num_layers, model.ffn_hidden_size, model.num_attention_heads, model.hidden_size)
    new = {name: getattr(sizes, name) or size for name, size in asdict(current).items()}
    for name, size in asdict(current).items():
        if new[name] > size:
            raise ConfigError(f"--{name} {new[name]} must be at most {size}, as in the model")
    heads, group = new["heads"], model.num_attention_heads // model.key_value_heads
    if model.key_value_heads > 1 and heads % group:
        raise ConfigError(
            f"--heads {heads} must be a multiple of {group}, the number of query heads per key/value head",
            hint=f"--heads {max(group, heads // group * group)}",
        )
    if heads < model.num_attention_heads and model.qk_norm and model.qk_norm_span == "all":
        raise ConfigError(
            f"--heads {heads} is not supported with query and key norms over all heads (model.qk_norm_span = all), which would "
            "change for the remaining heads",
            hint="reduce --ffn, --hidden or --layers instead",
        )
    found: dict[str, Any] = model.model_dump(exclude_unset=True) | {
        "num_layers": new["layers"], "ffn_hidden_size": new["ffn"], "num_attention_heads": heads,
        "hidden_size": new["hidden"],
    }  # fmt: skip
    if model.num_kv_heads:
        found["num_kv_heads"] = heads // group if model.key_value_heads > 1 else 1
    if model.head_dim is None and new["hidden"] != heads * model.query_key_head_dim:
        found["head_dim"] = model.query_key_head_dim
    kept_layers = range(new["layers"]) if layers is None else layers
    for name in ("full_attention_layers", "no_rope_layers"):
        if (listed := getattr(model, name)) is not None:
            found[name] = [index for index, layer in enumerate(kept_layers) if layer in listed]
    return ModelConfig.parse(found, source="shrinking")


def select_parts_to_keep(importance: PartImportance, model: ModelConfig, smaller: ModelConfig) -> KeptModelParts:
    """Return the most important layers, neurons, heads and channels of a model, as many as a smaller one has.
    The configurations are `model` and `smaller`. Key/value heads are kept with all of their query heads.
    """
    layers = _top_indices(importance.layers, smaller.num_layers)
    heads, group = importance.heads[layers], model.num_attention_heads // model.key_value_heads
    if model.key_value_heads > 1:
        kv_heads = _top_indices(torch.unflatten(heads, 1, (-1, group)).sum(-1), smaller.key_value_heads)
        queries = (kv_heads.unsqueeze(-1) * group + torch.arange(group)).flatten(1)
    else:
        kv_heads = torch.zeros(len(layers), 1, dtype=torch.int64)
        queries = _top_indices(heads, smaller.num_attention_heads)
    neurons = _top_indices(importance.neurons[layers], smaller.ffn_hidden_size)
    return KeptModelParts(layers, neurons, queries, kv_heads, _top_indices(importance.channels, smaller.hidden_size))


def shrink_model(
    source: WeightSource, destination: str | Location, importance: PartImportance, sizes: ShrinkSizes
) -> KeptModelParts:
    """Write a mega checkpoint of the most important parts of a model, and return their indices.
    The parts are layers, neurons, heads and channels of the model in `source`, in the target `sizes`.

    Raises:
        ConfigError: when the model does not support a size.
        CheckpointError: when `destination` exists. No files are left then.
    """
    kept = select_parts_to_keep(importance, source.model, shrunk_config(source.model, sizes))
    smaller = shrunk_config(source.model, sizes, kept.layers.tolist())
    with create_new_checkpoint_folder(destination) as folder:
        note = {**asdict(sizes), "layers": kept.layers.tolist()}
        write_weights_as_checkpoint(
            ShrunkSource(source, smaller, kept), folder, "shrinking", provenance={"shrunk": note}
        )
    return kept


class ShrunkSource(DerivedWeightSource):
    """Reader of the weights of a pruned model: the kept layers, neurons, heads and channels of a larger one."""

    def __init__(self, whole: WeightSource, model: ModelConfig, kept: KeptModelParts) -> None:
        super().__init__(whole, model)
        self._kept = kept
        self._shapes = canonical_tensors(model)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names of the shrunk model, in the order of the forward pass."""
        return list(self._shapes)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the shape of a tensor of the shrunk model."""
        return self._shapes[name]

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the shrunk model, which is that of the larger model's tensor."""
        return self.base.tensor_dtype(self._source_indices(name)[0])

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of the shrunk model's tensor `name`."""
        origin, indices = self._source_indices(name)
        part = self.base.read_tensor(origin)
        for axis, kept in enumerate(indices):
            if kept is None:
                part = part.narrow(axis, offset[axis], shape[axis])
            else:
                part = part.index_select(axis, crop_tensor(kept, offset[axis : axis + 1], shape[axis : axis + 1]))
        return part

    def _source_indices(self, name: str) -> tuple[str, list[Tensor | None]]:
        """Return the larger model's tensor, and the kept indices of each of its axes; None for all."""
        kept, found = self._kept, LAYER.fullmatch(name)
        if found is None:  # the vocabulary, positions, norms
            return name, [None] * (len(self.tensor_shape(name)) - 1) + [kept.channels]
        layer, rest = int(found[1]), found[2]
        size = self.model.query_key_head_dim
        by_kind: dict[str, Tensor | None] = {
            "D": kept.channels, "F": kept.neurons[layer], "H": kept.heads[layer], "K": kept.kv_heads[layer],
            "Hd": _head_rows(kept.heads[layer], size), "Kd": _head_rows(kept.kv_heads[layer], size), "d": None,
        }  # fmt: skip
        kinds = _axis_kinds(rest, self.model)
        return f"model.layers.{int(kept.layers[layer])}.{rest}", [by_kind[kind] for kind in kinds]

    def buffer_names(self) -> Sequence[str]:
        """Return an empty list: buffers of the larger model, such as masks, have its sizes."""
        return []


def _axis_kinds(name: str, model: ModelConfig) -> Sequence[str]:
    """Return the kinds of the axes of a layer's tensor, as in the legend."""
    part, _, kind = name.rpartition(".")
    module = part.rpartition(".")[2]
    if module in ("q_norm", "k_norm"):
        head = "H" if module == "q_norm" else "K"
        return {"head": ["d"], "layernorm": ["d"], "all": [f"{head}d"], "each": [head, "d"]}[model.qk_norm_span]
    if name == "self_attn.sinks":
        return ["H"]
    axes = {
        "q_proj": ("Hd", "D"), "g_proj": ("Hd", "D"), "k_proj": ("Kd", "D"), "v_proj": ("Kd", "D"),
        "o_proj": ("D", "Hd"), "gate_proj": ("F", "D"), "up_proj": ("F", "D"), "down_proj": ("D", "F"),
    }.get(module, ("D",))  # fmt: skip
    return axes[:1] if kind == "bias" else axes


def _head_rows(heads: Tensor, size: int) -> Tensor:
    """Return the row indices of some heads [h * d]."""
    return (heads.unsqueeze(-1) * size + torch.arange(size)).flatten()


def _top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores of each row [.., count], ascending; ties keep the first."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return torch.sort(order[..., :count], dim=-1).values

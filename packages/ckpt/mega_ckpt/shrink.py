"""A smaller model cut out of a dense one: fewer layers, feed-forward neurons, heads, or a narrower residual stream (Minitron,
arXiv:2407.14679). What stays keeps its weights; it wants training afterwards, best by the larger one's distribution.

Legend: L layers, D model width, F feed-forward width, H query heads, K key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mega_ckpt.combine import new_folder
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Shape, crop
from mega_ckpt.stream import write_weights
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.remote import Place

if TYPE_CHECKING:
    from mega_ckpt.source import Source

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Importance:
    """How much of a model each of its parts makes, fp64.

    Attributes:
        layers: [L].
        neurons: [L, F].
        heads: [L, H].
        channels: [D], of the residual stream.
    """

    layers: Tensor
    neurons: Tensor
    heads: Tensor
    channels: Tensor


@dataclass(frozen=True)
class Kept:
    """Numbers of the parts that stay, int64 and rising: layers [l], channels [D'], and of each layer that stays its neurons
    [l, F'], query heads [l, H'] and key/value heads [l, K']."""

    layers: Tensor
    neurons: Tensor
    heads: Tensor
    kv_heads: Tensor
    channels: Tensor


def check_shrinkable(model: ModelConfig) -> None:
    """Refuse models with parts that this knows nothing of.

    Raises:
        ConfigError: naming one.
    """
    parts = {
        "experts": model.moe, "a latent attention": model.mla, "a recurrent mixer": model.recurrent,
        "a vision tower": model.vision, "an encoder": model.encoder or not model.causal,
        "relative positions": model.position == "relative", "a reward's head": model.score,
        "layers that predict further tokens": model.mtp_layers, "layers of several kinds": model.layers,
    }  # fmt: skip
    for what, there in parts.items():
        if there:
            raise ConfigError(f"the model has {what}, and only plain dense decoders are made smaller")


@dataclass(frozen=True)
class Sizes:
    """What a model is to have; None leaves it as it is."""

    layers: int | None = None
    ffn: int | None = None
    heads: int | None = None
    hidden: int | None = None


def shrunk_model(model: ModelConfig, sizes: Sizes, layers: Sequence[int] | None = None) -> ModelConfig:
    """The configuration with these sizes; `layers` are those that stay, if that is known.

    Raises:
        ConfigError: when a size is none of a part of the model.
    """
    check_shrinkable(model)
    there = Sizes(model.num_layers, model.ffn_hidden_size, model.num_attention_heads, model.hidden_size)
    new = {name: getattr(sizes, name) or has for name, has in asdict(there).items()}
    for name, has in asdict(there).items():
        if new[name] > has:
            raise ConfigError(f"--{name} {new[name]}: the model has {has}", hint="give no more than it has")
    heads, group = new["heads"], model.num_attention_heads // model.kv_heads
    if model.kv_heads > 1 and heads % group:
        raise ConfigError(f"--heads {heads}: {group} query heads share a key/value head", hint=f"a multiple of {group}")
    if heads < model.num_attention_heads and model.qk_norm and model.qk_norm_span == "all":
        raise ConfigError(
            f"--heads {heads} is not supported for a model whose query and key norms span all heads (model.qk_norm_span = all): "
            "the mean square that divides the remaining heads would change",
            hint="cut --ffn, --hidden or --layers",
        )
    found: dict[str, Any] = model.model_dump(exclude_unset=True) | {
        "num_layers": new["layers"], "ffn_hidden_size": new["ffn"], "num_attention_heads": heads,
        "hidden_size": new["hidden"],
    }  # fmt: skip
    if model.num_kv_heads:
        found["num_kv_heads"] = heads // group if model.kv_heads > 1 else 1
    if model.head_dim is None and new["hidden"] != heads * model.head_size:
        found["head_dim"] = model.head_size
    stay = range(new["layers"]) if layers is None else layers
    for name in ("full_attention_layers", "no_rope_layers"):
        if (named := getattr(model, name)) is not None:
            found[name] = [place for place, layer in enumerate(stay) if layer in named]
    return ModelConfig.parse(found, source="shrinking")


def choose(importance: Importance, model: ModelConfig, smaller: ModelConfig) -> Kept:
    """The most important parts of `model`, as many as `smaller` has. Key/value heads go with all of their query heads."""
    layers = _best(importance.layers, smaller.num_layers)
    heads, group = importance.heads[layers], model.num_attention_heads // model.kv_heads
    if model.kv_heads > 1:
        kv_heads = _best(torch.unflatten(heads, 1, (-1, group)).sum(-1), smaller.kv_heads)
        queries = (kv_heads.unsqueeze(-1) * group + torch.arange(group)).flatten(1)
    else:
        kv_heads = torch.zeros(len(layers), 1, dtype=torch.int64)
        queries = _best(heads, smaller.num_attention_heads)
    neurons = _best(importance.neurons[layers], smaller.ffn_hidden_size)
    return Kept(layers, neurons, queries, kv_heads, _best(importance.channels, smaller.hidden_size))


def shrink(source: Source, destination: str | Place, importance: Importance, sizes: Sizes) -> Kept:
    """Write the mega checkpoint of the most important parts; what has stayed.

    Raises:
        ConfigError: when a size is none of a part of the model.
        CheckpointError: when `destination` exists. Nothing is left behind then.
    """
    kept = choose(importance, source.model, shrunk_model(source.model, sizes))
    smaller = shrunk_model(source.model, sizes, kept.layers.tolist())
    with new_folder(destination) as folder:
        note = {**asdict(sizes), "layers": kept.layers.tolist()}
        write_weights(Shrunk(source, smaller, kept), folder, "shrinking", provenance={"shrunk": note})
    return kept


class Shrunk:
    """A `Source`: the parts of a model that are kept, read from it."""

    def __init__(self, whole: Source, model: ModelConfig, kept: Kept) -> None:
        self._whole, self.model, self._kept = whole, model, kept
        self._shapes = tensors_of(model)

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """That of the tensor it is a part of."""
        return self._whole.dtype(self._origin(name)[0])

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it."""
        origin, places = self._origin(name)
        part = self._whole.read(origin)
        for axis, kept in enumerate(places):
            if kept is None:
                part = part.narrow(axis, offset[axis], shape[axis])
            else:
                part = part.index_select(axis, crop(kept, offset[axis : axis + 1], shape[axis : axis + 1]))
        return part

    def _origin(self, name: str) -> tuple[str, list[Tensor | None]]:
        """The tensor that one is a part of, and which places of each of its axes; None: all."""
        kept, found = self._kept, LAYER.fullmatch(name)
        if found is None:  # the vocabulary, positions, norms
            return name, [None] * (len(self.shape(name)) - 1) + [kept.channels]
        place, own = int(found[1]), found[2]
        kinds = _kinds(own, self.model)
        size = self.model.head_size
        each: dict[str, Tensor | None] = {
            "D": kept.channels, "F": kept.neurons[place], "H": kept.heads[place], "K": kept.kv_heads[place],
            "Hd": _rows(kept.heads[place], size), "Kd": _rows(kept.kv_heads[place], size), "d": None,
        }  # fmt: skip
        return f"model.layers.{int(kept.layers[place])}.{own}", [each[kind] for kind in kinds]

    def buffers(self) -> Sequence[str]:
        """None: masks and the like are of the old sizes."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """There is none."""
        raise KeyError(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """As the whole model's."""
        return self._whole.assets()


def _kinds(own: str, model: ModelConfig) -> Sequence[str]:
    """What the axes of a layer's tensor are, by the legend."""
    part, _, what = own.rpartition(".")
    module = part.rpartition(".")[2]
    if module in ("q_norm", "k_norm"):
        head = "H" if module == "q_norm" else "K"
        return {"head": ["d"], "all": [f"{head}d"], "each": [head, "d"]}[model.qk_norm_span]
    if own == "self_attn.sinks":
        return ["H"]
    axes = {
        "q_proj": ("Hd", "D"), "g_proj": ("Hd", "D"), "k_proj": ("Kd", "D"), "v_proj": ("Kd", "D"),
        "o_proj": ("D", "Hd"), "gate_proj": ("F", "D"), "up_proj": ("F", "D"), "down_proj": ("D", "F"),
    }.get(module, ("D",))  # fmt: skip
    return axes[:1] if what == "bias" else axes


def _rows(heads: Tensor, size: int) -> Tensor:
    """The rows of some heads [h * d]."""
    return (heads.unsqueeze(-1) * size + torch.arange(size)).flatten()


def _best(scores: Tensor, count: int) -> Tensor:
    """The places of the largest of each row [.., count], rising; of equal ones the first."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return torch.sort(order[..., :count], dim=-1).values

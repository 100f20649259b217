"""The kinds of mixer and of feed-forward that a layer can have: a new one is a file, an entry here and its tests.

Each is a module made from a `Builder` and the layer's number, and makes of the normed stream [B, S or S/T, D] and the
`Context` of the forward pass what is added to the stream, in the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from mega_common.layers import Feed, Mixer
from mega_trainer.model.attention import Attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.delta import GatedDelta
from mega_trainer.model.mamba import Mamba
from mega_trainer.model.mla import LatentAttention
from mega_trainer.model.mlp import Mlp
from mega_trainer.model.moe import Moe


def _attention(build: Builder, layer: int) -> nn.Module:
    return LatentAttention(build, layer) if build.config.mla else Attention(build, layer)


def _mlp(build: Builder, layer: int) -> nn.Module:
    return Mlp(build, f"model.layers.{layer}.mlp", build.config.ffn_hidden_size)


Kind = Callable[[Builder, int], nn.Module]
MIXERS: Mapping[Mixer, Kind] = {"attention": _attention, "mamba": Mamba, "delta": GatedDelta}
FEEDS: Mapping[Feed, Kind] = {"mlp": _mlp, "moe": Moe}

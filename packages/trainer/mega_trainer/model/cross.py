"""Cross attention (arXiv:1706.03762, section 3.2.3): the decoder's tokens ask, what the encoder made answers.

Legend: B batch, S tokens of the decoder, E of the encoder, D model width, H query heads, K key/value heads, d head size,
T tensor-parallel ranks, C context ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.base import Scores
from mega_trainer.kernels.masks import ALL
from mega_trainer.kernels.torch import plain_attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.parallel.tensor import Heads, whole_sequence


@dataclass(frozen=True)
class Source:
    """The encoder's side of one forward pass.

    Attributes:
        context: of its layers.
        length: its tokens in this rank's residual stream.
        seen: bool [B, 1, 1, E], which of its tokens are no padding, those of each context rank one after another; None: all.
        memory: what it made, [B, length, D], once it is done; of neighbours, first what it reads.
        chunks: where parts of the queries see parts of the memory.
    """

    context: Context
    length: int
    seen: Tensor | None = None
    memory: Tensor | None = None
    chunks: Chunks | None = None


def remembering(context: Context, memory: Tensor) -> Context:
    """The context of a layer whose cross attention asks what an encoder made, [B, E or E/T, D]."""
    assert context.source is not None
    return replace(context, source=replace(context.source, memory=memory))


@dataclass(frozen=True)
class Chunks:
    """Cross attention of parts: the queries are cut into chunks, and each sees as large a part of the keys.

    Attributes:
        count: chunks of all rows together.
        samples: the number of each, for its dropout.
        shift: the first chunk begins so many queries behind the first one. Those before it see nothing; the last one has as
            many fewer.
        some: [count, 1, 1, 1], or for each of its m queries [count, m, 1, 1]: 1 where it sees any key and 0 where none;
            None: all see some.
    """

    count: int
    samples: Sequence[int]
    shift: int = 0
    some: Tensor | None = None

    def attend(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [.., S, H, d], k and v [.., T, K, d], whose rows and tokens are `count` chunks in order -> as q, 0 where it sees nothing."""
        ahead = F.pad(q, (0, 0, 0, 0, -self.shift, self.shift))
        y = attend(*(t.reshape(self.count, -1, *t.shape[2:]) for t in (ahead, k, v)))
        y = y if self.some is None else y * self.some
        return F.pad(y.reshape(q.shape), (0, 0, 0, 0, self.shift, -self.shift))


class CrossAttention(nn.Module):
    """Heads are split over the tensor ranks. Context ranks gather keys and values of all of E, whichever way their own
    attention goes: a token sees all of it, so there is nothing to leave out and nothing that makes one rank's share larger.
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        config, self.groups, self.kernels, self.saved = build.config, build.groups, build.kernels, build.saved
        self.layer, self.size, self.dropout = layer, config.head_size, config.attention_dropout
        self.first_head = self.groups.tp.rank * config.num_attention_heads // self.groups.tp.size
        self.how = Scores(config.attention_scale or 1 / math.sqrt(config.head_size))
        name, heads, bias = f"model.layers.{layer}.cross_attn", config.num_attention_heads, config.qkv_bias
        self.q = build.column([Heads(f"{name}.q_proj", heads, self.size)], bias=bias)
        pair = [Heads(f"{name}.{x}_proj", config.kv_heads, self.size) for x in "kv"]
        self.kv = build.column(pair, bias=bias)
        # where some tokens see nothing, nothing is added to them
        self.out = build.row(f"{name}.o_proj", heads * self.size, bias=config.attention_out_bias and not config.retro)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape; `context.source` has what the encoder made, or the cache."""
        q = torch.unflatten(self.q(x), -1, (-1, self.size))
        if context.cache is not None:
            y = context.cache.cross(self.layer, q, partial(self.kernels.attention, how=self.how))
        else:
            assert context.source is not None
            assert context.source.memory is not None
            k, v = self.keys(context.source.memory)
            chunks = context.source.chunks
            attend = partial(self.saved.whole, "attention", self._attend, context, context.source)
            y = attend(q, k, v) if chunks is None else chunks.attend(attend, q, k, v)
        out: Tensor = self.out(y.flatten(-2))
        return out

    def keys(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, E, K, d] of what the encoder made, [B, E/C or E/(C T), D], the context ranks' one after another."""
        pair = self.kv(memory)
        if self.groups.cp.size > 1:
            pair = whole_sequence(pair, self.groups.cp, sp=True)
        k, v = torch.unflatten(pair, -1, (-1, self.size)).chunk(2, -2)
        return k, v

    def _attend(self, context: Context, source: Source, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, S, H/T, d], k and v [B, E, K/T, d] -> [B, S, H/T, d]."""
        mask = ALL if source.seen is None else source.seen
        dropout = context.dropout
        if dropout is not None and self.dropout:
            dropout = dropout if source.chunks is None else replace(dropout, samples=source.chunks.samples)

            def drop(p: Tensor) -> Tensor:  # with masks of its own, for the layer's other attention has layer's number
                return dropout.scores(p, self.dropout, ~self.layer, self.first_head)

            return plain_attention(q, k, v, mask, self.how, drop)
        return self.kernels.attention(q, k, v, mask, self.how)

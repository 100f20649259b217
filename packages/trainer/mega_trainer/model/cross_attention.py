"""Cross attention (arXiv:1706.03762, section 3.2.3): the decoder's tokens attend to the encoder's outputs.

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

from mega_trainer.kernels.attention_masks import ALL
from mega_trainer.kernels.kernel_interface import ScoreTransform
from mega_trainer.kernels.torch_kernels import reference_attention
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.tensor_parallel import SplitHeads, gather_sequence


@dataclass(frozen=True)
class EncoderContext:
    """Encoder side of one forward pass.

    Attributes:
        context: of its layers.
        length: its tokens in this rank's residual stream.
        attention_mask: bool [B, 1, 1, E], which of its tokens are no padding, those of each context rank one after another; None: all.
        memory: what it made, [B, length, D], once it is done; of neighbours, first what it reads.
        chunks: where parts of the queries see parts of the memory.
    """

    context: ForwardContext
    length: int
    attention_mask: Tensor | None = None
    memory: Tensor | None = None
    chunks: CrossAttentionChunks | None = None


def with_encoder_memory(context: ForwardContext, memory: Tensor) -> ForwardContext:
    """Return the context of a layer whose cross attention attends to an encoder's outputs [B, E or E/T, D]."""
    assert context.source is not None
    return replace(context, source=replace(context.source, memory=memory))


@dataclass(frozen=True)
class CrossAttentionChunks:
    """Chunked cross attention: queries are cut into chunks, and each attends to an equal part of the keys.

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

    def attend_chunks(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attend chunk by chunk: q [.., S, H, d], k and v [.., T, K, d], whose rows and tokens are `count` chunks in
        order -> shape of q, 0 for queries without keys.
        """
        ahead = F.pad(q, (0, 0, 0, 0, -self.shift, self.shift))
        y = attend(*(t.reshape(self.count, -1, *t.shape[2:]) for t in (ahead, k, v)))
        y = y if self.some is None else y * self.some
        return F.pad(y.reshape(q.shape), (0, 0, 0, 0, self.shift, -self.shift))


class CrossAttention(nn.Module):
    """Cross attention with heads split over the tensor ranks. Context ranks gather keys and values of all of E in every
    context-parallel mode: each token attends to all of E, so no key can be left out and every rank has equal work.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, self.groups, self.kernels, self.saved = build.config, build.groups, build.kernels, build.saved
        self.layer, self.size, self.dropout = layer, config.query_key_head_dim, config.attention_dropout
        self.first_head = self.groups.tp.rank * config.num_attention_heads // self.groups.tp.size
        self.how = ScoreTransform(config.attention_scale or 1 / math.sqrt(config.query_key_head_dim))
        name, heads, bias = f"model.layers.{layer}.cross_attn", config.num_attention_heads, config.qkv_bias
        self.q = build.build_column_linear([SplitHeads(f"{name}.q_proj", heads, self.size)], bias=bias)
        pair = [SplitHeads(f"{name}.{x}_proj", config.key_value_heads, self.size) for x in "kv"]
        self.kv = build.build_column_linear(pair, bias=bias)
        # where some tokens see nothing, nothing is added to them
        self.out = build.build_row_linear(
            f"{name}.o_proj", heads * self.size, bias=config.attention_out_bias and not config.retro
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map [B, S or S/T, D] to the same shape; `context.source` has the encoder's outputs, else the cache has them."""
        q = torch.unflatten(self.q(x), -1, (-1, self.size))
        if context.cache is not None:
            y = context.cache.cross_attend(self.layer, q, partial(self.kernels.attention, how=self.how))
        else:
            assert context.source is not None
            assert context.source.memory is not None
            k, v = self.project_keys_values(context.source.memory)
            chunks = context.source.chunks
            attend = partial(self.saved.checkpoint_module, "attention", self._attend, context, context.source)
            y = attend(q, k, v) if chunks is None else chunks.attend_chunks(attend, q, k, v)
        out: Tensor = self.out(y.flatten(-2))
        return out

    def project_keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project encoder outputs [B, E/C or E/(C T), D] to keys and values [B, E, K, d], gathered from the context
        ranks in order.
        """
        pair = self.kv(memory)
        if self.groups.cp.size > 1:
            pair = gather_sequence(pair, self.groups.cp, sp=True)
        k, v = torch.unflatten(pair, -1, (-1, self.size)).chunk(2, -2)
        return k, v

    def _attend(self, context: ForwardContext, source: EncoderContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [B, S, H/T, d], k and v [B, E, K/T, d] -> [B, S, H/T, d]."""
        mask = ALL if source.attention_mask is None else source.attention_mask
        dropout = context.dropout
        if dropout is not None and self.dropout:
            dropout = dropout if source.chunks is None else replace(dropout, samples=source.chunks.samples)

            def drop_scores(
                p: Tensor,
            ) -> Tensor:  # with masks of its own, for the layer's other attention has layer's number
                return dropout.drop_attention_probs(p, self.dropout, ~self.layer, self.first_head)

            return reference_attention(q, k, v, mask, self.how, drop_scores)
        return self.kernels.attention(q, k, v, mask, self.how)

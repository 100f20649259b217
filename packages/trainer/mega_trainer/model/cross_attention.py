"""Cross attention (arXiv:1706.03762, section 3.2.3): the decoder's tokens attend to the encoder's outputs.

Legend: B batch, S tokens of the decoder, E of the encoder, D model width, H query heads, K key/value heads, d head size,
T tensor-parallel ranks, C context ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mega_trainer.kernels.attention_masks import ALL
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.torch_kernels import reference_attention
from mega_trainer.model.forward_context import EncoderContext, ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.tensor_parallel import SplitHeads, gather_from_sequence_parallel_region


class CrossAttention(nn.Module):
    """Cross attention to an encoder's outputs, with heads split over the tensor ranks.

    In every context-parallel mode the ranks all-gather the keys and values of E: every token attends to all of E, so no
    block can be skipped, and all ranks have equal work.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, self.groups, self.kernels, self.saved = build.config, build.groups, build.kernels, build.saved
        self.layer, self.size, self.dropout = layer, config.query_key_head_dim, config.attention_dropout
        self.first_head = self.groups.tp.rank * config.num_attention_heads // self.groups.tp.size
        self.how = AttentionScoreTransform(config.attention_scale or 1 / math.sqrt(config.query_key_head_dim))
        name, heads, bias = f"model.layers.{layer}.cross_attn", config.num_attention_heads, config.qkv_bias
        self.q = build.build_column_linear([SplitHeads(f"{name}.q_proj", heads, self.size)], bias=bias)
        pair = [SplitHeads(f"{name}.{x}_proj", config.key_value_heads, self.size) for x in "kv"]
        self.kv = build.build_column_linear(pair, bias=bias)
        # Retro: no bias, so that nothing is added to tokens without neighbors
        self.out = build.build_row_linear(
            f"{name}.o_proj", heads * self.size, bias=config.attention_out_bias and not config.retro
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map decoder hidden states to hidden states of an equal shape by attention to an encoder's outputs.
        They are [B, S or S/T, D] (S/T under sequence parallelism over T ranks); `context.source` has the encoder's
        outputs, or in generation the KV cache has their keys and values.
        """
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
        """Project encoder outputs to the keys and values of cross attention, [B, all E encoder tokens, K heads, d].
        The outputs are this rank's, [B, its encoder tokens, D]; keys and values are gathered from the context ranks in
        order.
        """
        pair = self.kv(memory)
        if self.groups.cp.size > 1:
            pair = gather_from_sequence_parallel_region(pair, self.groups.cp, sp=True)
        k, v = torch.unflatten(pair, -1, (-1, self.size)).chunk(2, -2)
        return k, v

    def _attend(self, context: ForwardContext, source: EncoderContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q [B, S, H/T, d], k and v [B, E, K/T, d] -> [B, S, H/T, d]."""
        mask = ALL if source.attention_mask is None else source.attention_mask
        dropout = context.dropout
        if dropout is not None and self.dropout:
            dropout = dropout if source.chunks is None else replace(dropout, samples=source.chunks.samples)

            def drop_scores(p: Tensor) -> Tensor:
                # ~layer, so that the masks differ from those of the layer's self-attention
                return dropout.drop_attention_probs(p, self.dropout, ~self.layer, self.first_head)

            return reference_attention(q, k, v, mask, self.how, drop_scores)
        return self.kernels.attention(q, k, v, mask, self.how)

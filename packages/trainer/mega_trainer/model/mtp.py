"""Multi-token prediction (arXiv:2412.19437, section 2.2): layers behind the last that predict further tokens.

The k-th predicts token i + 1 + k from what the one before it made of token i (the first: the model's normed output)
and from the embedding of token i + k, with the model's own embedding and head:

    h = norm(block(W [enorm(embedding), hnorm(h)]))

Its weights are named and laid out as DeepSeek-V3's are on disk. Evaluation leaves these layers alone;
generation guesses by them where it is asked to.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_trainer.model.blocks import block_of
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context


class Predictor(nn.Module):
    """One layer that predicts a further token; `layer` counts on from the model's.

    W [D, 2 D] is whole on every tensor rank: under sequence parallelism each multiplies its part of the sequence.
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        name, width = f"model.layers.{layer}", build.config.hidden_size
        self.layer, self.linear = layer, build.linear
        self.embedding_norm, self.hidden_norm = build.norm(f"{name}.enorm"), build.norm(f"{name}.hnorm")
        self.join = build.replicated(f"{name}.eh_proj.weight", (width, 2 * width), std=build.config.init_std)
        self.block = block_of(build, layer)
        self.norm = build.norm(f"{name}.shared_head.norm")

    def forward(self, embedded: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """Embeddings of the tokens k places on, and h of the layer before, [B, S or S/T, D] -> this layer's h."""
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        y: Tensor = self.norm(self.block(self.linear(joined, self.join), context))
        return y

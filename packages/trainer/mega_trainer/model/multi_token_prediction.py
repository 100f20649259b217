"""Multi-token prediction (MTP, arXiv:2412.19437, section 2.2): layers after the last one that predict later tokens.

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

from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.transformer_layer import build_transformer_layer


class MultiTokenPredictor(nn.Module):
    """One MTP layer, which predicts one token further ahead; `layer` continues the numbers of the model's layers.

    W [D, 2 D] is whole on every tensor rank: under sequence parallelism each multiplies its part of the sequence.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        name, width = f"model.layers.{layer}", build.config.hidden_size
        self.layer, self.linear = layer, build.unsharded_linear
        self.embedding_norm, self.hidden_norm = (
            build.build_residual_norm(f"{name}.enorm"),
            build.build_residual_norm(f"{name}.hnorm"),
        )
        self.join = build.build_replicated(f"{name}.eh_proj.weight", (width, 2 * width), std=build.config.init_std)
        self.block = build_transformer_layer(build, layer)
        self.norm = build.build_residual_norm(f"{name}.shared_head.norm")

    def forward(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Map embeddings of the tokens k positions ahead and h of the previous layer, [B, S or S/T, D], to this layer's
        h.
        """
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        y: Tensor = self.norm(self.block(self.linear(joined, self.join), context))
        return y

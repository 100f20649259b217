"""Multi-token prediction (MTP, arXiv:2412.19437, section 2.2): layers after the last one that predict later tokens.

The k-th layer predicts token i + 1 + k from the previous MTP layer's output for token i (the first: from the model's
normalised output) and the embedding of token i + k, with the model's embedding and head:

    h = norm(block(W [enorm(embedding), hnorm(h)]))

Weights have the names and layout of DeepSeek-V3's checkpoints. Evaluation ignores these layers; generation can use them for
speculative decoding.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.transformer_layer import build_transformer_layer


class MultiTokenPredictor(nn.Module):
    """Multi-token prediction (MTP) layer, which predicts one more token ahead; its number `layer` follows the numbers
    of the model's layers.

    W [D, 2 D] is whole on every tensor rank: under sequence parallelism each rank applies it to its part of the sequence.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        name, width = f"model.layers.{layer}", build.config.hidden_size
        self.layer, self.linear = layer, build.unsharded_linear
        self.embedding_norm = build.build_residual_norm(f"{name}.enorm")
        self.hidden_norm = build.build_residual_norm(f"{name}.hnorm")
        self.join = build.build_replicated(f"{name}.eh_proj.weight", (width, 2 * width), std=build.config.init_std)
        self.block = build_transformer_layer(build, layer)
        self.norm = build.build_residual_norm(f"{name}.shared_head.norm")

    def forward(self, embedded: Tensor, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Map the embeddings of tokens k positions ahead and the previous layer's hidden states, [B, S or S/T, D], to
        this layer's hidden states.
        """
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        y: Tensor = self.norm(self.block(self.linear(joined, self.join), context))
        return y

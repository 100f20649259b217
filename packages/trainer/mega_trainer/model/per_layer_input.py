"""Per-layer inputs (Gemma 3n, Gemma 4): each layer gets a narrow input of each token in addition to the residual stream.

    p = (norm(W x / sqrt(D)) + sqrt(P) table[token]) / sqrt(2)    [B, S, L, P], from the embedded tokens x
    layer l:  x = x + norm(W_out (act(W_in x) p_l))

Legend: B batch, S sequence, D model width, P width of an input, L layers, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mega_ckpt.canonical_tensors import LAYER_EMBEDDING
from mega_trainer.model.feed_forward import make_activation
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder


class PerLayerEmbedding(nn.Module):
    """Inputs of all layers, from an embedding table [V, L P] and a projection of the embedded tokens.
    The table's rows are split over the tensor ranks; projection and norm are whole on each.
    """

    def __init__(self, build: LayerBuilder, size: int) -> None:
        super().__init__()
        config, self.size = build.config, size
        joined = config.num_layers * size
        self.rows = config.per_layer_vocab_size
        self.table = build.build_token_embedding(build.build_vocab_parameter(LAYER_EMBEDDING, joined, rows=self.rows))
        name, shape = "model.per_layer_model_projection.weight", (joined, config.hidden_size)
        self.linear, self.weight = build.unsharded_linear, build.build_replicated(name, shape, std=config.init_std)
        self.norm = build.build_residual_norm("model.per_layer_projection_norm", size)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the inputs [B, S or S/T, L P] of all layers for token ids int64 [B, S] embedded as x [B, S or S/T, D].
        S/T is the length under sequence parallelism.
        """
        tokens = tokens if self.rows is None else tokens.where(tokens < self.rows, 0)
        # factors in the dtype of the embeddings, as in training
        found: Tensor = self.table(tokens) * torch.tensor(math.sqrt(self.size), dtype=x.dtype)
        projected = self.linear(x, self.weight) * x.shape[-1] ** -0.5
        normed: Tensor = self.norm(torch.unflatten(projected, -1, (-1, self.size)))
        return (normed.flatten(-2) + found) * 2**-0.5


class LayerInputGate(nn.Module):
    """Addend norm(W_out (act(W_in x) p)) of the stream from a layer's input p; whole on every tensor rank."""

    def __init__(self, build: LayerBuilder, layer: int, size: int) -> None:
        super().__init__()
        name, width = f"model.layers.{layer}", build.config.hidden_size
        self.layer, self.linear, self.saved = layer, build.unsharded_linear, build.saved
        self.activate = make_activation(build)
        gate, out = f"{name}.per_layer_input_gate.weight", f"{name}.per_layer_projection.weight"
        self.gate = build.build_replicated(gate, (size, width), std=build.config.init_std)
        self.out = build.build_replicated(out, (width, size), std=build.residual_init_std)
        self.norm = build.build_residual_norm(f"{name}.post_per_layer_input_norm")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the addend [B, S or S/T, D] to the residual stream from this layer's own input, gated by x of that shape."""
        assert context.layer_inputs is not None
        gated = torch.cat([self.linear(x, self.gate), context.layer_inputs[self.layer]], -1)
        h = self.saved.recompute_output("activation", self.activate, gated)
        y: Tensor = self.norm(self.linear(h, self.out))
        return y

"""Embeddings that a model adds to those of its tokens, and their factors.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.tensor_parallel import local_sequence_slice


class PositionTypeEmbeddings(nn.Module):
    """Learned position and segment-type embeddings and their norm: norm(x + position + type).
    The sum has the terms that the model has; embeddings narrower than the layers are projected. Weights are whole on every
    tensor rank.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config, width = build.config, build.config.embedding_width
        self.offset, self.tp, self.sp = config.position_offset, build.groups.tp, build.sp

        def build_table(name: str, rows: int) -> nn.Parameter | None:
            return build.build_replicated(f"model.{name}.weight", (rows, width), std=config.init_std) if rows else None

        rows = config.max_position + self.offset if config.position == "learned" else 0
        self.positions = build_table("embed_positions", rows)
        self.types = build_table("embed_types", config.token_types)
        self.norm = build.build_residual_norm("model.embed_norm", width) if config.embedding_norm else None
        self.linear, self.weight, self.bias = build.unsharded_linear, None, None
        if config.embedding_size:
            shape, std = (config.hidden_size,), config.init_std
            self.weight = build.build_replicated("model.embed_proj.weight", (*shape, width), std=std)
            self.bias = build.build_replicated("model.embed_proj.bias", shape)

    def forward(self, x: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """Add the model's position and type embeddings to token embeddings x; normalise and project if configured.
        x is [B, S or S/T, D] (S/T under sequence parallelism over T ranks), positions int64 [B or 1, S], types int64
        [B, S] (None: all are 0).
        """
        part = local_sequence_slice(positions.shape[-1], self.tp, sp=self.sp)
        if self.positions is not None:
            x = x + F.embedding(positions[:, part] + self.offset if self.offset else positions[:, part], self.positions)
        if self.types is not None:
            x = x + F.embedding(torch.zeros_like(positions[:, part]) if types is None else types[:, part], self.types)
        x = x if self.norm is None else self.norm(x)
        return x if self.weight is None else self.linear(x, self.weight, self.bias)


def apply_embedding_scale(x: Tensor, config: ModelConfig) -> Tensor:
    """Return token embeddings [.., D] times sqrt(D) if the config scales embeddings, and times its `embedding_multiplier`.
    Gemma's sqrt(D) is rounded to their dtype, as in training.
    """
    if config.scale_embeddings:
        x = x * torch.tensor(math.sqrt(config.hidden_size), dtype=x.dtype)  # stays on the host: a copy would wait
    return x if config.embedding_multiplier == 1 else x * config.embedding_multiplier

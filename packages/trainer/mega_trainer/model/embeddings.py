"""What the embeddings of tokens become on their way to the first layer, where that is more than they are.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.model.builder import Builder
from mega_trainer.parallel.tensor import sequence_part


class Inputs(nn.Module):
    """norm(x + position + type of segment), as far as the model has them; each is whole on every tensor rank."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        config, width = build.config, build.config.hidden_size
        self.offset, self.tp, self.sp = config.position_offset, build.groups.tp, build.sp

        def table(name: str, rows: int) -> nn.Parameter | None:
            return build.replicated(f"model.{name}.weight", (rows, width), std=config.init_std) if rows else None

        rows = config.max_position + self.offset if config.position == "learned" else 0
        self.positions, self.types = table("embed_positions", rows), table("embed_types", config.token_types)
        self.norm = build.norm("model.embed_norm") if config.embedding_norm else None

    def forward(self, x: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """[B, S or S/T, D], with positions int64 [B or 1, S] and types int64 [B, S] (None: all are 0) -> the same shape."""
        part = sequence_part(positions.shape[-1], self.tp, sp=self.sp)
        if self.positions is not None:
            x = x + F.embedding(positions[:, part] + self.offset if self.offset else positions[:, part], self.positions)
        if self.types is not None:
            x = x + F.embedding(torch.zeros_like(positions[:, part]) if types is None else types[:, part], self.types)
        return x if self.norm is None else self.norm(x)


def scaled(x: Tensor, config: ModelConfig) -> Tensor:
    """Embeddings of tokens [.., D] as the layers want them; Gemma's factor is rounded to their dtype, as it was trained."""
    if config.scale_embeddings:
        x = x * x.new_tensor(math.sqrt(config.hidden_size))
    return x if config.embedding_multiplier == 1 else x * config.embedding_multiplier

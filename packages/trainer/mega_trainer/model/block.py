"""One layer: attention and feed-forward, each with a norm before it and a residual around it."""

from __future__ import annotations

from torch import Tensor, nn

from mega_trainer.model.attention import Attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.mlp import Mlp


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, build: Builder, layer: int, *, selective: bool = False) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        self.layer, self.dropout = layer, build.config.residual_dropout
        self.attention_norm = build.norm(f"{name}.input_layernorm")
        self.attention = Attention(build, layer, recompute=selective)
        self.mlp_norm = build.norm(f"{name}.post_attention_layernorm")
        self.mlp = Mlp(build, layer, recompute=selective)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        x = x + self._drop(self.attention(self.attention_norm(x), context), context, "attention")
        return x + self._drop(self.mlp(self.mlp_norm(x)), context, "mlp")

    def _drop(self, x: Tensor, context: Context, site: str) -> Tensor:
        return x if context.dropout is None else context.dropout.residual(x, self.dropout, self.layer, site)

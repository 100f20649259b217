"""One layer: attention and feed-forward, each with a norm before or after it and a residual around both."""

from __future__ import annotations

from torch import Tensor, nn

from mega_trainer.model.attention import Attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.mla import LatentAttention
from mega_trainer.model.mlp import Mlp


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x).

    With `norm_position` post it is norm(attention x) and norm(mlp x) (arXiv:2501.00656); with `parallel_residual` the
    MLP sees what attention sees (arXiv:2204.06745).
    """

    def __init__(self, build: Builder, layer: int, *, selective: bool = False) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        self.layer, self.dropout = layer, build.config.residual_dropout
        self.post, self.parallel = build.config.norm_position == "post", build.config.parallel_residual
        norms = ("post_attention", "post_feedforward") if self.post else ("input", "post_attention")
        self.attention_norm = build.norm(f"{name}.{norms[0]}_layernorm")
        attention = LatentAttention if build.config.mla else Attention
        self.attention = attention(build, layer, recompute=selective)
        self.mlp_norm = build.norm(f"{name}.{norms[1]}_layernorm")
        self.mlp = Mlp(build, layer, recompute=selective)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        y = x + self._drop(self._attend(x, context), context, "attention")
        return y + self._drop(self._feed(x if self.parallel else y), context, "mlp")

    def _attend(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = (
            self.attention_norm(self.attention(x, context))
            if self.post
            else self.attention(self.attention_norm(x), context)
        )
        return y

    def _feed(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp_norm(self.mlp(x)) if self.post else self.mlp(self.mlp_norm(x))
        return y

    def _drop(self, x: Tensor, context: Context, site: str) -> Tensor:
        return x if context.dropout is None else context.dropout.residual(x, self.dropout, self.layer, site)

"""One layer: attention and feed-forward, each with a norm before it, after it or both, and a residual around each."""

from __future__ import annotations

from torch import Tensor, nn

from mega_trainer.model.attention import Attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.mla import LatentAttention
from mega_trainer.model.mlp import Mlp
from mega_trainer.model.moe import Moe


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x).

    With `norm_position` post it is norm(attention x) and norm(mlp x) (arXiv:2501.00656), with both it is
    norm(attention(norm x)) and so on (arXiv:2408.00118); with `parallel_residual` the MLP sees what attention sees
    (arXiv:2204.06745).
    """

    def __init__(self, build: Builder, layer: int, *, selective: bool = False) -> None:
        super().__init__()
        name, position = f"model.layers.{layer}", build.config.norm_position
        self.layer, self.dropout = layer, build.config.residual_dropout
        self.parallel = build.config.parallel_residual

        def norm(which: str, there: bool) -> nn.Module:
            return build.norm(f"{name}.{which}_layernorm") if there else nn.Identity()

        before, after = position != "post", position != "pre"
        self.before_attention = norm("input", before)
        attention = LatentAttention if build.config.mla else Attention
        self.attention = attention(build, layer, recompute=selective)
        self.after_attention = norm("post_attention", after)
        self.before_mlp = norm("pre_feedforward" if after else "post_attention", before)
        self.mlp = (
            Moe(build, layer, recompute=selective)
            if build.config.has_experts(layer)
            else Mlp(build, f"{name}.mlp", build.config.ffn_hidden_size, recompute=selective)
        )
        self.after_mlp = norm("post_feedforward", after)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        y = x + self._drop(self._attend(x, context), context, "attention")
        return y + self._drop(self._feed(x if self.parallel else y, context), context, "mlp")

    def _attend(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = self.after_attention(self.attention(self.before_attention(x), context))
        return y

    def _feed(self, x: Tensor, context: Context) -> Tensor:
        x = self.before_mlp(x)
        y: Tensor = self.after_mlp(self.mlp(x, context) if isinstance(self.mlp, Moe) else self.mlp(x))
        return y

    def _drop(self, x: Tensor, context: Context, site: str) -> Tensor:
        return x if context.dropout is None else context.dropout.residual(x, self.dropout, self.layer, site)

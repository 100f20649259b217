"""One layer: attention and feed-forward, each with a norm before it, after it or both, and a residual around each."""

from __future__ import annotations

from torch import Tensor, nn

from mega_trainer.model.attention import Attention
from mega_trainer.model.builder import Builder, Norm
from mega_trainer.model.context import Context
from mega_trainer.model.mla import LatentAttention
from mega_trainer.model.mlp import Mlp
from mega_trainer.model.moe import Moe


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x).

    With `norm_position` post it is norm(attention x) and norm(mlp x) (arXiv:2501.00656), with both it is
    norm(attention(norm x)) and so on (arXiv:2408.00118); with `parallel_residual` the MLP sees what attention sees
    (arXiv:2204.06745), with `shared_norm` through the same norm. What they add is multiplied by `residual_multiplier`.
    """

    def __init__(self, build: Builder, layer: int, *, selective: bool = False) -> None:
        super().__init__()
        name, position = f"model.layers.{layer}", build.config.norm_position
        self.layer, self.dropout = layer, build.config.residual_dropout
        self.parallel, self.shared_norm = build.config.parallel_residual, build.config.shared_norm
        self.multiplier = build.config.residual_multiplier
        build = build.of_layer(layer)

        def norm(which: str, there: bool) -> nn.Module:
            return build.norm(f"{name}.{which}_layernorm") if there else nn.Identity()

        before, after = position != "post", position != "pre"
        self.before_attention = norm("input", before)
        attention = LatentAttention if build.config.mla else Attention
        self.attention = attention(build, layer, recompute=selective)
        self.after_attention = norm("post_attention", after)
        self.before_mlp = norm("pre_feedforward" if after else "post_attention", before and not self.shared_norm)
        self.mlp = (
            Moe(build, layer, recompute=selective)
            if build.config.has_experts(layer)
            else Mlp(build, f"{name}.mlp", build.config.ffn_hidden_size, recompute=selective)
        )
        self.after_mlp = norm("post_feedforward", after)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        x, normed = _normed(self.before_attention, x)
        attended = self._weighed(self.after_attention(self.attention(normed, context)), context, "attention")
        if self.parallel and not self.shared_norm:
            x, normed = _normed(self.before_mlp, x)
        if self.parallel or self.shared_norm:
            x = x + attended
        else:
            x, normed = _normed(self.before_mlp, x, attended)
        mlp = self.mlp(normed, context) if isinstance(self.mlp, Moe) else self.mlp(normed)
        return x + self._weighed(self.after_mlp(mlp), context, "mlp")

    def _weighed(self, y: Tensor, context: Context, site: str) -> Tensor:
        """What a site adds to the stream."""
        y = y if context.dropout is None else context.dropout.residual(y, self.dropout, self.layer, site)
        return y if self.multiplier == 1 else y * self.multiplier


def _normed(norm: nn.Module, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The stream x, or x + y, and its norm, if there is one at this place."""
    if isinstance(norm, Norm):
        return norm.of_sum(x, y)
    x = x if y is None else x + y
    return x, x

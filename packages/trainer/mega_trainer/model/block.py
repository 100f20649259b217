"""One layer: a mixer of tokens and a feed-forward, or one of them, each with norms around it and a residual."""

from __future__ import annotations

from torch import Tensor, nn

from mega_common.layers import Feed, Mixer
from mega_trainer.model.builder import Builder, Norm
from mega_trainer.model.context import Context
from mega_trainer.model.cross import CrossAttention
from mega_trainer.model.kinds import FEEDS, MIXERS


class Half(nn.Module):
    """norm(work(norm x)), which a mixer, a feed-forward or, of neither, a cross attention adds to the stream x."""

    def __init__(self, build: Builder, layer: int, mixer: Mixer | None, feed: Feed | None) -> None:
        super().__init__()
        config, self.layer, self.saved, self.feed = build.config, layer, build.saved, feed
        self.dropout, self.multiplier = config.residual_dropout, config.residual_multiplier

        def norm(which: str, there: bool) -> nn.Module:
            return build.norm(f"model.layers.{layer}.{which}_layernorm") if there else nn.Identity()

        before, after = config.norm_position in ("pre", "both"), config.norm_position in ("post", "both")
        self.replaces = config.norm_position == "sum"  # the norm's result is the stream
        if mixer:
            self.before, self.work = (
                norm("input", before and (layer > 0 or config.first_norm)),
                MIXERS[mixer](build, layer),
            )
            self.after = norm("post_attention", after)
        if feed:
            there = self.replaces or (before and not config.shared_norm)
            self.before = norm("pre_feedforward" if after else "post_attention", there)
            self.work, self.after = FEEDS[feed](build, layer), norm("post_feedforward", after)
        if not mixer and not feed:
            self.before, self.work, self.after = norm("cross_attn", True), CrossAttention(build, layer), nn.Identity()
        self.site = "attention" if mixer else "mlp" if feed else "cross"

    def normed(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream x, or x + y, and its norm, if there is one at this place: [B, S or S/T, D] all."""
        if isinstance(self.before, Norm):
            x, normed = self.before.of_sum(x, y)
            if self.replaces:
                return normed, normed
            self.saved.forget("norm", normed, self.before, x)
            return x, normed
        x = x if y is None else x + y
        return x, x

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """What comes to the stream, from what is normed of it."""
        y: Tensor = self.saved.whole(self.feed, self.work, x, context) if self.feed else self.work(x, context)
        y = self.after(y)
        if context.dropout is not None:
            y = context.dropout.residual(y, self.dropout, self.layer, self.site)
        return y if self.multiplier == 1 else y * self.multiplier


class Block(nn.Module):
    """x + mixer(norm x), then x + feed(norm x), as far as the layer has them.

    With `norm_position` post it is norm(mixer x) and norm(feed x) (arXiv:2501.00656), with both it is norm(mixer(norm x))
    and so on (arXiv:2408.00118); with `parallel_residual` the feed-forward sees what the mixer sees (arXiv:2204.06745),
    with `shared_norm` through the same norm. What they add is multiplied by `residual_multiplier`. With `norm_position` sum
    it is x = norm(x + mixer x), then x = norm(x + feed x) (arXiv:1706.03762).
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        (mixer, feed), build = build.config.kind(layer), build.of_layer(layer)
        self.parallel, self.shared_norm = build.config.parallel_residual, build.config.shared_norm
        self.mixer = Half(build, layer, mixer, None) if mixer else None
        self.cross = Half(build, layer, None, None) if build.config.crosses(layer) else None
        self.feed = Half(build, layer, None, feed) if feed else None
        last = build.config.norm_position == "sum"
        self.norm = build.norm(f"model.layers.{layer}.post_feedforward_layernorm") if last else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        added: list[Tensor] = []
        for half in filter(None, (self.mixer, self.cross, self.feed)):
            if not (added and self.shared_norm):
                x, normed = half.normed(x, *(() if self.parallel else added[-1:]))
            added.append(half(normed, context))
        x = sum(added if self.parallel else added[-1:], start=x)
        return x if self.norm is None else self.norm(x)

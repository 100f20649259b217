"""One layer: a mixer of tokens and a feed-forward, or one of them, each with norms around it and a residual."""

from __future__ import annotations

from torch import Tensor, nn

from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.kinds import FEEDS, MIXERS, Kind


class Half(nn.Module):
    """norm(work(norm x)), which a mixer, a cross attention or a feed-forward adds to the stream x; either norm may be missing."""

    def __init__(self, build: Builder, layer: int, name: str, kind: Kind, before: str, after: str) -> None:
        super().__init__()
        self.layer, self.saved, self.name = layer, build.saved, name
        self.feed = next((feed for feed in FEEDS if feed == name), None)
        self.dropout, self.multiplier = build.config.residual_dropout, build.config.residual_multiplier
        self.before = build.norm(f"model.layers.{layer}.{before}_layernorm") if before else None
        self.work = kind(build, layer)
        self.after = build.norm(f"model.layers.{layer}.{after}_layernorm") if after else None

    def normed(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream x, or x + y, and its norm, if there is one at this place: [B, S or S/T, D] all."""
        if self.before is None:
            x = x if y is None else x + y
            return x, x
        x, normed = self.before.of_sum(x, y)
        self.saved.forget("norm", normed, self.before, x)
        return x, normed

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """What comes to the stream, from what is normed of it."""
        y: Tensor = self.saved.whole(self.feed, self.work, x, context) if self.feed else self.work(x, context)
        y = y if self.after is None else self.after(y)
        if context.dropout is not None:
            y = context.dropout.residual(y, self.dropout, self.layer, "mlp" if self.feed else self.name)
        return y if self.multiplier == 1 else y * self.multiplier


class Block(nn.Module):
    """x + mixer(norm x), then x + feed(norm x), as far as the layer has them.

    With `norm_position` post it is norm(mixer x) and norm(feed x) (arXiv:2501.00656), with both it is norm(mixer(norm x))
    and so on (arXiv:2408.00118); with `parallel_residual` the feed-forward sees what the mixer sees (arXiv:2204.06745),
    with `shared_norm` through the same norm. What they add is multiplied by `residual_multiplier`.
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        (mixer, feed), config, build = build.config.kind(layer), build.config, build.of_layer(layer)
        before, after = config.norm_position in ("pre", "both"), config.norm_position in ("post", "both")
        self.parallel, self.shared_norm = config.parallel_residual, config.shared_norm
        self.mixer = self.feed = None
        self.cross: Half | None = None  # see `block_of`
        if mixer:
            first = "input" if before and (layer > 0 or config.first_norm) else ""
            self.mixer = Half(build, layer, "attention", MIXERS[mixer], first, "post_attention" if after else "")
        if feed:
            second = ("pre_feedforward" if after else "post_attention") if before and not config.shared_norm else ""
            self.feed = Half(build, layer, feed, FEEDS[feed], second, "post_feedforward" if after else "")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        added: list[Tensor] = []
        for half in filter(None, (self.mixer, self.cross, self.feed)):
            if not (added and self.shared_norm):
                x, normed = half.normed(x, *(() if self.parallel else added[-1:]))
            added.append(half(normed, context))
        return sum(added if self.parallel else added[-1:], start=x)

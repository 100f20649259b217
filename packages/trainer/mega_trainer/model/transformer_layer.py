"""Transformer layers: a token mixer, a feed-forward or both, each with norms and a residual connection.

Mixers and feed-forwards are built from a `LayerBuilder` and the layer's number. They map the normalised stream
[B, S or S/T, D] and the `ForwardContext` to the addend of the stream, in the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.errors import ConfigError
from mega_common.layer_kinds import COMPRESSED_MIXERS, FeedForwardKind, MixerKind
from mega_trainer.model.alternating_updates import AlternatingUpdate, LowRankResidual
from mega_trainer.model.asymmetric_attention import AsymmetricAttention
from mega_trainer.model.attention import EncodedPositionAttention, SelfAttention
from mega_trainer.model.compressed_attention import CompressedAttention
from mega_trainer.model.cross_attention import CrossAttention
from mega_trainer.model.feed_forward import FeedForward, SparseFeedForward
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.gated_convolution import GatedConvolution
from mega_trainer.model.gated_delta_net import GatedDeltaNet
from mega_trainer.model.hybrid_mixer import HybridMixer, ScaledFeedForward
from mega_trainer.model.hyper_connections import HyperConnection, expand_streams
from mega_trainer.model.kimi_delta_attention import KimiDeltaAttention
from mega_trainer.model.latent_attention import MultiLatentAttention
from mega_trainer.model.layer_builder import LayerBuilder, LayerFactory
from mega_trainer.model.lightning_attention import LightningAttention
from mega_trainer.model.mamba import MambaMixer
from mega_trainer.model.mamba1 import Mamba1Mixer
from mega_trainer.model.mixture_of_experts import MixtureOfExperts
from mega_trainer.model.norms import Norm
from mega_trainer.model.per_layer_input import LayerInputGate
from mega_trainer.model.separately_normed_experts import SeparatelyNormedExperts
from mega_trainer.model.shared_key_values import KeyValueSource, SharedKeyValueAttention
from mega_trainer.model.sparse_attention import SparseLatentAttention
from mega_trainer.parallel.parameter_info import NonTrainableBuffer


def _build_attention(build: LayerBuilder, layer: int) -> nn.Module:
    if build.config.mla:
        return (SparseLatentAttention if build.config.mla.indexer else MultiLatentAttention)(build, layer)
    if not build.config.has_own_keys:
        return SharedKeyValueAttention(build, layer)
    if layer in build.config.key_value_sources:
        return KeyValueSource(build, layer)
    usual = AsymmetricAttention if build.config.has_asymmetric_attention else SelfAttention
    return (EncodedPositionAttention if "position" in build.functions else usual)(build, layer)


def _build_feed_forward(build: LayerBuilder, layer: int) -> nn.Module:
    sparsity = build.config.ffn_sparsity[layer] if build.config.ffn_sparsity else 0.0
    if sparsity:
        return SparseFeedForward(build, f"model.layers.{layer}.mlp", build.config.ffn_hidden_size, sparsity)
    kind = FeedForward if build.config.mlp_multipliers is None else ScaledFeedForward
    return kind(build, f"model.layers.{layer}.mlp", build.config.ffn_hidden_size)


def _build_experts(build: LayerBuilder, layer: int) -> nn.Module:
    separate = build.config.moe is not None and build.config.moe.separate_norms
    return (SeparatelyNormedExperts if separate else MixtureOfExperts)(build, layer)


MIXERS: Mapping[MixerKind, LayerFactory] = {
    "attention": _build_attention,
    "mamba": MambaMixer,
    "mamba1": Mamba1Mixer,
    "delta": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "lightning": LightningAttention,
    "conv": GatedConvolution,
    "hybrid": partial(HybridMixer, attention=_build_attention),
    **dict.fromkeys(COMPRESSED_MIXERS, CompressedAttention),
}
FEEDS: Mapping[FeedForwardKind, LayerFactory] = {"mlp": _build_feed_forward, "moe": _build_experts}


def find_layer_factory(build: LayerBuilder, kind: MixerKind | FeedForwardKind) -> LayerFactory:
    """Return the constructor of a mixer or feed-forward block of mega or an extension; a ConfigError if it is not loaded.

    Raises:
        ConfigError: if its extension is not loaded.
    """
    factories: dict[str, LayerFactory] = {**MIXERS, **FEEDS, **build.blocks}
    if kind not in factories:
        raise ConfigError(
            f"the layer kind {kind} requires the code of its extension",
            hint="name it in extensions of run.yaml, or with --extension",
        )
    return factories[kind]


class ResidualBranch(nn.Module):
    """Residual branch norm(work(norm x)) of a transformer layer.
    The module `work` is a token mixer, a cross attention or a feed-forward block; either norm may be missing.
    """

    def __init__(self, build: LayerBuilder, layer: int, name: str, kind: LayerFactory, before: str, after: str) -> None:
        super().__init__()
        self.layer, self.saved, self.name = layer, build.saved, name
        recomputed: tuple[Literal["mlp", "moe"], ...] = ("mlp", "moe")
        self.feed = next((feed for feed in recomputed if feed == name), None)
        self.dropout, self.multiplier = build.config.residual_dropout, build.config.residual_multiplier
        self.before = build.build_residual_norm(f"model.layers.{layer}.{before}_layernorm") if before else None
        self.work = kind(build, layer)
        self.after = build.build_residual_norm(f"model.layers.{layer}.{after}_layernorm") if after else None

    def add_and_norm(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream x + y (x without y), and the branch's input: the stream, normed if pre-norm."""
        if self.before is None:
            x = x if y is None else x + y
            return x, x
        x, normed = self.before.add_and_norm(x, y)
        self.saved.drop_output("norm", normed, self.before, x)
        return x, normed

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the branch's output for the normed stream x, with dropout and multiplier, to be added to the residual stream.
        x is [B, S or S/T, D] (S/T under sequence parallelism over T ranks).
        """
        y: Tensor = (
            self.saved.checkpoint_module(self.feed, self.work, x, context) if self.feed else self.work(x, context)
        )
        y = y if self.after is None else self.after(y)
        if context.dropout is not None:
            y = context.dropout.drop_residual(y, self.dropout, self.layer, "mlp" if self.feed else self.name)
        return y if self.multiplier == 1 else y * self.multiplier


class TransformerLayer(nn.Module):
    """Transformer layer, by default pre-norm: x + mixer(norm x), then x + feed_forward(norm x), if it has both.

    With `norm_position` "post" the addends are norm(mixer x) and norm(feed x) (arXiv:2501.00656), with "both"
    norm(mixer(norm x)) and norm(feed(norm x)) (arXiv:2408.00118). With `parallel_residual` the feed-forward has the mixer's
    input (arXiv:2204.06745), with `shared_norm` after the same norm. Addends are multiplied by `residual_multiplier`.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        build = build.builder_for_layer(layer)
        (mixer, feed), config = build.config.get_layer_kind(layer), build.config
        before, after = config.norm_position in ("pre", "both", "stream"), config.norm_position in ("post", "both")
        self.parallel, self.shared_norm = config.parallel_residual, config.shared_norm
        self.mixer = self.feed = None
        self.cross: ResidualBranch | None = None  # set by `build_transformer_layer`
        if mixer:
            first = "input" if before and (layer > 0 or config.first_norm) else ""
            self.mixer = ResidualBranch(
                build, layer, "attention", find_layer_factory(build, mixer), first, "post_attention" if after else ""
            )
        if feed:
            own_norm = before and config.has_norm_before_feed(feed)
            second = ("pre_feedforward" if after else "post_attention") if own_norm else ""
            name = feed if feed in FEEDS else "mlp"  # an extension's block is recomputed as the one it replaces
            self.feed = ResidualBranch(
                build, layer, name, find_layer_factory(build, feed), second, "post_feedforward" if after else ""
            )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream [B, S or S/T, D] after this layer; S/T under sequence parallelism over T ranks."""
        if self.parallel:
            return self._forward_parallel(x, context)
        y = None
        for branch in (self.mixer, self.cross, self.feed):
            if branch is not None:
                x, normed = branch.add_and_norm(x, y)
                y = branch(normed, context)
        return x if y is None else x + y

    def _forward_parallel(self, x: Tensor, context: ForwardContext) -> Tensor:
        added: list[Tensor] = []
        for branch in filter(None, (self.mixer, self.cross, self.feed)):
            if not (added and self.shared_norm):
                x, normed = branch.add_and_norm(x)
            added.append(branch(normed, context))
        return sum(added, start=x)


class GemmaLayer(TransformerLayer):
    """Transformer layer with a per-layer input and a stored scalar, as in Gemma 4; either may be missing.
    The input is added to the layer's output, and the scalar, which is not trained, multiplies the sum.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        size, self.scalar = build.config.per_layer_input_size, None
        self.gate = LayerInputGate(build.builder_for_layer(layer), layer, size) if size else None
        if build.config.layer_scale:
            name = f"model.layers.{layer}.layer_scalar"
            wide = torch.promote_types(build.dtype, torch.float32)
            self.scalar = NonTrainableBuffer(name, (1,), dtype=wide, device=build.device, fill=1.0)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream [B, S or S/T, D] after this layer; S/T under sequence parallelism over T ranks."""
        x = super().forward(x, context)
        x = x if self.gate is None else x + self.gate(x, context)
        return x if self.scalar is None else x * self.scalar.values.to(x.dtype)


class AltUpLayer(GemmaLayer):
    """Layer of Gemma 3n on n residual streams X: with AltUp, a residual of low rank and an input of its own, P.

    x = X_a of predict(X)    h = (x + mixer(norm x) + laurel(norm x)) / sqrt(2)    X = correct(predict(X), h + feed(norm h))
    X_i = X_i + gate(scale X_a, P) for all streams i but the first
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        self.altup, self.laurel = AlternatingUpdate(build, layer), LowRankResidual(build, layer)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the streams [B, S or S/T, n D] (S/T under sequence parallelism over T ranks) after this layer."""
        assert self.mixer is not None
        assert self.feed is not None
        assert self.gate is not None
        active, predicted = self.altup.active, self.altup.predict(x)
        one = predicted[..., active, :].contiguous()
        normed = self.mixer.add_and_norm(one)[1]
        h = (one + self.mixer(normed, context) + self.laurel(normed)) * 2**-0.5
        streams = self.altup.correct(predicted, h + self.feed(self.feed.add_and_norm(h)[1], context))
        added = self.gate(streams[..., active, :] * self.altup.scale, context)
        others = streams[..., 1:, :] + added.unsqueeze(-2)
        return torch.cat([streams[..., 0, :], others.flatten(-2)], -1)


class HyperConnectedLayer(TransformerLayer):
    """Layer on several residual streams, which learned weights mix around each branch (arXiv:2512.24880).
    The first layer of a model gets embeddings, which are each stream at first.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        assert build.config.hyper_connections is not None
        self.streams, self.width = build.config.hyper_connections.streams, build.config.hidden_size
        names = {"attn_hc": self.mixer, "ffn_hc": self.feed}
        self.connections = nn.ModuleList(
            HyperConnection(build, f"model.layers.{layer}.{name}") for name, branch in names.items() if branch
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the n residual streams after this layer, [B, S or S/T, n D].
        The input has the streams, or in the first layer the embeddings [B, S or S/T, D].
        """
        streams = torch.unflatten(x, -1, (-1, self.width)).expand(*x.shape[:-1], self.streams, -1)
        branches = [branch for branch in (self.mixer, self.feed) if branch is not None]
        for branch, connection in zip(branches, self.connections, strict=True):
            collapsed, post, comb = connection(streams)
            streams = expand_streams(streams, branch(branch.add_and_norm(collapsed)[1], context), post, comb)
        return streams.flatten(-2)


class ShortcutLayer(TransformerLayer):
    """Layer of a model whose experts' output is added after the next layer (arXiv:2404.05019).
    Between a layer with experts and the next one the stream is [hidden states | output of the experts], of width 2 D. Between
    pipeline stages it always has this width, with zeros where there is no such output.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        self.width, self.defers = build.config.hidden_size, build.config.has_shortcut(layer)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream after this layer: [B, S or S/T, D], or of width 2 D after a layer with experts.
        S/T is the length under sequence parallelism over T ranks.
        """
        x, deferred = x[..., : self.width].contiguous(), x[..., self.width :]
        if not self.defers:
            x = super().forward(x, context)
            return x + deferred if deferred.shape[-1] else x
        assert self.mixer is not None
        assert self.feed is not None
        x, normed = self.mixer.add_and_norm(x)
        x, normed = self.feed.add_and_norm(x, self.mixer(normed, context))
        y: Tensor = self.feed(normed, context)
        return F.pad(x, (0, self.width)) + y


class PostNormLayer(TransformerLayer):
    """Post-norm layer: x = norm(x + mixer x), then x = norm(x + feed_forward x), as in BERT (arXiv:1706.03762)."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        cross = ["cross_attn"] if build.config.has_cross_attention(layer) else []
        names = (*cross, "post_attention", "post_feedforward")
        self.norms = nn.ModuleList(
            build.build_residual_norm(f"model.layers.{layer}.{name}_layernorm") for name in names
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream [B, S or S/T, D] after this layer; S/T under sequence parallelism over T ranks."""
        branches = [branch for branch in (self.mixer, self.cross, self.feed) if branch is not None]
        for branch, norm in zip(branches, self.norms, strict=True):
            assert isinstance(norm, Norm)
            x = norm.add_and_norm(x, branch(x, context))[1]
        return x


class NormedResidualLayer(TransformerLayer):
    """Layer whose residual is the normalised stream: x = a norm(x) + b f(norm x), for mixer and feed-forward.

    The factors a and b are `residual_factors`, by the kind of mixer or feed-forward block, as in MiniMax-Text-01
    (arXiv:2501.08313).
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        factors = build.config.residual_factors
        self.factors = [factors.get(kind, (1.0, 1.0)) for kind in build.config.get_layer_kind(layer) if kind]

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream [B, S or S/T, D] after this layer; S/T under sequence parallelism over T ranks."""
        branches = [branch for branch in (self.mixer, self.feed) if branch is not None]
        for branch, (alpha, beta) in zip(branches, self.factors, strict=True):
            x = branch.add_and_norm(x)[1]
            x = alpha * x + beta * branch(x, context)
        return x


def build_transformer_layer(build: LayerBuilder, layer: int) -> TransformerLayer:
    """Build the transformer layer number `layer`, of the class and with the blocks that the configuration names."""
    post_norm = build.config.norm_position == "sum"
    layers = {"sum": PostNormLayer, "stream": NormedResidualLayer}
    several = HyperConnectedLayer if build.config.hyper_connections else TransformerLayer
    several = ShortcutLayer if build.config.has_shortcuts else several
    usual = GemmaLayer if build.config.layer_scale or build.config.per_layer_input_size else several
    usual = AltUpLayer if build.config.altup else usual
    block = layers.get(build.config.norm_position, usual)(build, layer)
    if build.config.has_cross_attention(layer):
        before = "" if post_norm else "cross_attn"
        block.cross = ResidualBranch(build.builder_for_layer(layer), layer, "cross", CrossAttention, before, "")
    return block

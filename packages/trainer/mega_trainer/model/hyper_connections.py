"""Manifold-constrained hyper-connections (mHC, arXiv:2512.24880), in DeepSeek-V4's and transformers' conventions.

The residual is n streams per token, X [n, D]. Around each mixer and feed-forward block f three weights come from X:

    w = norm(vec X) F^T    pre = sigmoid(a_0 w_pre + b_pre) + eps    post = 2 sigmoid(a_1 w_post + b_post)
    C = Sinkhorn(softmax(a_2 w_comb + b_comb) + eps)   [n, n], rows and columns sum to one
    X = C^T X + post f(pre^T X)

The weights are computed in at least fp32. They are whole on every tensor rank.

Legend: B batch, S sequence, T tensor ranks, n streams, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.model.alternating_updates import MergedStreamsNorm
from mega_trainer.model.layer_builder import LayerBuilder


def sinkhorn_knopp(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Return positive matrices [.., n, n] scaled so that columns sum to one, and rows nearly so."""
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class HyperConnection(nn.Module):
    """Learned weights that mix the residual streams into a block's input, and its output back into the streams."""

    def __init__(self, build: LayerBuilder, name: str) -> None:
        super().__init__()
        config, hyper = build.config, build.config.hyper_connections
        assert hyper is not None
        n = hyper.streams
        self.hyper, self.norm_eps = hyper, config.norm_eps
        self.fn = build.build_replicated(f"{name}.fn", ((2 + n) * n, n * config.hidden_size), std=config.init_std)
        self.base = build.build_replicated(f"{name}.base", ((2 + n) * n,))
        self.scale = build.build_replicated(f"{name}.scale", (3,), fill=1.0)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's input [B, S, D] mixed from streams [B, S, n, D], and the weights of its output.
        The weights are post [B, S, n] and C [B, S, n, n], as for `expand_streams`.
        """
        n, eps = self.hyper.streams, self.hyper.eps
        mixed = _project_streams(streams, self.fn, self.norm_eps)
        parts = zip(*(torch.split(upcast_to_fp32(each), [n, n, n * n], -1) for each in (mixed, self.base)), strict=True)
        pre, post, comb = (w * scale + b for (w, b), scale in zip(parts, upcast_to_fp32(self.scale), strict=True))
        comb = sinkhorn_knopp(comb.unflatten(-1, (n, n)).softmax(-1) + eps, self.hyper.iterations, eps)
        return collapse_streams(streams, pre.sigmoid() + eps), 2 * post.sigmoid(), comb


class CollapsedNorm(nn.Module):
    """Final norm of the weighted sum of all residual streams (hyper-connections)."""

    def __init__(self, build: LayerBuilder, norm: nn.Module) -> None:
        super().__init__()
        config, hyper = build.config, build.config.hyper_connections
        assert hyper is not None
        n = hyper.streams
        self.hyper, self.norm_eps, self.norm = hyper, config.norm_eps, norm
        self.fn = build.build_replicated("model.hc_head.hc_fn", (n, n * config.hidden_size), std=config.init_std)
        self.base = build.build_replicated("model.hc_head.hc_base", (n,))
        self.scale = build.build_replicated("model.hc_head.hc_scale", (1,), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm [B, S or S/T, D] of the weighted sum of residual streams [B, S or S/T, n D]."""
        streams = torch.unflatten(x, -1, (self.hyper.streams, -1))
        mixed = _project_streams(streams, self.fn, self.norm_eps)
        pre = torch.sigmoid(mixed * upcast_to_fp32(self.scale) + upcast_to_fp32(self.base)) + self.hyper.eps
        y: Tensor = self.norm(collapse_streams(streams, pre))
        return y


def build_final_norm(build: LayerBuilder) -> nn.Module:
    """Build the norm before the output head, which first merges several residual streams, if any; identity after post-norm."""
    if build.config.norm_position == "sum":
        return nn.Identity()
    norm = build.build_residual_norm("model.norm")
    if build.config.altup:
        return MergedStreamsNorm(build, norm)
    return CollapsedNorm(build, norm) if build.config.hyper_connections else norm


def collapse_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [B, S, D] of streams [B, S, n, D], with weights [B, S, n]."""
    return (weights.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def expand_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams C^T X + post y [B, S, n, D] after a block with output y [B, S, D]."""
    kept = torch.matmul(comb.to(streams.dtype).transpose(-1, -2), streams)
    return post.to(y.dtype).unsqueeze(-1) * y.unsqueeze(-2) + kept


def _project_streams(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(vec X) F^T without a norm weight, in at least fp32."""
    flat = upcast_to_fp32(streams.flatten(-2))
    return F.linear(F.rms_norm(flat, flat.shape[-1:], eps=eps), upcast_to_fp32(weight))

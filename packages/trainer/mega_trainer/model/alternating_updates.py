"""Alternating updates (AltUp, arXiv:2301.13310) with residuals of low rank (LAuReL, arXiv:2411.07501), as in Gemma 3n.

The residual is n streams per token, X [n, D]. A layer computes stream a, and updates all with coefficients from one stream:

    m(x) = tanh(W_m norm(x) / D)    [n]
    predict: X = X + C X, with C [n, n] = W_p m(X_a)
    correct: X_i = X_i + (1 + W_c m(y))_i (y - X_a), with the layer's output y

The streams are at first the embedding x and n - 1 projections of it, each scaled to the root mean square of x. At the end
they are projected and scaled likewise, and their mean is normalised. All weights are whole on every tensor rank, and the
coefficients are computed in at least fp32.

Legend: B batch, S sequence, T tensor ranks, n streams, D model width, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.model.layer_builder import LayerBuilder

LEAST_SCALE = 1e-5**0.5  # least root mean square that a projected stream is divided by


class AlternatingUpdate(nn.Module):
    """AltUp of Gemma 3n: prediction of all residual streams before a layer, and their correction by its output.

    In training, weights of coefficients count as clipped to `coefficient_clip`. The factor on the active stream before the
    gate of the layer's input, `scale` [D], is 1 at first: at 0, as in transformers, the gate's weights have no gradient.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, altup, name = build.config, build.config.altup, f"model.layers.{layer}.altup"
        assert altup is not None
        n, std = altup.streams, config.init_std
        self.streams, self.active, self.clip, self.linear = (
            n,
            altup.active,
            altup.coefficient_clip,
            build.unsharded_linear,
        )
        self.scale = build.build_replicated(f"{name}.correct_output_scale", (config.hidden_size,), fill=1.0)
        self.correction = build.build_replicated(f"{name}.correction_coefs.weight", (n, n), std=std)
        self.prediction = build.build_replicated(f"{name}.prediction_coefs.weight", (n * n, n), std=std)
        self.router = build.build_replicated(f"{name}.modality_router.weight", (n, config.hidden_size), std=std)
        self.norm = build.build_residual_norm(f"{name}.router_norm")

    def predict(self, x: Tensor) -> Tensor:
        """Return the predicted residual streams [B, S or S/T, n, D] before a layer, from its input streams [.., n D]."""
        streams = torch.unflatten(x, -1, (self.streams, -1))
        coefficients = self._coefficients(streams[..., self.active, :], self.prediction)
        mixing = torch.unflatten(coefficients, -1, (self.streams, -1))
        return streams + torch.matmul(mixing.to(x.dtype), streams)

    def correct(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Return the residual streams [B, S or S/T, n, D]: `predicted`, corrected by the layer's output y [B, S or S/T, D]."""
        factors = 1 + self._coefficients(y, self.correction)
        change = y - predicted[..., self.active, :]
        return predicted + factors.to(y.dtype).unsqueeze(-1) * change.unsqueeze(-2)

    def _coefficients(self, x: Tensor, weight: Tensor) -> Tensor:
        routed = upcast_to_fp32(self.linear(self.norm(x.contiguous()) / x.shape[-1], self.router))
        weight = upcast_to_fp32(weight)
        return F.linear(routed.tanh(), weight.clamp(-self.clip, self.clip) if self.training else weight)


class LowRankResidual(nn.Module):
    """Learned residual of low rank, x + norm(R L x) with L [r, D] and R [D, r] (LAuReL)."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, altup, name = build.config, build.config.altup, f"model.layers.{layer}.laurel"
        assert altup is not None
        shape, std = (altup.laurel_rank, config.hidden_size), config.init_std
        self.linear = build.unsharded_linear
        self.left = build.build_replicated(f"{name}.linear_left.weight", shape, std=std)
        self.right = build.build_replicated(f"{name}.linear_right.weight", shape[::-1], std=build.residual_init_std)
        self.norm = build.build_residual_norm(f"{name}.post_laurel_norm")

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised stream x [B, S or S/T, D] plus its residual of low rank."""
        y: Tensor = self.norm(self.linear(self.linear(x, self.left), self.right))
        return x + y


class _StreamProjections(nn.Module):
    """Projections [D, D] of n - 1 vectors, each scaled to the root mean square of another vector."""

    def __init__(self, build: LayerBuilder, name: str) -> None:
        super().__init__()
        config = build.config
        assert config.altup is not None
        shape, names = (config.hidden_size,) * 2, [f"model.{name}.{i}.weight" for i in range(config.altup.streams - 1)]
        self.linear = build.unsharded_linear
        self.weights = nn.ParameterList(build.build_replicated(each, shape, std=config.init_std) for each in names)

    def project(self, first: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        """Return `first` and the scaled projections of `others`, all [B, S or S/T, D]."""
        target = _root_mean_square(first)
        projected = [self.linear(x, weight) for x, weight in zip(others, self.weights, strict=True)]
        scales = [target / _root_mean_square(y).clamp(min=LEAST_SCALE) for y in projected]
        return [first, *((y * scale).to(y.dtype) for y, scale in zip(projected, scales, strict=True))]


class StreamExpansion(_StreamProjections):
    """Residual streams before the first layer, from the embedded tokens."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__(build, "altup_projections")

    def forward(self, x: Tensor) -> Tensor:
        """Return the n residual streams [B, S or S/T, n D] of embedded tokens [B, S or S/T, D]."""
        return torch.cat(self.project(x, [x] * len(self.weights)), -1)


class MergedStreamsNorm(_StreamProjections):
    """Final norm of the mean of all residual streams, projected and scaled."""

    def __init__(self, build: LayerBuilder, norm: nn.Module) -> None:
        super().__init__(build, "altup_unembed_projections")
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm [B, S or S/T, D] of the mean of residual streams [B, S or S/T, n D], projected and scaled."""
        first, *others = (stream.contiguous() for stream in x.chunk(len(self.weights) + 1, -1))
        y: Tensor = self.norm(torch.stack(self.project(first, others)).mean(0))
        return y


def _root_mean_square(x: Tensor) -> Tensor:
    """Return the root mean square [.., 1] of x [.., D] in at least fp32, whose gradient is 0 for x = 0."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return length / math.sqrt(x.shape[-1])

"""Small functions of a model as an extension: a norm, a gated activation, a position encoding and a score modification."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_trainer.extend import (
    ActivationFunction,
    Extension,
    NoOptions,
    NormFunction,
    PositionFunction,
    ScoreFunction,
    StrictConfig,
)


def normalize_by_mean_size(x: Tensor, weight: Tensor | None, eps: float, *, options: NoOptions) -> Tensor:
    """Divide x [.., D] by its mean absolute value, and multiply by the weight [D]."""
    y = x / (x.abs().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


class ReGluOptions(StrictConfig):
    """Options of the gated activation: the power of the gate."""

    power: float = 2.0


def apply_relu_gate(gate: Tensor, up: Tensor, *, options: ReGluOptions) -> Tensor:
    """Multiply `up` by a power of relu(gate)."""
    return gate.relu().pow(options.power) * up


class PhaseOptions(StrictConfig):
    """Options of the position encoding: the longest wavelength in tokens, divided by 2 pi."""

    longest: float = 1000.0


def rotate_neighbors(x: Tensor, positions: Tensor, *, options: PhaseOptions) -> Tensor:
    """Rotate pairs of neighboring elements of each head of x [B, S, H, d] by angles that grow with the position."""
    pairs = x.shape[-1] // 2
    frequencies = options.longest ** (-torch.arange(pairs, device=x.device, dtype=x.dtype) / pairs)
    angles = positions[..., None, None].to(x.dtype) * frequencies
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class DistanceOptions(StrictConfig):
    """Options of the score modification: the slope of the first head."""

    slope: float = 0.5


def penalize_distance(
    score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, *, options: DistanceOptions
) -> Tensor:
    """Subtract a slope times the logarithm of the distance, as KERPLE (arXiv:2205.09921); later heads have smaller slopes."""
    return score - options.slope / (1 + head) * torch.log1p((query - key).abs().to(score.dtype))


EXTENSION = Extension(
    name="model-functions",
    version="1.0",
    api=1,
    norms={"mean_size": NormFunction(normalize_by_mean_size)},
    activations={"relu_gate": ActivationFunction(apply_relu_gate, gated=True, options=ReGluOptions)},
    positions={"neighbors": PositionFunction(rotate_neighbors, options=PhaseOptions)},
    attention_scores={"log_distance": ScoreFunction(penalize_distance, options=DistanceOptions)},
)

"""What stands between the projections of a feed-forward block, dense or of an expert."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.kernels.base import Kernels


def activate(x: Tensor, weights: Tensor | None = None, *, config: ModelConfig, kernels: Kernels) -> Tensor:
    """[.., 2F] (gate, then up) -> [.., F] for a gated activation, [.., F] -> [.., F] for the others.

    Each row times its weight, where there are `weights` [..].
    """
    if config.gated:
        return kernels.gated(x, config.activation, config.activation_limit, weights)
    y = plain(x, config.activation)
    return y if weights is None else y * weights.to(y.dtype).unsqueeze(-1)


def plain(x: Tensor, activation: str) -> Tensor:
    """One that has no gate, element by element."""
    if activation == "relu2":  # arXiv:2109.08668
        return F.relu(x).square()
    if activation == "quick_gelu":  # CLIP's
        return x * torch.sigmoid(1.702 * x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def opened(y: Tensor, gate: Tensor) -> Tensor:
    """y as far as its gate of the same shape is open (arXiv:2505.06708)."""
    return y * torch.sigmoid(gate)

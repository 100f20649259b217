"""What stands between the projections of a feed-forward block, dense or of an expert."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.kernels.base import Kernels


def activate(x: Tensor, config: ModelConfig, kernels: Kernels) -> Tensor:
    """[.., 2F] (gate, then up) -> [.., F] for a gated activation, [.., F] -> [.., F] for the others."""
    match config.activation:
        case "swiglu" | "geglu":
            return kernels.gated(x, config.activation, config.activation_limit)
        case "relu2":  # arXiv:2109.08668
            return F.relu(x).square()
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)


def activate_weighted(x: Tensor, weights: Tensor, config: ModelConfig, kernels: Kernels) -> Tensor:
    """`activate` of rows [M, ..], times the weight [M] of each."""
    return activate(x, config, kernels) * weights.to(x.dtype).unsqueeze(-1)

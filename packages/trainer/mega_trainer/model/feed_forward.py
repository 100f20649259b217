"""Feed-forward block (MLP), its width split over the tensor ranks, and activation functions.

Legend: B batch, S sequence, D model width, F feed-forward width, T tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.tensor_parallel import SplitHeads, sum_input_gradient, sum_partial_results

XIELU_BETA = 0.5  # slope at zero
# Inverse softplus of the initial slopes 0.8, the negative one without the slope at zero.
XIELU_START = {"p": math.log(math.expm1(0.8)), "n": math.log(math.expm1(0.8 - XIELU_BETA))}


def apply_activation(x: Tensor, weights: Tensor | None = None, *, config: ModelConfig, kernels: Kernels) -> Tensor:
    """Apply the model's feed-forward activation, which halves the width if gated, and multiply rows by `weights` if given.
    A gated activation maps [.., 2F] (gate, then up) to [.., F], others map [.., F] to [.., F]. Each row is multiplied
    by its `weights` [..], if given.
    """
    if config.has_gated_mlp:
        return kernels.gated_activation(x, config.activation, config.activation_limit, weights)
    y = apply_ungated_activation(x, config.activation)
    return y if weights is None else y * weights.to(y.dtype).unsqueeze(-1)


def make_activation(build: LayerBuilder) -> Callable[..., Tensor]:
    """Return the model's feed-forward activation, with the arguments of `apply_activation`."""
    config, added = build.config, build.functions.get("activation")
    if added is None:
        return partial(apply_activation, config=config, kernels=build.kernels)
    return partial(_apply_extension_activation, added, gated=config.has_gated_mlp)


def _apply_extension_activation(
    activate: Callable[..., Tensor], x: Tensor, weights: Tensor | None = None, *, gated: bool
) -> Tensor:
    y = (activate(*x.chunk(2, -1)) if gated else activate(x)).to(x.dtype)
    return y if weights is None else y * weights.to(y.dtype).unsqueeze(-1)


def apply_ungated_activation(x: Tensor, activation: str) -> Tensor:
    """Apply an activation function (such as gelu or relu2), without a gate, element by element.
    `activation` is its name.
    """
    if activation == "relu2":  # arXiv:2109.08668
        return F.relu(x).square()
    if activation == "quick_gelu":  # CLIP's
        return x * torch.sigmoid(1.702 * x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def apply_xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Apply xIELU (arXiv:2411.13010) to x [.., F], with slopes of positive and negative inputs [1] as softplus^-1."""
    up, down = F.softplus(positive), XIELU_BETA + F.softplus(negative)
    below = (torch.expm1(x.clamp(max=-1e-6)) - x) * down
    return torch.where(x > 0, up * x * x, below) + XIELU_BETA * x


def apply_sigmoid_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Multiply y by the sigmoid of a gate of the same shape (arXiv:2505.06708)."""
    return y * torch.sigmoid(gate)


class FeedForward(nn.Module):
    """Feed-forward layer: MLP down(act(gate x) * up x), or down(act(up x)) without a gate.

    Args:
        build: builder of the model.
        name: prefix of the tensors.
        width: F.
    """

    def __init__(self, build: LayerBuilder, name: str, width: int) -> None:
        super().__init__()
        config = build.config
        parts = ["gate_proj", "up_proj"] if config.has_gated_mlp else ["up_proj"]
        self.config, self.saved = config, build.saved
        self.activate: Callable[..., Tensor] = make_activation(build)
        self.up = build.build_column_linear(
            [SplitHeads(f"{name}.{part}", width) for part in parts], bias=config.mlp_bias
        )
        self.down = build.build_row_linear(f"{name}.down_proj", width, bias=config.mlp_bias or config.mlp_out_bias)
        self.norm = build.build_split_norm(f"{name}.down_norm", width) if config.output_input_norms else None
        self.slopes = nn.ParameterList()
        if config.activation == "xielu":
            # partial_grad: a rank's gradient is only from its own part of the width
            slope = partial(build.build_replicated, shape=(1,), partial_grad=True)
            self.slopes.extend(slope(f"{name}.act_fn.alpha_{sign}", fill=start) for sign, start in XIELU_START.items())
            self.activate = apply_xielu

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """Map hidden states to the feed-forward block's output of an equal shape.
        The shape is [B, S or S/T, D] (S/T under sequence parallelism over T ranks). Of the context only the dropout is
        used, for LoRA adapters.
        """
        dropout = None if context is None else context.dropout
        up = self.up(x, dropout)
        h = self.saved.recompute_output("activation", self.activate, up, *self.activation_inputs(up))
        y: Tensor = self.down(h if self.norm is None else self.norm(h.unsqueeze(-2)).squeeze(-2), dropout)
        return y

    def activation_inputs(self, up: Tensor) -> Sequence[Tensor]:
        """Return the inputs of the activation in addition to the hidden values `up`."""
        return list(self.slopes)


class SparseFeedForward(FeedForward):
    """Gated MLP whose gate g becomes relu(g - c), with c = mean(g) + z std(g) over the width F of each token.

    For normally distributed gates, z makes `sparsity` of them zero (Gemma 3n). Statistics are in at least fp32, over the F
    gates on all tensor ranks.
    """

    def __init__(self, build: LayerBuilder, name: str, width: int, sparsity: float) -> None:
        super().__init__(build, name, width)
        self.deviations, self.tp = NormalDist().inv_cdf(sparsity), build.groups.tp
        self.activate = partial(_activate_above_cutoff, self.activate)

    def activation_inputs(self, up: Tensor) -> Sequence[Tensor]:
        """Return the cutoff [B, S, 1] of each token's gates, the first half of `up` [B, S, 2 F/T]."""
        gate, wide = up.chunk(2, -1)[0], torch.promote_types(up.dtype, torch.float32)
        mean = gate.mean(-1, keepdim=True, dtype=wide)
        square = torch.linalg.vector_norm(gate, dim=-1, keepdim=True, dtype=wide).square() / gate.shape[-1]
        moments = sum_partial_results(torch.cat([mean, square], -1) / self.tp.size, self.tp, sp=False)
        mean, square = sum_input_gradient(moments, self.tp).chunk(2, -1)
        variance = (square - mean.square()).clamp(min=torch.finfo(wide).tiny)  # without a gradient if all are equal
        return [(mean + self.deviations * variance.sqrt()).to(up.dtype)]


def _activate_above_cutoff(activate: Callable[..., Tensor], gate_up: Tensor, cutoff: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activate(torch.cat([F.relu(gate - cutoff), up], -1))

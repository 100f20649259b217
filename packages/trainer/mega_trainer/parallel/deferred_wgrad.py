"""Deferred weight gradients (wgrad), with which a pipeline can fill its idle time (arXiv:2401.10241).

The backward of Y = X W^T is two GEMMs: dX = dY W, which the previous stage waits for, and dW = dY^T X, which nothing waits
for. A layer with a `DeferredWgradQueue` computes dX in its backward and queues dW with X and dY, its only inputs. Other
gradients (of norms, biases, embeddings, the head) are computed with dX. `run_deferred_wgrads` then runs as a separate
backward: each parameter gets its gradient of a micro-batch once, complete, so gradient hooks work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class DeferredWgrad:
    """Weight gradient (wgrad) whose GEMM runs after the backward, as zero-bubble pipeline schedules need.

    Attributes:
        weight: a parameter, or a tensor made from parameters.
        edge: autograd edge that receives the gradient. It is kept separately, because a weight that recomputation made
            does not keep its graph alive.
        compute_grad: computes the gradient; returns None if it wrote it to the main gradient.
    """

    weight: Tensor
    edge: GradientEdge
    compute_grad: Callable[[], Tensor | None]

    def autograd_root(self) -> Tensor:
        """Return a zero scalar whose backward computes the weight gradient and passes it to the weight."""
        scalar: Tensor = _ComputeInBackward.apply(self.weight, self.compute_grad)  # type: ignore[no-untyped-call]
        return scalar


class DeferredWgradQueue:
    """Queue of the deferred weight gradients of one stage's backward, in the order of the backward."""

    def __init__(self) -> None:
        self._wgrads: list[DeferredWgrad] = []

    def defer_wgrad(self, weight: Tensor, gradient: Callable[[], Tensor | None]) -> None:
        """Queue the function `gradient` that computes the gradient of `weight`, a parameter or a tensor made from
        parameters; called in a backward.
        """
        self._wgrads.append(DeferredWgrad(weight, get_gradient_edge(weight), gradient))

    def take_all_wgrads(self) -> list[DeferredWgrad]:
        """Return all queued weight gradients and empty the queue."""
        wgrads, self._wgrads = self._wgrads, []
        return wgrads


def run_deferred_wgrads(deferred: list[DeferredWgrad], computed: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compute deferred weight gradients and pass them to their parameters, the last layer's first, as a backward would;
    empties `deferred`.

    Args:
        deferred: gradients queued by a backward; emptied, so that each is freed once it is computed.
        computed: parameters and gradients, or parts of gradients, that were computed before.
    """
    # autograd runs the node that was created last first
    scalars = [deferred.pop().autograd_root() for _ in range(len(deferred))]
    roots = [*scalars, *(parameter for parameter, _ in computed)]
    torch.autograd.backward(roots, [*(None for _ in scalars), *(gradient for _, gradient in computed)])


class _ComputeInBackward(Function):
    """Zero in the forward; the backward computes the deferred gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Callable[[], Tensor | None]) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient(), None

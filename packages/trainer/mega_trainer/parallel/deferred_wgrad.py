"""Deferred weight gradients (wgrad), with which a pipeline can fill its idle time (arXiv:2401.10241).

The backward of Y = X W^T is two products: dX = dY W, for which the stage before waits, and dW = dY^T X, for which nobody
does. A layer that is handed a `Deferred` makes the first in its backward and leaves the second there, with X and dY, all
that must be kept for it. Gradients that are no product of that kind (of norms, biases, embeddings, the head) are made
with dX. `run_deferred_wgrads` then runs as one backward of its own: each parameter gets its gradient of a micro-batch once, whole,
and the hooks that take it notice no difference.
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
    """Weight gradient (wgrad) to be computed later.

    Attributes:
        weight: a parameter, or made from some.
        edge: where its gradient goes. The weight itself may be a copy that recomputation made, which does not keep the
            way to the parameter alive.
        compute_grad: computes it; none where it has put it in its place.
    """

    weight: Tensor
    edge: GradientEdge
    compute_grad: Callable[[], Tensor | None]

    def autograd_root(self) -> Tensor:
        """Return a scalar whose backward computes the gradient and passes it to the weight."""
        scalar: Tensor = _ComputeInBackward.apply(self.weight, self.compute_grad)  # type: ignore[no-untyped-call]
        return scalar


class DeferredWgradQueue:
    """Deferred weight gradients of one stage's backward, in the order of the backward."""

    def __init__(self) -> None:
        self._products: list[DeferredWgrad] = []

    def defer_wgrad(self, weight: Tensor, gradient: Callable[[], Tensor | None]) -> None:
        """Queue the gradient of `weight`, a parameter or a tensor made from parameters; called in a backward."""
        self._products.append(DeferredWgrad(weight, get_gradient_edge(weight), gradient))

    def take_all_wgrads(self) -> list[DeferredWgrad]:
        """Return all queued gradients and empty the queue."""
        products, self._products = self._products, []
        return products


def run_deferred_wgrads(deferred: list[DeferredWgrad], computed: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compute gradients and pass them to their parameters, the last layer's first, as a backward would.

    Args:
        deferred: what a backward put off; emptied, so that each is freed once it is computed.
        computed: parameters and their gradients, or parts of them, that were computed before.
    """
    # autograd runs first what was made last
    made = [deferred.pop().autograd_root() for _ in range(len(deferred))]
    roots = [*made, *(parameter for parameter, _ in computed)]
    torch.autograd.backward(roots, [*(None for _ in made), *(gradient for _, gradient in computed)])


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

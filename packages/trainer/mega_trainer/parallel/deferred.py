"""Weight gradients that a backward puts off, so that a pipeline can fill its waits with them (arXiv:2401.10241).

The backward of Y = X W^T is two products: dX = dY W, for which the stage before waits, and dW = dY^T X, for which nobody
does. A layer that is handed a `Deferred` makes the first in its backward and leaves the second there, with X and dY, all
that must be kept for it. Gradients that are no product of that kind (of norms, biases, embeddings, the head) are made
with dX. `deliver` then runs as one backward of its own: each parameter gets its gradient of a micro-batch once, whole,
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
class Product:
    """A weight gradient to be computed.

    Attributes:
        weight: a parameter, or made from some.
        edge: where its gradient goes. The weight itself may be a copy that recomputation made, which does not keep the
            way to the parameter alive.
        gradient: computes it.
    """

    weight: Tensor
    edge: GradientEdge
    gradient: Callable[[], Tensor]

    def root(self) -> Tensor:
        """A scalar whose backward computes the gradient and hands it to the weight."""
        scalar: Tensor = _Computed.apply(self.weight, self.gradient)  # type: ignore[no-untyped-call]
        return scalar


class Deferred:
    """The products of one stage's backward, in the order in which it came to them."""

    def __init__(self) -> None:
        self._products: list[Product] = []

    def put(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Leave the gradient of `weight`, a parameter or made from some, for later; to be called in a backward."""
        self._products.append(Product(weight, get_gradient_edge(weight), gradient))

    def take(self) -> list[Product]:
        """All that was put here; from then on it is the caller's."""
        products, self._products = self._products, []
        return products


def deliver(products: list[Product], known: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compute gradients and give them to their parameters, the last layer's first, as a backward would.

    Args:
        products: what a backward put off; emptied, so that each is freed once it is computed.
        known: parameters and their gradients, or parts of them, that were computed before.
    """
    # autograd runs first what was made last
    made = [products.pop().root() for _ in range(len(products))]
    roots = [*made, *(parameter for parameter, _ in known)]
    torch.autograd.backward(roots, [*(None for _ in made), *(gradient for _, gradient in known)])


class _Computed(Function):
    """Zero; its backward is the product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient(), None

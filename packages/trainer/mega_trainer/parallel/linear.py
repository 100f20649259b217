"""Linear layers: one autograd Function over the three products of a back end, whichever way a layer is split.

    Y  = X W^T + b    `linear`
    dX = dY W         `linear_dx`
    dW = dY^T X       `linear_dw`

Column-parallel layers (arXiv:1909.08053) see all of X on every rank and sum dX over them, beside the product for dW;
under sequence parallelism (arXiv:2205.05198) X is gathered first, in the backward beside the product for dX, and the sum
is a reduce-scatter. The sum of a row-parallel layer's Y is a step of its own: `parallel.tensor.sum_over`.

Where the weight is a parameter with a place for its gradient in a flat buffer, the product for dW is added there, and
autograd gets none. A weight made from several parameters, or a sharded one (ZeRO-3), gets its gradient by autograd.
A back end may prepare factors for two products at once: dY, and a weight that stays for all micro-batches of a step.

Legend: B batch, S sequence, D input width, N output width, T ranks, M rows of experts, G experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from mega_trainer.comm import Group, all_gather, all_reduce, start_all_gather, start_reduce_scatter
from mega_trainer.kernels.base import Factor, Kernels
from mega_trainer.kernels.grouped import Rows
from mega_trainer.parallel.deferred import Deferred
from mega_trainer.parallel.param import MainGrad, PackedWeight, PreparedWeight, keeper_of, main_grad_of

SEQUENCE = 1  # the axis of [B, S, D] that sequence parallelism splits
ALONE = Group("alone")


class Products(Protocol):
    """What `Kernels` offers for linear layers, or what takes its place for some of them."""

    def prepare_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_weight`."""

    def prepare_gradient(self, dy: Tensor) -> Factor:
        """See `Kernels.prepare_gradient`."""

    def linear(self, x: Tensor, weight: Factor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""

    def linear_dx(self, dy: Factor, weight: Factor) -> Tensor:
        """See `Kernels.linear_dx`."""

    def linear_dw(self, dy: Factor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.linear_dw`."""


@dataclass(frozen=True)
class Linear:
    """Y = X W^T + b, differentiable.

    Attributes:
        products: of the back end.
        deferred: takes the product for dW, and the gathering of X for it, where a backward puts them off.
        group: the ranks that each have some rows of W, and all of X.
        sp: X is split over them by the sequence.
    """

    products: Products
    deferred: Deferred | None = None
    group: Group = ALONE
    sp: bool = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[B, S or S/T, D], [N/T, D] and [N/T] -> [B, S, N/T]."""
        if not torch.is_grad_enabled():
            return self.products.linear(self.whole(x), self.factor(weight, keeper_of(weight)), bias)
        y: Tensor = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return y

    def factor(self, weight: Tensor, keeper: PreparedWeight | PackedWeight | None) -> Factor:
        """The weight for a product. It is asked for in each pass, so that nothing holds the numbers of a packed one between them."""
        return weight if keeper is None else keeper.of(weight, self.products.prepare_weight)

    def whole(self, x: Tensor) -> Tensor:
        """All of X: [B, S, D]."""
        return all_gather(x, self.group, SEQUENCE) if self.sp else x

    def weight_gradient(self, x: Tensor, dy: Factor, main: MainGrad | None) -> Tensor | None:
        """dW from all of X and dY, prepared; none where that has been put in its place."""
        if main is None:
            return self.products.linear_dw(dy, x)
        out, add = main()
        self.products.linear_dw(dy, x, out, add=add)
        return None

    def put_off(self, weight: Tensor, x: Tensor, dy: Factor, main: MainGrad | None) -> None:
        """Leave dW for later, with X as the layer keeps it: with `sp` this rank's part."""
        assert self.deferred is not None
        self.deferred.put(weight, lambda: self.weight_gradient(self.whole(x), dy, main))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        # the weight that a backward sees may be a copy, made in recomputation
        ctx.layer, ctx.main, ctx.keeper = layer, main_grad_of(weight), keeper_of(weight)
        return layer.products.linear(layer.whole(x), layer.factor(weight, ctx.keeper), bias)

    # not once_differentiable: its check costs 5 us of host time, a third of what is here
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: Linear = ctx.layer
        trains = ctx.needs_input_grad[1]
        now = layer.deferred is None and trains
        full, gathering = start_all_gather(x, layer.group, SEQUENCE) if layer.sp and now else (x, None)
        dx = work = dweight = None
        given = layer.products.prepare_gradient(dy)
        if ctx.needs_input_grad[0]:
            dx = layer.products.linear_dx(given, layer.factor(weight, ctx.keeper))
            if layer.sp:
                dx, work = start_reduce_scatter(dx, layer.group, SEQUENCE)
            elif layer.group.size > 1:
                work = all_reduce(dx, layer.group, async_op=True)
        if gathering is not None:
            gathering.wait()
        if now:
            dweight = layer.weight_gradient(full, given, ctx.main)
        elif trains:
            layer.put_off(weight, x, given, ctx.main)
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return dx, dweight, dbias, None


@dataclass(frozen=True)
class _Grouped:
    """`Products` of rows with their groups' matrices: X [M, D], W [G, N, D], Y [M, N]."""

    kernels: Kernels
    rows: Rows

    def prepare_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_grouped_weight`."""
        return self.kernels.prepare_grouped_weight(weight)

    def prepare_gradient(self, dy: Tensor) -> Factor:
        """As it is."""
        return dy

    def linear(self, x: Tensor, weight: Factor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.grouped_linear`."""
        assert bias is None
        return self.kernels.grouped_linear(x, weight, self.rows)

    def linear_dx(self, dy: Tensor, weight: Factor) -> Tensor:
        """See `Kernels.grouped_dx`."""
        return self.kernels.grouped_dx(dy, weight, self.rows)

    def linear_dw(self, dy: Tensor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.grouped_dw`."""
        return self.kernels.grouped_dw(dy, x, self.rows, out, add=add)


def grouped_linear(x: Tensor, weight: Tensor, rows: Rows, kernels: Kernels, deferred: Deferred | None = None) -> Tensor:
    """Each row by its group's matrix: [M, D] x [G, N, D] -> [M, N]; a group without rows has a gradient of zero.

    `deferred` takes the product for the weight's gradient, where a backward puts it off.
    """
    return Linear(_Grouped(kernels, rows), deferred)(x, weight)

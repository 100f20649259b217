"""Linear layers: one autograd Function over the three GEMMs of a back end, for column, row and no parallelism.

    Y  = X W^T + b    `linear_forward`
    dX = dY W         `linear_dgrad`
    dW = dY^T X       `linear_wgrad`

Column-parallel layers (arXiv:1909.08053) have all of X on every rank and all-reduce dX, overlapped with the wgrad GEMM.
Under sequence parallelism (arXiv:2205.05198) X is all-gathered before the GEMM, in the backward overlapped with the dgrad
GEMM, and the all-reduce becomes a reduce-scatter. The sum of a row-parallel layer's Y is separate:
`tensor_parallel.sum_partial_results`.

If the weight is a parameter with a main gradient in a flat buffer, dW is written there, and autograd gets None. A weight
made from several parameters, or a sharded one (ZeRO-3), gets its gradient from autograd. A back end may prepare an operand
for two GEMMs at once: dY, and a weight for all micro-batches of a step.

Legend: B batch, S sequence, D input width, N output width, T ranks, M rows of experts, G experts.

Deferred weight gradients (wgrad), with which a pipeline can fill its idle time (arXiv:2401.10241): the backward of Y = X W^T
is two GEMMs, dX = dY W, which the previous stage waits for, and dW = dY^T X, which nothing waits for. A layer with a
`DeferredWgradQueue` computes dX in its backward and queues dW with X and dY, its only inputs. Other gradients (of norms,
biases, embeddings, the head) are computed with dX. `run_deferred_wgrads` then runs as a separate backward: each parameter gets
its gradient of a micro-batch once, complete, so gradient hooks work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mega_trainer.distributed.comm import CommGroup, all_gather, all_reduce, start_all_gather, start_reduce_scatter
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.kernel_interface import GemmOperand, Kernels
from mega_trainer.kernels.leaf_compiler import apply_autograd_function
from mega_trainer.parallel.parameter_info import (
    GemmOperandCache,
    MainGrad,
    QuantizedFrozenWeight,
    get_main_grad_function,
    get_weight_preparer,
)


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
        """Queue a function that computes a weight gradient, in a backward.
        `gradient` is the function; `weight` is a parameter or a tensor made from parameters.
        """
        self._wgrads.append(DeferredWgrad(weight, get_gradient_edge(weight), gradient))

    def take_all_wgrads(self) -> list[DeferredWgrad]:
        """Return all queued weight gradients and empty the queue."""
        wgrads, self._wgrads = self._wgrads, []
        return wgrads


def run_deferred_wgrads(deferred: list[DeferredWgrad], computed: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compute deferred weight gradients, pass them and those in `computed` to their parameters, and empty `deferred`.
    The last layer's gradient is first.

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


SEQUENCE = 1  # the axis of [B, S, D] that sequence parallelism splits
ALONE = CommGroup("alone")


class LinearLayerGemms(Protocol):
    """Interface of the GEMMs of a linear layer: a `Kernels` back end, or a replacement for some of its methods."""

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Prepare the weight W [N, D] (for example quantise it) for the forward and dgrad GEMMs."""

    def prepare_gradient(self, dy: Tensor) -> GemmOperand:
        """Prepare the output gradient dY [.., N] (for example quantise it) for the dgrad and wgrad GEMMs."""

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + b: [.., D] x [N, D] -> [.., N]; not differentiable by itself."""

    def linear_dgrad(self, dy: GemmOperand, weight: GemmOperand) -> Tensor:
        """Return the input gradient dX = dY W: [.., N] x [N, D] -> [.., D]; dY from `prepare_gradient`."""

    def linear_wgrad(self, dy: GemmOperand, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the weight gradient dW = dY^T X [N, D], written, or with `add` added, to `out` if given.
        It is summed over tokens: [.., N] x [.., D] -> [N, D].
        """


@dataclass(frozen=True)
class ParallelLinearFunction:
    """Callable that computes a differentiable linear layer Y = X W^T + b, with X gathered over `group` if `sp`.

    Attributes:
        gemms: GEMMs of the back end.
        deferred: queue for wgrad GEMMs, and the all-gather of X for them, if the pipeline splits backwards.
        group: the ranks that each have some rows of W, and all of X.
        sp: X is split over `group` along the sequence.
    """

    gemms: LinearLayerGemms
    deferred: DeferredWgradQueue | None = None
    group: CommGroup = ALONE
    sp: bool = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return Y [B, S, N/T] for x [B, S or, with `sp`, S/T, D], weight [N/T, D] and bias [N/T] of T tensor ranks."""
        if not torch.is_grad_enabled():
            return self.compute_output(x, self.prepare_weight_operand(weight, get_weight_preparer(weight)), bias)
        y: Tensor = apply_autograd_function(_Linear, x, weight, bias, self)
        return y

    def prepare_weight_operand(
        self, weight: Tensor, preparer: GemmOperandCache | QuantizedFrozenWeight | None
    ) -> GemmOperand:
        """Return a weight as GEMM operand: prepared by `preparer`, or unchanged without one.
        Prepared means, for example, quantised or unpacked.

        Called in each pass, so that the unpacked values of a packed weight are not kept between passes.
        """
        return weight if preparer is None else preparer.gemm_operand(weight, self.gemms.prepare_weight)

    def compute_output(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + b without a gradient, from a weight that `prepare_weight_operand` returned.
        X is gathered with `sp`.
        """
        return self.gemms.linear_forward(self.gather_input(x), weight, bias)

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the input of all tensor ranks, [B, S, D], all-gathered along the sequence with `sp`."""
        return all_gather(x, self.group, SEQUENCE) if self.sp else x

    def compute_wgrad(self, x: Tensor, dy: GemmOperand, main: MainGrad | None) -> Tensor | None:
        """Return a linear layer's weight gradient dW, or with `main` write it to the flat buffer and return None.
        It is computed from the gathered input x and the prepared dY.
        """
        if main is None:
            return self.gemms.linear_wgrad(dy, x)
        out, add = main()
        self.gemms.linear_wgrad(dy, x, out, add=add)
        return None

    def defer_wgrad(self, weight: Tensor, x: Tensor, dy: GemmOperand, main: MainGrad | None) -> None:
        """Queue a linear layer's weight gradient for later; only x's own slice is kept, to be gathered again then."""
        assert self.deferred is not None
        self.deferred.defer_wgrad(weight, lambda: self.compute_wgrad(self.gather_input(x), dy, main))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ParallelLinearFunction) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        # taken here: in the backward, the weight may be a copy made by recomputation
        ctx.layer, ctx.main, ctx.preparer = layer, get_main_grad_function(weight), get_weight_preparer(weight)
        return layer.compute_output(x, layer.prepare_weight_operand(weight, ctx.preparer), bias)

    # not once_differentiable: its check costs 5 us of host time, a third of the rest of this function
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: ParallelLinearFunction = ctx.layer
        trains = ctx.needs_input_grad[1]
        now = layer.deferred is None and trains
        full, gathering = start_all_gather(x, layer.group, SEQUENCE) if layer.sp and now else (x, None)
        dx = work = dweight = None
        grad_operand = layer.gemms.prepare_gradient(dy)
        if ctx.needs_input_grad[0]:
            dx = layer.gemms.linear_dgrad(grad_operand, layer.prepare_weight_operand(weight, ctx.preparer))
            if layer.sp:
                dx, work = start_reduce_scatter(dx, layer.group, SEQUENCE)
            elif layer.group.size > 1:
                work = all_reduce(dx, layer.group, async_op=True)
        if gathering is not None:
            gathering.wait()
        if now:
            dweight = layer.compute_wgrad(full, grad_operand, ctx.main)
        elif trains:
            layer.defer_wgrad(weight, x, grad_operand, ctx.main)
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if work is not None:
            work.wait()
        return dx, dweight, dbias, None


@dataclass(frozen=True)
class _GroupedGemms:
    """`LinearLayerGemms` by grouped GEMMs: X [M, D], W [G, N, D], Y [M, N]."""

    kernels: Kernels
    rows: GroupedRows

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Prepare a stack of expert weights W [G, N, D] for grouped GEMMs.
        See `Kernels.prepare_grouped_weight`.
        """
        return self.kernels.prepare_grouped_weight(weight)

    def prepare_gradient(self, dy: Tensor) -> GemmOperand:
        """Return the output gradient dY unchanged, as grouped GEMMs need no preparation of it."""
        return dy

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Multiply each row of X by its group's (expert's) matrix.
        See `Kernels.grouped_linear`.
        """
        assert bias is None
        return self.kernels.grouped_linear(x, weight, self.rows)

    def linear_dgrad(self, dy: Tensor, weight: GemmOperand) -> Tensor:
        """Return the input gradient of a grouped linear layer.
        See `Kernels.grouped_dgrad`.
        """
        return self.kernels.grouped_dgrad(dy, weight, self.rows)

    def linear_wgrad(self, dy: Tensor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the weight gradient of a grouped linear layer.
        See `Kernels.grouped_wgrad`.
        """
        return self.kernels.grouped_wgrad(dy, x, self.rows, out, add=add)


def apply_grouped_linear(
    x: Tensor, weight: Tensor, rows: GroupedRows, kernels: Kernels, deferred: DeferredWgradQueue | None = None
) -> Tensor:
    """Multiply each row by its group's (expert's) matrix, differentiable: [M, D] x [G, N, D] -> [M, N].

    The weight gradient of a group without rows is zero. `deferred` is as in `ParallelLinearFunction`.
    """
    return ParallelLinearFunction(_GroupedGemms(kernels, rows), deferred)(x, weight)

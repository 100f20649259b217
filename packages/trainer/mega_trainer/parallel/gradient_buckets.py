"""Gradient buckets: gradients that are reduced over the data-parallel ranks together.

A `StepGradientBucket` accumulates the whole gradient over a step and reduces it once (ZeRO-0 and ZeRO-1). In a
`MicroBatchGradientBucket` the whole gradient exists only during a backward; it is reduced after each micro-batch, and only
the sums are kept, in ZeRO-2 only those of this rank's slice (arXiv:1910.02054). So the orders of summation differ:
micro-batches then ranks, or ranks then micro-batches.

The backward of large weights writes the gradient to the bucket itself, by `parameter.main_grad`, in the wgrad GEMM.
Gradients from autograd are added here. The first part of a parameter's gradient overwrites the old values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import ItemsView, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from mega_trainer.distributed.comm import CollectiveWork, CommGroup, all_reduce, reduce_scatter_into
from mega_trainer.kernels.gemm_accumulation import write_or_add_values
from mega_trainer.parallel.parameter_info import get_parameter_info

# Slices are multiples of this, so that every element is updated by vectorised code: scalar code for a remainder rounds
# differently, and an element's value would depend on the start of its slice.
SLICE_ELEMENTS = 64


class GradientBucket(ABC):
    """Bucket of a flat gradient buffer, elements [start, stop), reduced over the data ranks in one collective.

    Args:
        start: first element, in the buffer.
        param_slices: slice of each parameter's gradient in the bucket.
        data: the ranks to reduce over; the bucket is padded so that their slices are equal.
        sharded: keep only the sum of this rank's slice.
        dtype, device: of the gradients.
        reduce_dtype: dtype in which gradients are reduced over the ranks.

    Attributes:
        grads: reduced gradients of the step: of the slice if `sharded`, else of the whole bucket.
    """

    def __init__(
        self,
        start: int,
        param_slices: Mapping[nn.Parameter, slice],
        data: CommGroup,
        *,
        sharded: bool,
        dtype: torch.dtype,
        device: torch.device,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.start, self.param_slices, self.data, self.sharded = start, dict(param_slices), data, sharded
        self._reduce_dtype = dtype if data.size == 1 else reduce_dtype
        unit, self._used = data.size * SLICE_ELEMENTS, max(part.stop for part in param_slices.values())
        self.size = -(-self._used // unit) * unit
        share = self.size // data.size
        self.stop = start + self.size
        self.grads = torch.zeros(share if sharded else self.size, dtype=dtype, device=device)
        self._missing: set[nn.Parameter] = set()  # parameters whose gradient of this backward is incomplete
        self._filled: set[nn.Parameter] = set()  # parameters with a gradient in the whole tensor
        for parameter in (p for p in param_slices if get_parameter_info(p).accumulate_in_place):
            parameter.main_grad = partial(self.grad_destination, parameter)  # type: ignore[attr-defined]

    @abstractmethod
    def begin_step(self) -> None:
        """Discard the reduced gradients of the previous step."""

    @abstractmethod
    def should_reduce(self, last: bool) -> bool:
        """Return whether the next backward ends with a reduction of gradients over the data ranks.
        `last` says that it is the step's last backward.
        """

    def begin_backward(self) -> None:
        """Mark the gradient of every parameter of the bucket as incomplete, before a backward."""
        self._missing = set(self.param_slices)

    def grad_destination(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the bucket's view for a parameter's next gradient, and whether to add or overwrite; call once per gradient."""
        add = parameter in self._filled
        self._filled.add(parameter)
        return self._grad_view(parameter), add

    def accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Move a parameter's gradient from `parameter.grad` to the bucket, and mark it as complete.
        It is complete for this micro-batch.
        """
        if parameter.grad is not None:
            out, add = self.grad_destination(parameter)
            write_or_add_values(out, parameter.grad, add=add)
            parameter.grad = None
        self._missing.discard(parameter)

    @property
    def is_complete(self) -> bool:
        """True if the gradients of all of the bucket's parameters have arrived in this backward."""
        return not self._missing

    @abstractmethod
    def _grad_view(self, parameter: nn.Parameter) -> Tensor:
        """Return the view of a parameter in the whole gradient."""

    @abstractmethod
    def start_reduce(self) -> None:
        """Start the reduction over the data ranks; a missing gradient counts as zero."""

    @abstractmethod
    def wait_for_reduce(self) -> None:
        """Wait until this rank's gradients (`grads`) contain all reductions that were started."""

    def _zero_missing(self, whole: Tensor) -> None:
        for parameter, part in self.param_slices.items():
            if parameter not in self._filled:
                whole[part].zero_()

    def _start_sum(self, whole: Tensor, out: Tensor) -> tuple[CollectiveWork | None, Tensor, Tensor]:
        """Start the reduction of `whole` over the ranks; return the work, its input, and its output.

        The output is `out` (a slice, or `whole` itself) unless the reduction has another dtype.
        """
        if self._reduce_dtype != whole.dtype:
            whole = whole.to(self._reduce_dtype)
            out = torch.empty_like(out, dtype=self._reduce_dtype) if self.sharded else whole
        if self.sharded:
            return reduce_scatter_into(out, whole, self.data, async_op=True), whole, out
        return all_reduce(whole, self.data, async_op=True), whole, out


class StepGradientBucket(GradientBucket):
    """Gradient bucket that reduces over the data ranks once per step (ZeRO-0 and ZeRO-1).
    It accumulates local gradients over a step's micro-batches and reduces them in the last backward.
    """

    def __init__(
        self,
        start: int,
        param_slices: Mapping[nn.Parameter, slice],
        data: CommGroup,
        *,
        sharded: bool,
        dtype: torch.dtype,
        device: torch.device,
        reduce_dtype: torch.dtype,
    ) -> None:
        super().__init__(
            start, param_slices, data, sharded=sharded, dtype=dtype, device=device, reduce_dtype=reduce_dtype
        )
        self._whole = torch.zeros(self.size, dtype=dtype, device=device) if sharded else self.grads
        self._views = {
            parameter: self._whole[part].view(parameter.shape) for parameter, part in self.param_slices.items()
        }
        self._flight: tuple[CollectiveWork | None, Tensor, Tensor] | None = None  # from `_start_sum`

    def begin_step(self) -> None:
        """Let the next gradient of each parameter overwrite the gradient of the previous step."""
        self._filled.clear()

    def should_reduce(self, last: bool) -> bool:
        """Return `last`: only the step's last backward ends with a reduction."""
        return last

    def local_gradients(self) -> ItemsView[nn.Parameter, Tensor]:
        """Return views of each parameter's gradient on this rank, accumulated since `begin_step`, before reduction."""
        self._zero_missing(self._whole)
        return self._views.items()

    def _grad_view(self, parameter: nn.Parameter) -> Tensor:
        return self._views[parameter]

    def start_reduce(self) -> None:
        """Start the reduction of the step's gradients over the data ranks; a missing gradient counts as zero."""
        self._zero_missing(self._whole)
        self._flight = self._start_sum(self._whole, self.grads)

    def wait_for_reduce(self) -> None:
        """Wait for the reduction of the step's gradients over the data ranks, if it was started."""
        if self._flight is None:
            return
        work, _, reduced = self._flight
        if work is not None:
            work.wait()
        if reduced is not self.grads:
            self.grads.copy_(reduced)
        self._flight = None


class MicroBatchGradientBucket(GradientBucket):
    """Gradient bucket that reduces over the data ranks after every micro-batch (ZeRO-2).
    Whole gradients exist only from a backward's first gradient to the end of its reduction.
    """

    _whole: Tensor | None = None
    _flight: tuple[CollectiveWork | None, Tensor, Tensor] | None = None  # from `_start_sum`
    _first = True

    def begin_step(self) -> None:
        """Let the next reduced gradient overwrite the previous step's sum."""
        self._first = True

    def should_reduce(self, last: bool) -> bool:
        """Return True: every backward ends with a reduction."""
        return True

    def _grad_view(self, parameter: nn.Parameter) -> Tensor:
        if self._whole is None:
            self._whole = self.grads.new_empty(self.size)
            self._whole[self._used :].zero_()
        return self._whole[self.param_slices[parameter]].view(parameter.shape)

    def start_reduce(self) -> None:
        """Start the reduction of this micro-batch's gradients over the data ranks; a missing gradient is zero."""
        self.wait_for_reduce()
        whole = self.grads.new_zeros(self.size) if self._whole is None else self._whole
        self._zero_missing(whole)
        self._filled.clear()
        reduced = torch.empty_like(self.grads) if self.sharded else whole
        self._whole, self._flight = None, self._start_sum(whole, reduced)

    def wait_for_reduce(self) -> None:
        """Wait for the reduction of the micro-batch's gradients and add it to the step's sum, `grads`."""
        if self._flight is None:
            return
        work, _, reduced = self._flight
        if work is not None:
            work.wait()
        if self._first:
            self.grads.copy_(reduced)
        else:
            self.grads.add_(reduced)
        self._first, self._flight = False, None

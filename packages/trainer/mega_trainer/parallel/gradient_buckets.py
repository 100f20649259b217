"""Gradient buckets: gradients reduced over the data-parallel ranks together. Two kinds differ in what they keep.

A `StepBucket` keeps the whole gradient for all of a step and sums it over the ranks once (ZeRO-0 and ZeRO-1). The whole
gradient of a `MicroBatchGradientBucket` exists only while a backward fills it; it is summed after each micro-batch, and only the sums
are kept, of this rank's slice alone in ZeRO-2 (arXiv:1910.02054). The kinds add in different orders: over micro-batches
and then ranks, or over ranks and then micro-batches.

A backward puts the gradients of large weights where they belong itself, by `parameter.main_grad`: a product is added there
as it is made. Those that autograd brings are added here. The first of a parameter is written over what was there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import ItemsView, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from mega_trainer.distributed.comm import CollectiveWork, CommGroup, all_reduce, reduce_scatter_into
from mega_trainer.kernels.gemm_accumulation import write_values
from mega_trainer.parallel.parameter_info import get_parameter_info

# Slices are multiples of this. An update in vectors then has no remainder, which would be rounded in another way, so an
# element's new value does not depend on where its slice begins.
SLICE_ELEMENTS = 64


class GradientBucket(ABC):
    """Elements [start, stop) of a flat gradient buffer, reduced over the data ranks together.

    Args:
        start: first element, in the buffer.
        param_slices: where each parameter's gradient lies in the bucket.
        data: the ranks to sum over; the bucket is padded so that their slices are equal.
        sharded: keep the sum of this rank's slice alone.
        dtype, device: of the gradients.
        reduce_dtype: the type they are sent and summed over the ranks in.

    Attributes:
        grads: the sums of the step: of the slice when `sharded`, else of the whole bucket.
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
        unit, self._used = data.size * SLICE_ELEMENTS, max(place.stop for place in param_slices.values())
        self.size = -(-self._used // unit) * unit
        share = self.size // data.size
        self.stop = start + self.size
        self.grads = torch.zeros(share if sharded else self.size, dtype=dtype, device=device)
        self._owed: set[nn.Parameter] = set()
        self._filled: set[nn.Parameter] = set()  # whose gradients so far are in the whole one
        for parameter in (p for p in param_slices if get_parameter_info(p).accumulate_in_place):
            parameter.main_grad = partial(self.grad_destination, parameter)  # type: ignore[attr-defined]

    @abstractmethod
    def begin_step(self) -> None:
        """Discard the sums of the previous step."""

    @abstractmethod
    def should_reduce(self, last: bool) -> bool:
        """Return whether the next backward, the step's last or not, ends with a sum over the ranks."""

    def begin_backward(self) -> None:
        """Expect a gradient of every parameter."""
        self._owed = set(self.param_slices)

    def grad_destination(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the view for the next part of a parameter's gradient, and whether to add to it: see `MainGrad`."""
        add = parameter in self._filled
        self._filled.add(parameter)
        return self._grad_view(parameter), add

    def accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Add the gradient that autograd holds for a parameter and clear it there; the gradient of this micro-batch is
        then complete.
        """
        if parameter.grad is not None:
            out, add = self.grad_destination(parameter)
            write_values(out, parameter.grad, add=add)
            parameter.grad = None
        self._owed.discard(parameter)

    @property
    def is_complete(self) -> bool:
        """True if all gradients of this backward have arrived."""
        return not self._owed

    @abstractmethod
    def _grad_view(self, parameter: nn.Parameter) -> Tensor:
        """Return the view of a parameter in the whole gradient."""

    @abstractmethod
    def start_reduce(self) -> None:
        """Start the sum over the ranks; a missing gradient counts as zero."""

    @abstractmethod
    def wait_for_reduce(self) -> None:
        """Wait until `grads` has all sums that were started."""

    def _zero_missing(self, whole: Tensor) -> None:
        for parameter, place in self.param_slices.items():
            if parameter not in self._filled:
                whole[place].zero_()

    def _start_sum(self, whole: Tensor, out: Tensor) -> tuple[CollectiveWork | None, Tensor, Tensor]:
        """Start the sum of `whole` over the ranks; return the work, its input, and its output.

        That is `out`, a slice or `whole` itself, unless another type is sent.
        """
        if self._reduce_dtype != whole.dtype:
            whole = whole.to(self._reduce_dtype)
            out = torch.empty_like(out, dtype=self._reduce_dtype) if self.sharded else whole
        if self.sharded:
            return reduce_scatter_into(out, whole, self.data, async_op=True), whole, out
        return all_reduce(whole, self.data, async_op=True), whole, out


class StepGradientBucket(GradientBucket):
    """Gradient bucket that keeps the whole gradient over the micro-batches; the last backward starts the one sum."""

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
            parameter: self._whole[place].view(parameter.shape) for parameter, place in self.param_slices.items()
        }
        self._flight: tuple[CollectiveWork | None, Tensor, Tensor] | None = None  # as `_sum` tells

    def begin_step(self) -> None:
        """Let the next gradient of each parameter replace the present one."""
        self._filled.clear()

    def should_reduce(self, last: bool) -> bool:
        """Return true for the last backward only."""
        return last

    def local_gradients(self) -> ItemsView[nn.Parameter, Tensor]:
        """Return each parameter's gradient on this rank since `begin_step`, as a view."""
        self._zero_missing(self._whole)
        return self._views.items()

    def _grad_view(self, parameter: nn.Parameter) -> Tensor:
        return self._views[parameter]

    def start_reduce(self) -> None:
        """See `GradientBucket.start_reduce`."""
        self._zero_missing(self._whole)
        self._flight = self._start_sum(self._whole, self.grads)

    def wait_for_reduce(self) -> None:
        """See `GradientBucket.wait_for_reduce`."""
        if self._flight is None:
            return
        work, _, arrival = self._flight
        if work is not None:
            work.wait()
        if arrival is not self.grads:
            self.grads.copy_(arrival)
        self._flight = None


class MicroBatchGradientBucket(GradientBucket):
    """Gradient bucket that holds a whole gradient only from the first parameter of a backward to the end of its sum
    over the ranks.
    """

    _whole: Tensor | None = None
    _flight: tuple[CollectiveWork | None, Tensor, Tensor] | None = None  # as `_sum` tells
    _first = True

    def begin_step(self) -> None:
        """Let the next sum replace the present one."""
        self._first = True

    def should_reduce(self, last: bool) -> bool:
        """Return true for every backward."""
        return True

    def _grad_view(self, parameter: nn.Parameter) -> Tensor:
        if self._whole is None:
            self._whole = self.grads.new_empty(self.size)
            self._whole[self._used :].zero_()
        return self._whole[self.param_slices[parameter]].view(parameter.shape)

    def start_reduce(self) -> None:
        """See `GradientBucket.start_reduce`."""
        self.wait_for_reduce()
        whole = self.grads.new_zeros(self.size) if self._whole is None else self._whole
        self._zero_missing(whole)
        self._filled.clear()
        arrival = torch.empty_like(self.grads) if self.sharded else whole
        self._whole, self._flight = None, self._start_sum(whole, arrival)

    def wait_for_reduce(self) -> None:
        """See `GradientBucket.wait_for_reduce`."""
        if self._flight is None:
            return
        work, _, arrival = self._flight
        if work is not None:
            work.wait()
        if self._first:
            self.grads.copy_(arrival)
        else:
            self.grads.add_(arrival)
        self._first, self._flight = False, None

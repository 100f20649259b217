"""Buckets: gradients that are summed over the data-parallel ranks together. Two kinds differ in what they keep.

A `StepBucket` keeps the whole gradient for all of a step and sums it over the ranks once (ZeRO-0 and ZeRO-1). The whole
gradient of a `MicroBucket` exists only while a backward fills it; it is summed after each micro-batch, and only the sums
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

from mega_trainer.comm import Group, Work, all_reduce, reduce_scatter_into
from mega_trainer.kernels.products import put
from mega_trainer.parallel.param import info_of

# Slices are multiples of this. An update in vectors then has no remainder, which would be rounded in another way, so an
# element's new value does not depend on where its slice begins.
SLICE_ELEMENTS = 64


class Bucket(ABC):
    """Elements [start, stop) of a buffer.

    Args:
        start: first element, in the buffer.
        places: where each parameter's gradient lies in the bucket.
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
        places: Mapping[nn.Parameter, slice],
        data: Group,
        *,
        sharded: bool,
        dtype: torch.dtype,
        device: torch.device,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.start, self.places, self.data, self.sharded = start, dict(places), data, sharded
        self._reduce_dtype = dtype if data.size == 1 else reduce_dtype
        unit, self._used = data.size * SLICE_ELEMENTS, max(place.stop for place in places.values())
        self.size = -(-self._used // unit) * unit
        share = self.size // data.size
        self.stop = start + self.size
        self.grads = torch.zeros(share if sharded else self.size, dtype=dtype, device=device)
        self._owed: set[nn.Parameter] = set()
        self._filled: set[nn.Parameter] = set()  # whose gradients so far are in the whole one
        for parameter in (p for p in places if info_of(p).straight):
            parameter.main_grad = partial(self.place, parameter)  # type: ignore[attr-defined]

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the sums of the step before."""

    @abstractmethod
    def reduces(self, last: bool) -> bool:
        """Whether the backward that comes next, the step's last or not, ends with a sum over the ranks."""

    def begin_backward(self) -> None:
        """Expect a gradient of every parameter."""
        self._owed = set(self.places)

    def place(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Where a part of a parameter's gradient belongs, and whether to add it: see `param.MainGrad`."""
        add = parameter in self._filled
        self._filled.add(parameter)
        return self._view(parameter), add

    def take(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient of one micro-batch is complete: add what autograd has brought of it, and drop it there."""
        if parameter.grad is not None:
            out, add = self.place(parameter)
            put(out, parameter.grad, add=add)
            parameter.grad = None
        self._owed.discard(parameter)

    @property
    def complete(self) -> bool:
        """Whether all gradients of this backward are there."""
        return not self._owed

    @abstractmethod
    def _view(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's place in the whole gradient."""

    @abstractmethod
    def reduce(self) -> None:
        """Start the sum over the ranks; a gradient that did not come counts as zero."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until `grads` has all that was started."""

    def _zero_missing(self, whole: Tensor) -> None:
        for parameter, place in self.places.items():
            if parameter not in self._filled:
                whole[place].zero_()

    def _sum(self, whole: Tensor, out: Tensor) -> tuple[Work | None, Tensor, Tensor]:
        """Start the sum of `whole` over the ranks: the work, what it reads, and where the sum arrives.

        That is `out`, a slice or `whole` itself, unless another type is sent.
        """
        if self._reduce_dtype != whole.dtype:
            whole = whole.to(self._reduce_dtype)
            out = torch.empty_like(out, dtype=self._reduce_dtype) if self.sharded else whole
        if self.sharded:
            return reduce_scatter_into(out, whole, self.data, async_op=True), whole, out
        return all_reduce(whole, self.data, async_op=True), whole, out


class StepBucket(Bucket):
    """Keeps the whole gradient over the micro-batches; the last backward starts the one sum."""

    def __init__(
        self,
        start: int,
        places: Mapping[nn.Parameter, slice],
        data: Group,
        *,
        sharded: bool,
        dtype: torch.dtype,
        device: torch.device,
        reduce_dtype: torch.dtype,
    ) -> None:
        super().__init__(start, places, data, sharded=sharded, dtype=dtype, device=device, reduce_dtype=reduce_dtype)
        self._whole = torch.zeros(self.size, dtype=dtype, device=device) if sharded else self.grads
        self._views = {parameter: self._whole[place].view(parameter.shape) for parameter, place in self.places.items()}
        self._flight: tuple[Work | None, Tensor, Tensor] | None = None  # as `_sum` tells

    def begin_step(self) -> None:
        """The next gradient of each parameter replaces what is there."""
        self._filled.clear()

    def reduces(self, last: bool) -> bool:
        """Only the last."""
        return last

    def own_gradients(self) -> ItemsView[nn.Parameter, Tensor]:
        """Of each parameter, what this rank's backwards have brought since `begin_step`, as a view."""
        self._zero_missing(self._whole)
        return self._views.items()

    def _view(self, parameter: nn.Parameter) -> Tensor:
        return self._views[parameter]

    def reduce(self) -> None:
        """See `Bucket.reduce`."""
        self._zero_missing(self._whole)
        self._flight = self._sum(self._whole, self.grads)

    def settle(self) -> None:
        """See `Bucket.settle`."""
        if self._flight is None:
            return
        work, _, arrival = self._flight
        if work is not None:
            work.wait()
        if arrival is not self.grads:
            self.grads.copy_(arrival)
        self._flight = None


class MicroBucket(Bucket):
    """Holds a whole gradient from the first parameter's of a backward to the end of its sum over the ranks."""

    _whole: Tensor | None = None
    _flight: tuple[Work | None, Tensor, Tensor] | None = None  # as `_sum` tells
    _first = True

    def begin_step(self) -> None:
        """The next sum replaces what is there."""
        self._first = True

    def reduces(self, last: bool) -> bool:
        """Every one."""
        return True

    def _view(self, parameter: nn.Parameter) -> Tensor:
        if self._whole is None:
            self._whole = self.grads.new_empty(self.size)
            self._whole[self._used :].zero_()
        return self._whole[self.places[parameter]].view(parameter.shape)

    def reduce(self) -> None:
        """See `Bucket.reduce`."""
        self.settle()
        whole = self.grads.new_zeros(self.size) if self._whole is None else self._whole
        self._zero_missing(whole)
        self._filled.clear()
        arrival = torch.empty_like(self.grads) if self.sharded else whole
        self._whole, self._flight = None, self._sum(whole, arrival)

    def settle(self) -> None:
        """See `Bucket.settle`."""
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

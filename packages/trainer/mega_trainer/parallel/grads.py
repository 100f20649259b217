"""Flat buffers: weights in one stretch of memory, gradients in another, reduced in buckets while the backward runs.

Parameters that are treated alike (same data group, same further sums, same weight decay) share a `FlatBuffer`. Its
gradients are fp32 (fp64 in an fp64 model) and accumulate over the micro-batches of a step in `param.main_grad`, a view.
A bucket is reduced as soon as the last of its gradients of the step is there. With ZeRO-1 (arXiv:1910.02054) each rank
of the data group keeps the sum of its own slice of every bucket, and updates that slice of the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mega_trainer.comm import Group, Work, all_gather_into, all_reduce, reduce_scatter_into
from mega_trainer.parallel.param import info_of

BUCKET_ELEMENTS = 40_000_000  # large enough for full bandwidth, small enough that the first starts early


@dataclass(eq=False)
class Bucket:
    """Elements [start, stop) of a buffer, reduced together; `pending` counts gradients still to come this step."""

    start: int
    stop: int
    parameters: list[nn.Parameter]
    pending: int = 0


@dataclass(frozen=True)
class Span:
    """A parameter's place in its buffer: elements [start, start + numel)."""

    parameter: nn.Parameter
    start: int


@dataclass(eq=False)
class Shard:
    """This rank's slice of a bucket: what it reduces, updates and saves.

    Attributes:
        start: first element, in the buffer.
        weights: the slice in model precision, a view.
        grads: the reduced gradient of the slice, fp32 or fp64.
    """

    start: int
    weights: Tensor
    grads: Tensor


class FlatBuffer:
    """Parameters that are treated alike, laid out one after another, last first (the order of the backward).

    Args:
        parameters: they become views of `weights`.
        decay: whether weight decay applies to them.
        sharded: keep only this rank's slice of each reduced bucket (ZeRO-1), rather than all of it on every rank.
    """

    def __init__(
        self, parameters: list[nn.Parameter], *, decay: bool, sharded: bool, bucket_elements: int = BUCKET_ELEMENTS
    ) -> None:
        info, first = info_of(parameters[0]), parameters[0]
        self.data, self.grad_sync, self.replicas = info.data, info.grad_sync, info.replicas
        self.decay, self.sharded = decay, sharded and self.data.size > 1
        self.spans: list[Span] = []
        self.buckets: list[Bucket] = []
        size = self._lay_out(parameters[::-1], bucket_elements)
        grad_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=grad_dtype, device=first.device)
        for span in self.spans:
            self._adopt(span)
        self.shards = [self._shard(bucket) for bucket in self.buckets]
        self._works: list[Work] = []
        self._fresh: set[nn.Parameter] = set()
        self._last = False
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}

    def _lay_out(self, parameters: Iterable[nn.Parameter], bucket_elements: int) -> int:
        position, bucket = 0, Bucket(0, 0, [])
        for parameter in parameters:
            self.spans.append(Span(parameter, position))
            bucket.parameters.append(parameter)
            position += parameter.numel()
            if position - bucket.start >= bucket_elements:
                position = self._close(bucket, position)
                bucket = Bucket(position, position, [])
        return self._close(bucket, position) if bucket.parameters else position

    def _close(self, bucket: Bucket, position: int) -> int:
        """End a bucket at a multiple of the data ranks, so that slices are equal; returns where the next may start."""
        bucket.stop = bucket.start + -(-(position - bucket.start) // self.data.size) * self.data.size
        self.buckets.append(bucket)
        return bucket.stop

    def _adopt(self, span: Span) -> None:
        parameter, place = span.parameter, slice(span.start, span.start + span.parameter.numel())
        view = self.weights[place].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
        parameter.main_grad = self.grads[place].view(parameter.shape)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]

    def _shard(self, bucket: Bucket) -> Shard:
        start, stop = bucket.start, bucket.stop
        if self.sharded:
            share = (stop - start) // self.data.size
            start += share * self.data.rank
            return Shard(start, self.weights[start : start + share], self.grads.new_zeros(share))
        return Shard(start, self.weights[start:stop], self.grads[start:stop])

    def start(self) -> None:
        """Begin a step: the next gradient of each parameter replaces what is there."""
        self._fresh = {span.parameter for span in self.spans}
        self._last = False
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameters)

    def expect_last(self) -> None:
        """The backward that comes next is the step's last for these parameters: reduce each bucket once it is complete."""
        self._last = True

    def _accumulate(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if parameter in self._fresh:
            main.copy_(parameter.grad)
            self._fresh.discard(parameter)
        else:
            main.add_(parameter.grad)
        parameter.grad = None
        if self._last:
            bucket = self._bucket_of[parameter]
            bucket.pending -= 1
            if bucket.pending == 0:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        grads, shard = self.grads[bucket.start : bucket.stop], self.shards[self.buckets.index(bucket)]
        if self.sharded:
            work = reduce_scatter_into(shard.grads, grads, self.data, async_op=True)
        else:
            work = all_reduce(grads, self.data, async_op=True)
        if work is not None:
            self._works.append(work)

    def finish(self) -> None:
        """End of the step's backwards: wait for the reductions, after those of parameters that got no gradient."""
        for parameter in self._fresh:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        self._fresh = set()
        for bucket in self.buckets:
            if bucket.pending:
                bucket.pending = 0
                self._reduce(bucket)
        for work in self._works:
            work.wait()
        self._works = []
        for group in self.grad_sync:
            for shard in self.shards:
                all_reduce(shard.grads, group)

    def publish(self) -> None:
        """After an update of the shards' weights: give every rank all of them."""
        if self.sharded:
            for bucket, shard in zip(self.buckets, self.shards, strict=True):
                all_gather_into(self.weights[bucket.start : bucket.stop], shard.weights.clone(), self.data)

    @property
    def counts_here(self) -> bool:
        """Whether this rank is the one, of those that hold copies, whose part counts in a norm over the model."""
        return all(group.rank == 0 for group in self.replicas)

    def parts(self, shard: Shard) -> Iterator[tuple[nn.Parameter, int, slice]]:
        """What a shard holds: (parameter, first element of it, place in the shard's tensors)."""
        stop = shard.start + shard.weights.numel()
        for span in self.spans:
            low, high = max(span.start, shard.start), min(span.start + span.parameter.numel(), stop)
            if low < high:
                yield span.parameter, low - span.start, slice(low - shard.start, high - shard.start)


@dataclass(frozen=True)
class _Kind:
    """What parameters of one buffer have in common."""

    data: Group
    grad_sync: tuple[Group, ...]
    replicas: tuple[Group, ...]
    decay: bool
    dtype: torch.dtype = field(default=torch.float32)


def build_buffers(model: nn.Module, *, sharded: bool, bucket_elements: int = BUCKET_ELEMENTS) -> list[FlatBuffer]:
    """Sort the parameters of a model (or of one pipeline stage) into buffers.

    Weight decay applies to matrices, not to biases and norms. Call after initialisation or loading, or before: the
    parameters keep their values and from then on are views of the buffers.
    """
    kinds: dict[_Kind, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        info = info_of(parameter)
        kind = _Kind(info.data, info.grad_sync, info.replicas, parameter.dim() > 1, parameter.dtype)
        kinds.setdefault(kind, []).append(parameter)
    return [
        FlatBuffer(parameters, decay=kind.decay, sharded=sharded, bucket_elements=bucket_elements)
        for kind, parameters in kinds.items()
    ]

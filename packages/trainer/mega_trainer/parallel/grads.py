"""How data-parallel ranks share a stage's weights and gradients, up to ZeRO-2 (arXiv:1910.02054).

Parameters that are treated alike (same data group, same further sums, same weight decay) lie in one `FlatBuffer`, cut in
buckets that are summed over the ranks while the backward still runs. Gradients are fp32 (fp64 in an fp64 model); a sum
over the data ranks may be in bf16, which loses bits: what a rank adds up by itself never is.

    level   weights   gradients kept            summed over the data ranks
    0       all       all                       all-reduce, once a step
    1       all       all, the sum of a slice   reduce-scatter, once a step; then all-gather of the new weights
    2       all       a slice                   reduce-scatter, each micro-batch; then all-gather of the new weights
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from mega_trainer.comm import Work, all_gather_into, all_reduce
from mega_trainer.parallel.buckets import Bucket, MicroBucket, StepBucket
from mega_trainer.parallel.param import PreparedWeight, info_of, trains
from mega_trainer.parallel.shared import Buffer, Kind, LrFactor, Part, Shard, by_kind

BUCKET_ELEMENTS = 40_000_000  # large enough for full bandwidth, small enough that the first starts early
RANK_ELEMENTS = 1_000_000  # a rank's slice is at least so large: among many ranks smaller messages cost their latency
IN_FLIGHT = 2  # sums under way at once where what they send is to be short-lived


@dataclass(frozen=True)
class Span:
    """A parameter's place in its buffer: elements [start, start + numel)."""

    parameter: nn.Parameter
    start: int


@dataclass(frozen=True)
class Sharing:
    """What the data ranks share and when they sum.

    Attributes:
        slices: each rank keeps, updates and saves its slice of every bucket (ZeRO-1 and up), rather than all of it.
        each_backward: gradients are summed after every micro-batch and not kept whole (ZeRO-2).
        apart: which parameters have buffers of their own, for an optimizer that treats them otherwise.
        decoupled, lr_factor: so have the embedding and the output layer, or those of each factor, for their learning rates.
        reduce_dtype: the type that gradients are sent and summed over the data ranks in; default: their own.
        bucket_elements: a bucket is closed when it has so many; default: grows with the number of ranks.
        prepares: what a back end prepares of a weight for its products is kept until the next update.
    """

    slices: bool
    each_backward: bool = False
    apart: Callable[[nn.Parameter], bool] | None = None
    decoupled: bool = False
    lr_factor: LrFactor = lambda name: 1.0
    reduce_dtype: torch.dtype | None = None
    bucket_elements: int | None = None
    prepares: bool = False

    def enough(self, ranks: int) -> int:
        """Elements of a bucket that so many data ranks share."""
        return self.bucket_elements or max(BUCKET_ELEMENTS, RANK_ELEMENTS * ranks)


@dataclass(frozen=True)
class Unit:
    """A module whose forward is the first to need these parameters, its own or others."""

    module: nn.Module
    parameters: list[nn.Parameter]


class FlatBuffer(Buffer):
    """Parameters that are treated alike, laid out one after another, last first (the order of the backward).

    Args:
        parameters: they become views of `weights`.
        kind: what they have in common.
        sharing: what each rank keeps.
    """

    def __init__(self, parameters: list[nn.Parameter], kind: Kind, sharing: Sharing) -> None:
        self.kind, self.sharded = kind, sharing.slices and kind.data.size > 1
        self.spans: list[Span] = []
        self.buckets = list(self._lay_out(parameters[::-1], sharing))
        self.weights = torch.zeros(self.buckets[-1].stop, dtype=kind.dtype, device=parameters[0].device)
        for span in self.spans:
            self._adopt(span)
        self.shards = [self._shard(bucket) for bucket in self.buckets]

    def _lay_out(self, parameters: Sequence[nn.Parameter], sharing: Sharing) -> Iterator[Bucket]:
        """Give each parameter its span; a bucket is closed once it is large enough."""
        kind = MicroBucket if sharing.each_backward else StepBucket
        dtype = torch.float64 if self.kind.dtype == torch.float64 else torch.float32
        start, places, length = 0, {}, 0
        for parameter in parameters:
            self.spans.append(Span(parameter, start + length))
            places[parameter] = slice(length, length + parameter.numel())
            length += parameter.numel()
            if length >= sharing.enough(self.kind.data.size) or parameter is parameters[-1]:
                bucket = kind(
                    start, places, self.kind.data, sharded=self.sharded, dtype=dtype, device=parameter.device,
                    reduce_dtype=sharing.reduce_dtype or dtype,
                )  # fmt: skip
                yield bucket
                start, places, length = bucket.stop, {}, 0

    def _adopt(self, span: Span) -> None:
        view = self.weights[span.start : span.start + span.parameter.numel()].view(span.parameter.shape)
        view.copy_(span.parameter.detach())
        span.parameter.data = view

    def _shard(self, bucket: Bucket) -> Shard:
        share = bucket.grads.numel()
        start = bucket.start + (share * self.kind.data.rank if self.sharded else 0)
        parts = list(self._parts(start, start + share))
        return Shard(self.weights[start : start + share], bucket.grads, parts, bucket)

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        """What lies at elements [start, stop)."""
        for span in self.spans:
            low, high = max(span.start, start), min(span.start + span.parameter.numel(), stop)
            if low < high:
                place = slice(low - start, high - start)
                yield Part(info_of(span.parameter).pieces, tuple(span.parameter.shape), low - span.start, place)


class FlatStage:
    """The buffers of one pipeline stage: takes gradients as they come and starts the sums over the ranks.

    All ranks start their buckets in the same order, or they would wait for each other in vain: a bucket that is complete
    on one rank may lack a gradient on another (an expert that got no token). The order is that in which a backward is
    expected to complete them. Each starts when it and all before it are complete, the rest at the backward's end.

    New weights are gathered in the background, and each unit's forward waits for its own.
    """

    def __init__(
        self, model: nn.Module, buffers: Sequence[FlatBuffer], sharing: Sharing, units: Sequence[Unit]
    ) -> None:
        self.buffers = list(buffers)
        self._in_flight_limit = IN_FLIGHT if sharing.each_backward or sharing.reduce_dtype else None
        position = {parameter: index for index, parameter in enumerate(model.parameters())}
        self._homes = {
            bucket: (buffer, shard)
            for buffer in buffers
            for bucket, shard in zip(buffer.buckets, buffer.shards, strict=True)
        }
        self._buckets = sorted(self._homes, key=lambda bucket: -min(position[p] for p in bucket.places))
        self._arriving: dict[Bucket, tuple[Work | None, Tensor]] = {}
        self._await_before(units)
        # of frozen ones, too
        self._prepared = {parameter: PreparedWeight() for parameter in position} if sharing.prepares else {}
        for parameter, prepared in self._prepared.items():
            parameter.prepared = prepared  # type: ignore[attr-defined]
        self._waiting: deque[Bucket] = deque()
        self._in_flight: deque[Bucket] = deque()
        self._ends: list[Node] = []
        for bucket in self._buckets:
            for parameter in bucket.places:
                self._watch(bucket, parameter)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self._buckets:
            bucket.begin_step()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around one micro-batch's backward through the stage; `last` of the step or not."""
        self._waiting.extend(bucket for bucket in self._buckets if bucket.reduces(last))
        for bucket in self._waiting:
            bucket.begin_backward()
        yield
        while self._waiting:
            self._reduce(self._waiting.popleft())

    def _watch(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Be told when a backward is through with a parameter, after all its uses.

        By a hook of the graph's node, which is called whether autograd brings a gradient or it is in its place already;
        of a parameter's own hook torch promises that only where one has come.
        """
        end = get_gradient_edge(parameter).node
        end.register_hook(partial(self._take, bucket, parameter))
        self._ends.append(end)  # it lives, and its hook with it, only as long as someone holds it

    def _take(self, bucket: Bucket, parameter: nn.Parameter, *_: object) -> None:
        bucket.take(parameter)
        while self._waiting and self._waiting[0].complete:
            self._reduce(self._waiting.popleft())

    def _reduce(self, bucket: Bucket) -> None:
        bucket.reduce()
        self._in_flight.append(bucket)
        if self._in_flight_limit is not None and len(self._in_flight) > self._in_flight_limit:
            self._in_flight.popleft().settle()

    def finish(self) -> None:
        """End of the step's backwards: wait for the sums, and sum over the further groups that share gradients."""
        while self._in_flight:
            self._in_flight.popleft().settle()
        for buffer in self.buffers:
            for group in buffer.kind.grad_sync:
                for shard in buffer.shards:
                    all_reduce(shard.grads, group)

    def own_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """This rank's gradients of its micro-batches so far, before any sum over ranks: up to ZeRO-1, which keeps them."""
        for bucket in self._buckets:
            assert isinstance(bucket, StepBucket)
            yield from bucket.own_gradients()

    def publish(self) -> None:
        """After an update of the shards' weights: start to give every rank all of them, first needed first."""
        for parameter, prepared in self._prepared.items():
            if trains(parameter):
                prepared.forget()
        for bucket in reversed(self._buckets):
            buffer, shard = self._homes[bucket]
            if buffer.sharded:
                mine, whole = shard.weights.clone(), buffer.weights[bucket.start : bucket.stop]
                self._arriving[bucket] = (all_gather_into(whole, mine, buffer.kind.data, async_op=True), mine)

    def settle(self) -> None:
        """Wait until all weights are there: before anything but a forward reads or writes them."""
        self._await(list(self._arriving))

    def _await(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets if self._arriving else ():
            work, _ = self._arriving.pop(bucket, (None, None))
            if work is not None:
                work.wait()

    def _await_before(self, units: Sequence[Unit]) -> None:
        """Let each unit's forward wait for its buckets, and the first one for those of no unit."""
        needs = [[b for b in self._buckets if not b.places.keys().isdisjoint(unit.parameters)] for unit in units]
        needs[0] += [bucket for bucket in self._buckets if all(bucket not in needed for needed in needs)]
        for unit, buckets in zip(units, needs, strict=True):
            unit.module.register_forward_pre_hook(lambda module, inputs, buckets=buckets: self._await(buckets))


def flatten(model: nn.Module, sharing: Sharing, units: Sequence[Unit] = ()) -> FlatStage:
    """Sort the parameters of a model (or of one pipeline stage) into buffers.

    Weight decay applies to matrices, not to biases and norms. Call after initialisation or loading, or before: the
    parameters keep their values and from then on are views of the buffers.

    Args:
        model: its parameters carry their descriptions.
        sharing: what each data rank keeps.
        units: its parts in the order of a forward; by default the whole model is one.
    """
    dtype = next(model.parameters()).dtype
    kinds = by_kind(model, dtype, sharing.apart, decoupled=sharing.decoupled, lr_factor=sharing.lr_factor)
    buffers = [FlatBuffer(parameters, kind, sharing) for kind, parameters in kinds.items()]
    return FlatStage(model, buffers, sharing, units or [Unit(model, list(model.parameters()))])

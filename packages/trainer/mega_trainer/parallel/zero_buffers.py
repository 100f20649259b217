"""ZeRO-0 to ZeRO-2 (arXiv:1910.02054): flat buffers of a stage's weights and gradients, sharded over data-parallel ranks.

The parameters of a group (`ParamGroupKey`) are in one `FlatParameterBuffer`, cut in buckets that are reduced over the ranks
while the backward still runs. Gradients are fp32 (fp64 in an fp64 model); the reduction over the data ranks may be in bf16,
which loses bits, but local accumulation never is.

    level   weights   gradients kept            reduction over the data ranks
    0       all       all                       all-reduce, once a step
    1       all       all, the sum of a slice   reduce-scatter, once a step; then all-gather of the new weights
    2       all       a slice                   reduce-scatter, each micro-batch; then all-gather of the new weights
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from mega_trainer.distributed.comm import CollectiveWork, all_gather_into, all_reduce
from mega_trainer.parallel.gradient_buckets import GradientBucket, MicroBatchGradientBucket, StepGradientBucket
from mega_trainer.parallel.parameter_info import GemmOperandCache, get_parameter_info, is_trainable
from mega_trainer.parallel.parameter_shards import (
    GatheredShardLayout,
    LrFactor,
    ParameterBuffer,
    ParameterShard,
    ParameterShardPart,
    ParamGroupKey,
    make_param_groups,
)

BUCKET_ELEMENTS = 40_000_000  # large enough for full bandwidth, small enough that the first starts early
RANK_ELEMENTS = 1_000_000  # least elements of a rank's slice: with many ranks, smaller messages are bound by latency
IN_FLIGHT = 2  # most reductions in progress at once where their send buffers should be short-lived


@dataclass(frozen=True)
class ParameterSpan:
    """Range of a parameter in its flat buffer: elements [start, start + numel)."""

    parameter: nn.Parameter
    start: int


@dataclass(frozen=True)
class ZeroConfig:
    """Settings of ZeRO: how data ranks shard optimizer state and gradients, and how gradients are reduced.

    Attributes:
        shard_grads: each rank keeps, updates and saves only its slice of every bucket (ZeRO-1 and up).
        reduce_every_microbatch: gradients are reduced after every micro-batch and only a slice is kept (ZeRO-2).
        separate: selects parameters with separate buffers, for another optimizer.
        decoupled, lr_factor: separate buffers for embedding and output layer, or per learning-rate factor.
        reduce_dtype: dtype in which gradients are reduced over the data ranks; default: their own.
        bucket_elements: least elements of a bucket; default: grows with the number of ranks.
        cache_prepared_weights: keep the operands that a back end prepares from weights until the next update.
    """

    shard_grads: bool
    reduce_every_microbatch: bool = False
    separate: Callable[[nn.Parameter], bool] | None = None
    decoupled: bool = False
    lr_factor: LrFactor = lambda name: 1.0
    reduce_dtype: torch.dtype | None = None
    bucket_elements: int | None = None
    cache_prepared_weights: bool = False

    def min_bucket_elements(self, ranks: int) -> int:
        """Return the least number of elements of a gradient bucket that `ranks` data ranks share."""
        return self.bucket_elements or max(BUCKET_ELEMENTS, RANK_ELEMENTS * ranks)


@dataclass(frozen=True)
class ForwardGatherUnit:
    """Module with the parameters that its forward is the first to use.
    They are not only its own; their gathered weights are waited for just before the forward.
    """

    module: nn.Module
    parameters: list[nn.Parameter]


class FlatParameterBuffer(ParameterBuffer):
    """Flat buffer of one param group's parameters, in the order of the backward (the last parameter first).

    Args:
        parameters: parameters in the order of the forward; they become views of `weights`.
        kind: param group of the parameters.
        sharing: sharding settings.
    """

    def __init__(self, parameters: list[nn.Parameter], kind: ParamGroupKey, sharing: ZeroConfig) -> None:
        self.kind, self.sharded = kind, sharing.shard_grads and kind.data.size > 1
        self.spans: list[ParameterSpan] = []
        self.buckets = list(self._make_buckets(parameters[::-1], sharing))
        self.weights = torch.zeros(self.buckets[-1].stop, dtype=kind.dtype, device=parameters[0].device)
        for span in self.spans:
            self._move_to_buffer(span)
        self.shards = [self._bucket_shard(bucket) for bucket in self.buckets]

    def _make_buckets(self, parameters: Sequence[nn.Parameter], sharing: ZeroConfig) -> Iterator[GradientBucket]:
        """Assign each parameter its span; a bucket is closed once it is large enough."""
        kind = MicroBatchGradientBucket if sharing.reduce_every_microbatch else StepGradientBucket
        dtype = torch.float64 if self.kind.dtype == torch.float64 else torch.float32
        start, slices, length = 0, {}, 0
        for parameter in parameters:
            self.spans.append(ParameterSpan(parameter, start + length))
            slices[parameter] = slice(length, length + parameter.numel())
            length += parameter.numel()
            if length >= sharing.min_bucket_elements(self.kind.data.size) or parameter is parameters[-1]:
                bucket = kind(
                    start, slices, self.kind.data, sharded=self.sharded, dtype=dtype, device=parameter.device,
                    reduce_dtype=sharing.reduce_dtype or dtype,
                )  # fmt: skip
                yield bucket
                start, slices, length = bucket.stop, {}, 0

    def _move_to_buffer(self, span: ParameterSpan) -> None:
        view = self.weights[span.start : span.start + span.parameter.numel()].view(span.parameter.shape)
        view.copy_(span.parameter.detach())
        span.parameter.data = view

    def _bucket_shard(self, bucket: GradientBucket) -> ParameterShard:
        share = bucket.grads.numel()
        start = bucket.start + (share * self.kind.data.rank if self.sharded else 0)
        parts = list(self._parameter_parts(start, start + share))
        gathered = GatheredShardLayout(share, bucket.param_slices)
        return ParameterShard(self.weights[start : start + share], bucket.grads, parts, gathered)

    def _parameter_parts(self, start: int, stop: int) -> Iterator[ParameterShardPart]:
        """Yield the parameter parts at elements [start, stop)."""
        for span in self.spans:
            low, high = max(span.start, start), min(span.start + span.parameter.numel(), stop)
            if low < high:
                pieces, shape = get_parameter_info(span.parameter).pieces, tuple(span.parameter.shape)
                yield ParameterShardPart(pieces, shape, low - span.start, slice(low - start, high - start))


class FlatBufferStage:
    """Pipeline stage with flat parameter and gradient buffers for ZeRO-0 to ZeRO-2.
    This `ShardedStage` accumulates gradients as they arrive and starts their reductions over the data ranks.

    All ranks must reduce their buckets in the same order, or they would deadlock: a bucket that is complete on one rank may
    lack a gradient on another (an expert without tokens). The order is the expected order of completion in a backward. A
    bucket starts when it and all before it are complete, the rest at the end of the backward.

    New weights are all-gathered in the background, and each unit's forward waits for its own weights.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: Sequence[FlatParameterBuffer],
        sharing: ZeroConfig,
        units: Sequence[ForwardGatherUnit],
    ) -> None:
        self.buffers = list(buffers)
        self._in_flight_limit = IN_FLIGHT if sharing.reduce_every_microbatch or sharing.reduce_dtype else None
        position = {parameter: index for index, parameter in enumerate(model.parameters())}
        self._bucket_shards = {
            bucket: (buffer, shard)
            for buffer in buffers
            for bucket, shard in zip(buffer.buckets, buffer.shards, strict=True)
        }
        self._buckets = sorted(self._bucket_shards, key=lambda bucket: -min(position[p] for p in bucket.param_slices))
        self._arriving: dict[GradientBucket, tuple[CollectiveWork | None, Tensor]] = {}
        self._register_gather_hooks(units)
        cached = position if sharing.cache_prepared_weights else ()  # frozen parameters included
        self._prepared = {parameter: GemmOperandCache() for parameter in cached}
        for parameter, prepared in self._prepared.items():
            parameter.prepared = prepared  # type: ignore[attr-defined]
        self._waiting: deque[GradientBucket] = deque()
        self._in_flight: deque[GradientBucket] = deque()
        self._grad_nodes: list[Node] = []
        for bucket in self._buckets:
            for parameter in bucket.param_slices:
                self._register_grad_hook(bucket, parameter)

    def begin_step(self) -> None:
        """Discard the stage's gradients of the previous step."""
        for bucket in self._buckets:
            bucket.begin_step()

    @contextmanager
    def backward_context(self, last: bool) -> Iterator[None]:
        """Accumulate the gradients of the backward in the `with` block, and start the reductions of complete buckets.
        Under ZeRO-0 and ZeRO-1 only the step's last backward (`last`) reduces, under ZeRO-2 each one.
        """
        self._waiting.extend(bucket for bucket in self._buckets if bucket.should_reduce(last))
        for bucket in self._waiting:
            bucket.begin_backward()
        yield
        while self._waiting:
            self._start_reduce(self._waiting.popleft())

    def _register_grad_hook(self, bucket: GradientBucket, parameter: nn.Parameter) -> None:
        """Register a hook that fires when a parameter's gradient is complete, after all its uses.

        The hook is on the graph's node, because it also fires if the gradient was written to the main gradient; torch
        guarantees a parameter's own hook only if autograd delivers a gradient.
        """
        node, owner = get_gradient_edge(parameter).node, weakref.ref(self)
        target, weak_parameter = weakref.ref(bucket), weakref.ref(parameter)

        def complete_grad(*_: object) -> None:
            # weak references, since Python's garbage collector does not see a cycle through a node: the memory of a model
            # that is no longer used would never be freed
            owner()._grad_completed(target(), weak_parameter())  # type: ignore[union-attr, arg-type]

        node.register_hook(complete_grad)
        self._grad_nodes.append(node)  # keep a reference, else the node and its hook are freed

    def _grad_completed(self, bucket: GradientBucket, parameter: nn.Parameter) -> None:
        bucket.accumulate_grad(parameter)
        while self._waiting and self._waiting[0].is_complete:
            self._start_reduce(self._waiting.popleft())

    def _start_reduce(self, bucket: GradientBucket) -> None:
        bucket.start_reduce()
        self._in_flight.append(bucket)
        if self._in_flight_limit is not None and len(self._in_flight) > self._in_flight_limit:
            self._in_flight.popleft().wait_for_reduce()

    def finish_gradients(self) -> None:
        """Wait for the step's gradient reductions over data ranks, and sum gradients over the `grad_sync` groups."""
        while self._in_flight:
            self._in_flight.popleft().wait_for_reduce()
        for buffer in self.buffers:
            for group in buffer.kind.grad_sync:
                for shard in buffer.shards:
                    all_reduce(shard.grads, group)

    def local_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its gradient on this rank before any reduction; only for ZeRO-0 and ZeRO-1.
        The gradient is over the micro-batches so far.
        """
        for bucket in self._buckets:
            assert isinstance(bucket, StepGradientBucket)
            yield from bucket.local_gradients()

    def all_gather_params(self) -> None:
        """Start to all-gather the updated weights over the data ranks, in the order of the forward."""
        for parameter, prepared in self._prepared.items():
            if is_trainable(parameter):
                prepared.invalidate()
        for bucket in reversed(self._buckets):
            buffer, shard = self._bucket_shards[bucket]
            if buffer.sharded:
                mine, whole = shard.weights.clone(), buffer.weights[bucket.start : bucket.stop]
                self._arriving[bucket] = (all_gather_into(whole, mine, buffer.kind.data, async_op=True), mine)

    def wait_for_params(self) -> None:
        """Wait until all updated weights are gathered; needed before any access to them other than a forward."""
        self._wait_for_buckets(list(self._arriving))

    def _wait_for_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        for bucket in buckets if self._arriving else ():
            work, _ = self._arriving.pop(bucket, (None, None))
            if work is not None:
                work.wait()

    def _register_gather_hooks(self, units: Sequence[ForwardGatherUnit]) -> None:
        """Make each unit's forward wait for its buckets, and the first unit's also for buckets of no unit."""
        needs = [[b for b in self._buckets if not b.param_slices.keys().isdisjoint(unit.parameters)] for unit in units]
        needs[0] += [bucket for bucket in self._buckets if all(bucket not in needed for needed in needs)]
        for unit, buckets in zip(units, needs, strict=True):
            unit.module.register_forward_pre_hook(
                lambda module, inputs, buckets=buckets: self._wait_for_buckets(buckets)
            )


def flatten_parameters(model: nn.Module, zero: ZeroConfig, units: Sequence[ForwardGatherUnit] = ()) -> FlatBufferStage:
    """Move the trainable parameters of a model or pipeline stage into flat buffers by param group; return the stage.

    Weight decay applies to matrices, not to biases and norms. Call after initialisation or loading, or before: the
    parameters keep their values and from then on are views of the buffers.

    Args:
        model: model whose parameters have a `ParameterInfo`.
        zero: sharding settings.
        units: parts of the model in the order of a forward; default: the whole model is one unit.
    """
    dtype = next(model.parameters()).dtype
    kinds = make_param_groups(model, dtype, zero.separate, decoupled=zero.decoupled, lr_factor=zero.lr_factor)
    buffers = [FlatParameterBuffer(parameters, kind, zero) for kind, parameters in kinds.items()]
    return FlatBufferStage(model, buffers, zero, units or [ForwardGatherUnit(model, list(model.parameters()))])

"""Bugs that trainers really had, planted one at a time from outside: the comparison must see each of them.

A mutation replaces a function of the product while a trainer is built and runs; the reference of one process is made
without it. What has no counterpart here yet (experts, context parallelism, label smoothing, several predicted tokens)
is not in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity.cases import Case, case
from parity.worker import Found, References, Trainer, compare, make_groups, places
from torch import Tensor

from mega_trainer import rng, step
from mega_trainer.comm import all_reduce
from mega_trainer.model import builder, decoder, loss
from mega_trainer.model.attention import Attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel import grads, tensor
from mega_trainer.parallel.grads import FlatBuffer
from mega_trainer.pipeline.run import Executor

Patch = Callable[[], AbstractContextManager[Any]]
swap = mock.patch.object

TP = case("gqa", 2, parallel={"tp": 2})
SP = case("tied", 2, parallel={"tp": 2, "sp": True})
SHARED = case("gqa", 4, parallel={"tp": 4})  # every key/value head on two ranks
PP = case("tied", 2, parallel={"pp": 2}, micro=2)
DP = case("dense", 2, parallel={"zero": 0}, micro=2)
ZERO = case("dense", 2, parallel={"zero": 1}, micro=4)


@dataclass(frozen=True, eq=False)
class Mutation:
    """A bug, and a layout in which it shows."""

    name: str
    case: Case
    patch: Patch


def _row_without_sum() -> AbstractContextManager[Any]:
    return swap(tensor._SumForward, "forward", staticmethod(lambda ctx, x, group, sp: _keep(ctx, x, group, sp)))


def _keep(ctx: Any, x: Tensor, group: Any, sp: bool) -> Tensor:
    ctx.group, ctx.sp = group, sp
    return x.clone()


def _column_without_sum() -> AbstractContextManager[Any]:
    def only_blocking(x: Tensor, group: Any, *args: Any, async_op: bool = False) -> None:
        if not async_op:
            all_reduce(x, group, *args)

    return swap(tensor, "all_reduce", only_blocking)


def _row_bias_on_every_rank() -> AbstractContextManager[Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return tensor.sum_over(self.kernels.linear(x, self.weight, self.bias), self.group, sp=self.sp)

    return swap(tensor.RowLinear, "forward", forward)


def _replicated(change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Patch:
    """Change the arguments with which replicated parameters are made."""
    real = Builder.replicated

    def replicated(self: Builder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        return real(self, name, shape, **change(name, options))

    return lambda: swap(Builder, "replicated", replicated)


def _without_sync() -> AbstractContextManager[Any]:
    real = builder.make_parameter
    return swap(builder, "make_parameter", lambda *args, **options: real(*args, **{**options, "grad_sync": ()}))


def _tied_without_sync() -> AbstractContextManager[Any]:
    real = builder.vocab_parameter
    return swap(builder, "vocab_parameter", lambda *args, **options: real(*args, **{**options, "grad_sync": ()}))


def _norm_counts_copies() -> AbstractContextManager[Any]:
    return swap(FlatBuffer, "counts_here", property(lambda self: True))


def _norm_of_this_rank() -> AbstractContextManager[Any]:
    real = Optimizer.grad_norm

    def grad_norm(self: Optimizer) -> Tensor:
        with swap(self, "model_groups", []):
            return real(self)

    return swap(Optimizer, "grad_norm", grad_norm)


@contextmanager
def _mean_of_means() -> Any:
    real = Decoder.loss

    def count_batches(batches: Sequence[Any], data: Any) -> float:
        count = torch.tensor(float(len(batches)), dtype=torch.float64)
        all_reduce(count, data)
        return count.item()

    def mean(self: Decoder, x: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return real(self, x, labels, weights / weights.sum())

    with swap(step, "count_tokens", count_batches), swap(Decoder, "loss", mean):
        yield


def _own_tokens() -> AbstractContextManager[Any]:
    return swap(step, "count_tokens", lambda batches, data: sum(b.weights.sum().item() for b in batches))


def _gradients_swapped() -> AbstractContextManager[Any]:
    real = Executor._backward

    def backward(self: Executor, key: tuple[int, int]) -> None:
        if key == (0, 0):
            edges = self._edges
            edges[0, 0], edges[0, 1] = edges[0, 1], edges[0, 0]
        real(self, key)

    return swap(Executor, "_backward", backward)


def _gradient_lost() -> AbstractContextManager[Any]:
    real = Executor._backward

    def backward(self: Executor, key: tuple[int, int]) -> None:
        if key == (0, 1):
            self._arrived("B", key)
        else:
            real(self, key)

    return swap(Executor, "_backward", backward)


def _labels_of_another() -> AbstractContextManager[Any]:
    real = Executor.run

    def run(self: Executor, batches: Sequence[Any], scale: float) -> Tensor:
        labels = [batch.labels for batch in batches]
        return real(self, [replace(b, labels=x) for b, x in zip(batches, labels[1:] + labels[:1], strict=True)], scale)

    return swap(Executor, "run", run)


def _reduced(change: Callable[[FlatBuffer, Any], None], *, before: bool = True) -> Patch:
    """Do something to a bucket before it is reduced."""
    real = FlatBuffer._reduce

    def reduce(self: FlatBuffer, bucket: Any) -> None:
        change(self, bucket)
        real(self, bucket)

    return lambda: swap(FlatBuffer, "_reduce", reduce)


def _double_alone(buffer: FlatBuffer, bucket: Any) -> None:
    if buffer.data.size == 1:
        buffer.grads[bucket.start : bucket.stop] *= 2


def _average(buffer: FlatBuffer, bucket: Any) -> None:
    buffer.grads[bucket.start : bucket.stop] /= buffer.data.size


def _last_step_left(buffer: FlatBuffer) -> None:
    """Instead of `FlatBuffer.start`: gradients of the step before stay."""
    buffer._fresh, buffer._last = set(), False
    for bucket in buffer.buckets:
        bucket.pending = len(bucket.parameters)


def _slice_off_by_one() -> AbstractContextManager[Any]:
    def scatter(out: Tensor, full: Tensor, group: Any, *, async_op: bool = False) -> None:
        all_reduce(full, group)
        first = group.rank * out.numel()
        out.copy_(full.roll(-1)[first : first + out.numel()])

    return swap(grads, "reduce_scatter_into", scatter)


def _unpublished() -> AbstractContextManager[Any]:
    return swap(FlatBuffer, "publish", lambda self: None)


def _reduced_early() -> AbstractContextManager[Any]:
    """Each bucket is reduced in the first backward: what later micro-batches add stays on its rank."""
    real = FlatBuffer.start

    def start(self: FlatBuffer) -> None:
        real(self)
        self._last = True

    return swap(FlatBuffer, "start", start)


def _dropout_by_rank() -> AbstractContextManager[Any]:
    real = rng.generator
    return swap(rng, "generator", lambda device, *key: real(device, *key, dist.get_rank()))


def _dropout_of_first_part() -> AbstractContextManager[Any]:
    real = rng.Dropout.__init__

    def init(self: Any, seed: int, samples: Any, length: int, part: slice = slice(None)) -> None:
        real(self, seed, samples, length, slice(0, part.stop - part.start) if part.stop else part)

    return swap(rng.Dropout, "__init__", init)


def _dropout_of_first_heads() -> AbstractContextManager[Any]:
    real = Attention.__init__

    def init(self: Attention, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.first_head = 0

    return swap(Attention, "__init__", init)


def _padding_takes_part() -> AbstractContextManager[Any]:
    real = loss._chunk

    def chunk(hidden: Tensor, head: Tensor, labels: Tensor, group: Any, vocab_size: int) -> Any:
        return real(hidden, head, labels, group, head.shape[0] * group.size)

    return swap(loss, "_chunk", chunk)


def _loss_of_local_logits() -> AbstractContextManager[Any]:
    return swap(loss, "all_reduce", lambda *args, **options: None)


def _positions_of_first_part() -> AbstractContextManager[Any]:
    real = decoder.sequence_part

    def part(length: int, group: Any, *, sp: bool) -> slice:
        own = real(length, group, sp=sp)
        return slice(0, length // group.size) if sp else own

    return swap(decoder, "sequence_part", part)


def _layers_counted_from_zero() -> AbstractContextManager[Any]:
    """Every stage names its layers from 0: the layers of the first stage are started, or restored, everywhere."""
    real = decoder.Block
    first: dict[int, int] = {}

    def block(build: Builder, index: int, **options: Any) -> Any:
        return real(build, index - first.setdefault(id(build), 0), **options)

    real_init = Decoder.__init__

    def init(self: Decoder, build: Builder, stage: Any = None, recompute: Any = None) -> None:
        first[id(build)] = stage.first if stage else 0
        real_init(self, build, stage, recompute)

    @contextmanager
    def both() -> Any:
        with swap(decoder, "Block", block), swap(Decoder, "__init__", init):
            yield

    return both()


def _only_last_weight_decayed() -> AbstractContextManager[Any]:
    """Weight decay by the local shape: a flat slice is no matrix."""
    real = FlatBuffer.__init__

    def init(self: FlatBuffer, parameters: Any, *, decay: bool, **options: Any) -> None:
        real(self, parameters, decay=False, **options)

    return swap(FlatBuffer, "__init__", init)


def _kv_window_of_first_head() -> AbstractContextManager[Any]:
    """Every rank takes the first key/value head."""
    real = Builder.shared_rows
    return swap(Builder, "shared_rows", lambda self, blocks, index, **rest: real(self, blocks, index=0, **rest))


def _copied(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "partial_grad": True}


def _head_norm_alone(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "partial_grad": False}


MUTATIONS = [
    Mutation("row layer: all-reduce dropped", TP, _row_without_sum),
    Mutation("column layer: the sum of dX dropped", TP, _column_without_sum),
    Mutation("row layer: bias added on every rank", replace(SP, parallel={"tp": 2}), _row_bias_on_every_rank),
    Mutation("head: gradient of the hidden state not summed", TP, lambda: swap(decoder, "sum_gradient", lambda x, g: x)),
    Mutation("norm gradient counted by every tensor rank", TP, _replicated(_copied)),
    Mutation("query-key norm gradient not summed", TP, _replicated(_head_norm_alone)),
    Mutation("norm gradient not summed under sequence parallelism", SP, _without_sync),
    Mutation("key/value gradients not summed over the ranks that share a head", SHARED, _without_sync),
    Mutation("every rank takes the first key/value head", SHARED, _kv_window_of_first_head),
    Mutation("mean of micro-batch means", DP, _mean_of_means),
    Mutation("mean of micro-batch means, one rank", replace(DP, ranks=1), _mean_of_means),
    Mutation("each rank divides by its own tokens", DP, _own_tokens),
    Mutation("norm counts a replicated tensor on every rank", TP, _norm_counts_copies),
    Mutation("norm of this rank's part alone, tensor parallel", TP, _norm_of_this_rank),
    Mutation("norm of this rank's part alone, pipeline", PP, _norm_of_this_rank),
    Mutation("norm counts the tied embedding on both stages", PP, _norm_counts_copies),
    Mutation("pipeline: gradients of two micro-batches swapped", PP, _gradients_swapped),
    Mutation("pipeline: a micro-batch's gradient lost", PP, _gradient_lost),
    Mutation("pipeline: labels of another micro-batch", PP, _labels_of_another),
    Mutation("pipeline: tied embedding gradients not summed over the stages", PP, _tied_without_sync),
    Mutation("pipeline: every stage counts its layers from zero", PP, _layers_counted_from_zero),
    Mutation("gradient doubled in a data group of one", TP, _reduced(_double_alone)),
    Mutation("gradient averaged over ranks that divided by all tokens", DP, _reduced(_average)),
    Mutation("bucket reduced before the last micro-batch", DP, _reduced_early),
    Mutation("gradients of the last step stay", DP, lambda: swap(FlatBuffer, "start", _last_step_left)),
    Mutation("ZeRO slice off by one", ZERO, _slice_off_by_one),
    Mutation("ZeRO weights not gathered after the update", ZERO, _unpublished),
    Mutation("ZeRO: no weight decay on flat slices", ZERO, _only_last_weight_decayed),
    Mutation("dropout drawn by rank", SP, _dropout_by_rank),
    Mutation("dropout of the sequence's first part on every rank", SP, _dropout_of_first_part),
    Mutation("dropout of the first heads on every rank", SP, _dropout_of_first_heads),
    Mutation("positions of the sequence's first part on every rank", SP, _positions_of_first_part),
    Mutation("padded vocabulary takes part in the softmax", TP, _padding_takes_part),
    Mutation("cross entropy of the local logits", TP, _loss_of_local_logits),
]


def mutated(mutations: Sequence[Mutation] | None = None) -> list[tuple[Found | None, Found | None]]:
    """On each rank, what it finds of each mutation's case without and with the bug."""
    mutations = mutations or MUTATIONS
    rank, references = dist.get_rank(), References()
    maker = make_groups(one.case for one in mutations)
    out: list[tuple[Found | None, Found | None]] = []
    for one in mutations:
        if rank >= one.case.ranks:
            out.append((None, None))
            continue
        reference, find = references.of(one.case), partial(_find, one.case, rank, maker)
        healthy = find(reference)
        with one.patch():
            out.append((healthy, find(reference)))
    return out


def _find(one: Case, rank: int, maker: Any, reference: Any) -> Found:
    mine = Trainer.make(one, rank, maker).run()
    shapes = {name: tuple(held.shape) for name, held in reference.tensors.items()}
    held = {name: boxes for name, boxes in places(mine).items() if name in shapes}
    return Found(compare_known(mine, reference), held, shapes)


def compare_known(mine: Any, reference: Any) -> dict[str, float]:
    """`compare`, for a bug that leaves names out or makes new ones."""
    return compare(mine, reference)

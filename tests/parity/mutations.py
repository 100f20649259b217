"""Bugs that trainers really had, planted one at a time from outside: the comparison must see each of them.

A mutation replaces a function of the product while a trainer is built and runs; the reference of one process is made
without it. What has no counterpart here yet (experts, context parallelism, label smoothing) is not in the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from parity.cases import VARIANTS, case
from parity.eight_bit_mutations import EIGHT_BITS
from parity.encoder_mutations import ENCODERS
from parity.expert_mutations import EXPERTS
from parity.mamba_mutations import MAMBAS
from parity.recurrence_mutations import RECURRENCES
from parity.retro_mutations import RETROS
from parity.sharding_mutations import SHARDINGS
from parity.source_mutations import SOURCES
from parity.vision_mutations import VISIONS
from torch import Tensor

from mega_common.errors import NumericalError
from mega_data.batch_loader import StepBatch
from mega_trainer.data import micro_batch as batches
from mega_trainer.data.micro_batch import DocumentBounds, HeadTargets, MicroBatch
from mega_trainer.distributed import rng
from mega_trainer.distributed.comm import CommGroup, RingTransfer, all_reduce
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.kernels import gemm_accumulation as products
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model import (
    decoder,
    input_embeddings,
    latent_attention,
    output_heads,
    parameter_builder,
    sparse_attention,
    vocab_parallel_loss,
)
from mega_trainer.model.activation_checkpointing import OffloadedActivations, _RecomputedTensor
from mega_trainer.model.attention import AttentionCore
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.output_heads import OutputHead, OutputProjection
from mega_trainer.objectives import training_objective
from mega_trainer.optim import gradient_clipping
from mega_trainer.optim.muon import MuonUpdateRule
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel import context_parallel, gradient_buckets, parallel_linear
from mega_trainer.parallel import tensor_parallel as tensor
from mega_trainer.parallel.gradient_buckets import GradientBucket, MicroBatchGradientBucket, StepGradientBucket
from mega_trainer.parallel.overlapped_linear import RingGemms
from mega_trainer.parallel.parameter_shards import ParamGroupKey
from mega_trainer.parallel.zero_buffers import FlatBufferStage, FlatParameterBuffer
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run import train_step
from mega_trainer.verify.case_comparison import RankFindings, compare_outcomes, list_held_tensor_slices
from mega_trainer.verify.case_trainer import CaseTrainer, SingleProcessOutcomes, make_case_process_groups
from mega_trainer.verify.layout_case import CONTEXT_KINDS, STEPS, LayoutCase
from mega_trainer.verify.restore_comparison import RestoreFindings, restore_in_other_layouts

Patch = Callable[[], AbstractContextManager[Any]]
swap = mock.patch.object

TP = case("gqa", 2, parallel={"tp": 2})
SP = case("tied", 2, parallel={"tp": 2, "sp": True})
OVERLAPPED = case("gqa", 4, parallel={"tp": 4, "sp": True, "tp_comm_overlap": True})
SHARED = case("gqa", 4, parallel={"tp": 4})  # every key/value head on two ranks
SINKS = case("gemma", 2, parallel={"tp": 2})
PP = case("tied", 2, parallel={"pp": 2}, micro=2)
ZB = case("dense", 2, layers=4, parallel={"pp": 2, "schedule": "zb-h1"}, micro=2)
ZBV = case("tied", 2, layers=4, parallel={"pp": 2, "schedule": "zbv", "virtual_stages": 2}, micro=2)
DP = case("dense", 2, parallel={"zero": 0}, micro=2)
ZERO = case("dense", 2, parallel={"zero": 1}, micro=4)
ZERO2 = case("dense", 2, parallel={"zero": 2}, micro=2)
RING, GATHER, EXCHANGE = (case("long", 2, parallel={"cp": 2, "cp_kind": kind}) for kind in CONTEXT_KINDS)
DROPPING = case("tied", 2, parallel={"cp": 2, "cp_kind": "alltoall"})
AGAIN = case("gqa", 1, recompute={"kind": "selective"})
AWAY = case("gqa", 1, offload={"activations": 1, "min_bytes": 0})
LATENT = case("mla", 2, parallel={"tp": 2, "sp": True})
RAW_LATENT = case("mla", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["mla"][2])
INDEXED = case("mla", 2, parallel={"tp": 2}, variant=VARIANTS["mla"][5])
INDEXED_CP = replace(INDEXED, parallel={"cp": 2})
AHEAD_DP = case("mla", 2, parallel={"zero": 0}, micro=2)
AHEAD_CP = case("mla", 2, parallel={"cp": 2})
AHEAD_PP = case("mla", 2, parallel={"pp": 2}, micro=2)


@dataclass(frozen=True, eq=False)
class Mutation:
    """A bug, and a layout in which it shows."""

    name: str
    case: LayoutCase
    patch: Patch


def _row_without_sum() -> AbstractContextManager[Any]:
    def forward(ctx: Any, x: Tensor, group: Any, sp: bool) -> Tensor:
        ctx.group, ctx.sp = group, sp
        return x.clone()

    return swap(tensor._SumForward, "forward", staticmethod(forward))


def _column_without_sum() -> AbstractContextManager[Any]:
    def only_blocking(x: Tensor, group: Any, *args: Any, async_op: bool = False) -> None:
        if not async_op:
            all_reduce(x, group, *args)

    return swap(parallel_linear, "all_reduce", only_blocking)


def _gathered_pieces_one_rank_off() -> AbstractContextManager[Any]:
    """Products of pieces that arrive over a ring stand where those of the next rank belong."""
    real = RingGemms.all_gather_gemm

    def gather(self: RingGemms, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor | None, Tensor]:
        gathered, y = real(self, x, *args, **options)
        return gathered, y.roll(x.shape[1], 1)

    return swap(RingGemms, "all_gather_gemm", gather)


def _scattered_pieces_one_rank_off() -> AbstractContextManager[Any]:
    """The sum over a ring of a piece ends on the rank behind its own."""
    real = RingGemms.gemm_reduce_scatter

    def scatter(self: RingGemms, x: Tensor, matrix: Tensor, group: CommGroup) -> Tensor:
        return real(self, x.roll(x.shape[1] // group.size, 1), matrix, group)

    return swap(RingGemms, "gemm_reduce_scatter", scatter)


def _row_bias_on_every_rank() -> AbstractContextManager[Any]:
    def forward(self: Any, x: Tensor, dropout: object = None) -> Tensor:
        return tensor.sum_partial_results(self.linear(x, self.weight, self.bias), self.group, sp=self.sp)

    return swap(tensor.RowParallelLinear, "forward", forward)


def _replicated(partial_grad: bool) -> Patch:
    """Say of all replicated parameters that their gradients are, or are not, parts to be summed."""
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        return real(self, name, shape, **{**options, "partial_grad": partial_grad})

    return lambda: swap(LayerBuilder, "build_replicated", replicated)


def _without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_parameter
    return swap(
        parameter_builder, "make_parameter", lambda *args, **options: real(*args, **{**options, "grad_sync": ()})
    )


def _tied_without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_vocab_parameter
    return swap(
        parameter_builder, "make_vocab_parameter", lambda *args, **options: real(*args, **{**options, "grad_sync": ()})
    )


def _sinks_left_out() -> AbstractContextManager[Any]:
    """Every rank but the first takes its sinks for copies of the first's."""
    real = LayerBuilder.build_parameter

    def parameter(self: LayerBuilder, shape: Any, pieces: Any, **options: Any) -> Any:
        copies = {"replicas": (self.groups.tp,)} if pieces[0].name.endswith(".sinks") else {}
        return real(self, shape, pieces, **{**options, **copies})

    return swap(LayerBuilder, "build_parameter", parameter)


def _norm_counts_copies() -> AbstractContextManager[Any]:
    return swap(ParamGroupKey, "counts_in_norms", property(lambda self: True))


def _norm_of_this_rank(axis: str) -> Patch:
    """Norms are not summed over the ranks of an axis."""
    real = gradient_clipping.all_gather
    return lambda: swap(gradient_clipping, "all_gather", lambda x, group: x if group.name == axis else real(x, group))


@contextmanager
def _mean_of_means() -> Any:
    real = OutputHead.compute_token_loss

    def count_batches(batch: StepBatch, further: int, groups: ParallelGroups) -> list[float]:
        return [len(batch.tokens) // DP.micro * groups.dp.size]

    def mean(self: OutputHead, hidden: Tensor, output: OutputProjection, targets: HeadTargets) -> tuple[Tensor, Tensor]:
        return real(self, hidden, output, replace(targets, weights=targets.weights / targets.weights.sum()))

    with swap(training_objective, "count_step_tokens", count_batches), swap(OutputHead, "compute_token_loss", mean):
        yield


def _own_tokens() -> AbstractContextManager[Any]:
    """Those of a data rank, and of a context rank about its share."""
    return swap(
        training_objective, "count_step_tokens", lambda batch, *more: [batch.loss_weights.sum() / more[-1].cp.size]
    )


def _tokens_of_every_rank() -> AbstractContextManager[Any]:
    real = training_objective.count_local_tokens
    return swap(
        training_objective, "count_local_tokens", lambda batch, further, groups: real(batch, further, ParallelGroups())
    )


def _loss_of_every_rank() -> AbstractContextManager[Any]:
    return swap(
        PipelineExecutor,
        "parallel_groups",
        property(lambda self: replace(self.first_local_stage.groups, tp=CommGroup("tp"))),
    )


def _gradients_swapped() -> AbstractContextManager[Any]:
    real = PipelineExecutor._backward

    def backward(self: PipelineExecutor, key: tuple[int, int]) -> None:
        if key == (0, 0):
            edges = self._edges
            edges[0, 0], edges[0, 1] = edges[0, 1], edges[0, 0]
        real(self, key)

    return swap(PipelineExecutor, "_backward", backward)


def _gradient_lost() -> AbstractContextManager[Any]:
    real = PipelineExecutor._backward

    def backward(self: PipelineExecutor, key: tuple[int, int]) -> None:
        if key == (0, 1):
            self._wait_for_recv("B", key)
        else:
            real(self, key)

    return swap(PipelineExecutor, "_backward", backward)


def _weight_gradients(times: int) -> Patch:
    """Deliver the weight gradients of one micro-batch so many times."""
    real = PipelineExecutor._backward_weights

    def backward(self: PipelineExecutor, key: tuple[int, int]) -> None:
        products, known = self._deferred_wgrads[key]
        for _ in range(times if key == (0, 1) else 1):
            self._deferred_wgrads[key] = list(products), known
            real(self, key)
        self._deferred_wgrads.pop(key, None)

    return lambda: swap(PipelineExecutor, "_backward_weights", backward)


def _inputs_of_the_microbatch_before() -> AbstractContextManager[Any]:
    """What was put off is computed from the micro-batch's own dY and the X that was used last."""
    real, used = parallel_linear.ParallelLinearFunction.compute_wgrad, {}

    def stale(self: parallel_linear.ParallelLinearFunction, x: Tensor, dy: Tensor, main: Any) -> Tensor | None:
        previous, used[x.shape] = used.get(x.shape, x), x
        return real(self, previous, dy, main)

    return swap(parallel_linear.ParallelLinearFunction, "compute_wgrad", stale)


def _gradients_of_another_layer() -> AbstractContextManager[Any]:
    """Products that were put off are added where that of the last weight of this shape belongs."""
    real, used = parallel_linear.ParallelLinearFunction.defer_wgrad, {}

    def swapped(self: parallel_linear.ParallelLinearFunction, weight: Tensor, x: Tensor, dy: Tensor, main: Any) -> None:
        other, used[weight.shape] = used.get(weight.shape, main), main
        real(self, weight, x, dy, other)

    return swap(parallel_linear.ParallelLinearFunction, "defer_wgrad", swapped)


def _head_of_a_tied_embedding_lost() -> AbstractContextManager[Any]:
    return swap(PipelineExecutor, "_tied_grad", lambda self, key: [])


def _labels_of_another() -> AbstractContextManager[Any]:
    real = PipelineExecutor.run_operations

    def run(self: PipelineExecutor, batches: Sequence[Any], *scales: float) -> Tensor:
        labels = [batch.labels for batch in batches]
        others = [replace(b, labels=x) for b, x in zip(batches, labels[1:] + labels[:1], strict=True)]
        return real(self, others, *scales)

    return swap(PipelineExecutor, "run_operations", run)


def _summed(change: Callable[[GradientBucket, Tensor], None]) -> Patch:
    """Do something to a bucket's gradients before they are summed over the data ranks."""
    real = GradientBucket._start_sum

    def changed(self: GradientBucket, whole: Tensor, out: Tensor) -> Any:
        change(self, whole)
        return real(self, whole, out)

    return lambda: swap(GradientBucket, "_start_sum", changed)


def _double_alone(bucket: GradientBucket, whole: Tensor) -> None:
    whole *= 2 if bucket.data.size == 1 else 1


def _average(bucket: GradientBucket, whole: Tensor) -> None:
    whole /= bucket.data.size


def _last_step_stays() -> AbstractContextManager[Any]:
    return swap(StepGradientBucket, "begin_step", lambda self: None)


def _last_microbatch_only() -> AbstractContextManager[Any]:
    """Each micro-batch's sum replaces the one before."""
    real = MicroBatchGradientBucket.wait_for_reduce

    def settle(self: MicroBatchGradientBucket) -> None:
        self._first = True
        real(self)

    return swap(MicroBatchGradientBucket, "wait_for_reduce", settle)


def _overwritten() -> AbstractContextManager[Any]:
    real = GradientBucket.grad_destination
    return swap(GradientBucket, "grad_destination", lambda self, parameter: (real(self, parameter)[0], False))


def _weight_gradient_twice() -> AbstractContextManager[Any]:
    """Added to its place, and given to autograd too."""
    real = parallel_linear.ParallelLinearFunction.compute_wgrad

    def twice(self: parallel_linear.ParallelLinearFunction, x: Tensor, dy: Tensor, main: Any) -> Tensor | None:
        real(self, x, dy, main)
        return real(self, x, dy, None)

    return swap(parallel_linear.ParallelLinearFunction, "compute_wgrad", twice)


def _head_gradient_unscaled() -> AbstractContextManager[Any]:
    real = products.write_scaled_values
    return swap(
        products, "write_scaled_values", lambda values, scale, *args, **kw: real(values, scale * 0 + 1, *args, **kw)
    )


def _slice_off_by_one() -> AbstractContextManager[Any]:
    def scatter(out: Tensor, full: Tensor, group: Any, *, async_op: bool = False) -> None:
        all_reduce(full, group)
        first = group.rank * out.numel()
        out.copy_(full.roll(-1)[first : first + out.numel()])

    return swap(gradient_buckets, "reduce_scatter_into", scatter)


def _unpublished() -> AbstractContextManager[Any]:
    return swap(FlatBufferStage, "all_gather_params", lambda self: None)


def _reduced_early() -> AbstractContextManager[Any]:
    """Each bucket is summed in the first backward: what later micro-batches add stays on its rank."""
    real = FlatBufferStage.backward_context
    begun: set[int] = set()

    def backward(self: FlatBufferStage, last: bool) -> Any:
        first = id(self) not in begun
        begun.symmetric_difference_update({id(self)} if first or last else ())
        return real(self, first)

    return swap(FlatBufferStage, "backward_context", backward)


def _dropout_by_rank() -> AbstractContextManager[Any]:
    real = rng.seeded_generator
    return swap(rng, "seeded_generator", lambda device, *key: real(device, *key, dist.get_rank()))


def _dropout_of_first_part() -> AbstractContextManager[Any]:
    real = rng.SeededDropout.__init__

    def init(self: Any, seed: int, samples: Any, places: Any, whole: Any) -> None:
        real(self, seed, samples, [range(sum(map(len, places)))], whole)

    return swap(rng.SeededDropout, "__init__", init)


def _dropout_of_first_heads() -> AbstractContextManager[Any]:
    real = AttentionCore.__init__

    def init(self: AttentionCore, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.first_head = 0

    return swap(AttentionCore, "__init__", init)


def _padding_takes_part() -> AbstractContextManager[Any]:
    return swap(vocab_parallel_loss, "compute_local_logits", lambda hidden, head, *rest: hidden @ head.t())


def _cap_without_slope() -> AbstractContextManager[Any]:
    return swap(vocab_parallel_loss, "softcap_derivative", lambda logits, softcap: 1.0)


def _loss_of_local_logits() -> AbstractContextManager[Any]:
    return swap(vocab_parallel_loss, "all_reduce", lambda *args, **options: None)


def _positions_of_first_part() -> AbstractContextManager[Any]:
    real = input_embeddings.local_sequence_slice

    def part(length: int, group: Any, *, sp: bool) -> slice:
        own = real(length, group, sp=sp)
        return slice(0, length // group.size) if sp else own

    return swap(input_embeddings, "local_sequence_slice", part)


def _computed_again_from_zeros() -> AbstractContextManager[Any]:
    real = _RecomputedTensor.recompute_value
    return swap(_RecomputedTensor, "recompute_value", lambda self: torch.zeros_like(real(self)))


def _views_begin_at_the_first_element() -> AbstractContextManager[Any]:
    """Of what is brought back from host memory: so up is what gate is, and values what queries are."""
    real = OffloadedActivations.unpack_saved_tensor
    return swap(
        OffloadedActivations,
        "unpack_saved_tensor",
        lambda self, packed: real(self, replace(packed, offset=0) if hasattr(packed, "offset") else packed),
    )


@contextmanager
def _layers_counted_from_zero() -> Any:
    """Every stage names its layers from 0: the layers of the first stage are started, or restored, everywhere."""
    real, block, first = Decoder.__init__, decoder.build_transformer_layer, [0]

    def init(self: Decoder, build: LayerBuilder, stage: Any, *more: Any) -> None:
        first[0] = stage.first
        real(self, build, stage, *more)

    def renamed(build: LayerBuilder, index: int) -> Any:
        return block(build, index - first[0])

    with swap(decoder, "build_transformer_layer", renamed), swap(Decoder, "__init__", init):
        yield


def _no_decay_of_slices() -> AbstractContextManager[Any]:
    """Weight decay by the local shape: a flat slice is no matrix."""
    real = FlatParameterBuffer.__init__

    def init(self: FlatParameterBuffer, parameters: Any, kind: ParamGroupKey, sharing: Any) -> None:
        real(self, parameters, replace(kind, decay=False), sharing)

    return swap(FlatParameterBuffer, "__init__", init)


def _first_kv_head() -> AbstractContextManager[Any]:
    """Every rank takes the first key/value head."""
    real = parameter_builder.get_fused_heads_layout

    def first(blocks: Any, tail: Any, group: CommGroup) -> Any:
        shared = blocks[0].count < group.size
        return real(blocks, tail, replace(group, rank=0) if shared else group)

    return swap(parameter_builder, "get_fused_heads_layout", first)


def _ring_skips_a_block() -> AbstractContextManager[Any]:
    real = context_parallel.BlockwiseAttention.visible_blocks

    def blocks(self: Any, length: int, rank: int, see: Any) -> Any:
        found = list(real(self, length, rank, see))
        return found if rank == self.group.rank else found[:-1]

    return swap(context_parallel.BlockwiseAttention, "visible_blocks", blocks)


def _blocks_added_without_weights() -> AbstractContextManager[Any]:
    def merge(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
        y += block_y
        lse.copy_(torch.logaddexp(lse, block_lse))

    return swap(context_parallel, "_merge_block", merge)


def _documents_of_the_first_tokens() -> AbstractContextManager[Any]:
    """Documents taken from the places of a block within its rank, not within the sequence."""
    real = SequenceMask.list_mask_blocks

    def parts(self: SequenceMask, queries: range, keys: range, window: int | None) -> Any:
        moved = None
        if self.document_starts is not None:
            documents = np.roll(self.document_starts, 1, axis=1)
            documents[:, 0] = 0
            moved = DocumentBounds.from_positions(documents, documents).document_starts
        return real(replace(self, document_starts=moved, _masks={}, _preceding={}), queries, keys, window)

    return swap(SequenceMask, "list_mask_blocks", parts)


def _window_within_a_block() -> AbstractContextManager[Any]:
    real = SequenceMask.list_mask_blocks

    def parts(self: SequenceMask, queries: range, keys: range, window: int | None) -> Any:
        return real(self, queries, keys, window if queries == keys else None)

    return swap(SequenceMask, "list_mask_blocks", parts)


def _each_block_alone() -> AbstractContextManager[Any]:
    """The backward of a block goes by its own result, as if its queries saw no other."""
    real = TorchKernels.attend_block_backward

    def backward(self: Any, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *how: Any) -> Any:
        y, lse = self.attend_block(q, k, v, *how)
        return real(self, dy, q, k, v, y.to(q.dtype), lse, *how)

    return swap(TorchKernels, "attend_block_backward", backward)


def _gradient_stays_away() -> AbstractContextManager[Any]:
    """The last step of the ring's gradients left out: each rank keeps those of its neighbor's keys."""
    real = context_parallel.RingKeyValueExchange.collect_gradients

    def collect(self: Any, mine: Tensor, work: Any) -> Tensor:
        last: list[RingTransfer] = []
        start = context_parallel.start_ring_transfer

        def passed(tensor: Tensor, group: Any) -> RingTransfer:
            last.append(start(tensor, group))
            return last[-1]

        with swap(context_parallel, "start_ring_transfer", passed):
            real(self, mine, work)
        return last[-1].sent

    return swap(context_parallel.RingKeyValueExchange, "collect_gradients", collect)


def _gathered_gradient_not_summed() -> AbstractContextManager[Any]:
    def own_part(out: Tensor, whole: Tensor, group: Any) -> None:
        out.copy_(whole.chunk(group.size)[group.rank])

    return swap(context_parallel, "reduce_scatter_into", own_part)


def _tokens_in_order_of_ranks() -> AbstractContextManager[Any]:
    return swap(context_parallel, "_sequence_order", lambda parts: parts.movedim(0, 1).flatten(1, 2))


def _heads_of_the_first_rank() -> AbstractContextManager[Any]:
    real = context_parallel.UlyssesAttention.compute_attention

    def attention(self: Any, q: Tensor, k: Tensor, v: Tensor, how: Any, see: Any, whole: Any) -> Tensor:
        return real(self, q, k, v, how, see, lambda q, k, v, how, first: whole(q, k, v, how, 0))

    return swap(context_parallel.UlyssesAttention, "compute_attention", attention)


def _blocks_without_sinks() -> AbstractContextManager[Any]:
    real = context_parallel.BlockwiseAttention.compute_attention

    def attention(self: Any, q: Tensor, k: Tensor, v: Tensor, how: Any, see: Any, whole: Any) -> Tensor:
        return real(self, q, k, v, replace(how, sinks=None), see, whole)

    return swap(context_parallel.BlockwiseAttention, "compute_attention", attention)


def _sinks_of_the_first_rank() -> AbstractContextManager[Any]:
    real = context_parallel.UlyssesAttention.compute_attention

    def attention(self: Any, q: Tensor, k: Tensor, v: Tensor, how: Any, see: Any, whole: Any) -> Tensor:
        def swapped(q: Tensor, k: Tensor, v: Tensor, mine: Any, first: int) -> Tensor:
            return whole(q, k, v, replace(mine, sinks=how.sinks[: len(mine.sinks)]), first)

        return real(self, q, k, v, how, see, swapped)

    return swap(context_parallel.UlyssesAttention, "compute_attention", attention)


def _positions_from_zero() -> AbstractContextManager[Any]:
    """Every context rank counts positions from the start of its own tokens."""
    real = batches.MicroBatch.select_tokens

    def part(self: Any, places: Tensor) -> Any:
        return replace(real(self, places), positions=self.positions[:, : len(places)])

    return swap(batches.MicroBatch, "select_tokens", part)


def _latent_norms_without_sync() -> AbstractContextManager[Any]:
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        return real(replace(self, sp=False) if "a_layernorm" in name else self, name, shape, **options)

    return swap(LayerBuilder, "build_replicated", replicated)


def _latent_projections_without_sync() -> AbstractContextManager[Any]:
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        return real(replace(self, sp=False) if "_a_proj" in name else self, name, shape, **options)

    return swap(LayerBuilder, "build_replicated", replicated)


def _ahead_by_own_counts() -> AbstractContextManager[Any]:
    real = train_step.normalize_auxiliary_loss_weights

    def weigh(batches: Sequence[MicroBatch], tokens: Sequence[float]) -> Sequence[MicroBatch]:
        own = [sum(b.mtp_targets[k].weights.sum().item() for b in batches) for k in range(len(batches[0].mtp_targets))]
        return real(batches, [tokens[0] / 2, *own])  # of two ranks

    return swap(train_step, "normalize_auxiliary_loss_weights", weigh)


def _ahead_of_own_tokens() -> AbstractContextManager[Any]:
    """The next token of the rank's, across the gap between its chunks too."""
    real = batches.MicroBatch.select_tokens

    def part(self: Any, places: Tensor) -> Any:
        own = real(self, places)
        return replace(own, mtp_targets=[replace(one, tokens=own.tokens.roll(-1, 1)) for one in own.mtp_targets])

    return swap(batches.MicroBatch, "select_tokens", part)


def _ahead_by_each_batch() -> AbstractContextManager[Any]:
    """The mean of each micro-batch's mean."""
    real = train_step.normalize_auxiliary_loss_weights

    def weigh(batches: Sequence[MicroBatch], tokens: Sequence[float]) -> list[MicroBatch]:
        owns = [[a.weights.sum().item() for a in batch.mtp_targets] for batch in batches]
        return [real([b], [tokens[0] / len(batches), *own])[0] for b, own in zip(batches, owns, strict=True)]

    return swap(train_step, "normalize_auxiliary_loss_weights", weigh)


MUTATIONS = [
    Mutation("row layer: all-reduce dropped", TP, _row_without_sum),
    Mutation("column layer: the sum of dX dropped", TP, _column_without_sum),
    Mutation("row layer: bias added on every rank", replace(SP, parallel={"tp": 2}), _row_bias_on_every_rank),
    Mutation(
        "head: gradient of the hidden state not summed",
        TP,
        lambda: swap(output_heads, "gather_from_sequence_parallel_region", lambda x, g, sp: x),
    ),
    Mutation("norm gradient counted by every tensor rank", TP, _replicated(partial_grad=True)),
    Mutation("query-key norm gradient not summed", TP, _replicated(partial_grad=False)),
    Mutation("norm gradient not summed under sequence parallelism", SP, _without_sync),
    Mutation("key/value gradients not summed over the ranks that share a head", SHARED, _without_sync),
    Mutation("every rank takes the first key/value head", SHARED, _first_kv_head),
    Mutation("mean of micro-batch means", DP, _mean_of_means),
    Mutation("mean of micro-batch means, one rank", replace(DP, ranks=1), _mean_of_means),
    Mutation("each rank divides by its own tokens", DP, _own_tokens),
    Mutation("every tensor rank counts the same tokens", TP, _tokens_of_every_rank),
    Mutation("every stage counts the same tokens", PP, _tokens_of_every_rank),
    Mutation("every context rank counts the same tokens", RING, _tokens_of_every_rank),
    Mutation("the loss that tensor ranks have alike is summed over them", TP, _loss_of_every_rank),
    Mutation("norm counts a replicated tensor on every rank", TP, _norm_counts_copies),
    Mutation("norm leaves sinks out but on the first rank", SINKS, _sinks_left_out),
    Mutation("logits are capped, their gradient is not", SINKS, _cap_without_slope),
    Mutation("norm of this rank's part alone, tensor parallel", TP, _norm_of_this_rank("tp")),
    Mutation("norm of this rank's part alone, pipeline", PP, _norm_of_this_rank("pp")),
    Mutation("norm counts the tied embedding on both stages", PP, _norm_counts_copies),
    Mutation("pipeline: gradients of two micro-batches swapped", PP, _gradients_swapped),
    Mutation("pipeline: a micro-batch's gradient lost", PP, _gradient_lost),
    Mutation("pipeline: labels of another micro-batch", PP, _labels_of_another),
    Mutation("pipeline: tied embedding gradients not summed over the stages", PP, _tied_without_sync),
    Mutation("pipeline: every stage counts its layers from zero", PP, _layers_counted_from_zero),
    Mutation("zero bubble: a micro-batch's weight gradients left out", ZB, _weight_gradients(0)),
    Mutation("zero bubble: a micro-batch's weight gradients twice", ZB, _weight_gradients(2)),
    Mutation("zero bubble: weight gradient from another's input", ZB, _inputs_of_the_microbatch_before),
    Mutation("zero bubble: weight gradients of two layers swapped", ZB, _gradients_of_another_layer),
    Mutation("zero bubble: the head's part of a tied embedding's gradient lost", ZBV, _head_of_a_tied_embedding_lost),
    Mutation("what is computed again is zero", AGAIN, _computed_again_from_zeros),
    Mutation("offloaded views begin at the first element", AWAY, _views_begin_at_the_first_element),
    Mutation("gradient doubled in a data group of one", TP, _summed(_double_alone)),
    Mutation("gradient averaged over ranks that divided by all tokens", DP, _summed(_average)),
    Mutation("bucket reduced before the last micro-batch", DP, _reduced_early),
    Mutation("gradients of the last step stay", DP, _last_step_stays),
    Mutation("a weight's gradient both in its place and by autograd", DP, _weight_gradient_twice),
    Mutation("each micro-batch's gradient written over the one before", DP, _overwritten),
    Mutation("head's gradient put in its place without the scale of the loss", DP, _head_gradient_unscaled),
    Mutation("ZeRO-2 keeps the last micro-batch alone", ZERO2, _last_microbatch_only),
    Mutation("ZeRO slice off by one", ZERO, _slice_off_by_one),
    Mutation("ZeRO weights not gathered after the update", ZERO, _unpublished),
    Mutation("ZeRO: no weight decay on flat slices", ZERO, _no_decay_of_slices),
    Mutation("dropout drawn by rank", SP, _dropout_by_rank),
    Mutation("dropout of the sequence's first part on every rank", SP, _dropout_of_first_part),
    Mutation("dropout of the first heads on every rank", SP, _dropout_of_first_heads),
    Mutation("positions of the sequence's first part on every rank", SP, _positions_of_first_part),
    Mutation("pieces of a gathered product one rank off", OVERLAPPED, _gathered_pieces_one_rank_off),
    Mutation("pieces of a scattered product one rank off", OVERLAPPED, _scattered_pieces_one_rank_off),
    Mutation("padded vocabulary takes part in the softmax", TP, _padding_takes_part),
    Mutation("cross entropy of the local logits", TP, _loss_of_local_logits),
    Mutation("ring skips a block", RING, _ring_skips_a_block),
    Mutation("ring adds blocks without their weights", RING, _blocks_added_without_weights),
    Mutation("ring's gradient of each block as if it were alone", RING, _each_block_alone),
    Mutation("ring leaves a key's gradient with the neighbor", RING, _gradient_stays_away),
    Mutation("gathered keys' gradients not summed", GATHER, _gathered_gradient_not_summed),
    Mutation("heads for sequence: tokens in the order of ranks", EXCHANGE, _tokens_in_order_of_ranks),
    Mutation("ring leaves the sinks out", RING, _blocks_without_sinks),
    Mutation("heads for sequence: sinks of the first heads", EXCHANGE, _sinks_of_the_first_rank),
    Mutation("heads for sequence: dropout of the first heads", DROPPING, _heads_of_the_first_rank),
    Mutation("context ranks divide by their own tokens", RING, _own_tokens),
    Mutation("context ranks count positions from zero", RING, _positions_from_zero),
    Mutation("documents of other tokens", GATHER, _documents_of_the_first_tokens),
    Mutation("window within a block alone", RING, _window_within_a_block),
    Mutation("dropout of the sequence's first tokens on every context rank", RING, _dropout_of_first_part),
    Mutation("latents: gradient of a norm not summed under sequence parallelism", LATENT, _latent_norms_without_sync),
    Mutation(
        "latents without norms: gradient of a projection not summed", RAW_LATENT, _latent_projections_without_sync
    ),
    Mutation(
        "latents: gradient of this rank's heads alone",
        replace(LATENT, parallel={"tp": 2}),
        lambda: swap(latent_attention, "gather_from_sequence_parallel_region", lambda x, g, sp: x),
    ),
    Mutation(
        "sparse attention: scores of this rank's index heads alone",
        INDEXED,
        lambda: swap(sparse_attention, "sum_partial_results", lambda x, group, sp: x),
    ),
    Mutation(
        "sparse attention: divergence from this rank's heads alone",
        INDEXED,
        lambda: swap(sparse_attention, "all_reduce", lambda x, group: None),
    ),
    Mutation(
        "sparse attention: mean over a context rank's own tokens",
        INDEXED_CP,
        lambda: swap(sparse_attention, "all_reduce", lambda x, group: None),
    ),
    Mutation(
        "sparse attention: masks of the first tokens on every context rank",
        INDEXED_CP,
        lambda: swap(
            sparse_attention, "get_context_rank_token_indices", lambda length, group: torch.arange(length // group.size)
        ),
    ),
    Mutation("further tokens: each rank divides by its own", AHEAD_DP, _ahead_by_own_counts),
    Mutation("further tokens: each context rank divides by its own", AHEAD_CP, _ahead_by_own_counts),
    Mutation("further tokens: the next of a context rank's own tokens", AHEAD_CP, _ahead_of_own_tokens),
    Mutation("further tokens: mean of micro-batch means", replace(AHEAD_DP, ranks=1), _ahead_by_each_batch),
    Mutation("further tokens: embedding gradients not summed over the stages", AHEAD_PP, _tied_without_sync),
    Mutation("further tokens: norm counts the embedding on both stages", AHEAD_PP, _norm_counts_copies),
]
MUTATIONS += [
    Mutation(*one)
    for one in [*EXPERTS, *EIGHT_BITS, *MAMBAS, *RECURRENCES, *SOURCES, *ENCODERS, *VISIONS, *RETROS, *SHARDINGS]
]

WHOLE, STAGES = case("dense", 1, layers=4, micro=4), case("dense", 2, layers=4, parallel={"pp": 2}, micro=4)
MUON = case("gqa", 2, parallel={"tp": 2}, optimizer="muon")


def _state_left_out() -> AbstractContextManager[Any]:
    return swap(ShardedOptimizer, "checkpoint_tensors", lambda self: {})


def _momentum_left_out() -> AbstractContextManager[Any]:
    return swap(MuonUpdateRule, "state_tensors", lambda self: {})


def _steps_left_out() -> AbstractContextManager[Any]:
    return swap(
        ShardedOptimizer, "update_count", property(ShardedOptimizer.update_count.fget, lambda self, value: None)
    )


# Bugs of a restore: from the first layout to the second.
RESTORES: list[tuple[str, tuple[LayoutCase, LayoutCase], Patch]] = [
    ("wrong layers restored after a change of pp", (WHOLE, STAGES), _layers_counted_from_zero),
    ("optimizer moments left out", (STAGES, WHOLE), _state_left_out),
    ("Muon's momentum left out", (replace(MUON, ranks=1, parallel={}), MUON), _momentum_left_out),
    ("updates made so far left out", (STAGES, WHOLE), _steps_left_out),
    ("every rank restores the first key/value head", (TP, SHARED), _first_kv_head),
]


def restored(folder: Path) -> list[RestoreFindings | None]:
    """On each rank, what it finds after each restore."""
    return restore_in_other_layouts([cases for _, cases, _ in RESTORES], folder, [patch for *_, patch in RESTORES])


def mutated() -> list[tuple[RankFindings | None, RankFindings | None]]:
    """On each rank, what it finds of each mutation's case without and with the bug."""
    rank, references = dist.get_rank(), SingleProcessOutcomes((one.case, STEPS) for one in MUTATIONS)
    maker = make_case_process_groups(one.case for one in MUTATIONS)
    healthy: dict[LayoutCase, RankFindings] = {}
    out: list[tuple[RankFindings | None, RankFindings | None]] = []
    for one in MUTATIONS:
        if rank >= one.case.ranks:
            out.append((None, None))
            continue
        find = partial(_find, one.case, rank, maker, references.get_outcome(one.case))
        if one.case not in healthy:
            healthy[one.case] = find()
        with one.patch():
            try:
                ill = find()
            except NumericalError:  # which reading what nobody wrote may make
                ill = replace(healthy[one.case], errors={"numbers": math.inf})
            out.append((healthy[one.case], ill))
    return out


def _find(one: LayoutCase, rank: int, maker: Any, reference: Any) -> RankFindings:
    mine = CaseTrainer.build(one, rank, maker).run()
    shapes = {name: tuple(held.shape) for name, held in reference.tensors.items()}
    held = {name: boxes for name, boxes in list_held_tensor_slices(mine).items() if name in shapes}
    return RankFindings(compare_outcomes(mine, reference), held, shapes)

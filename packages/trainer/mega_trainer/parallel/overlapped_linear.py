"""Tensor-parallel linear layers whose GEMMs overlap with their collectives, under sequence parallelism (arXiv:2305.10112).

Legend: B batch, S sequence, D input width, N output width, T tensor ranks.

    column, forward    Y  = all-gather(X) W^T        X [B, S/T, D], W [N/T, D]    Y [B, S, N/T]
    row, forward       Y  = reduce-scatter(X W^T)    X [B, S, D/T], W [N, D/T]    Y [B, S/T, N]
    row, backward      dX = all-gather(dY) W         dY [B, S/T, N]               dX [B, S, D/T]

Each of these GEMMs is computed in T pieces of S/T tokens, and the collective moves one piece while another one is computed.
The two collectives in the backward of a column layer overlap with whole GEMMs instead, as in `parallel_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch import Tensor
from torch.autograd import Function

from mega_trainer.distributed.comm import CommGroup, start_ring_transfer
from mega_trainer.kernels.kernel_interface import GemmOperand
from mega_trainer.parallel.parallel_linear import SEQUENCE, ParallelLinearFunction
from mega_trainer.parallel.parameter_info import get_main_grad_function, get_weight_preparer
from mega_trainer.parallel.tensor_parallel import RowParallelLinear


class OverlappedGemms(Protocol):
    """Interface of GEMMs that overlap with a collective along the sequence; not differentiable."""

    def all_gather_gemm(
        self, x: Tensor, matrix: Tensor, group: CommGroup, *, keep_input: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Return (the gathered input [B, S, D] with `keep_input`, else None; its product with `matrix`, [B, S, N]).
        `x` is this rank's slice of the input [B, S/T, D], `matrix` is [D, N].
        """

    def gemm_reduce_scatter(self, x: Tensor, matrix: Tensor, group: CommGroup) -> Tensor:
        """Return this rank's slice [B, S/T, N] of the sum over all ranks of x [B, S, D] times `matrix` [D, N]."""


class RingGemms:
    """Overlapped GEMMs by a ring of sends and receives, on any device and process group."""

    def all_gather_gemm(
        self, x: Tensor, matrix: Tensor, group: CommGroup, *, keep_input: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """All-gather the input and multiply it by `matrix`, each rank's slice while the next one arrives."""
        piece, length = x.contiguous(), x.shape[SEQUENCE]
        gathered = x.new_empty(len(x), length * group.size, x.shape[-1]) if keep_input else None
        y = x.new_empty(len(x), length * group.size, matrix.shape[1])
        for step in range(group.size):
            transfer = start_ring_transfer(piece, group) if step < group.size - 1 else None
            owner = (group.rank - step) % group.size
            torch.narrow(y, SEQUENCE, owner * length, length).copy_(piece @ matrix)
            if gathered is not None:
                torch.narrow(gathered, SEQUENCE, owner * length, length).copy_(piece)
            piece = piece if transfer is None else transfer.wait()
        return gathered, y

    def gemm_reduce_scatter(self, x: Tensor, matrix: Tensor, group: CommGroup) -> Tensor:
        """Multiply x by `matrix` and reduce-scatter the product, one piece's GEMM while a partial sum arrives."""
        pieces = x.chunk(group.size, SEQUENCE)
        total = pieces[group.rank - 1] @ matrix  # of the previous rank, which the ring reaches last
        for step in range(1, group.size):
            transfer = start_ring_transfer(total, group)
            partial = pieces[(group.rank - 1 - step) % group.size] @ matrix
            total = transfer.wait().add_(partial)
        return total


class SymmetricMemoryGemms:
    """Overlapped GEMMs by torch's symmetric memory: copies between GPUs of one NVLink domain, without NCCL."""

    def all_gather_gemm(
        self, x: Tensor, matrix: Tensor, group: CommGroup, *, keep_input: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """All-gather the input and multiply it by `matrix`, by torch's fused operation."""
        group.record_call("all_gather_gemm", x)
        gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x, [matrix], SEQUENCE, _group_name(group), return_A=keep_input
        )
        return None if gathered is None else gathered.contiguous(), y.contiguous()

    def gemm_reduce_scatter(self, x: Tensor, matrix: Tensor, group: CommGroup) -> Tensor:
        """Multiply x by `matrix` and reduce-scatter the product, by torch's fused operation."""
        group.record_call("gemm_reduce_scatter", x)
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", SEQUENCE, _group_name(group))
        return y.contiguous()


def _group_name(group: CommGroup) -> str:
    assert group.process_group is not None
    return group.process_group.group_name


def choose_overlapped_gemms(device: torch.device, group: CommGroup) -> OverlappedGemms:
    """Return symmetric-memory GEMMs if the GPUs of `group` can read each other's memory, else GEMMs by a ring.
    A group across machines, of as many ranks as a machine has GPUs, uses the ring.
    """
    if device.type != "cuda" or group.has_no_process_group:
        return RingGemms()
    devices = torch.cuda.device_count()
    one_machine = group.ranks[0] // devices == group.ranks[-1] // devices
    others = (other for other in range(devices) if other != device.index)
    reachable = one_machine and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    return SymmetricMemoryGemms() if reachable else RingGemms()


@dataclass(frozen=True, kw_only=True)
class OverlappedColumnFunction(ParallelLinearFunction):
    """Column-parallel linear function whose forward GEMM overlaps with the all-gather of its input.

    Attributes:
        overlapped: GEMMs that overlap with collectives.
    """

    overlapped: OverlappedGemms

    def compute_output(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y [B, S, N/T] = all-gather(X) W^T + b for x [B, S/T, D] and weight [N/T, D]."""
        _, y = self.overlapped.all_gather_gemm(x, weight.t(), self.group)
        return y if bias is None else y.add_(bias)


@dataclass(frozen=True, kw_only=True)
class OverlappedRowFunction(ParallelLinearFunction):
    """Row-parallel linear function, sum over ranks included, whose GEMMs overlap with its collectives.

    Attributes:
        scatter: the ranks that each have some columns of W; `group` stays this rank alone, as X is not gathered.
        overlapped: GEMMs that overlap with collectives.
    """

    scatter: CommGroup
    overlapped: OverlappedGemms

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's slice of Y [B, S/T, N] for x [B, S, D/T] and weight [N, D/T]; a bias is not supported."""
        assert bias is None
        if not torch.is_grad_enabled():
            return super().__call__(x, weight)
        y: Tensor = _OverlappedRow.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return y

    def compute_output(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return this rank's slice of Y = reduce-scatter(X W^T)."""
        return self.overlapped.gemm_reduce_scatter(x, weight.t(), self.scatter)


class _OverlappedRow(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: OverlappedRowFunction) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        # taken here: in the backward, the weight may be a copy made by recomputation
        ctx.layer, ctx.main, ctx.preparer = layer, get_main_grad_function(weight), get_weight_preparer(weight)
        return layer.compute_output(x, layer.prepare_weight_operand(weight, ctx.preparer))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: OverlappedRowFunction = ctx.layer
        trains, dweight = ctx.needs_input_grad[1], None
        matrix = layer.prepare_weight_operand(weight, ctx.preparer)
        gathered, dx = layer.overlapped.all_gather_gemm(dy, matrix, layer.scatter, keep_input=trains)
        if gathered is not None and layer.deferred is None:
            dweight = layer.compute_wgrad(x, gathered, ctx.main)
        elif gathered is not None:
            layer.defer_wgrad(weight, x, gathered, ctx.main)
        return dx, dweight, None


class OverlappedRowLinear(RowParallelLinear):
    """Row-parallel linear layer whose GEMMs overlap with its collectives; `linear` is an `OverlappedRowFunction`."""

    def _summed_output(self, x: Tensor) -> Tensor:
        y = self.linear(x, self.weight)
        return y if self.bias is None else y + self.bias

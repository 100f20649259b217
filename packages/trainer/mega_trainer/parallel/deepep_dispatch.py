"""Expert dispatch by DeepEP's kernels for NVLink and RDMA, if it is installed (version 2 or later).

As with `AllToAllDispatcher`, one row is sent per token and target rank, and rows are summed in the combine. The backward of
a dispatch is a combine, and the backward of a combine is a dispatch.

As in `async_all_to_all`, each exchange is two nodes of the autograd graph, start and wait: the library's kernels run on its own
stream, and the compute stream waits for their event. In a buffer that receives in a fixed order, the library sorts the received
rows in place after that wait, with the handle of the combine. The wait is a node so that autograd does not record the sort.

Legend: N tokens of this rank, K experts of a token, T received tokens, M rows of this rank's experts, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.parallel.expert_parallel import SortedExpertRows, TokenDispatch, sort_rows_by_expert
from mega_trainer.parallel.pass_interleaver import PassInterleaver

if TYPE_CHECKING:
    from deep_ep import ElasticBuffer


@dataclass(frozen=True)
class DeepEpDispatcher:
    """Expert-parallel dispatcher for all layers of a model by the DeepEP library, in bf16.
    It is an `ExpertDispatcher`; its communication buffer is made at the first dispatch.

    The host reads the number of received tokens once per layer. With a `bound` it reads nothing, and buffers hold every
    token of every rank.

    Attributes:
        num_experts: E.
        group: the ranks that hold all experts.
        bound: rows of this rank's experts, as a multiple of an even load.
        deterministic: receive tokens in a fixed order.
        interleaver: runs another pass before a wait for exchanged rows, if there is one.
    """

    num_experts: int
    group: CommGroup
    bound: float | None = None
    deterministic: bool = True
    interleaver: PassInterleaver | None = None
    _buffers: dict[tuple[int, int, int], ElasticBuffer] = field(default_factory=dict, compare=False)

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """Start to send tokens x to the ranks of their `chosen` experts by DeepEP; return the dispatch in progress."""
        shape = (*x.shape, chosen.shape[1])
        if shape not in self._buffers:
            self._buffers[shape] = self._make_buffer(*shape)
        state = DeepEpDispatchState(
            self._buffers[shape], self.num_experts, wait=self.bound is None, interleaver=self.interleaver
        )
        started = _StartDispatch.apply(x, weights, chosen, state)  # type: ignore[no-untyped-call]

        def wait_for_rows() -> SortedExpertRows:
            tokens, recv_weights = _WaitForDispatch.apply(*started, state)  # type: ignore[no-untyped-call]
            local, own = state.chosen.long(), self.num_experts // self.group.size
            if self.bound is None:
                rows = sum(state.handle.num_recv_tokens_per_expert_list)
                return sort_rows_by_expert(tokens, local, recv_weights, own, rows)
            count = state.handle.psum_num_recv_tokens_per_scaleup_rank[-1]  # later rows are not written
            local = local.masked_fill((torch.arange(len(local), device=local.device) >= count).unsqueeze(-1), -1)
            return sort_rows_by_expert(tokens, local, recv_weights, own, math.ceil(self.bound * chosen.numel()))

        def combine_outputs(y: Tensor) -> Tensor:
            out = _StartCombine.apply(y, state)  # type: ignore[no-untyped-call]
            combined: Tensor = _WaitForCombine.apply(out, state)  # type: ignore[no-untyped-call]
            return combined

        return TokenDispatch(wait_for_rows, combine_outputs, chosen.new_zeros(()))

    def _make_buffer(self, tokens: int, width: int, choices: int) -> ElasticBuffer:
        try:
            from deep_ep import ElasticBuffer
        except ImportError as error:
            raise ConfigError(
                f"parallel.dispatch = deepep requires DeepEP, which cannot be imported ({error})",
                hint="install deep_ep 2 or later for this CUDA, or set parallel.dispatch=alltoall",
            ) from error
        return ElasticBuffer(
            self.group.process_group, num_max_tokens_per_rank=tokens, hidden=width, num_topk=choices,
            deterministic=self.deterministic,
        )  # fmt: skip


@dataclass
class DeepEpDispatchState:
    """State of one DeepEP dispatch, for its combine and its backward.
    It has the communication buffer and the library's results.

    Attributes:
        buffer: buffer of the dispatch.
        num_experts: E.
        wait: let the host wait for the number of received tokens.
        interleaver: as in `DeepEpDispatcher`.
        handle, chosen: the library's results; `chosen` [T, K] are this rank's local experts, -1 for others, complete after the
            wait.
        pending: results and event of the exchange in progress; the event keeps the tensors of the exchange.
    """

    buffer: ElasticBuffer
    num_experts: int
    wait: bool
    interleaver: PassInterleaver | None = None
    handle: Any = None
    chosen: Any = None
    pending: tuple[tuple[Tensor, ...], Any] | None = None

    def start_dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Start to send tokens x [N, D] with experts and weights [N, K]; return the tensors [T, ..] being received."""
        buffer: ElasticBuffer = self.buffer
        rows, self.chosen, recv_weights, self.handle, event = buffer.dispatch(
            x, topk_idx=chosen, topk_weights=weights, num_experts=self.num_experts, do_cpu_sync=self.wait,
            async_with_compute_stream=True,
        )  # fmt: skip
        self.pending = ((rows, recv_weights), event)
        return rows, recv_weights

    def start_repeated_dispatch(self, dy: Tensor) -> None:
        """Start to send gradients dy [N, D] of combined tokens to the ranks to which the tokens were dispatched."""
        buffer: ElasticBuffer = self.buffer
        rows, _, _, _, event = buffer.dispatch(
            dy, handle=self.handle, num_experts=self.num_experts, num_sms=self.handle.num_sms,
            async_with_compute_stream=True,
        )  # fmt: skip
        self.pending = ((rows,), event)

    def start_combine(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Start to send back rows y [T, D], and their weights [T, K] if given; return the tensor of the sums [N, D]."""
        buffer: ElasticBuffer = self.buffer
        out: Tensor
        out, sums, event = buffer.combine(y, self.handle, topk_weights=weights, async_with_compute_stream=True)
        self.pending = ((out,) if weights is None else (out, sums), event)
        return out

    def wait_for_tensors(self) -> tuple[Tensor, ...]:
        """Let another pass run, then wait for the exchange in progress and return the received tensors."""
        if self.interleaver is not None:
            self.interleaver.switch_pass()
        assert self.pending is not None
        (tensors, event), self.pending = self.pending, None
        event.current_stream_wait()
        return tensors


class _StartDispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, state: DeepEpDispatchState) -> tuple[Tensor, ...]:
        ctx.state = state
        return state.start_dispatch(x, chosen, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.state.wait_for_tensors(), None, None


class _WaitForDispatch(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, recv_weights: Tensor, state: DeepEpDispatchState) -> tuple[Tensor, ...]:
        ctx.state = state
        state.wait_for_tensors()
        return rows.view_as(rows), recv_weights.view_as(recv_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, drecv_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.state.start_combine(drows, drecv_weights)
        return drows, drecv_weights, None  # `_StartDispatch.backward` returns the received gradients


class _StartCombine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, state: DeepEpDispatchState) -> Tensor:
        ctx.state = state
        return state.start_combine(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.state.wait_for_tensors()
        return rows, None


class _WaitForCombine(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, state: DeepEpDispatchState) -> Tensor:
        ctx.state = state
        state.wait_for_tensors()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.state.start_repeated_dispatch(dy)
        return dy, None  # `_StartCombine.backward` returns the received gradients

"""Expert dispatch by DeepEP's kernels for NVLink and RDMA, if it is installed (version 2 or later).

As with `AllToAllDispatcher`, one row is sent per token and target rank, and rows are summed in the combine. The backward of
a dispatch is a combine, and the backward of a combine is a dispatch.

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
    """

    num_experts: int
    group: CommGroup
    bound: float | None = None
    deterministic: bool = True
    _buffers: dict[tuple[int, int, int], ElasticBuffer] = field(default_factory=dict, compare=False)

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """Start to send tokens x to the ranks of their `chosen` experts by DeepEP, and return the dispatch in progress."""
        shape = (*x.shape, chosen.shape[1])
        if shape not in self._buffers:
            self._buffers[shape] = self._make_buffer(*shape)
        state = DeepEpDispatchState(self._buffers[shape], self.num_experts, wait=self.bound is None)
        tokens, recv_weights = _Dispatch.apply(x, weights, chosen, state)  # type: ignore[no-untyped-call]

        def wait_for_rows() -> SortedExpertRows:
            state.event.current_stream_wait()
            local, own = state.chosen.long(), self.num_experts // self.group.size
            if self.bound is None:
                rows = sum(state.handle.num_recv_tokens_per_expert_list)
                return sort_rows_by_expert(tokens, local, recv_weights, own, rows)
            count = state.handle.psum_num_recv_tokens_per_scaleup_rank[-1]  # later rows are not written
            local = local.masked_fill((torch.arange(len(local), device=local.device) >= count).unsqueeze(-1), -1)
            return sort_rows_by_expert(tokens, local, recv_weights, own, math.ceil(self.bound * chosen.numel()))

        def combine_outputs(y: Tensor) -> Tensor:
            combined: Tensor = _Combine.apply(y, state)  # type: ignore[no-untyped-call]
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
        handle, event, chosen: the library's results; `chosen` [T, K] are this rank's local experts, -1 for others.
    """

    buffer: ElasticBuffer
    num_experts: int
    wait: bool
    handle: Any = None
    event: Any = None
    chosen: Any = None


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, state: DeepEpDispatchState
    ) -> tuple[Tensor, Tensor]:
        ctx.state = state
        buffer: ElasticBuffer = state.buffer
        rows, state.chosen, recv_weights, state.handle, state.event = buffer.dispatch(
            x, topk_idx=chosen, topk_weights=weights, num_experts=state.num_experts, do_cpu_sync=state.wait,
            async_with_compute_stream=True,
        )  # fmt: skip
        return rows, recv_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, drecv_weights: Tensor) -> tuple[Tensor, Tensor, None, None]:
        buffer: ElasticBuffer = ctx.state.buffer
        dx, dweights, _ = buffer.combine(drows, ctx.state.handle, topk_weights=drecv_weights)
        return dx, dweights, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, state: DeepEpDispatchState) -> Tensor:
        ctx.state = state
        buffer: ElasticBuffer = state.buffer
        out: Tensor = buffer.combine(y, state.handle)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        state: DeepEpDispatchState = ctx.state
        buffer: ElasticBuffer = state.buffer
        rows, _, _, _, _ = buffer.dispatch(
            dy, handle=state.handle, num_experts=state.num_experts, num_sms=state.handle.num_sms
        )
        return rows, None

"""Expert dispatch by DeepEP's kernels for NVLink and RDMA, if it is installed (version 2 or later).

It sends what `AllToAll` does, one row for each token and rank, and sums on the way back. A backward is the other way's
forward: the gradient of what was sent is what comes back, and the other way round.

Legend: N tokens of this rank, K experts of a token, T tokens that came, M rows of this rank's experts, D model width.
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
from mega_trainer.parallel.expert_parallel import ExpertRows, TokenDispatch, sort_rows_by_expert

if TYPE_CHECKING:
    from deep_ep import ElasticBuffer


@dataclass(frozen=True)
class DeepEpDispatcher:
    """`ExpertDispatcher` by DeepEP for all layers of a model, in bf16; its buffer is made at the first dispatch.

    The host reads how many tokens came, once a layer, or with a `bound` nothing: tables then have room for every token
    of every rank.

    Attributes:
        num_experts: E.
        group: the ranks that hold all experts.
        bound: rows of this rank's experts, as a multiple of an even load.
        deterministic: what comes is in an order that does not change.
    """

    num_experts: int
    group: CommGroup
    bound: float | None = None
    deterministic: bool = True
    _buffers: dict[tuple[int, int, int], ElasticBuffer] = field(default_factory=dict, compare=False)

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """See `ExpertDispatcher.dispatch_tokens`."""
        shape = (*x.shape, chosen.shape[1])
        if shape not in self._buffers:
            self._buffers[shape] = self._make_buffer(*shape)
        trip = DeepEpDispatchState(self._buffers[shape], self.num_experts, wait=self.bound is None)
        tokens, came = _Dispatch.apply(x, weights, chosen, trip)  # type: ignore[no-untyped-call]

        def wait_for_rows() -> ExpertRows:
            trip.event.current_stream_wait()
            here, own = trip.chosen.long(), self.num_experts // self.group.size
            if self.bound is None:
                return sort_rows_by_expert(tokens, here, came, own, sum(trip.handle.num_recv_tokens_per_expert_list))
            count = trip.handle.psum_num_recv_tokens_per_scaleup_rank[-1]  # behind these nothing is written
            here = here.masked_fill((torch.arange(len(here), device=here.device) >= count).unsqueeze(-1), -1)
            return sort_rows_by_expert(tokens, here, came, own, math.ceil(self.bound * chosen.numel()))

        def combine_outputs(y: Tensor) -> Tensor:
            combined: Tensor = _Combine.apply(y, trip)  # type: ignore[no-untyped-call]
            return combined

        return TokenDispatch(wait_for_rows, combine_outputs, chosen.new_zeros(()))

    def _make_buffer(self, tokens: int, width: int, choices: int) -> ElasticBuffer:
        try:
            from deep_ep import ElasticBuffer
        except ImportError as error:
            raise ConfigError(
                f"parallel.dispatch = deepep: DeepEP cannot be imported: {error}",
                hint="install deep_ep 2 or later for this CUDA, or set parallel.dispatch=alltoall",
            ) from error
        return ElasticBuffer(
            self.group.process_group, num_max_tokens_per_rank=tokens, hidden=width, num_topk=choices,
            deterministic=self.deterministic,
        )  # fmt: skip


@dataclass
class DeepEpDispatchState:
    """State of one DeepEP dispatch: its buffer and what the library returns.

    Attributes:
        buffer: where it is made.
        num_experts: E.
        wait: for the number of tokens that come.
        handle, event, chosen: what it returned; `chosen` [T, K] are this rank's own experts, -1 for others.
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
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, trip: DeepEpDispatchState
    ) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        buffer: ElasticBuffer = trip.buffer
        rows, trip.chosen, came, trip.handle, trip.event = buffer.dispatch(
            x, topk_idx=chosen, topk_weights=weights, num_experts=trip.num_experts, do_cpu_sync=trip.wait,
            async_with_compute_stream=True,
        )  # fmt: skip
        return rows, came

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dcame: Tensor) -> tuple[Tensor, Tensor, None, None]:
        buffer: ElasticBuffer = ctx.trip.buffer
        dx, dweights, _ = buffer.combine(drows, ctx.trip.handle, topk_weights=dcame)
        return dx, dweights, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: DeepEpDispatchState) -> Tensor:
        ctx.trip = trip
        buffer: ElasticBuffer = trip.buffer
        out: Tensor = buffer.combine(y, trip.handle)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        trip: DeepEpDispatchState = ctx.trip
        buffer: ElasticBuffer = trip.buffer
        rows, _, _, _, _ = buffer.dispatch(
            dy, handle=trip.handle, num_experts=trip.num_experts, num_sms=trip.handle.num_sms
        )
        return rows, None

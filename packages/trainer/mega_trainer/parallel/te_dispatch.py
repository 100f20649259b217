"""Expert dispatch by NCCL's kernels in Transformer Engine (version 2.20 or later).

Tokens are received sorted by expert in a table of a fixed length, and returned summed. Row counts stay on the device, so
the host never waits. Tables hold a multiple of an even load.

This module has not run on a GPU yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.parallel.expert_parallel import SortedExpertRows, TokenDispatch


@dataclass(frozen=True)
class TransformerEngineDispatcher:
    """Dispatcher that sends tokens to their experts' ranks and back by Transformer Engine's NCCL kernels, in bf16.
    One serves all layers of a model.

    All ranks must have the same number of tokens.

    Attributes:
        num_experts: E.
        group: the ranks that hold all experts.
        bound: rows of this rank's experts, as a multiple of an even load.
    """

    num_experts: int
    group: CommGroup
    bound: float

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """Send tokens x to the ranks of their `chosen` experts by Transformer Engine, and return the dispatch."""
        try:
            from transformer_engine.pytorch import ep
        except ImportError as error:
            raise ConfigError(
                f"parallel.dispatch = te requires Transformer Engine's expert kernels, which cannot be imported ({error})",
                hint="install transformer-engine 2.20 or later for this CUDA, or set parallel.dispatch=alltoall",
            ) from error
        (tokens, choices), width = chosen.shape, x.shape[1]
        capacity = math.ceil(self.bound * chosen.numel()) + 1  # the last row is unused, as in `ExpertRowAssignment`
        if not ep.is_ep_bootstrapped():
            ep.ep_bootstrap(
                self.group.process_group, self.num_experts, tokens, width, choices, recv_capacity_per_rank=capacity,
                drop_on_overflow=True,
            )  # fmt: skip
        # one buffer per dispatch: the backward needs the state in it
        buffer = ep.EpBuffer(
            choices, tokens, width, self.num_experts // self.group.size, recv_capacity_per_rank=capacity
        )
        rows, recv_weights, counts = ep.ep_dispatch(buffer, x, chosen, weights)
        total: Tensor = buffer.total_recv_tokens  # [1]
        dropped = (total.sum() - (capacity - 1)).clamp(min=0)
        groups = GroupedRows(counts.cumsum(0).clamp(max=capacity - 1).int())
        received = SortedExpertRows(rows, recv_weights, groups, lambda y: y, dropped)

        def combine_outputs(y: Tensor) -> Tensor:
            out: Tensor = ep.ep_combine(buffer, y, num_local_tokens=tokens)
            return out

        return TokenDispatch(lambda: received, combine_outputs, chosen.new_zeros(()))

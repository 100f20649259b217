"""Expert dispatch by NCCL's kernels, which Transformer Engine offers (version 2.20 or later).

Tokens come sorted by expert into a table of a given length, and go back summed. The kernels know from the device where the
table's rows end, so that the host waits in no layer; and but for the products and the activation in between, whose tables have
room for a multiple of an even load, there is nothing left to do. How often a token travels is NCCL's affair.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.parallel.expert_parallel import ExpertRows, TokenDispatch


@dataclass(frozen=True)
class TransformerEngineDispatcher:
    """`ExpertDispatcher` by Transformer Engine for all layers of a model, in bf16; all ranks must bring equally many
    tokens each time.

    Attributes:
        num_experts: E.
        group: the ranks that hold all experts.
        bound: rows of this rank's experts, as a multiple of an even load.
    """

    num_experts: int
    group: CommGroup
    bound: float

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """See `ExpertDispatcher.dispatch_tokens`."""
        try:
            from transformer_engine.pytorch import ep
        except ImportError as error:
            raise ConfigError(
                f"parallel.dispatch = te: Transformer Engine's experts cannot be imported: {error}",
                hint="install transformer-engine 2.20 or later for this CUDA, or set parallel.dispatch=alltoall",
            ) from error
        (tokens, choices), width = chosen.shape, x.shape[1]
        room = math.ceil(self.bound * chosen.numel()) + 1  # the last row is nobody's, as grouped products want it
        if not ep.is_ep_bootstrapped():
            ep.ep_bootstrap(
                self.group.process_group, self.num_experts, tokens, width, choices, recv_capacity_per_rank=room,
                drop_on_overflow=True,
            )  # fmt: skip
        # what a backward needs to know of its dispatch is in the buffer, so that each has one
        buffer = ep.EpBuffer(choices, tokens, width, self.num_experts // self.group.size, recv_capacity_per_rank=room)
        rows, came, counts = ep.ep_dispatch(buffer, x, chosen, weights)
        total: Tensor = buffer.total_recv_tokens  # [1]
        lost = (total.sum() - (room - 1)).clamp(min=0)
        here = ExpertRows(rows, came, GroupedRows(counts.cumsum(0).clamp(max=room - 1).int()), lambda y: y, lost)

        def combine_outputs(y: Tensor) -> Tensor:
            out: Tensor = ep.ep_combine(buffer, y, num_local_tokens=tokens)
            return out

        return TokenDispatch(lambda: here, combine_outputs, chosen.new_zeros(()))

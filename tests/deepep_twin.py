"""A stand-in for DeepEP on a CPU, with the interface and the semantics of its ElasticBuffer, over gloo.

Rows arrive in an order of chance. As in the library, the current stream has them only after it has waited for the event of the
exchange, and a buffer that is deterministic then sorts them, and the handle that combines them, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mega_trainer.config.parallel_rules import ParallelRules
from mega_trainer.distributed.comm import CommGroup, all_gather


@dataclass
class TwinEvent:
    """An event of an exchange: what its wait does, once."""

    arrive: Callable[[], None]
    waited: bool = False

    def current_stream_wait(self) -> None:
        """Let the tensors of the exchange be there."""
        assert not self.waited
        self.arrive()
        self.waited = True


def _later(*results: tuple[Tensor, Tensor]) -> TwinEvent:
    """An event that fills tensors, which hold NaN or anything until then."""

    def arrive() -> None:
        for tensor, value in results:
            tensor.copy_(value)

    return TwinEvent(arrive)


class ElasticBuffer:
    """What one group of ranks exchanges tokens by."""

    def __init__(
        self, group: dist.ProcessGroup, num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        ranks = tuple(dist.get_process_group_ranks(group))
        self.group = CommGroup("ep", ranks, dist.get_rank(group), group)
        self.tokens, self.deterministic = num_max_tokens_per_rank, deterministic
        self.chance = torch.Generator().manual_seed(self.group.rank)

    def dispatch(
        self, x: Tensor, topk_idx: Any = None, topk_weights: Any = None, num_experts: int = 0, num_sms: int = 0,
        async_with_compute_stream: bool = False, handle: Any = None, do_cpu_sync: bool = False,
    ) -> Any:  # fmt: skip
        """Send each token once to each rank that has one of its experts; or again, along the paths of a handle."""
        assert (async_with_compute_stream, x.shape[0]) == (True, self.tokens)
        everyone = all_gather(x, self.group)
        if handle is not None:
            assert (topk_idx, topk_weights, do_cpu_sync, num_sms) == (None, None, False, handle.num_sms)
            rows = x.new_full((handle.length, x.shape[1]), torch.nan)
            return rows, None, None, handle, self._event(handle, [(rows, everyone[handle.arrived])])
        own = num_experts // self.group.size
        chosen = all_gather(topk_idx, self.group) - self.group.rank * own
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= own), -1)
        mine = (chosen >= 0).any(-1).nonzero().flatten()
        mine = mine[torch.randperm(len(mine), generator=self.chance)]
        handle = SimpleNamespace(
            arrived=mine, source=mine, length=len(mine) if do_cpu_sync else len(everyone), num_sms=3,
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor([0, len(mine)]),
            num_recv_tokens_per_expert_list=[int((chosen == i).sum()) for i in range(own)] if do_cpu_sync else [],
        )  # fmt: skip
        tables = [everyone, chosen, all_gather(topk_weights, self.group)]
        received = [table.new_full((handle.length, table.shape[1]), 7) for table in tables]  # anything, behind the rows
        arriving = [(to, table[mine]) for to, table in zip(received, tables, strict=True)]
        return *received, handle, self._event(handle, arriving)

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None, async_with_compute_stream: bool = False) -> Any:
        """Send rows back, and sum those of a token."""
        assert async_with_compute_stream

        def summed(values: Tensor) -> Tensor:
            whole = values.new_zeros(self.group.size * self.tokens, values.shape[1])
            whole[handle.source] = values[: len(handle.source)]
            dist.all_reduce(whole, group=self.group.process_group)
            return whole.chunk(self.group.size)[self.group.rank]

        sums = [summed(values) for values in ([x] if topk_weights is None else [x, topk_weights])]
        results = [torch.full_like(one, torch.nan) for one in sums]
        event = _later(*zip(results, sums, strict=True))
        return results[0], None if topk_weights is None else results[1], event

    def _event(self, handle: Any, arriving: list[tuple[Tensor, Tensor]]) -> TwinEvent:
        """Of a dispatch, whose rows are sorted after the wait if the buffer is deterministic."""

        def arrive() -> None:
            order = handle.arrived.argsort() if self.deterministic else torch.arange(len(handle.arrived))
            handle.source = handle.arrived[order]
            for to, rows in arriving:
                with torch.no_grad():
                    to[: len(rows)] = rows
                to[: len(rows)] = to[order]  # by torch's operations, as in the library: autograd sees them if it is on

        return TwinEvent(arrive)


@contextmanager
def deepep_twin() -> Iterator[None]:
    """Let the stand-in be `deep_ep`, which then runs in any precision."""
    module = SimpleNamespace(ElasticBuffer=ElasticBuffer)
    with (
        mock.patch.dict("sys.modules", {"deep_ep": module}),
        mock.patch.object(ParallelRules, "_dispatch_rule", return_value=""),
    ):
        yield

"""Asynchronous all-to-all of rows, overlapped with computation in forward and backward.

An exchange is two nodes of the graph: what stands between `start` and its wait runs beside it, and in the backward the
gradient's way back starts where the wait was, and is waited for where the rows set out. Autograd takes the youngest node
that is ready, so there too what stood between the two runs beside the exchange.

Tables of rows have one more than is sent: the last one is nobody's, as `RowAssignment` wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.distributed.comm import CollectiveWork, CommGroup, all_to_all_into

# rows, of which the first are sent; how many to and from each rank of the group; rows of the table that is to be returned ->
# that table, there after the wait, with what came as its first rows
AllToAllFunction = Callable[[Tensor, Any, Any, int], tuple[Tensor, CollectiveWork]]


@dataclass(frozen=True)
class HostSplitWire:
    """`Wire` for row counts on the host."""

    group: CommGroup

    def __call__(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], length: int
    ) -> tuple[Tensor, CollectiveWork]:
        """See `Wire`."""
        table = rows.new_empty((length, *rows.shape[1:]))
        out, own = table[: sum(received)], rows[: sum(sent)].contiguous()
        work = all_to_all_into(out, own, self.group, received, sent, async_op=True)
        assert work is not None
        return table, work


@dataclass
class AsyncAllToAll:
    """One all-to-all, and later that of the gradients.

    Attributes:
        wire: what sends.
        sent, received: rows to and from each of its ranks, as the wire wants them.
        length: of the table that comes.
    """

    wire: AllToAllFunction
    sent: Any
    received: Any
    length: int
    _under_way: tuple[Tensor, CollectiveWork] | None = None  # from the one node of a pass to the other

    def start_forward(self, rows: Tensor) -> Tensor:
        """Start to send the first of `rows`; the received table is complete after `wait_for_table`."""
        self._under_way = self.wire(rows, self.sent, self.received, self.length)
        return self._under_way[0]

    def start_backward(self, rows: Tensor, length: int) -> None:
        """Start the reverse exchange (combine), of a table as long as the received one."""
        self._under_way = self.wire(rows, self.received, self.sent, length)

    def wait_for_table(self) -> Tensor:
        """Wait for the exchange in progress and return its table."""
        assert self._under_way is not None
        (table, work), self._under_way = self._under_way, None
        work.wait()
        return table


class _StartExchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.start_forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait_for_table(), None


class _WaitForExchange(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: AsyncAllToAll, length: int) -> Tensor:
        ctx.exchange, ctx.length = exchange, length
        exchange.wait_for_table()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.exchange.start_backward(dy, ctx.length)
        return dy, None, None  # what came back is `_StartExchange`'s to return


def start_host_copy(table: Tensor) -> Callable[[], Any]:
    """Start to copy numbers to the host; the returned function waits for them and returns them as `tolist` does."""
    host = table.to("cpu", non_blocking=True)
    if not table.is_cuda:
        return host.tolist
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait_and_read() -> Any:
        copied.synchronize()
        return host.tolist()

    return wait_and_read


def start_exchange(rows: Tensor, exchange: AsyncAllToAll) -> Callable[[], Tensor]:
    """Send the first of rows [more than are sent, ..]; the returned function waits for the received table [length, ..]."""
    out: Tensor = _StartExchange.apply(rows, exchange)  # type: ignore[no-untyped-call]

    def wait_for_table() -> Tensor:
        there: Tensor = _WaitForExchange.apply(out, exchange, len(rows))  # type: ignore[no-untyped-call]
        return there

    return wait_for_table

"""Rows on their way to other ranks and back, while this one computes something else.

An exchange is two nodes of the graph: what stands between `start` and its wait runs beside it, and in the backward the
gradient's way back starts where the wait was, and is waited for where the rows set out. Autograd takes the youngest node
that is ready, so there too what stood between the two runs beside the exchange.

Tables of rows have one more than is sent: the last one is nobody's, as `Slots` wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.comm import Group, Work, all_to_all_into

# rows, of which the first are sent; how many to and from each rank of the group; rows of the table that is to be returned ->
# that table, there after the wait, with what came as its first rows
Wire = Callable[[Tensor, Any, Any, int], tuple[Tensor, Work]]


@dataclass(frozen=True)
class HostWire:
    """A `Wire` for numbers of rows that the host knows."""

    group: Group

    def __call__(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], length: int) -> tuple[Tensor, Work]:
        """See `Wire`."""
        table = rows.new_empty((length, *rows.shape[1:]))
        out, own = table[: sum(received)], rows[: sum(sent)].contiguous()
        work = all_to_all_into(out, own, self.group, received, sent, async_op=True)
        assert work is not None
        return table, work


@dataclass
class Exchange:
    """One all-to-all, and later that of the gradients.

    Attributes:
        wire: what sends.
        sent, received: rows to and from each of its ranks, as the wire wants them.
        length: of the table that comes.
    """

    wire: Wire
    sent: Any
    received: Any
    length: int
    _under_way: tuple[Tensor, Work] | None = None  # from the one node of a pass to the other

    def begin(self, rows: Tensor) -> Tensor:
        """Start to send the first of `rows`; what comes is there after `end`."""
        self._under_way = self.wire(rows, self.sent, self.received, self.length)
        return self._under_way[0]

    def begin_back(self, rows: Tensor, length: int) -> None:
        """The way back, of a table that is as long as the one that came."""
        self._under_way = self.wire(rows, self.received, self.sent, length)

    def end(self) -> Tensor:
        """Wait for what was begun."""
        assert self._under_way is not None
        (table, work), self._under_way = self._under_way, None
        work.wait()
        return table


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: Exchange, length: int) -> Tensor:
        ctx.exchange, ctx.length = exchange, length
        exchange.end()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.exchange.begin_back(dy, ctx.length)
        return dy, None, None  # what came back is `_Start`'s to return


def fetched(table: Tensor) -> Callable[[], Any]:
    """Start to copy numbers to the host; the function waits for them and returns them as `tolist` does."""
    host = table.to("cpu", non_blocking=True)
    if not table.is_cuda:
        return host.tolist
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> Any:
        copied.synchronize()
        return host.tolist()

    return read


def start(rows: Tensor, exchange: Exchange) -> Callable[[], Tensor]:
    """Send the first of rows [more than are sent, ..]. The function waits for what comes [length, ..]."""
    out: Tensor = _Start.apply(rows, exchange)  # type: ignore[no-untyped-call]

    def arrived() -> Tensor:
        there: Tensor = _Wait.apply(out, exchange, len(rows))  # type: ignore[no-untyped-call]
        return there

    return arrived

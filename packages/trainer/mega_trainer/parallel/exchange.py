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


@dataclass
class Exchange:
    """One all-to-all, and later that of the gradients.

    Attributes:
        group: who takes part.
        sent, received: rows to and from each of its ranks.
    """

    group: Group
    sent: Sequence[int]
    received: Sequence[int]
    _out: Tensor | None = None
    _work: Work | None = None

    def begin(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], length: int) -> Tensor:
        """Start to send the first of `rows`. What comes is there after `end`, the first of `length` rows."""
        self._out = rows.new_empty((length, *rows.shape[1:]))
        out, own = self._out[: sum(received)], rows[: sum(sent)].contiguous()
        self._work = all_to_all_into(out, own, self.group, received, sent, async_op=True)
        return self._out

    def end(self) -> Tensor:
        """Wait for what was begun."""
        out, work, self._out, self._work = self._out, self._work, None, None
        assert out is not None
        assert work is not None
        work.wait()
        return out


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, length: int) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, exchange.sent, exchange.received, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.end(), None, None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: Exchange, length: int) -> Tensor:
        ctx.exchange, ctx.length = exchange, length
        exchange.end()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.exchange.begin(dy, ctx.exchange.received, ctx.exchange.sent, ctx.length)
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


def start(rows: Tensor, exchange: Exchange, length: int | None = None) -> Callable[[], Tensor]:
    """Send the first of rows [sum(sent) + 1 or more, ..]. The function waits for what comes, the first of `length` rows.

    These are sum(received) + 1 where that is left out.
    """
    length = sum(exchange.received) + 1 if length is None else length
    out: Tensor = _Start.apply(rows, exchange, length)  # type: ignore[no-untyped-call]

    def arrived() -> Tensor:
        there: Tensor = _Wait.apply(out, exchange, len(rows))  # type: ignore[no-untyped-call]
        return there

    return arrived

"""Bugs of weights that are sharded over the data ranks (ZeRO-3), for `mutations`: of pipelines, of copies, of Muon."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from parity.cases import case
from torch import Tensor

from mega_trainer.distributed.comm import CommGroup, all_gather_into
from mega_trainer.optim import muon
from mega_trainer.parallel import fsdp
from mega_trainer.parallel.fsdp import FsdpUnitGradients
from mega_trainer.pipeline import executor
from mega_trainer.verify.layout_case import LayoutCase

swap = mock.patch.object

ONCE = case("dense", 4, layers=4, parallel={"pp": 2, "zero": 3, "zero3_gather": "step"}, micro=2)
HALVES = case("gqa", 4, layers=4, parallel={"pp": 2, "zero": 3, "schedule": "zb-h1"}, micro=2)
COPIES = case("dense", 4, parallel={"zero": 3, "zero3_shard": 2}, micro=2)
MUON = case("gqa", 4, parallel={"tp": 2, "zero": 3}, micro=2, optimizer="muon")


def _not_gathered_again() -> AbstractContextManager[Any]:
    def gather(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> None:
        if not hasattr(self, "first"):
            all_gather_into(output_tensor, input_tensor, self.group)
            self.first = output_tensor.clone()
        output_tensor.copy_(self.first)

    return swap(fsdp._AllGather, "__call__", gather)


def _summed_twice() -> AbstractContextManager[Any]:
    real = FsdpUnitGradients.wait_for_reduce

    def wait(self: FsdpUnitGradients) -> None:
        real(self)
        self._start_sum()
        real(self)

    return swap(FsdpUnitGradients, "wait_for_reduce", wait)


def _sharded_leaves() -> AbstractContextManager[Any]:
    return swap(executor, "list_autograd_leaves", lambda stage: list(stage.parameters()))


def _own_part_alone() -> AbstractContextManager[Any]:
    def scatter(out: Tensor, tensor: Tensor, group: CommGroup, *, async_op: bool = False) -> None:
        out.copy_(tensor.chunk(group.size)[group.rank])

    return swap(fsdp, "reduce_scatter_into", scatter)


def _rows_of_this_rank() -> AbstractContextManager[Any]:
    def gather(out: Tensor, tensor: Tensor, group: CommGroup) -> None:
        out.copy_(tensor.repeat(group.size))

    return swap(muon, "all_gather_into", gather)


SHARDINGS: list[tuple[str, LayoutCase, Callable[[], AbstractContextManager[Any]]]] = [
    ("ZeRO-3: weights of the first step, gathered once for all steps", ONCE, _not_gathered_again),
    ("ZeRO-3: gradients summed twice over the copies of the weights", COPIES, _summed_twice),
    ("ZeRO-3: a rank keeps its own part of the gradient", ONCE, _own_part_alone),
    ("ZeRO-3, zero bubble: gradients that are not deferred get lost", HALVES, _sharded_leaves),
    ("ZeRO-3: Muon takes this rank's rows for those of all", MUON, _rows_of_this_rank),
]

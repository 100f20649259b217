"""Speeds of collectives in groups of ranks, against the machine table of `mega plan`; every rank runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.distributed.comm import (
    CommGroup,
    all_gather_into,
    all_reduce,
    all_to_all_into,
    reduce_scatter_into,
    start_ring_transfer,
)
from mega_trainer.distributed.process_groups import build_parallel_groups
from mega_trainer.doctor.check_result import CheckResult, make_speed_check_result, make_upper_bound_check_result
from mega_trainer.doctor.speed_checks import time_fastest_call
from mega_trainer.plan.machine import Interconnect, MachineSpec

PART = "collectives"
MESSAGE_BYTES, MESSAGE_BYTES_CPU = 1 << 28, 1 << 22


def measure_collectives(device: torch.device, machine: MachineSpec | None) -> Iterator[CheckResult]:
    """Yield whether sums are right, and the speed of each collective, in the world, tp and dp groups of this job.

    The speed is of the slowest rank. All groups of a kind run at the same time, as in training.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = ParallelLayout(tp=2, dp=world // 2) if world % 2 == 0 and world > 2 else ParallelLayout(dp=world)
    groups = build_parallel_groups(layout, rank, heads=[])
    strides = {"world": (groups.world, 1), "tp": (groups.tp, 1), "dp": (groups.dp, layout.tp)}
    links = None if machine is None else Interconnect.from_machine(machine, machine.achieved_efficiency)
    for name, (group, stride) in strides.items():
        if group.size > 1 and (name == "world" or group.size < world):
            yield _check_sum(group, device)
            yield from _measure_group(group, stride, device, links, groups.world)


def _check_sum(group: CommGroup, device: torch.device) -> CheckResult:
    """Return the result of an all-reduce of each rank's number."""
    value = torch.full((1 << 16,), float(dist.get_rank() + 1), device=device, dtype=torch.float64)
    all_reduce(value, group)
    wanted = float(sum(rank + 1 for rank in group.ranks))
    return make_upper_bound_check_result(
        PART, f"sum in {group.name} of {group.size}", float((value - wanted).abs().max()), 0.0
    )


def _measure_group(
    group: CommGroup, stride: int, device: torch.device, links: Interconnect | None, world: CommGroup
) -> Iterator[CheckResult]:
    total = MESSAGE_BYTES if device.type == "cuda" else MESSAGE_BYTES_CPU
    count = total // 4 // group.size * group.size
    whole, part = torch.ones(count, device=device), torch.ones(count // group.size, device=device)
    other, splits = torch.empty_like(whole), [count // group.size] * group.size
    share = 4 * count * (group.size - 1) / group.size  # bytes that a rank sends in a ring
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-gather": (lambda: all_gather_into(whole, part, group), share),
        "reduce-scatter": (lambda: reduce_scatter_into(part, whole, group), share),
        "all-reduce": (lambda: all_reduce(whole, group), 2 * share),
        "all-to-all": (lambda: all_to_all_into(other, whole, group, splits, splits), share),
        "ring send": (lambda: start_ring_transfer(whole, group).wait(), 4 * count),
    }
    expected = {} if links is None else _expected_seconds(links, group.size, stride, 4 * count)
    for name, (call, moved) in calls.items():
        seconds = _slowest_rank(time_fastest_call(call, device), world)
        rate = moved / expected[name] / 1e9 if name in expected else None
        yield make_speed_check_result(
            PART, f"{name} in {group.name} of {group.size}", moved / seconds / 1e9, rate, "GB/s"
        )
    small = torch.zeros(1, device=device)
    micros = 1e6 * _slowest_rank(time_fastest_call(lambda: all_reduce(small, group), device), world)
    name = f"latency in {group.name} of {group.size}"
    yield CheckResult(PART, name, "no expectation", f"{micros:.4g} us", value=micros, unit="us")


def _expected_seconds(links: Interconnect, size: int, stride: int, total: int) -> dict[str, float]:
    """Return the predicted seconds of each collective of `total` bytes in a group of `size` ranks `stride` apart."""
    ranks = links.make_rank_group(size, stride)
    gather = links.all_gather_seconds(total, ranks)
    return {
        "all-gather": gather, "reduce-scatter": gather, "all-reduce": 2 * gather,
        "all-to-all": links.all_to_all_seconds(total, ranks), "ring send": links.send_seconds(total, stride),
    }  # fmt: skip


def _slowest_rank(seconds: float, world: CommGroup) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)  # on the host, where gloo reduces it
    all_reduce(slowest, world, "max")
    return slowest.item()

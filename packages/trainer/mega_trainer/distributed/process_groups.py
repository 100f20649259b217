"""Rank of this process and its process groups under a parallel layout. Each group is created by its members only, so that the
cost does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch
import torch.distributed as dist

from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup, CommTrafficCounter


@dataclass(frozen=True)
class RankInfo:
    """Global rank, local rank and world size of this process in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@dataclass
class ProcessGroupCache:
    """Cache of torch process groups by their ranks, so that layouts with the same ranks share them.

    Torch names a group that only its members create by its ranks and the number of groups of this process: all members must
    have created equally many before. So groups of some stages only, such as `embedding`, come after all others.
    """

    timeout: timedelta | None = None  # of collectives; None: torch's default
    groups_by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def get_process_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the process group of `ranks`, or None for one rank; all members, and no others, must call.
        It is created at the first call.
        """
        key = tuple(ranks)
        if len(key) == 1:
            return None
        if key not in self.groups_by_ranks:
            if len(key) == dist.get_world_size():
                world = dist.group.WORLD
                assert world is not None
                self.groups_by_ranks[key] = world
            else:
                self.groups_by_ranks[key] = dist.new_group(
                    list(key), self.timeout, get_device_process_group_backend(), use_local_synchronization=True
                )
        return self.groups_by_ranks[key]


def get_device_process_group_backend() -> str | None:
    """Return "nccl", for process groups of device tensors only, if the job's GPUs use it; else None, torch's default.
    Without host tensors in such a group, no host sockets are opened.
    """
    return "nccl" if "cuda:nccl" in dist.get_backend_config() else None


@dataclass(frozen=True)
class ParallelGroups:
    """Communication groups to which one rank belongs, by axis of parallelism.

    Attributes:
        dp_cp: data and context ranks, over which gradients of non-expert weights are reduced.
        shard: neighbors in `dp_cp` that shard one copy of the weights under ZeRO-3.
        replicate: ranks in `dp_cp` with the same shard of different copies.
        head_sharing: by number of ranks, neighboring tensor ranks with the same head, for mixers with fewer heads than ranks.
        ep: neighbors that together hold all experts of a stage.
        expert_tp: ranks in `ep` that split the same experts.
        expert_data: ranks with the same part of the same experts.
        embedding: first and last pipeline stage, which share a tied embedding.
    """

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    world: CommGroup = field(default_factory=lambda: CommGroup("world"))
    tp: CommGroup = field(default_factory=lambda: CommGroup("tp"))
    pp: CommGroup = field(default_factory=lambda: CommGroup("pp"))
    cp: CommGroup = field(default_factory=lambda: CommGroup("cp"))
    dp: CommGroup = field(default_factory=lambda: CommGroup("dp"))
    dp_cp: CommGroup = field(default_factory=lambda: CommGroup("dp_cp"))
    shard: CommGroup = field(default_factory=lambda: CommGroup("shard"))
    replicate: CommGroup = field(default_factory=lambda: CommGroup("replicate"))
    ep: CommGroup = field(default_factory=lambda: CommGroup("ep"))
    expert_tp: CommGroup = field(default_factory=lambda: CommGroup("expert_tp"))
    expert_data: CommGroup = field(default_factory=lambda: CommGroup("expert_data"))
    embedding: CommGroup = field(default_factory=lambda: CommGroup("embedding"))
    head_sharing: Mapping[int, CommGroup] = field(default_factory=dict)

    def head_sharing_group(self, heads: int) -> CommGroup:
        """Return the tensor-parallel ranks that hold the same head as this rank, in a layer with `heads` heads.
        The group is this rank alone if no head is shared.
        """
        ranks = self.tp.size // heads
        return self.head_sharing[ranks] if ranks > 1 else CommGroup("shared", (self.tp.ranks[self.tp.rank],))

    def all_groups(self) -> list[CommGroup]:
        """Return all communication groups of this rank, including groups of one rank."""
        axes = [getattr(self, axis.name) for axis in fields(self)]
        return [*(group for group in axes if isinstance(group, CommGroup)), *self.head_sharing.values()]


def list_communicating_groups(groups: ParallelGroups, config: RunConfig) -> list[CommGroup]:
    """Return the groups of several ranks on which a run as configured calls collectives, each set of ranks once.
    Each has its own NCCL communicator, which takes 0.1 to 0.4 GB of device memory outside of torch's pool.
    """
    model, unused = config.model, set[CommGroup]()
    if not (model.tie_embeddings or model.mtp_layers):
        unused.add(groups.embedding)
    if model.moe is None:
        unused |= {groups.ep, groups.expert_tp, groups.expert_data}
        if not (config.fault.hash_every or config.fault.recompute_every):
            unused.add(groups.dp)
    by_ranks = {group.ranks: group for group in groups.all_groups() if group.size > 1 and group not in unused}
    return list(by_ranks.values())


def warm_up_nccl_communicators(groups: ParallelGroups, used: Sequence[CommGroup], device: torch.device) -> None:
    """Create the NCCL communicators of a run by a first message before the model fills device memory.
    The communicators connect the `used` groups, and each pipeline rank with its neighbors.

    A communicator is created by the first message, in memory outside of torch's pool, so it must exist before the model
    fills the device. All ranks visit the axes in the same order, which avoids deadlocks.
    """
    for group in used:
        dist.all_reduce(torch.zeros(1, device=device), group=group.process_group)
    ring = groups.pp
    if ring.size > 1:
        token, (after, before) = (
            torch.zeros(1, device=device),
            (ring.ranks[(ring.rank + step) % ring.size] for step in (1, -1)),
        )
        if ring.rank > 0:
            dist.recv(token, before, group=ring.process_group)
        dist.send(token, after, group=ring.process_group)
        if ring.rank == 0:
            dist.recv(token, before, group=ring.process_group)


def build_parallel_groups(
    layout: ParallelLayout,
    rank: int,
    *,
    heads: Collection[int],
    shard: int | None = None,
    maker: ProcessGroupCache | None = None,
    ordered: bool = False,
    log: CommTrafficCounter | None = None,
) -> ParallelGroups:
    """Return the communication groups of `rank` in the parallel layout; all ranks of the layout must call it.

    Args:
        layout: degrees of parallelism.
        rank: of this process.
        heads: numbers of heads that several tensor ranks may share, such as key/value heads.
        shard: number of data ranks that shard one copy of the weights under ZeRO-3; None for all.
        maker: cache of process groups.
        ordered, log: as in `CommGroup`.
    """
    maker = maker or ProcessGroupCache()
    at = layout.coordinates_of(rank)

    def make_rank_group(name: str, ranks: list[int]) -> CommGroup:
        if len(ranks) == 1 or rank not in ranks:  # such as the embedding group, on a middle stage
            return CommGroup(name, (rank,))
        return CommGroup(name, tuple(ranks), ranks.index(rank), maker.get_process_group(ranks), ordered, log)

    def ranks_along_axis(name: str) -> list[int]:
        return [layout.rank_at(**{**at, name: index}) for index in range(getattr(layout, name))]

    dp_cp = [layout.rank_at(**{**at, "dp": d, "cp": c}) for d in range(layout.dp) for c in range(layout.cp)]
    data, size = make_rank_group("dp_cp", dp_cp), shard or len(dp_cp)
    begin, index = data.rank // size * size, data.rank % size
    stage = at["pp"] * layout.ranks_per_stage  # its first rank
    block, inner = layout.ep * layout.expert_tp, rank - stage
    experts = stage + inner // block * block  # first rank of the block that holds all experts
    part = stage + inner // layout.expert_tp * layout.expert_tp
    shares = sorted({layout.tp // n for n in heads if n < layout.tp})  # tensor ranks with the same head
    ends = sorted({0, layout.pp - 1})
    return ParallelGroups(
        layout=layout,
        world=make_rank_group("world", list(range(layout.world_size))),
        tp=make_rank_group("tp", ranks_along_axis("tp")),
        pp=make_rank_group("pp", ranks_along_axis("pp")),
        cp=make_rank_group("cp", ranks_along_axis("cp")),
        dp=make_rank_group("dp", ranks_along_axis("dp")),
        dp_cp=data,
        shard=data if size == len(dp_cp) else make_rank_group("shard", dp_cp[begin : begin + size]),
        replicate=make_rank_group("replicate", dp_cp[index::size]),
        head_sharing={n: make_rank_group("shared", ranks_along_axis("tp")[at["tp"] // n * n :][:n]) for n in shares},
        ep=make_rank_group("ep", list(range(experts, experts + block))),
        expert_tp=make_rank_group("expert_tp", list(range(part, part + layout.expert_tp))),
        expert_data=make_rank_group(
            "expert_data", list(range(stage + inner % block, stage + layout.ranks_per_stage, block))
        ),
        # last, as not every rank creates it: torch names a group by the number of groups that each member has
        embedding=make_rank_group("embedding", [layout.rank_at(**{**at, "pp": stage}) for stage in ends]),
    )

"""Which ranks form which group, under a layout of degrees. Only the groups this rank belongs to are made, each by its own members, so that building them costs the same in a world of ten thousand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch
import torch.distributed as dist

from mega_trainer.comm import CommLog, Group
from mega_trainer.layout import Layout


@dataclass
class GroupMaker:
    """Makes process groups, each once, however many layouts ask for the same ranks.

    Torch names a group that its members alone ask for by its ranks and by how many groups this process has: all members
    must have made as many before. So a group of some stages only, as `embedding`, comes after all that span stages.
    """

    timeout: timedelta | None = None  # how long a collective may wait; None: torch's own
    made: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def handle(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The process group of `ranks`, to be asked for by its members alone; None for a single rank."""
        key = tuple(ranks)
        if len(key) == 1:
            return None
        if key not in self.made:
            if len(key) == dist.get_world_size():
                world = dist.group.WORLD
                assert world is not None
                self.made[key] = world
            else:
                self.made[key] = dist.new_group(
                    list(key), self.timeout, device_backend(), use_local_synchronization=True
                )
        return self.made[key]


def device_backend() -> str | None:
    """The backend of a group that only its ranks' devices talk in: where those are GPUs, without sockets for the host.

    The host talks in the group of all ranks alone. None: that of all ranks, which is a CPU's.
    """
    return "nccl" if "cuda:nccl" in dist.get_backend_config() else None


@dataclass(frozen=True)
class Groups:
    """The groups one rank belongs to, by axis.

    `dp_cp` is where gradients of ordinary weights are summed (context ranks see other tokens of the same sequences);
    `shard` are neighbours among them that share one copy of the weights under ZeRO-3, `replicate` those that hold the
    same part of different copies;
    `shared` are the so many neighbouring tensor ranks that hold the same head, for each kind with fewer heads than ranks;
    `ep` are the neighbours that hold all experts of a stage, of which `expert_tp` share the same ones, a part of each; and
    `expert_data` those that hold the same part of the same experts;
    `embedding` joins the first and the last pipeline stage, which share a tied embedding.
    """

    layout: Layout = field(default_factory=Layout)
    world: Group = field(default_factory=lambda: Group("world"))
    tp: Group = field(default_factory=lambda: Group("tp"))
    pp: Group = field(default_factory=lambda: Group("pp"))
    cp: Group = field(default_factory=lambda: Group("cp"))
    dp: Group = field(default_factory=lambda: Group("dp"))
    dp_cp: Group = field(default_factory=lambda: Group("dp_cp"))
    shard: Group = field(default_factory=lambda: Group("shard"))
    replicate: Group = field(default_factory=lambda: Group("replicate"))
    ep: Group = field(default_factory=lambda: Group("ep"))
    expert_tp: Group = field(default_factory=lambda: Group("expert_tp"))
    expert_data: Group = field(default_factory=lambda: Group("expert_data"))
    embedding: Group = field(default_factory=lambda: Group("embedding"))
    shared: Mapping[int, Group] = field(default_factory=dict)

    def sharing(self, heads: int) -> Group:
        """The tensor ranks that hold the same one of so many heads (of keys and values, or of another kind)."""
        ranks = self.tp.size // heads
        return self.shared[ranks] if ranks > 1 else Group("shared", (self.tp.ranks[self.tp.rank],))

    def all(self) -> list[Group]:
        """Each of them."""
        axes = [getattr(self, axis.name) for axis in fields(self)]
        return [*(group for group in axes if isinstance(group, Group)), *self.shared.values()]


def warm_up(groups: Groups, device: torch.device) -> None:
    """Have every group make its communicator, and pipeline ranks theirs with their neighbours.

    A communicator is made by the first message, in memory that torch's pool does not count: here before the model fills
    it. All ranks go through the axes in the same order, so that none waits for one that waits for it.
    """
    met: set[tuple[int, ...]] = set()
    for group in groups.all():
        if group.size > 1 and group.ranks not in met:
            met.add(group.ranks)
            dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
    ring = groups.pp
    if ring.size > 1:
        token, (after, before) = (
            torch.zeros(1, device=device),
            (ring.ranks[(ring.rank + step) % ring.size] for step in (1, -1)),
        )
        if ring.rank > 0:
            dist.recv(token, before, group=ring.handle)
        dist.send(token, after, group=ring.handle)
        if ring.rank == 0:
            dist.recv(token, before, group=ring.handle)


def build_groups(
    layout: Layout,
    rank: int,
    *,
    heads: Collection[int],
    shard: int | None = None,
    maker: GroupMaker | None = None,
    ordered: bool = False,
    log: CommLog | None = None,
) -> Groups:
    """Make this rank's groups. A collective call among the ranks of the layout.

    Args:
        layout: degrees of parallelism.
        rank: this one.
        heads: how many the model has of each kind that several tensor ranks may share, as key/value heads.
        shard: data ranks that share one copy of the weights under ZeRO-3, a divisor of their number; None for all.
        maker: makes the process groups.
        ordered, log: as in `Group`.
    """
    maker = maker or GroupMaker()
    at = layout.coordinates(rank)

    def group(name: str, ranks: list[int]) -> Group:
        if len(ranks) == 1 or rank not in ranks:  # such as the embedding group, on a middle stage
            return Group(name, (rank,))
        return Group(name, tuple(ranks), ranks.index(rank), maker.handle(ranks), ordered, log)

    def along(name: str) -> list[int]:
        return [layout.rank(**{**at, name: index}) for index in range(getattr(layout, name))]

    dp_cp = [layout.rank(**{**at, "dp": d, "cp": c}) for d in range(layout.dp) for c in range(layout.cp)]
    data, size = group("dp_cp", dp_cp), shard or len(dp_cp)
    begin, place = data.rank // size * size, data.rank % size
    stage = at["pp"] * layout.stage_size  # its first rank
    block, inner = layout.ep * layout.expert_tp, rank - stage
    experts = stage + inner // block * block  # the first rank of those that hold all experts
    part = stage + inner // layout.expert_tp * layout.expert_tp
    shares = sorted({layout.tp // n for n in heads if n < layout.tp})  # tensor ranks with the same head
    ends = sorted({0, layout.pp - 1})
    return Groups(
        layout=layout,
        world=group("world", list(range(layout.world_size))),
        tp=group("tp", along("tp")),
        pp=group("pp", along("pp")),
        cp=group("cp", along("cp")),
        dp=group("dp", along("dp")),
        dp_cp=data,
        shard=data if size == len(dp_cp) else group("shard", dp_cp[begin : begin + size]),
        replicate=group("replicate", dp_cp[place::size]),
        shared={n: group("shared", along("tp")[at["tp"] // n * n :][:n]) for n in shares},
        ep=group("ep", list(range(experts, experts + block))),
        expert_tp=group("expert_tp", list(range(part, part + layout.expert_tp))),
        expert_data=group("expert_data", list(range(stage + inner % block, stage + layout.stage_size, block))),
        # last: torch names a group that its members alone make by how many groups each of them has, so those that
        # not every rank makes come after those that every rank does
        embedding=group("embedding", [layout.rank(**{**at, "pp": stage}) for stage in ends]),
    )

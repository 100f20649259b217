"""Groups of ranks: each axis cuts the world into groups of those that differ on it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommTrafficCounter, all_reduce
from mega_trainer.distributed.process_groups import (
    ParallelGroups,
    ProcessGroupCache,
    build_parallel_groups,
    list_communicating_groups,
    warm_up_nccl_communicators,
)

AXES = ("tp", "pp", "cp", "dp")
layouts = st.builds(ParallelLayout, *[st.integers(1, 4)] * 4)


@dataclass
class Asked(ProcessGroupCache):
    """Makes nothing, and remembers what was asked for."""

    asked: list[tuple[int, ...]] = field(default_factory=list)

    def get_process_group(self, ranks: Sequence[int]) -> None:
        self.asked.append(tuple(ranks))


def groups_of(layout: ParallelLayout, *heads: int) -> list[ParallelGroups]:
    """What every rank has."""
    return [build_parallel_groups(layout, rank, heads=heads, maker=Asked()) for rank in range(layout.world_size)]


@given(layouts)
def test_an_axis_cuts_the_world_into_groups_that_differ_on_it_alone(layout: ParallelLayout) -> None:
    everyone = groups_of(layout)
    for axis in AXES:
        for rank, groups in enumerate(everyone):
            group = getattr(groups, axis)
            assert group.size == getattr(layout, axis)
            assert group.ranks[group.rank] == rank
            assert group.rank == layout.coordinates_of(rank)[axis]
            at = [layout.coordinates_of(other) for other in group.ranks]
            assert all(one[other] == at[0][other] for one in at for other in AXES if other != axis)


@given(layouts)
def test_all_members_of_a_group_have_the_same_one(layout: ParallelLayout) -> None:
    everyone = groups_of(layout)
    for name in ("world", "tp", "pp", "cp", "dp", "dp_cp", "embedding"):
        for groups in everyone:
            mine = getattr(groups, name)
            assert all(getattr(everyone[other], name).ranks == mine.ranks for other in mine.ranks)


@given(layouts)
def test_gradients_are_summed_over_data_and_context_ranks(layout: ParallelLayout) -> None:
    for groups in groups_of(layout):
        assert groups.dp_cp.size == layout.dp * layout.cp
        assert set(groups.dp.ranks) | set(groups.cp.ranks) <= set(groups.dp_cp.ranks)


@given(layouts)
def test_the_first_and_last_stage_share_the_embedding(layout: ParallelLayout) -> None:
    for rank, groups in enumerate(groups_of(layout)):
        ends = layout.coordinates_of(rank)["pp"] in (0, layout.pp - 1)
        expected = sorted({groups.pp.ranks[0], groups.pp.ranks[-1]}) if ends else [rank]
        assert list(groups.embedding.ranks) == expected


@st.composite
def expert_layouts(draw: st.DrawFn) -> ParallelLayout:
    tp, pp, cp, dp = (draw(st.integers(1, 4)) for _ in range(4))
    blocks = [(ep, parts) for ep in range(1, 9) for parts in range(1, 5) if tp * cp * dp % (ep * parts) == 0]
    ep, parts = draw(st.sampled_from(blocks))
    return ParallelLayout(tp, pp, cp, dp, ep, parts)


@given(expert_layouts())
def test_all_experts_are_among_neighbors_of_a_stage(layout: ParallelLayout) -> None:
    everyone = groups_of(layout)
    for rank, groups in enumerate(everyone):
        assert groups.ep.ranks[groups.ep.rank] == rank
        assert groups.ep.size == layout.ep * layout.expert_tp
        assert list(groups.ep.ranks) == list(range(groups.ep.ranks[0], groups.ep.ranks[0] + groups.ep.size))
        assert {layout.coordinates_of(other)["pp"] for other in groups.ep.ranks} == {layout.coordinates_of(rank)["pp"]}
        assert groups.expert_tp.size == layout.expert_tp
        assert set(groups.expert_tp.ranks) <= set(groups.ep.ranks)
        assert groups.ep.rank % layout.expert_tp == groups.expert_tp.rank
        assert groups.expert_data.size * groups.ep.size == layout.ranks_per_stage
        assert {everyone[other].ep.rank for other in groups.expert_data.ranks} == {groups.ep.rank}
        for name in ("ep", "expert_tp", "expert_data"):
            mine = getattr(groups, name)
            assert all(getattr(everyone[other], name).ranks == mine.ranks for other in mine.ranks)


@pytest.mark.parametrize(("tp", "heads"), [(8, 2), (8, 1), (4, 4), (6, 3), (2, 8)])
def test_tensor_ranks_with_the_same_head_form_a_group(tp: int, heads: int) -> None:
    head = [rank * heads // tp for rank in range(tp)]  # the head a rank's queries look at
    for rank, groups in enumerate(groups_of(ParallelLayout(tp=tp), heads, 1, 2)):  # and kinds with one and two
        shares = [other for other in range(tp) if head[other] == head[rank]] if heads < tp else [rank]
        assert list(groups.head_sharing_group(heads).ranks) == shares


def test_a_rank_makes_only_groups_that_it_is_in() -> None:
    maker = Asked()
    build_parallel_groups(ParallelLayout(tp=4, pp=16, dp=16), 700, heads=[2], maker=maker)
    assert len(maker.asked) <= 8
    assert all(700 in ranks for ranks in maker.asked)


def real_groups() -> tuple[list[float], int]:
    log = CommTrafficCounter()
    rank = dist.get_rank()
    maker = ProcessGroupCache(timedelta(seconds=77))
    groups = build_parallel_groups(ParallelLayout(tp=2, pp=2), rank, heads=[1], maker=maker, log=log)
    assert groups.tp.process_group is not None
    assert groups.tp.process_group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    sums = []
    for group in (groups.world, groups.tp, groups.pp, groups.dp, groups.embedding, groups.head_sharing_group(1)):
        value = torch.tensor(float(10**rank))
        all_reduce(value, group)
        sums.append(value.item())
    return sums, len(maker.groups_by_ranks)


def test_groups_of_processes() -> None:
    for rank, (sums, made) in enumerate(run_ranks(real_groups, 4)):
        tp, pp = (11.0, 1100.0)[rank // 2], (101.0, 1010.0)[rank % 2]
        assert sums == [1111.0, tp, pp, float(10**rank), pp, tp]
        assert made == 3  # the same ranks are one group, whatever it is for


def run(**sections: Any) -> RunConfig:
    model = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 40}
    rest = {
        "data": {"train": "tokens", "seq_length": 16},
        "batch": {"micro": 1, "global": 8},
        "optimizer": {"lr": 1e-3},
    }
    raw = {**rest, **sections, "model": {**model, **sections.get("model", {})}}
    return RunConfig.parse({**raw, "train": {"steps": 1}})


MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}}
USED: dict[str, tuple[ParallelLayout, dict[str, Any], list[str]]] = {  # groups of rank 0
    "one rank": (ParallelLayout(), {}, []),
    "data ranks": (ParallelLayout(dp=4), {}, ["world"]),
    "4D": (ParallelLayout(tp=2, pp=4, cp=2, dp=2), {}, ["world", "tp", "pp", "cp", "dp_cp"]),
    "4D, tied": (
        ParallelLayout(tp=2, pp=4, cp=2, dp=2), {"model": {"tie_embeddings": True}},
        ["world", "tp", "pp", "cp", "dp_cp", "embedding"]
    ),
    "4D, tied, two stages": (
        ParallelLayout(tp=2, pp=2, cp=2, dp=2), {"model": {"tie_embeddings": True}}, ["world", "tp", "pp", "cp", "dp_cp"]
    ),
    "4D, checked": (
        ParallelLayout(tp=2, pp=2, cp=2, dp=2), {"fault": {"hash_every": 5}}, ["world", "tp", "pp", "cp", "dp", "dp_cp"]
    ),
    "experts": (ParallelLayout(tp=2, dp=4, ep=2, expert_tp=1), {"model": MOE}, ["world", "tp", "dp"]),
    "experts, split": (
        ParallelLayout(tp=2, dp=4, ep=2, expert_tp=2), {"model": MOE}, ["world", "tp", "dp", "ep", "expert_data"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "sections", "names"), USED.values(), ids=USED)
def test_a_run_has_a_communicator_for_each_set_of_ranks_that_it_uses(
    layout: ParallelLayout, sections: dict[str, Any], names: list[str]
) -> None:
    groups = build_parallel_groups(layout, 0, heads=[], maker=Asked())
    used = list_communicating_groups(groups, run(**sections))
    assert {group.ranks for group in used} == {getattr(groups, name).ranks for name in names}
    assert len(used) == len(names)


def warmed() -> list[list[int]]:
    """The ranks of each group that has talked, in order, and then what a neighbor in the pipeline is sent."""
    rank = dist.get_rank()
    groups = [
        build_parallel_groups(layout, rank, heads=[4]) for layout in (ParallelLayout(tp=2, dp=2), ParallelLayout(pp=4))
    ]
    real, talked = dist.all_reduce, []

    def spy(tensor: torch.Tensor, *, group: Any) -> None:
        talked.append(dist.get_process_group_ranks(group))
        real(tensor, group=group)

    with mock.patch.object(dist, "all_reduce", spy):
        for one in groups:
            warm_up_nccl_communicators(
                one, list_communicating_groups(one, run(model={"tie_embeddings": True})), torch.device("cpu")
            )
    return talked


def test_every_communicator_is_made_once_before_the_model() -> None:
    found = run_ranks(warmed, 4, timeout=60)
    everyone = [0, 1, 2, 3]
    for rank, talked in enumerate(found):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        ends = [[0, 3]] if rank in (0, 3) else []
        assert talked == [everyone, pair, [rank % 2, rank % 2 + 2], everyone, *ends]


@pytest.mark.parametrize(("config", "backend"), [("cpu:gloo,cuda:nccl", "nccl"), ("cpu:gloo,cuda:gloo", None)])
def test_among_gpus_only_the_group_of_all_ranks_has_sockets_for_the_host(
    config: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "new_group", lambda *args, **more: made.append(args))
    ProcessGroupCache().get_process_group([0, 1])
    assert made == [([0, 1], None, backend)]

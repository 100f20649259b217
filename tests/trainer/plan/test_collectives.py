from __future__ import annotations

import pytest

from mega_trainer.plan.machine import Interconnect, RankPlacement

WIRES = Interconnect(link=400e9, network=50e9, exchange=40e9, hop=1e-6, node=8, host=50e9)


def test_groups_lie_on_nodes_by_how_far_apart_their_ranks_are() -> None:
    assert WIRES.make_rank_group(8, 1) == RankPlacement(8, 8)
    assert WIRES.make_rank_group(16, 4) == RankPlacement(16, 2)
    assert WIRES.make_rank_group(4, 8) == RankPlacement(4, 1)
    assert (WIRES.make_rank_group(16, 4).num_nodes, WIRES.make_rank_group(4, 64).num_nodes) == (8, 4)


def test_a_ring_sends_all_but_a_rank_s_own_part_and_leaves_a_node_by_all_its_adapters() -> None:
    assert WIRES.all_gather_seconds(8e9, RankPlacement(8, 8)) == pytest.approx(7e9 / 400e9 + 8e-6)
    assert WIRES.all_gather_seconds(8e9, RankPlacement(16, 2)) == pytest.approx(7.5e9 / 100e9 + 16e-6)
    assert WIRES.all_gather_seconds(8e9, RankPlacement(16, 8)) == pytest.approx(7.5e9 / 400e9 + 16e-6)
    assert WIRES.all_reduce_seconds(8e9, RankPlacement(8, 8)) == 2 * WIRES.all_gather_seconds(8e9, RankPlacement(8, 8))
    assert WIRES.all_gather_seconds(8e9, RankPlacement(1, 1)) == WIRES.all_to_all_seconds(8e9, RankPlacement(1, 1)) == 0


def test_many_small_all_reduces_over_many_nodes_go_up_and_down_a_tree() -> None:
    """A ring of 512 ranks passes each of 200 calls 1,024 times; a tree of 64 nodes of 8 ranks passes it 2 x (8 + 6) times."""
    ranks, one = RankPlacement(512, 8), RankPlacement(8, 8)
    assert WIRES.all_reduce_seconds(4e9, ranks, calls=200) == pytest.approx(2 * (4e9 / 400e9 + 200 * 14e-6))
    assert WIRES.all_reduce_seconds(4e9, one, calls=200) == pytest.approx(2 * (3.5e9 / 400e9 + 200 * 8e-6))
    assert WIRES.all_reduce_seconds(4e9, RankPlacement(1, 1), calls=200) == 0


def test_what_each_sends_to_all_is_bound_by_what_leaves_the_node() -> None:
    assert WIRES.all_to_all_seconds(8e9, RankPlacement(8, 8)) == pytest.approx(7e9 / 400e9 + 1e-6)
    assert WIRES.all_to_all_seconds(8e9, RankPlacement(64, 8)) == pytest.approx(7e9 / 40e9 + 1e-6)

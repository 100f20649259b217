from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_trainer.pipeline.layer_partition import split_stage_layers


def counts(*args, **kwargs) -> list[int]:
    return [len(layers) for layers in split_stage_layers(*args, **kwargs)]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 40), st.floats(0, 3), st.floats(0, 9))
def test_layers_are_whole_in_order_and_balanced(pp, virtual_stages, more, embed, head) -> None:
    num_layers = pp * virtual_stages + more
    stages = split_stage_layers(num_layers, pp, virtual_stages, embed_cost=embed, head_cost=head)
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))
    work = [float(len(layers)) for layers in stages]
    work[0] += embed
    work[-1] += head
    for layers, mine in zip(stages, work, strict=True):
        # moving one layer to the least stage would not help, unless it is the only one here
        assert len(layers) == 1 or mine - 1 <= min(work) + 1e-9


def test_by_hand() -> None:
    assert split_stage_layers(32, 4) == [range(8), range(8, 16), range(16, 24), range(24, 32)]
    assert counts(30, 4) == [7, 7, 8, 8]
    assert counts(30, 4, embed_cost=0.1, head_cost=0.5) == [7, 8, 8, 7]
    assert counts(8, 2, 2, head_cost=1.5) == [2, 2, 3, 1]


def test_a_layout_is_taken_as_it_is() -> None:
    assert split_stage_layers(5, 2, 2, [0, 3, 2, 0]) == [range(0), range(3), range(3, 5), range(5, 5)]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((6, 4, 2), "set parallel.virtual_stages=1"),
        ((7, 3, 4), "set parallel.virtual_stages=2"),
        ((3, 4, 1), "set parallel.pp=3"),
        ((3, 4, 2), "set parallel.pp=3 and parallel.virtual_stages=1"),
        ((8, 4, 1, [4, 4]), r"has 2 stages.* = 4\n.*for example \[2, 2, 2, 2\]"),
        ((8, 2, 1, [4, 5]), r"has 9 layers.* = 8\n.*for example \[4, 4\]"),
        ((8, 3, 1, [4, 0, 4]), r"may have 0 layers.*\n.*for example \[2, 3, 3\]"),
        ((8, 3, 1, [9, 1, -2]), "may have 0 layers"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(args, told) -> None:
    with pytest.raises(ConfigError, match=told):
        split_stage_layers(*args)


@pytest.mark.parametrize("costs", [None, [1.0] * 8, [3.0] * 4 + [1.0] * 4])
def test_the_first_stage_has_the_layers_that_must_be_on_it(costs: list[float] | None) -> None:
    for pp in range(1, 7):
        found = counts(8, pp, layer_costs=costs, first_stage_layers=3)
        assert sum(found) == 8
        assert found[0] >= 3
        assert min(found) >= 1
    assert counts(8, 2, layout=[3, 5], first_stage_layers=3) == [3, 5]
    with pytest.raises(ConfigError, match=r"8 layers in 7 stages: the first stage has at most 2 layer.*first 3 layers"):
        split_stage_layers(8, 7, layer_costs=costs, first_stage_layers=3)
    with pytest.raises(ConfigError, match=r"pipeline_layout = \[2, 6\]: .*\n.*begins with 3"):
        split_stage_layers(8, 2, layout=[2, 6], layer_costs=costs, first_stage_layers=3)


@pytest.mark.parametrize("costs", [None, [1.0] * 8, [1.0] * 4 + [3.0] * 4])
def test_the_last_stage_has_the_layers_that_must_be_on_it(costs: list[float] | None) -> None:
    for pp in range(1, 6):
        found = counts(8, pp, layer_costs=costs, first_stage_layers=2, last_stage_layers=3)
        assert sum(found) == 8
        assert found[0] >= 2
        assert found[-1] >= 3
        assert min(found) >= 1
    with pytest.raises(ConfigError, match=r"8 layers in 7 stages: the last stage has at most 2 layer.*last 3 layers"):
        split_stage_layers(8, 7, layer_costs=costs, last_stage_layers=3)
    with pytest.raises(ConfigError, match=r"pipeline_layout = \[6, 2\]: .*\n.*ends with 3"):
        split_stage_layers(8, 2, layout=[6, 2], layer_costs=costs, last_stage_layers=3)


@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=7), st.data())
def test_no_other_split_of_unlike_layers_has_less_work_in_its_busiest_stage(
    costs: list[float], data: st.DataObject
) -> None:
    pp, head = data.draw(st.integers(1, len(costs))), data.draw(st.sampled_from([0.0, 1.5]))

    def most(bounds: Sequence[int]) -> float:
        works = [sum(costs[a:b]) for a, b in pairwise([0, *bounds, len(costs)])]
        return max([*works[:-1], works[-1] + head])

    stages = split_stage_layers(len(costs), pp, head_cost=head, layer_costs=costs)
    assert [place for stage in stages for place in stage] == list(range(len(costs)))
    assert all(stages)
    least = min(most(bounds) for bounds in combinations(range(1, len(costs)), pp - 1))
    assert most([stage.start for stage in stages[1:]]) <= least + 1e-9

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError, DataError
from mega_data.data_config import DataConfig
from mega_data.sampling.staged_blend import StagedBlend, compute_blend_stage_weights


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=3).filter(any), min_size=1, max_size=3
    ),
    st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=3, max_size=3),
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
    st.integers(0, 50),
)
@settings(max_examples=40, deadline=None)
def test_each_data_set_goes_on_from_stage_to_stage_up_to_its_limit(
    weights: list[list[float]], limits: list[int | None], read: list[int], first: int
) -> None:
    blend = StagedBlend([(first + 40 * i, each) for i, each in enumerate(weights)], limits, read)
    counts = list(read)
    for k in range(first, first + 120):
        chosen = weights[min((k - first) // 40, len(weights) - 1)]
        left = [
            w > 0 and (limit is None or count < limit) for w, limit, count in zip(chosen, limits, counts, strict=True)
        ]
        assert blend.count_samples(k) == counts
        if not any(left):
            with pytest.raises(DataError, match="has reached its max_epochs"):
                blend.locate_sample(k)
            return
        source, number = blend.locate_sample(k)
        assert left[source]
        assert number == counts[source]
        counts[source] += 1


def test_shares_of_a_stage_are_its_weights() -> None:
    blend = StagedBlend([(0, [1.0, 1.0, 0.0]), (1000, [0.0, 1.0, 3.0])], [None, None, 600], [0, 0, 0])
    assert blend.count_samples(1000) == [500, 500, 0]
    assert blend.count_samples(1400) == [500, 600, 300]
    assert blend.count_samples(2000) == [500, 900, 600]  # the third has had enough, 800 samples on


def test_a_curriculum_counts_tokens() -> None:
    curricula = [{0: 1.0, 100: 0.5, 1000: 0.0}, {0: 2.0}, {0: 0.0, 330: 4.0}]
    assert compute_blend_stage_weights(curricula, 16, 0) == [
        (0, [1.0, 2.0, 0.0]), (7, [0.5, 2.0, 0.0]), (21, [0.5, 2.0, 4.0]), (63, [0.0, 2.0, 4.0]),
    ]  # fmt: skip
    assert compute_blend_stage_weights(curricula, 16, 30) == [(30, [0.5, 2.0, 4.0]), (63, [0.0, 2.0, 4.0])]


@pytest.mark.parametrize(
    ("source", "more", "problem"),
    [
        ({"curriculum": {0: 0}}, {}, "requires a data set with a weight above 0 at 0 training tokens"),
        ({"curriculum": {10: 0, 20: 1}}, {}, "requires a data set with a weight above 0 at 10 training tokens"),
        ({"curriculum": {-1: 1}}, {}, "curriculum"),
        ({"max_epochs": 0}, {}, "max_epochs"),
        ({"max_epochs": 2}, {"order": "megatron"}, "is not supported with order: megatron"),
        ({}, {"temperature": 0}, "temperature"),
    ],
)
def test_problems_of_blends(source: dict[str, object], more: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DataConfig.parse({"train": [{"path": "a", **source}], **more}, source="data")


def test_a_curriculum_comes_back_from_a_file() -> None:
    made = DataConfig.parse({"train": [{"path": "a", "curriculum": {0: 0.5, 2_000_000_000: 1}}]})
    assert DataConfig.parse(made.model_dump(mode="json")) == made
    assert np.isclose(made.train[0].weights_by_tokens[2_000_000_000], 1)

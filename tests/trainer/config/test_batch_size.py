from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_trainer.config.batch_size import BatchConfig


def batch(size: int = 32, micro: int = 1, **rampup: int) -> BatchConfig:
    return BatchConfig.parse({"micro": micro, "global": size, "rampup": rampup or None})


@st.composite
def growing(draw: st.DrawFn) -> BatchConfig:
    start, increment, times = (draw(st.integers(1, bound)) for bound in (40, 9, 12))
    return batch(start + increment * times, start=start, increment=increment, samples=draw(st.integers(1, 5000)))


def stepwise(sizes: BatchConfig, steps: int, consumed: int = 0) -> int:
    for _ in range(steps):
        consumed += sizes.batch_size_after_samples(consumed)
    return consumed


def test_without_a_rampup_all_steps_are_alike() -> None:
    assert batch().batch_size_after_samples(0) == batch().batch_size_after_samples(10**9) == 32
    assert list(batch().iterate_rampup_sizes()) == []
    assert batch().samples_after_steps(5) == 160
    assert batch().steps_for_samples(191) == 5


@st.composite
def staged(draw: st.DrawFn) -> BatchConfig:
    untils = sorted(draw(st.sets(st.integers(1, 2000), max_size=5)))
    stages = [{"until": until, "size": draw(st.integers(1, 50))} for until in untils]
    return BatchConfig.parse({"global": 50, "stages": stages})


@given(growing() | staged(), st.integers(0, 400), st.integers(0, 400))
def test_whole_plateaus_at_once_are_step_by_step(sizes: BatchConfig, steps: int, more: int) -> None:
    consumed = stepwise(sizes, steps)
    assert sizes.samples_after_steps(steps) == consumed
    assert sizes.samples_after_steps(more, consumed) == stepwise(sizes, more, consumed)
    assert sizes.steps_for_samples(consumed) == steps
    assert sizes.steps_for_samples(consumed + sizes.batch_size_after_samples(consumed) - 1) == steps


@given(growing())
def test_it_grows_from_its_start_to_its_end(sizes: BatchConfig) -> None:
    ramp = sizes.rampup
    assert ramp is not None
    found = [sizes.batch_size_after_samples(consumed) for consumed in range(ramp.samples + 2)]
    assert (found[0], found[-1]) == (ramp.start, sizes.global_)
    assert found == sorted(found)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    bad: dict[str, Any] = {"micro": 4, "global": 30, "rampup": {"start": 6, "increment": 5, "samples": 100}}
    with pytest.raises(ConfigError) as told:
        BatchConfig.parse(bad)
    text = str(told.value)
    assert "global = 30: must be a multiple of batch.micro = 4 -> set batch.global=32" in text
    assert "rampup.start = 6: must be a multiple of batch.micro = 4" in text
    assert "rampup.increment = 5: must be a multiple of batch.micro = 4" in text
    assert "rampup.increment = 5: must divide batch.global - batch.rampup.start = 24" in text
    with pytest.raises(ConfigError, match=r"rampup\.start = 32: must be below batch\.global = 32"):
        batch(start=32, increment=8, samples=100)


def test_stages_have_their_sizes_up_to_their_samples() -> None:
    sizes = BatchConfig.parse({"global": 8, "stages": [{"until": 4, "size": 2}, {"until": 10, "size": 4}]})
    assert [sizes.batch_size_after_samples(consumed) for consumed in (0, 2, 3, 4, 8, 9, 10, 100)] == [
        2,
        2,
        2,
        4,
        4,
        4,
        8,
        8,
    ]
    assert list(sizes.iterate_rampup_sizes()) == [(2, 2), (4, 2)]
    assert sizes.samples_after_steps(5) == 2 + 2 + 4 + 4 + 8


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"stages": [{"until": 8, "size": 4}, {"until": 8, "size": 4}]},
            r"stages\.1\.until = 8: must be larger than 8",
        ),
        ({"stages": [{"until": 8, "size": 64}]}, r"stages\.0\.size = 64: must be at most batch\.global = 32"),
        ({"stages": [{"until": 8, "size": 3}]}, r"stages\.0\.size = 3: must be a multiple of batch\.micro = 2"),
        ({"stages": [{"until": 0, "size": 2}]}, r"stages\.0\.until"),
        (
            {"stages": [{"until": 8, "size": 2}], "rampup": {"start": 2, "increment": 2, "samples": 9}},
            r"stages: conflicts with batch\.rampup",
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        BatchConfig.parse({"micro": 2, "global": 32, **fields})

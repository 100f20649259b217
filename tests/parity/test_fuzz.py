"""Random models in random layouts agree with one process. `make parity-fuzz` runs as many as one likes."""

from __future__ import annotations

import pytest
from parity.fuzz import disagreements, random_cases


@pytest.mark.long
def test_random_models_in_random_layouts() -> None:
    assert not disagreements(random_cases(seed=1, count=12))


def test_a_seed_says_all() -> None:
    first, again = (random_cases(seed=40, count=3) for _ in range(2))
    assert [case.raw for case in first] == [case.raw for case in again]
    assert random_cases(seed=41, count=1)[0].raw == first[1].raw

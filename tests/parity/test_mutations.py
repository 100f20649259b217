"""The parity suite can fail: every planted bug shows as an error, or as a tensor that nobody holds."""

from __future__ import annotations

import pytest
from parity.mutations import MUTATIONS, mutated
from parity.worker import verdict
from ranks import run_ranks

SEEN = 1e-6


@pytest.fixture(scope="module")
def found() -> list[list]:
    return list(zip(*run_ranks(mutated, 4, timeout=200), strict=True))


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=[one.name for one in MUTATIONS])
def test_is_seen(found: list[list], number: int) -> None:
    one = MUTATIONS[number]
    healthy, ill = (verdict(one.case, ranks) for ranks in zip(*found[number], strict=True))
    assert not healthy.problem(1e-10)
    assert ill.missing or max(ill.errors.values()) > SEEN, f"{one.name}: {ill.errors}"

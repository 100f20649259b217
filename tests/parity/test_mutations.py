"""The parity suite can fail: every planted bug shows as an error, or as a tensor that nobody holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity.mutations import MUTATIONS, RESTORES, mutated, restored
from ranks import run_ranks

from mega_trainer.verify.case_comparison import merge_rank_findings

SEEN = 1e-6


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_each_is_seen() -> None:
    """One test, for pytest-xdist would train them once in each of its processes."""
    for one, *ranks in zip(MUTATIONS, *run_ranks(mutated, 4, timeout=1100), strict=True):
        healthy, ill = (merge_rank_findings(one.case, each) for each in zip(*ranks, strict=True))
        assert not healthy.describe_problem(1e-10), one.name
        assert ill.missing or max(ill.errors.values()) > SEEN, f"{one.name}: {ill.errors}"


def test_bugs_of_a_restore_are_seen(tmp_path: Path) -> None:
    for (name, (_, after), _), *ranks in zip(RESTORES, *run_ranks(restored, 4, tmp_path), strict=True):
        found = [one for one in ranks if one is not None]
        judged = merge_rank_findings(after, [one.steps for one in found])
        unlike = [tensor for one in found for tensor in one.differing]
        assert unlike or judged.missing or max(judged.errors.values()) > SEEN, name

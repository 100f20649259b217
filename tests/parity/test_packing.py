"""Documents packed into samples give the losses and gradients of the documents one by one, in any layout."""

from __future__ import annotations

import pytest
from parity.cases import covering
from parity.packing import RANKS, plain_layouts, problems

from mega_trainer.verify.layout_case import group_cases_by_rank_count


def test_packed_documents_train_as_one_by_one_in_a_covering_of_layouts() -> None:
    cases = [case for case in plain_layouts() if case.ranks != 3]
    assert not problems(covering(cases, 4), RANKS)


@pytest.mark.long
def test_packed_documents_train_as_one_by_one_in_layouts_of_four_ranks() -> None:
    """Sixty of the 2,780, chosen for the most triples of settings; tests/parity/packing.py runs all."""
    assert not [
        problem
        for part in group_cases_by_rank_count(covering(plain_layouts(), 60), 100)
        for problem in problems(part, part[0].ranks)
    ]

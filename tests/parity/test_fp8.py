"""In fp8, too, any layout of ranks computes what one process computes: to the bounds of docs/architecture.md.

What fp8 does not round is in fp64 here, so that nothing else can hide a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from parity import eight_bits
from parity.bits import pairs, told
from parity.cases import covering
from parity.eight_bits import all_layouts
from ranks import run_ranks

from mega_trainer.verify.case_comparison import CaseVerdict, compare_cases_with_one_process, merge_findings_by_case
from mega_trainer.verify.layout_case import LayoutCase


def results(cases: Sequence[LayoutCase]) -> list[CaseVerdict]:
    """Each case against one process."""
    return merge_findings_by_case(
        cases, run_ranks(compare_cases_with_one_process, eight_bits.RANKS, cases, timeout=3600)
    )


@pytest.mark.long
def test_with_scales_of_blocks_to_the_last_digits() -> None:
    cases = [replace(one, steps=1) for one in covering(all_layouts("mxfp8"), 5)]
    shapes = [{"tp": 2, "sp": True, "zero": 1}, {"zero": 2}]
    cases += [eight_bits.case("blockwise", 2, shape, length=256, batch=2, micro=1) for shape in shapes]
    cases.append(replace(eight_bits.case("mxfp8", 2, {"tp": 2, "sp": True}, length=64), model=eight_bits.latent(32)))
    assert not [problem for one in results(cases) if (problem := one.describe_problem(1e-10))]


def test_in_four_bits_to_the_last_digits() -> None:
    cases = [replace(one, steps=1) for one in covering(all_layouts("nvfp4"), 3)]
    assert not [problem for one in results(cases) if (problem := one.describe_problem(1e-10))]


def test_with_scales_of_tensors_and_rows_but_for_numbers_that_leave_their_range() -> None:
    """A number that does in one layout moves others across the border between two of fp8's."""
    cases = [replace(one, steps=1) for recipe in ("tensorwise", "rowwise") for one in covering(all_layouts(recipe), 3)]
    shared = {
        **eight_bits.model(32),
        "num_kv_heads": 2,
    }  # on two ranks each, which quantise their parts of its gradient
    cases.append(replace(eight_bits.case("mxfp8", 4, {"tp": 4}), model=shared))
    for one in results(cases):
        assert not one.missing
        assert one.errors["loss"] < 1e-3, one
        assert one.errors["norm"] < 1e-2, one


def bits(cases: list[tuple[LayoutCase, LayoutCase]]) -> list[list[str] | None]:
    return pairs(cases, norms=True)


def test_schedules_and_recomputation_change_no_bit() -> None:
    serial, full = eight_bits.case("rowwise", 1, {}, wide=False, micro=1), {"kind": "full"}
    others = [replace(serial, ranks=2, parallel={"pp": 2, "schedule": "zb-h1"}), replace(serial, recompute=full)]
    assert not told(others, run_ranks(bits, 2, [(serial, other) for other in others], timeout=3600))


@pytest.mark.long
def test_layouts_of_up_to_four_ranks() -> None:
    """Forty-eight of the 752, the fewest of the covering that have every pair of settings."""
    assert not [
        problem for one in results(covering(all_layouts("mxfp8"), 48)) if (problem := one.describe_problem(1e-10))
    ]

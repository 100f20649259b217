"""An adapter beside a base in 4 bits is trained in any layout as in one process."""

from __future__ import annotations

from typing import Any

import pytest
from parity.cases import case
from ranks import run_ranks

from mega_trainer.verify.case_comparison import compare_cases_with_one_process, merge_findings_by_case

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
LORA: dict[str, Any] = {"rank": 3, "modules": ["q_proj", "v_proj", "down_proj"], "quantize": "nf4"}
WIDE: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 128, "head_dim": 32}
EXPERTS: dict[str, Any] = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128}}
Layout = tuple[str, dict[str, Any], dict[str, Any]]
SOME: list[Layout] = [("moe", {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2, "zero": 1}, {"kind": "full"})]
MORE: list[Layout] = [
    ("dense", {"tp": 2, "sp": True, "zero": 1}, {"kind": "selective"}),
    ("dense", {"tp": 2, "pp": 2, "schedule": "zb-h1"}, {"kind": "full"}),
    ("dense", {"cp": 2, "zero": 2}, {}),
    ("gqa", {"tp": 2, "pp": 2, "schedule": "zbv", "virtual_stages": 2}, {}),
    ("moe", {"ep": 4, "zero": 2}, {"kind": "selective"}),
]


def problems(layouts: list[Layout]) -> list[str]:
    cases = [
        case(
            name, 4, layers=2 * shape.get("pp", 1), parallel=shape, micro=2, recompute=again, lora=LORA, steps=2, bucket=300,
            variant=WIDE | (EXPERTS if name == "moe" else {}),
        )
        for name, shape, again in layouts
    ]  # fmt: skip
    return [
        text
        for one in merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases))
        if (text := one.describe_problem(1e-10))
    ]


def test_blocks_of_four_bits_are_the_same_in_some_layouts() -> None:
    assert not problems(SOME)


@pytest.mark.long
def test_blocks_of_four_bits_are_the_same_in_more_layouts() -> None:
    assert not problems(MORE)

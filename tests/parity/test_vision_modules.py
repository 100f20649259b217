"""Vision encoders that are modules of transformers: two parallel layouts compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
from parity.cases import case
from ranks import run_ranks
from vision_modules import PREPARED, read_vision

from mega_trainer.verify.case_comparison import compare_cases_with_one_process, merge_findings_by_case
from mega_trainer.verify.layout_case import LayoutCase


def make_cases(kind: str, shapes: list[tuple[int, dict[str, Any]]], **more: Any) -> list[LayoutCase]:
    variant: dict[str, Any] = {"vision": read_vision(kind) | {"image_token": 60}}
    if variant["vision"]["module"].get("grid_positions"):
        variant |= {"head_dim": 8, "scale_embeddings": False, "rope": {"theta": 100.0, "sections": [2, 1, 1]}}
    return [
        case("vision", ranks, parallel=parallel, micro=2, variant=variant, length=24, **more)
        for ranks, parallel in shapes
    ]


def problems(cases: list[LayoutCase]) -> list[str]:
    found = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases, timeout=280))
    return [problem for one in found if (problem := one.describe_problem(1e-10))]


def test_all_dimensions() -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2, "sp": True}), (4, {"cp": 2, "zero": 3}), (4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
    ]  # fmt: skip
    cases = make_cases("internvl", shapes, steps=1)
    cases += make_cases("qwen2_vl", [(4, {"tp": 2, "cp": 2, "zero": 2})], steps=1)
    cases += make_cases("paligemma:1", [(4, {"cp": 2, "zero": 3})], steps=1)
    cases += make_cases("mistral3", [(2, {"tp": 2})], freeze=["model.vision_tower.*"], steps=1)
    assert not problems(cases)


@pytest.mark.long
def test_every_type_split_over_tensor_ranks_and_over_stages_and_data_ranks() -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [(2, {"tp": 2}), (4, {"pp": 2, "zero": 1})]
    kinds = [
        kind for kind in PREPARED if kind != "aria" and not kind.startswith(("gemma4", "glm"))
    ]  # of long images, or with norms in fp32
    assert not problems([one for kind in kinds for one in make_cases(kind, shapes, steps=1)])

"""Runs with extensions, held against one process in layouts of up to four ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranks import run_ranks

from mega_trainer.verify.case_comparison import TOLERANCE, compare_cases_with_one_process, merge_findings_by_case
from mega_trainer.verify.layout_case import LayoutCase

EXAMPLES = Path(__file__).parents[1] / "examples" / "extensions"
SIZES = {
    "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8, "vocab_size": 61, "max_position": 64,
    "init_std": 0.3,
}  # fmt: skip
# Every axis and its combinations with others; a layout is (degrees, recomputation).
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"tp": 4}, "none"), ({"tp": 2, "sp": True, "zero": 2}, "selective"), ({"pp": 2, "virtual_stages": 2}, "full"),
    ({"tp": 2, "sp": True, "pp": 2, "schedule": "zb-h1"}, "none"), ({"tp": 2, "zero": 3}, "full"),
]  # fmt: skip
CONTEXT: list[tuple[dict[str, Any], str]] = [
    ({"cp": 4, "zero": 3}, "none"), ({"tp": 2, "sp": True, "cp": 2}, "full"),
    ({"tp": 2, "cp": 2, "cp_kind": "alltoall"}, "selective"), ({"cp": 2, "pp": 2}, "none"),
]  # fmt: skip


def extended_cases(
    file: str, run: Mapping[str, Any], layouts: list[tuple[dict[str, Any], str]] = LAYOUTS, **options: Any
) -> list[LayoutCase]:
    """The run in each layout of four ranks; `run` has the settings that differ from those of a small decoder, among
    them `layers`, one layer's kind, or several that are repeated."""
    settings: dict[str, Any] = {**run, "extensions": [str(EXAMPLES / file)]}
    model = {**SIZES, **settings.pop("model", {})}
    kinds = model.pop("layers", ["attention+mlp"])
    found = []
    for parallel, recompute in layouts:
        layers = max(2, parallel.get("pp", 1) * parallel.get("virtual_stages", 1))
        fields = {**model, "layers": [kinds[i % len(kinds)] for i in range(layers)]}
        found.append(
            LayoutCase(
                file, fields, 4, parallel=parallel, recompute={"kind": recompute}, micro=2, sections=settings, **options
            )
        )
    return found


def find_differences(cases: list[LayoutCase]) -> list[str]:
    """What differs from one process by more than 1e-10, relative, in fp64: losses, gradients, weights or moments."""
    found = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases, timeout=280))
    return [problem for one in found if (problem := one.describe_problem(TOLERANCE))]

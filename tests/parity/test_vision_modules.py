"""Vision encoders that are modules of transformers: two parallel layouts compute what one process computes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parity.cases import COMMON, case
from ranks import run_ranks
from transformers import CONFIG_MAPPING
from vision_modules import CASES, PREPARED

from mega_ckpt.families import family_of_config
from mega_ckpt.families.image_processor import add_module_processor, apply_image_processor
from mega_trainer.verify.case_comparison import compare_cases_with_one_process, merge_findings_by_case
from mega_trainer.verify.layout_case import LayoutCase


def read_vision(kind: str) -> dict[str, Any]:
    """The section `vision` of a type whose encoder stands before a text model of the parity tests."""
    config, image_processor, processor, named = CASES[kind]
    assert config["text_config"]["hidden_size"] == COMMON["hidden_size"]
    raw = json.loads(CONFIG_MAPPING[kind](**config).to_json_string(use_diff=False)) | {"model_type": kind}
    vision = family_of_config(raw).read_config_json(raw).vision
    assert vision is not None
    files = {"processor_config.json": processor, "tokenizer_config.json": {"extra_special_tokens": named}}
    vision = add_module_processor(apply_image_processor(vision, image_processor), lambda name: files.get(name, {}))
    return vision.model_dump(mode="json", exclude_unset=True) | {"image_token": 60}


def make_cases(kind: str, shapes: list[tuple[int, dict[str, Any]]], **more: Any) -> list[LayoutCase]:
    variant = {"vision": read_vision(kind)}
    return [
        case("vision", ranks, parallel=parallel, micro=2, variant=variant, length=24, **more)
        for ranks, parallel in shapes
    ]


def problems(cases: list[LayoutCase]) -> list[str]:
    found = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases, timeout=280))
    return [problem for one in found if (problem := one.describe_problem(1e-10))]


def test_all_dimensions() -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2, "sp": True}), (4, {"cp": 2, "zero": 3}), (4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}), (4, {"tp": 2, "cp": 2, "zero": 2}),
    ]  # fmt: skip
    cases = make_cases("internvl", shapes, steps=2)
    frozen = make_cases("mistral3", [(2, {"tp": 2})], freeze=["model.vision_tower.*"], steps=2)
    assert not problems([*cases, *frozen])


@pytest.mark.long
def test_every_type_split_over_tensor_ranks_and_over_stages_and_data_ranks() -> None:
    shapes: list[tuple[int, dict[str, Any]]] = [(2, {"tp": 2}), (4, {"pp": 2, "zero": 1})]
    assert not problems([one for kind in PREPARED if kind != "aria" for one in make_cases(kind, shapes, steps=1)])

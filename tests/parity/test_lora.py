"""An adapter of low rank, or a part of the model alone, is trained in any layout as in one process."""

from __future__ import annotations

from typing import Any

import pytest
from parity.cases import case
from ranks import run_ranks

from mega_trainer.verify.case_comparison import compare_cases_with_one_process, merge_findings_by_case

FEW: dict[str, Any] = {"rank": 3, "alpha": 5, "modules": ["q_proj", "v_proj", "down_proj"], "ranks": {"v_proj": 2}}
ALL: dict[str, Any] = {"rank": 4, "rslora": True}
Layout = tuple[str, dict[str, Any], dict[str, Any]]
SOME: list[Layout] = [
    ("gqa", {"tp": 4, "sp": True}, {"lora": FEW | {"dropout": 0.3}}),
    ("moe", {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2}, {"lora": ALL}),
    ("tied", {"tp": 2, "sp": True, "zero": 2}, {"lora": FEW | {"dora": True, "modules": [".*_proj"]}}),
    ("tied", {"pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"freeze": ["model.embed_*", "model.layers.0.*"]}),
]
MORE: list[Layout] = [
    ("gqa", {"tp": 4}, {"lora": ALL | {"dora": True}}),
    ("dense", {"tp": 2, "pp": 2, "schedule": "zb-h1"}, {"lora": ALL | {"dora": True}}),
    ("dense", {"tp": 2, "zero": 3}, {"lora": ALL | {"dora": True}}),
    ("mla", {"tp": 2}, {"lora": ALL | {"dora": True}}),
    ("tied", {"tp": 2, "sp": True, "pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"lora": FEW | {"dropout": 0.3}}),
    ("tied", {"pp": 2, "zero": 2}, {"lora": FEW | {"modules_to_save": ["embed_tokens"]}}),
    ("mla", {"tp": 2, "sp": True}, {"lora": ALL | {"dropout": 0.3}}),
    ("long", {"cp": 2, "zero": 3}, {"lora": ALL | {"dropout": 0.3, "modules_to_save": ["lm_head"]}}),
    ("deepseek", {"tp": 2, "ep": 2, "expert_tp": 2}, {"lora": ALL}),
    ("moe", {"cp": 2, "ep": 2, "zero": 3}, {"lora": ALL}),
    ("dense", {"tp": 2, "zero": 3}, {"freeze": ["*.self_attn.*", "lm_head.weight"]}),
    ("moe", {"ep": 2, "zero": 2}, {"freeze": ["*.mlp.experts.*", "*.mlp.gate.*"]}),
]
RECOMPUTE: list[dict[str, Any]] = [{"kind": "selective"}, {}, {"kind": "full"}]


def problems(layouts: list[Layout], **more: Any) -> list[str]:
    cases = [
        case(
            name, 4, layers=2 * shape.get("pp", 1), parallel=shape, micro=2, recompute=RECOMPUTE[number % 3],
            **{"bucket": 300, **what, **more},
        )
        for number, (name, shape, what) in enumerate(layouts)
    ]  # fmt: skip
    return [
        text
        for one in merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases))
        if (text := one.describe_problem(1e-10))
    ]


def test_an_adapter_and_a_part_of_the_model_in_some_layouts() -> None:
    """Among them a first stage without anything to train, and a frozen embedding that is lent to the head."""
    assert not problems(SOME, steps=2)


@pytest.mark.long
def test_an_adapter_in_every_way_to_split_a_model() -> None:
    assert not problems(MORE)

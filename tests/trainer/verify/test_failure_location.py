"""A failure is traced to the smallest layout, the layer and the tensor: bugs of sharding, planted in one layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from trainer.verify.planted_bugs import (
    error_of_the_tensor_ranks,
    forgotten_reduction,
    norm_counted_twice,
    state_not_passed,
)

from mega_trainer.config.run_config import RunConfig
from mega_trainer.verify.case_comparison import TOLERANCE
from mega_trainer.verify.local_examination import verify_layout_cases
from mega_trainer.verify.tiny_model import TinyModelRun
from mega_trainer.verify.verification import Verification, parse_layout

DENSE = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip
HYBRID = DENSE | {
    "layers": ["attention+mlp", "mamba+mlp"] * 2,
    "mamba": {"num_heads": 4, "head_dim": 8, "state_size": 8, "chunk_size": 16},
}  # fmt: skip
BUGS: list[tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any], str, str, tuple[str, str, int]]] = [
    (forgotten_reduction, DENSE, "tp=2 pp=2", "tp=2", ("activation", "model.layers.1.mlp", 1)),
    (
        norm_counted_twice, DENSE, "tp=2 dp=2 zero=1", "tp=2",
        ("gradient", "model.layers.0.post_attention_layernorm.weight", 0),
    ),
    (state_not_passed, HYBRID, "tp=2 cp=2", "cp=2", ("activation", "model.layers.1.mamba", 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "model", "layout", "smallest", "first"), BUGS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_bug_is_named_with_its_layer(
    bug: Callable[[], AbstractContextManager[Any]],
    model: dict[str, Any],
    layout: str,
    smallest: str,
    first: tuple[str, str, int],
) -> None:
    config = RunConfig.parse({"model": model, "data": {"train": ["none"], "seq_length": 32}})
    verification = Verification(TinyModelRun.from_run(config), only=layout, context=bug)
    (row,) = verification.run_checks()
    assert row.problem
    report = verification.explain_failure()
    assert report.layout.split()[0] == smallest
    assert report.ranks == 2
    found = report.difference
    assert found is not None
    assert (found.kind, found.name, found.layer) == first
    assert found.error > 1e-6
    assert found.expected != found.found


def test_ranks_that_raise_fail_their_layout_and_the_next_one_runs() -> None:
    tiny = TinyModelRun.from_run(RunConfig.parse({"model": DENSE, "data": {"train": ["none"], "seq_length": 32}}))
    cases = [parse_layout(tiny, "tp=2"), parse_layout(tiny, "dp=2 zero=1")]
    found = {
        verdict.case.layout["tp"]: verdict for verdict in verify_layout_cases(cases, context=error_of_the_tensor_ranks)
    }
    assert "RuntimeError: shapes differ (in forward, " in found[2].failure
    assert found[2].largest_error == math.inf
    assert found[1].describe_errors(TOLERANCE) == ""

"""A plan of a legal configuration with large counts ends soon, and what cannot be listed is refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mega_cli.plan_prediction import describe_plan
from mega_common.errors import ConfigError
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.run_config import RunConfig
from mega_trainer.pipeline.schedules import make_pipeline_schedule, simulate_pipeline_schedule
from mega_trainer.plan.pipeline_fill import estimate_pipeline_bubble, estimate_pipeline_makespan

RUN: Mapping[str, Any] = {
    "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64, "vocab_size": 64},
    "data": {"train": ["none"], "seq_length": 16},
}


def _plan(overrides: list[str]) -> dict[str, Any]:
    config = RunConfig.parse(apply_config_overrides(RUN, overrides))
    ranks = config.parallel_rules.minimum_ranks
    config.check_world_size(ranks)
    return describe_plan(config, ranks)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.global=1000000"],
        ["batch.global=1000000", "parallel.pp=2"],
        ["batch.global=1000000", "parallel.pp=2", "parallel.virtual_stages=2"],
        ["batch.global=999999", "parallel.pp=4", "parallel.schedule=zb-h1"],
        ["batch.global=999999", "parallel.pp=2", "parallel.schedule=zbv", "parallel.virtual_stages=2"],
        ["data.seq_length=1000000000"],
        ["train.steps=1000000000000", "train.eval_every=1"],
        ["model.vocab_size=1000000000"],
        ["model.moe={num_experts: 100000, top_k: 2, ffn_hidden_size: 8}"],
        ["batch.global=1000000", "batch.stages=[{size: 1, until: 1000000000}, {size: 2, until: 1000000000000}]"],
        ["batch.global=1000000", "batch.rampup={start: 1, increment: 999, samples: 1000000000000}"],
    ],
)
def test_a_plan_does_not_list_what_repeats(overrides: list[str]) -> None:
    told = _plan(overrides)
    assert 0 <= told["bubble"] < 0.01
    assert max(told["microbatches_in_flight"]) <= 8


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.cp=1000000"], "parallel.cp = 1000000"),
        (["model.mtp_layers=1000"], "model.mtp_layers = 1000"),
        (
            ["batch.global=1000000", "batch.rampup={start: 1, increment: 1, samples: 1000000}"],
            "at most 10000 batch sizes, found 999999",
        ),
        (["model.num_layers=1024", "parallel.pp=1024", "batch.global=4096"], "x 1,024 pipeline stages"),
    ],
)
def test_what_cannot_be_listed_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _plan(overrides)


@pytest.mark.parametrize(
    ("name", "pp", "stages"), [("1f1b", 4, 1), ("1f1b", 2, 2), ("zb-h1", 4, 1), ("zbv", 3, 2), ("dualpipev", 3, 2)]
)
def test_folded_time_is_that_of_all_micro_batches(
    name: str, pp: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_trainer.plan.pipeline_fill.MAX_SIMULATED", 0)
    count = pp * 20
    timeline = simulate_pipeline_schedule(
        make_pipeline_schedule(name, pp=pp, microbatches=count, virtual_stages=stages)
    )
    makespan = estimate_pipeline_makespan(name, pp=pp, microbatches=count, virtual_stages=stages)
    assert makespan == pytest.approx(timeline.makespan)
    bubble = estimate_pipeline_bubble(name, pp=pp, microbatches=count, virtual_stages=stages)
    assert bubble == pytest.approx(timeline.mean_bubble_share)

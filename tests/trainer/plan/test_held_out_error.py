from __future__ import annotations

import pytest

from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.plan.held_out_error import describe_prediction_error, format_prediction_error
from mega_trainer.plan.machine import load_machine

MODELS = {
    kind: ModelConfig.parse(load_model_preset(name))
    for kind, name in (("dense", "llama3-8b"), ("experts", "qwen3-30b-a3b"), ("hybrid", "nemotron-3-nano"))
}


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("machine", ["h100", "gb200"])
def test_each_kind_of_model_has_an_error_on_machines_with_published_runs(kind: str, machine: str) -> None:
    found = describe_prediction_error(MODELS[kind], load_machine(machine), "fp8")
    assert kind in str(found["class"])
    assert 0 < float(str(found["median"])) < float(str(found["p90"]))
    assert int(str(found["runs"])) >= 3


def test_a_precision_without_runs_has_the_error_of_the_generation() -> None:
    found = describe_prediction_error(MODELS["dense"], load_machine("h100"), "fp32")
    assert found["class"] == "hopper dense"
    assert format_prediction_error(found).startswith("half within ")


def test_a_class_without_published_runs_says_so() -> None:
    error = describe_prediction_error(MODELS["hybrid"], load_machine("mi355x"), "bf16")
    assert error == {"class": "cdna4 hybrid bf16", "runs": 0}
    assert format_prediction_error(error) == "unknown: no run of this class (cdna4 hybrid bf16) was published"

"""Runs that `mega doctor` compares with the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_trainer.config.run_config import RunConfig
from mega_trainer.doctor.training_checks import PLANNED_MODELS, PLANNED_MODELS_CPU, _small_run


@pytest.mark.parametrize(("model", "length"), [*PLANNED_MODELS.values(), *PLANNED_MODELS_CPU.values()])
def test_models_of_the_plan_are_valid_runs(model: dict[str, object], length: int, tmp_path: Path) -> None:
    sections = {"model": model, "data": {"seq_length": length}, "precision": "bf16"}
    config = RunConfig.parse(_small_run(tmp_path, "cpu", 1, "plan", sections))
    assert config.model.hidden_size == model["hidden_size"]

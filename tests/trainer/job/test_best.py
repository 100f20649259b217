"""Fine-tuning's ends and choices: epochs, the best checkpoint, an early stop, averages of weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.source import open_weight_source
from mega_ckpt.store import Checkpoint, list_checkpoints
from mega_common.errors import CheckpointError, ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run import training_loop
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]
EVALUATED = {"steps": 9, "eval_every": 2, "eval_steps": 1}


def trained(raw: dict[str, Any]) -> TrainState:
    return run_training(RunConfig.parse(raw), RankInfo())


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations with these losses."""
    told: Iterator[float] = iter([3.0, 2.0, 2.5, 2.25, 1.0])
    monkeypatch.setattr(training_loop, "run_validation", lambda *_: {"valid_loss": next(told)})


@pytest.mark.usefixtures("losses")
def test_the_best_checkpoint_stays_and_a_run_without_a_lower_loss_ends(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    raw = settings(train={**EVALUATED, "early_stop": 2}, checkpoint={"best": True, "keep": 1})
    with caplog.at_level(logging.INFO):
        state = trained(raw)
    assert state.step == 8
    assert [path.name for path in list_checkpoints(RunConfig.parse(raw).checkpoint_root)] == [
        "step-00000004",
        "step-00000008",
    ]
    assert "no lower validation loss in 2 validations" in caplog.text
    assert "the lowest validation loss is 2.0000" in caplog.text
    assert trained(raw).step == 8  # the same command has nothing left to do
    assert trained({**raw, "train": {**raw["train"], "early_stop": 3}}).best.loss == 1.0


def test_epochs_become_steps(settings: Settings) -> None:
    raw = settings(train={"epochs": 0.25}, lr_schedule={"warmup_steps": 1})
    del raw["train"]["steps"]
    state = trained(raw)
    told = [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]
    (passes,) = (value for key, value in told[-1].items() if key.startswith("epochs/"))
    assert 0.25 * (1 - 1 / state.step) < passes <= 0.25
    assert len(told) == state.step == state.config.train.steps > 1
    assert trained(raw).step == state.step
    with pytest.raises(ConfigError, match="depend on the number of steps"):
        trained(settings(train={"epochs": 1}, data={"order": "megatron"}))
    with pytest.raises(ConfigError, match="requires validation"):
        trained(settings(train={"early_stop": 1}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_averages_are_of_every_step_and_go_on(settings: Settings, tmp_path: Path, precision: str) -> None:
    constant = {"name": "constant"}
    raw = settings(precision=precision, train={"steps": 3, "ema": 0.75}, checkpoint={"every": 1}, lr_schedule=constant)
    trained({**raw, "train": {**raw["train"], "steps": 2}})
    trained(raw)
    kept = [Checkpoint.open_folder(path) for path in list_checkpoints(RunConfig.parse(raw).checkpoint_root)]
    name = "model.layers.0.mlp.up_proj.weight"
    main = f"optimizer/main/{name}" if precision == "bf16" else f"weights/{name}"
    first, second, third = (one.read_tensor(main) for one in kept)
    after_first = kept[0].read_tensor(f"optimizer/ema/{name}")
    expected = torch.lerp(torch.lerp(after_first, second, 0.25), third, 0.25)
    torch.testing.assert_close(kept[2].read_tensor(f"optimizer/ema/{name}"), expected)
    assert not torch.equal(after_first, first)
    averaged = open_weight_source(tmp_path / "run", averaged=True)
    assert torch.equal(averaged.read_tensor(name), expected.to(averaged.tensor_dtype(name)))
    trained(settings(train={"steps": 1}, output=str(tmp_path / "plain")))
    with pytest.raises(CheckpointError, match="no exponential moving average"):
        open_weight_source(tmp_path / "plain", averaged=True)

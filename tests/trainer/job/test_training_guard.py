from __future__ import annotations

import doctest
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.store import Checkpoint, list_checkpoints
from mega_common.errors import ConfigError, TrainingError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.config.sections import TrainConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job import training_guard
from mega_trainer.job.step_result import StepResult
from mega_trainer.job.training_guard import WARM, LossGuard, SkippedSampleRanges, StopSignalHandler
from mega_trainer.run import train_step as step_module
from mega_trainer.run import training_context
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.training_run import run_training


def good(loss: float = 2.0) -> StepResult:
    return StepResult(loss, 1.0, 10, True)


BAD = StepResult(float("nan"), float("inf"), 10, False)


def test_stops_at_the_first_bad_step_by_default() -> None:
    with pytest.raises(TrainingError, match="step 7: loss nan"):
        LossGuard(TrainConfig()).check_loss_and_grad_norm(7, BAD)


def test_skips_some_bad_steps_but_not_many_in_a_row() -> None:
    guard = LossGuard(TrainConfig(on_nan="skip", max_skips=3))
    for step in (1, 2):
        guard.check_loss_and_grad_norm(step, BAD)
    guard.check_loss_and_grad_norm(3, good())
    guard.check_loss_and_grad_norm(4, BAD)
    guard.check_loss_and_grad_norm(5, BAD)
    with pytest.raises(TrainingError, match="3 times in a row") as told:
        guard.check_loss_and_grad_norm(6, BAD)
    assert "on_nan=skip" not in str(told.value)
    with pytest.raises(TrainingError, match=r", or set train\.on_nan=skip"):
        LossGuard(TrainConfig()).check_loss_and_grad_norm(1, BAD)


def test_a_spike_is_told_or_stops_after_the_average_has_settled() -> None:
    guard = LossGuard(TrainConfig(spike_factor=2.0, on_spike="stop"))
    guard.check_loss_and_grad_norm(1, good(100.0))
    guard.check_loss_and_grad_norm(2, good(1000.0))  # too early to judge
    guard = LossGuard(TrainConfig(spike_factor=2.0, on_spike="stop"))
    for step in range(WARM):
        guard.check_loss_and_grad_norm(step, good())
    guard.check_loss_and_grad_norm(WARM, good(3.9))
    with pytest.raises(TrainingError, match="over 2 times its average"):
        guard.check_loss_and_grad_norm(WARM + 1, good(5.0))


def test_the_average_follows_the_loss() -> None:
    guard = LossGuard(TrainConfig())
    for step in range(1000):
        guard.check_loss_and_grad_norm(step, good(3.0 if step < 500 else 1.0))
    assert guard.average == pytest.approx(1.0, abs=1e-3)


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_ctrl_c")
def test_signals_after_the_first_change_nothing_but_a_later_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    ended: list[str] = []
    with StopSignalHandler(told.append, again=lambda: ended.append("at once")) as stop:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert (stop.name, told) == ("SIGHUP", [signal.SIGHUP])
        monkeypatch.setattr(training_guard, "AGAIN_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == ["at once"]
    with pytest.raises(KeyboardInterrupt):  # as before
        os.kill(os.getpid(), signal.SIGINT)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignalHandler() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.name is None
    finally:
        signal.signal(signal.SIGHUP, before)


Settings = Callable[..., dict[str, Any]]
NAN, HIGH = float("nan"), 1e6


def trained(raw: dict[str, Any]) -> TrainState:
    return run_training(RunConfig.parse(raw), RankInfo())


def weights(state: TrainState) -> dict[str, list[torch.Tensor]]:
    return {name: [box.tensor.clone() for box in held.boxes] for name, held in state.checkpoint_tensors().items()}


def equal_tensors(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for key in one for a, b in zip(one[key], other[key], strict=True)
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Fills with the first token of each sample that a step reads, step by step."""
    seen: list[tuple[int, ...]] = []
    real = training_context.split_micro_batches

    def noted(batch: Any, *more: Any) -> Any:
        seen.append(tuple(map(tuple, batch.tokens)))
        return real(batch, *more)

    monkeypatch.setattr(training_context, "split_micro_batches", noted)
    return seen


def poison(monkeypatch: pytest.MonkeyPatch, samples: tuple[int, ...], loss: float) -> None:
    """Each step that reads these samples has that sum of losses, whenever it comes."""
    real, at_hand = step_module.sum_step_scalars, []
    batches = step_module.normalize_auxiliary_loss_weights

    def look(given: Any, tokens: Any) -> Any:
        at_hand[:] = [tuple(row.tolist()) for batch in given for row in batch.tokens]
        return batches(given, tokens)

    def poisoned(*args: Any) -> Any:
        told, table = real(*args)
        if tuple(at_hand) == samples:
            told[0] = loss
        return told, table

    monkeypatch.setattr(step_module, "normalize_auxiliary_loss_weights", look)
    monkeypatch.setattr(step_module, "sum_step_scalars", poisoned)


def test_a_rollback_goes_past_the_samples_and_every_way_there_has_the_same_bits(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, read: list[Any], caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Bad is the 5th step's data; with checkpoints at 2 and 4 and two steps back, steps 3 to 5 are left out."""
    monkeypatch.setattr(training_guard, "WARM", 2)
    policy = {"steps": 8, "on_spike": "rollback", "rollback_steps": 2, "spike_factor": 3.0}
    asked: dict[str, Any] = {"checkpoint": {"every": 2}, "lr_schedule": {"decay_steps": 8}}
    trained(settings(train={"steps": 11}, output=str(tmp_path / "plain"), **asked))
    plain = list(read)
    poison(monkeypatch, plain[4], HIGH)
    raw = settings(train=policy, **asked)
    read.clear()
    whole = trained(raw)
    assert read == [*plain[:5], *plain[5:11]]  # steps 1 to 5, then 3 to 8 on what comes after the bad one
    assert "step 5: loss" in caplog.text
    assert "samples 16 to 19" in caplog.text
    assert "rolled back to step 2; skipped samples 8 to 19" in caplog.text
    assert (whole.step, whole.consumed_samples, whole.skipped_ranges) == (8, 32, SkippedSampleRanges(((8, 12),)))
    assert whole.count_samples_read is not None
    assert (
        sum(Checkpoint.open_folder(list_checkpoints(whole.config.checkpoint_root)[-1]).trainer_state["read"].values())
        == 44
    )
    lines = [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    halves = {**raw, "output": str(tmp_path / "halves")}
    trained({**halves, "train": {**policy, "steps": 6}})
    read.clear()
    assert equal_tensors(weights(whole), weights(trained(halves)))
    assert read == plain[9:11]


def test_a_spike_can_be_skipped_and_leaves_weights_and_average_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, read: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training_guard, "WARM", 2)
    raw = settings(train={"steps": 6, "on_spike": "skip", "spike_factor": 3.0})
    trained({**raw, "output": raw["output"] + "-plain"})
    poison(monkeypatch, read[3], HIGH)
    state = trained(raw)
    assert (state.step, state.optimizer.update_count, state.guard.seen) == (6, 5, 5)
    assert state.guard.average < 10
    assert "samples 12 to 15; the weights were not updated" in caplog.text


def test_a_rollback_without_a_checkpoint_or_that_never_helps_ends_the_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"steps": 4, "on_nan": "rollback", "max_skips": 2}
    real = step_module.sum_step_scalars

    def poisoned(*args: Any) -> Any:
        told, table = real(*args)
        return told * (NAN if len(done) >= 2 else 1), table

    done: list[int] = []
    monkeypatch.setattr(step_module, "sum_step_scalars", poisoned)
    advance = TrainState.advance_step
    monkeypatch.setattr(TrainState, "advance_step", lambda self, result: (done.append(1), advance(self, result)))
    with pytest.raises(TrainingError, match=r"step 3: loss nan .* no checkpoint in .*"):
        trained(settings(train=policy))
    done.clear()
    with pytest.raises(TrainingError, match="2 consecutive rollbacks to step 2 failed"):
        trained(settings(train=policy, checkpoint={"every": 1}, output=settings()["output"] + "-saves"))


def test_megatrons_order_has_no_other_samples_to_read(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"train\.on_spike.*data\.order = megatron"):
        RunConfig.parse(settings(data={"order": "megatron"}, train={"on_spike": "rollback"}))


def test_its_examples_hold() -> None:
    assert doctest.testmod(training_guard).failed == 0

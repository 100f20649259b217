from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mega_common.errors import TrainingError
from mega_trainer.config.sections import TrainConfig
from mega_trainer.job import training_guard as guard_module
from mega_trainer.job.step_result import StepResult
from mega_trainer.job.training_guard import WARM, LossGuard, StopSignalHandler


def good(loss: float = 2.0) -> StepResult:
    return StepResult(loss, 1.0, 10, True)


BAD = StepResult(float("nan"), float("inf"), 10, False)


def test_stops_at_the_first_bad_step_by_default() -> None:
    with pytest.raises(TrainingError, match="step 7: loss nan"):
        LossGuard(TrainConfig()).check_step(7, BAD)


def test_skips_some_bad_steps_but_not_many_in_a_row() -> None:
    guard = LossGuard(TrainConfig(on_nan="skip", max_skips=3))
    for step in (1, 2):
        guard.check_step(step, BAD)
    guard.check_step(3, good())
    guard.check_step(4, BAD)
    guard.check_step(5, BAD)
    with pytest.raises(TrainingError, match="3 times in a row") as told:
        guard.check_step(6, BAD)
    assert "on_nan=skip" not in str(told.value)
    with pytest.raises(TrainingError, match=r"or set train\.on_nan=skip"):
        LossGuard(TrainConfig()).check_step(1, BAD)


def test_a_spike_is_told_or_stops_after_the_average_has_settled() -> None:
    guard = LossGuard(TrainConfig(spike_factor=2.0, on_spike="stop"))
    guard.check_step(1, good(100.0))
    guard.check_step(2, good(1000.0))  # too early to judge
    guard = LossGuard(TrainConfig(spike_factor=2.0, on_spike="stop"))
    for step in range(WARM):
        guard.check_step(step, good())
    guard.check_step(WARM, good(3.9))
    with pytest.raises(TrainingError, match="over 2 times its average"):
        guard.check_step(WARM + 1, good(5.0))


def test_the_average_follows_the_loss() -> None:
    guard = LossGuard(TrainConfig())
    for step in range(1000):
        guard.check_step(step, good(3.0 if step < 500 else 1.0))
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
        monkeypatch.setattr(guard_module, "AGAIN_SECONDS", 0.0)
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

"""A reward function of the user's runs in a process of its own; its failures are warnings with a reward of none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_common.errors import ConfigError
from mega_trainer.objectives.reward_process import RewardPool, RewardProcess

FUNCTIONS = """
import os, sys, time

def worker(prompt, answer, record):
    time.sleep(0.05)
    return os.getpid() if answer == "pid" else float(answer)

def length(prompt, answer, record):
    print("printed", answer)
    if answer == "raise":
        raise ValueError("no number in it")
    if answer == "hang":
        time.sleep(60)
    if answer == "exit":
        os._exit(3)
    if answer == "nan":
        return float("nan")
    return len(answer) + record["add"]
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RewardProcess]:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    made = RewardProcess(f"{tmp_path}/rewards.py:length", 0.5)
    yield made
    made.close()


def test_failures_of_the_function_leave_the_other_rewards(
    process: RewardProcess, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["ab", "raise", "hang", "four", "exit", "nan", "a\nb"]
    with caplog.at_level(logging.WARNING):
        logging.getLogger("mega").propagate = True
        found = [process.compute_reward("q", answer, {"add": 1}) for answer in answers]
    assert found == [3.0, None, None, 5.0, None, None, 4.0]
    for words in ("raised ValueError: no number in it", "gave no result within 0.5 s", "ended its process", "finite"):
        assert words in caplog.text


def test_a_signal_to_the_run_does_not_reach_the_function(process: RewardProcess) -> None:
    assert os.getpgid(process._worker.pid) != os.getpgid(0)


def test_several_processes_divide_the_calls_and_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    pool = RewardPool(f"{tmp_path}/rewards.py:worker", 10.0, 2)
    assert pool.compute_rewards([("q", str(k), {}) for k in range(9)]) == [float(k) for k in range(9)]
    assert len({*pool.compute_rewards([("q", "pid", {})] * 8)}) == 2
    pool.close()


def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    for spec, words in [
        (f"{tmp_path}/rewards.py:other", "found no 'other'"),
        (f"{tmp_path}/broken.py:length", "cannot be loaded: ModuleNotFoundError"),
        (f"{tmp_path}/absent.py:length", "cannot be loaded: FileNotFoundError"),
    ]:
        with pytest.raises(ConfigError, match=words):
            RewardProcess(spec, 1.0)


def test_the_function_of_an_installed_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scoring").mkdir()
    (tmp_path / "scoring" / "rewards.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    process = RewardProcess("scoring.rewards:length", 5)
    assert process.compute_reward("q", "ab", {"add": 1}) == 3.0
    process.close()
    for spec, words in (("scoring.rewards:none", "found no 'none'"), ("scoring.rules:length", "ModuleNotFoundError")):
        with pytest.raises(ConfigError, match=words):
            RewardProcess(spec, 5)

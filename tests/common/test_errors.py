from __future__ import annotations

import pickle

import pytest

from mega_common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegaError,
    MissingPackageError,
    TrainingError,
)


def test_the_hint_stands_on_a_line_of_its_own() -> None:
    assert str(DataError("a.bin: truncated")) == "a.bin: truncated"
    assert str(DataError("a.bin: truncated", hint="make it again")) == "a.bin: truncated\n  make it again"


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError, MissingPackageError])
def test_the_users_mistakes_end_with_2(kind: type[MegaError]) -> None:
    assert kind("x").exit_status == 2


def test_failures_of_training_end_with_1() -> None:
    assert TrainingError("x").exit_status == 1


class TensorError(CheckpointError):
    def __init__(self, tensor: str, *, shape: tuple[int, ...]) -> None:
        super().__init__(f"{tensor} has shape {shape}", hint="convert it")


@pytest.mark.parametrize("error", [ConfigError("m", hint="h"), TensorError("w", shape=(2, 3))])
def test_errors_cross_process_borders(error: MegaError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args

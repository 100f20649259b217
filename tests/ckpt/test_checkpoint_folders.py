"""A disk that refuses during the commit of a checkpoint: one sentence, and what was there stays whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from crash.savers import MODEL, found, part

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.store import (
    AsyncSaver,
    delete_old_checkpoints,
    list_checkpoints,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_ckpt.verify import verify_checkpoint
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

REFUSALS = {
    "EIO": errno.EIO,
    "EXDEV": errno.EXDEV,
    "EROFS": errno.EROFS,
    "ESTALE": errno.ESTALE,
    "ENOSPC": errno.ENOSPC,
}


@contextmanager
def refused(name: str, number: int, at: int, *, once: bool = False) -> Iterator[None]:
    """Let the call `at`, counted from 0, of `os.<name>` and unless `once` all later ones fail as a file system does."""
    real: Callable[..., Any] = getattr(os, name)
    calls = iter(range(1 << 30))

    def failing(*arguments: Any, **options: Any) -> Any:
        call = next(calls)
        if call < at or (once and call > at):
            return real(*arguments, **options)
        paths = [str(given) for given in arguments if isinstance(given, (str, Path))]
        raise OSError(number, os.strerror(number), *paths[:1])

    with mock.patch.object(os, name, failing):
        yield


def save_version(root: Path, version: int, step: int | None = None) -> Path:
    return save_sharded_checkpoint(root, step or version, part(version, 0, 1), model=MODEL, state={"version": version})


def assert_one_sentence(error: CheckpointError, root: Path, number: int) -> None:
    assert error.exit_status == 2
    assert len(error.message.splitlines()) == 1
    assert os.strerror(number) in error.message
    assert str(root) in error.message


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(
    ("name", "at"), [("rename", 0), ("fsync", 0), ("fsync", 1), ("fsync", 2), ("fsync", 3), ("write", 0), ("write", 2)]
)
def test_a_new_step(tmp_path: Path, name: str, at: int, refusal: str) -> None:
    save_version(tmp_path, 1)
    with refused(name, REFUSALS[refusal], at), pytest.raises(CheckpointError) as raised:
        save_version(tmp_path, 2)
    assert_one_sentence(raised.value, tmp_path, REFUSALS[refusal])
    assert found(tmp_path) in (1, 2)
    assert all(verify_checkpoint(folder).ok for folder in list_checkpoints(tmp_path))
    save_version(tmp_path, 3)
    remove_leftovers(tmp_path)
    assert found(tmp_path) == 3
    assert {path.name for path in tmp_path.iterdir()} <= {f"step-{step:08d}" for step in (1, 2, 3)}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("name", "at"), [("rename", 0), ("rename", 1), *(("fsync", at) for at in range(5))])
def test_a_step_that_is_saved_again(tmp_path: Path, name: str, at: int, refusal: str) -> None:
    """At each moment one of the two is there."""
    save_version(tmp_path, 1, step=5)
    with refused(name, REFUSALS[refusal], at), pytest.raises(CheckpointError) as raised:
        save_version(tmp_path, 2, step=5)
    assert_one_sentence(raised.value, tmp_path, REFUSALS[refusal])
    for _ in range(2):
        (folder,) = list_checkpoints(tmp_path)
        assert verify_checkpoint(folder).ok
        assert found(tmp_path) in (1, 2)
        remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("name", "at"), [("rename", 0), ("fsync", 2)])
def test_in_the_background(tmp_path: Path, name: str, at: int, refusal: str) -> None:
    save_version(tmp_path, 1)
    with AsyncSaver() as saver, refused(name, REFUSALS[refusal], at):
        saver.start_save(tmp_path, 2, part(2, 0, 1), model=MODEL, state={"version": 2})
        with pytest.raises(CheckpointError) as raised:
            saver.wait_for_save()
    assert_one_sentence(raised.value, tmp_path, REFUSALS[refusal])
    assert found(tmp_path) in (1, 2)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("name", "at"), [("rename", 0), ("fsync", 0)])
def test_removing_old_steps(tmp_path: Path, name: str, at: int, refusal: str) -> None:
    for version in (1, 2):
        save_version(tmp_path, version)
    with refused(name, REFUSALS[refusal], at), pytest.raises(CheckpointError) as raised:
        delete_old_checkpoints(tmp_path, keep=1)
    assert_one_sentence(raised.value, tmp_path, REFUSALS[refusal])
    assert found(tmp_path) == 2
    assert all(verify_checkpoint(folder).ok for folder in list_checkpoints(tmp_path))


@pytest.mark.parametrize("refusal", REFUSALS)
def test_sweeping(tmp_path: Path, refusal: str) -> None:
    os.rename(save_version(tmp_path, 1), tmp_path / ".step-00000001.replaced-0a")
    with refused("rename", REFUSALS[refusal], 0), pytest.raises(CheckpointError) as raised:
        remove_leftovers(tmp_path)
    assert_one_sentence(raised.value, tmp_path, REFUSALS[refusal])
    assert found(tmp_path) == 1


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("name", "at"), [("rename", 0), ("rename", 1), ("fsync", 0), ("fsync", 4)])
def test_a_conversion_in_place_of_another(tmp_path: Path, name: str, at: int, refusal: str) -> None:
    model = ModelConfig.parse(
        {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}
    )
    shapes = canonical_tensors(model).items()
    held = {
        f"weights/{key}": ShardedTensor(shape, [TensorBox((0,) * len(shape), torch.randn(shape))])
        for key, shape in shapes
    }
    save_sharded_checkpoint(tmp_path / "run", 1, held, model=model, state={})
    convert_checkpoint(tmp_path / "run", tmp_path / "out", "mega")
    with refused(name, REFUSALS[refusal], at, once=True), pytest.raises(CheckpointError) as raised:
        convert_checkpoint(tmp_path / "run", tmp_path / "out", "mega", overwrite=True)
    assert_one_sentence(raised.value, tmp_path, REFUSALS[refusal])
    assert verify_checkpoint(tmp_path / "out").ok

"""A conversion that was killed goes on where it was, and takes nothing that is not its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import object_stores
import pytest
import torch
from hf_models import content, save_model
from ranks import PRELOAD

from mega_ckpt import shard_files, stream_checkpoint
from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.formats import megatron_dist_write
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.megatron_write import MegatronWriteInput
from mega_ckpt.resumable_folder import CONTENT, JOURNAL, open_resumable_folder
from mega_ckpt.source import MegaWeightSource, open_weight_source
from mega_ckpt.verify import diff_checkpoints, verify_checkpoint
from mega_common.errors import CheckpointError, MegaError
from mega_common.object_store import parse_location

FILE_BYTES = 4000


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf") / "llama", "llama", dtype=torch.bfloat16, shard="4KB")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_checkpoint, "FILE_BYTES", FILE_BYTES)


@pytest.fixture
def mega(llama: Path, tmp_path: Path, small_files: None) -> Path:
    convert_checkpoint(llama, tmp_path / "source", "mega")
    return tmp_path / "source"


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """Raise in the read of that number."""
    calls = iter(range(10**9))

    def wrapped(read: Any) -> Any:
        def failing(self: Any, *args: Any) -> Any:
            if next(calls) == at:
                raise error
            return read(self, *args)

        return failing

    for kind in (HfSource, MegaWeightSource):
        monkeypatch.setattr(kind, "read_tensor_slice", wrapped(kind.read_tensor_slice))


def interrupt_conversion(monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, **more: Any) -> Path:
    """A conversion to mega that an interrupt ended; the folder that it left."""
    before = set(out.parent.glob(f".{out.name}.*.partial"))
    with monkeypatch.context() as patch:
        interrupt(patch, 14, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, out, "mega", **more)
    (left,) = set(out.parent.glob(f".{out.name}.*.partial")) - before
    return left


def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are written from now on."""
    names: list[str] = []
    make = shard_files.HashingFileWriter.__init__

    def told(self: shard_files.HashingFileWriter, path: Path) -> None:
        names.append(path.name)
        make(self, path)

    monkeypatch.setattr(shard_files.HashingFileWriter, "__init__", told)
    return names


def convert_and_die(source: Path, out: Path, to: str, at: int, **more: Any) -> None:
    stream_checkpoint.FILE_BYTES = megatron_dist_write.BYTES_PER_FILE = FILE_BYTES
    calls = iter(range(10**9))

    def dying(work: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*args)

        return wrapped

    shard_files.HashingFileWriter.write_hashed = dying(shard_files.HashingFileWriter.write_hashed)  # type: ignore[method-assign]
    MegatronWriteInput.read_block = dying(MegatronWriteInput.read_block)  # type: ignore[method-assign]
    convert_checkpoint(source, out, to, **more)


def killed(*args: Any, **more: Any) -> None:
    """Run a conversion, in a process of its own, that is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=convert_and_die, args=args, kwargs=more)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("to", ["hf", "mega"])
def test_killed_at_random_and_started_again(
    to: str, llama: Path, mega: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mega if to == "hf" else llama
    convert_checkpoint(source, tmp_path / "straight", to)
    shard_count = len(list((tmp_path / "straight").glob("*.safetensors")))
    assert shard_count > 5
    choose = random.Random()
    for turn in range(4):
        out = tmp_path / f"out-{turn}"
        for _ in range(2):  # killed, and killed again
            killed(source, out, to, choose.randrange(2, 20))
            assert not out.exists()
        (left,) = tmp_path.glob(f".{out.name}.*.partial")
        kept = len((left / JOURNAL).read_text().splitlines()) - 1
        with monkeypatch.context() as patch:
            names = written(patch)
            convert_checkpoint(source, out, to, verify=True)
        assert len([name for name in names if name.endswith(".safetensors")]) == shard_count - kept
        assert content(out) == content(tmp_path / "straight")
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("kind", "at"), [("torch_dist", 15), ("torch", 30)])  # of 21 and 2 * 24 blocks
def test_to_megatron(kind: str, at: int, mega: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_dist_write, "BYTES_PER_FILE", FILE_BYTES)
    options, out = ConvertOptions(megatron_format=kind, tp=2), tmp_path / "out"
    convert_checkpoint(mega, tmp_path / "straight", "megatron", options=options)
    for block in (at, 3):  # killed, and killed again
        killed(mega, out, "megatron", block, options=options)
        assert not out.exists()
    (left,) = tmp_path.glob(f".{out.name}.*.partial")
    finished = [json.loads(line)["name"] for line in (left / JOURNAL).read_text().splitlines()[1:]]
    times = {name: (left / CONTENT / name).stat().st_mtime_ns for name in finished}
    assert times
    convert_checkpoint(mega, out, "megatron", options=options)
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == times
    assert content(out) == content(tmp_path / "straight")
    assert not list(tmp_path.glob(".*"))


def test_an_interrupt_says_how_to_go_on(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt_conversion(monkeypatch, llama, tmp_path / "out")
    assert "run the same command to resume" in caplog.text


def test_nothing_of_another_source_or_other_options_is_taken(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = Path(shutil.copytree(llama, tmp_path / "source")), tmp_path / "out"
    interrupt_conversion(monkeypatch, source, out, options=ConvertOptions(dtype=torch.float32))
    interrupt_conversion(monkeypatch, source, out)
    changed = min(source.glob("*.safetensors"))
    data = changed.read_bytes()
    changed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # the same names, shapes and sizes
    names = written(monkeypatch)
    convert_checkpoint(source, out, "mega", verify=True)
    assert len(set(names)) == len(names)
    assert sorted(path.name for path in out.glob("*.safetensors")) == sorted(n for n in names if "shard" in n)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_what_is_not_as_it_was_finished_is_made_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_checkpoint(llama, tmp_path / "straight", "mega")
    out = tmp_path / "out"
    left = interrupt_conversion(monkeypatch, llama, out)
    one, two, three, *_ = sorted((left / CONTENT).glob("*.safetensors"))
    data = one.read_bytes()
    one.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    two.write_bytes(two.read_bytes()[:-1])
    three.unlink()
    (left / CONTENT / "foreign").write_text("x")
    journal = (left / JOURNAL).read_text()
    (left / JOURNAL).write_text(journal[:-5])  # the last line was not written to its end
    with monkeypatch.context() as patch:
        names = written(patch)
        convert_checkpoint(llama, out, "mega")
    assert {one.name, two.name, three.name} < set(names)
    assert content(out) == content(tmp_path / "straight")


def test_an_error_that_would_come_again_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, 14, CheckpointError("damaged"))
        with pytest.raises(CheckpointError, match="damaged"):
            convert_checkpoint(llama, tmp_path / "out", "mega")
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        interrupt(patch, 14, OSError(28, "No space left"))
        with pytest.raises(MegaError, match="No space"):
            convert_checkpoint(llama, tmp_path / "out", "mega")
    convert_checkpoint(llama, tmp_path / "out", "mega", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with (
        open_resumable_folder(tmp_path / "out", {"a": 1}) as journal,
        pytest.raises(CheckpointError, match="another process is writing it"),
        open_resumable_folder(tmp_path / "out", {"a": 1}),
    ):
        pass
    assert journal.finished == {}


def test_on_an_object_store(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    object_stores.write_objects({})
    out = parse_location("watched://bucket/llama")
    with monkeypatch.context() as patch:
        interrupt(patch, 14, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(llama, out, "mega")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_weight_source(out)
    kept = {path for path in object_stores.content() if path.endswith(".safetensors") and "/finished/" not in path}
    noted = {path for path in object_stores.content() if "/finished/" in path}
    assert len(kept) > 2
    assert len(noted) in (len(kept), len(kept) - 1)  # in memory an object is there before it is whole
    (out / "notes" / "mine").write_bytes(b"x")
    with monkeypatch.context() as patch:
        interrupt(patch, 14, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(llama, out, "mega", options=ConvertOptions(dtype=torch.float32))
    with monkeypatch.context() as patch:
        names = written(patch)
        convert_checkpoint(llama, out, "mega", verify=True)
    assert len(list(out.iterdir())) == 3
    (out / "notes").delete_objects()
    assert not {path.rpartition("/")[2] for path in noted} & set(names)
    assert verify_checkpoint(out).ok
    assert not verify_checkpoint(out).extra
    convert_checkpoint(llama, tmp_path / "straight", "mega")
    assert diff_checkpoints(out, tmp_path / "straight").is_identical
    with pytest.raises(CheckpointError, match="exists already"):
        convert_checkpoint(llama, out, "mega", overwrite=True)
    with pytest.raises(CheckpointError, match="is not supported on an object store"):
        convert_checkpoint(llama, "watched://bucket/hf", "hf")


def test_what_proves_wrong_on_an_object_store_goes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    object_stores.write_objects({})

    def wrong(_: object) -> None:
        raise CheckpointError("not the same")

    with pytest.raises(CheckpointError, match="not the same"):
        convert_checkpoint(llama, "watched://bucket/llama", "mega", check=wrong)
    assert object_stores.content() == {}

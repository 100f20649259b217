"""Checkpoints on object stores: the same promises as on a disk, by a manifest that is put last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import object_stores
import pytest
import torch
import torch.distributed as dist
from crash.savers import found, part
from object_stores import Watched
from ranks import run_ranks

from mega_ckpt import dcp_planners
from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.source import copy_assets, open_weight_source, resolve_run_to_checkpoint
from mega_ckpt.store import (
    AsyncSaver,
    Checkpoint,
    RemotePath,
    delete_old_checkpoints,
    get_checkpoint_step_folder,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_checkpoint,
    parse_location,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_ckpt.verify import diff_checkpoints, inspect_checkpoint, verify_checkpoint
from mega_common.errors import CheckpointError, ConfigError, MissingPackageError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, ObjectStoreError

MODEL = ModelConfig.parse(
    {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}
)


@pytest.fixture
def root() -> Iterator[Location]:
    object_stores.write_objects({})
    yield parse_location("watched://bucket/run")
    object_stores.write_objects({})


def whole_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor(tuple(t.shape), [TensorBox((0,) * t.dim(), t)]) for key, t in tensors.items()}


def save_version(root: Location, version: int, step: int | None = None, **more: Any) -> Location:
    """Save a version of the crash test's tensors."""
    return save_sharded_checkpoint(
        root, step or version, part(version, 0, 1), model=MODEL, state={"version": version}, **more
    )


def weights(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"weights/{name}": torch.full(shape, fill) for name, shape in canonical_tensors(MODEL).items()}


# Places


def test_what_a_user_calls_a_folder() -> None:
    assert parse_location("runs/a") == Path("runs/a")
    assert parse_location("file:///data/a") == Path("/data/a")
    there = parse_location("memory://bucket/run/")
    assert (str(there / "checkpoints"), there.name, str(there.parent)) == (
        "memory://bucket/run/checkpoints", "run", "memory://bucket",
    )  # fmt: skip
    assert parse_location(there) is there
    with pytest.raises(ConfigError, match="the protocol s4:// is not supported"):
        parse_location("s4://bucket")


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingPackageError, match=r"s3://bucket/run: Install s3fs"):
        latest_checkpoint(parse_location("s3://bucket/run"))


# Saving


def test_round_trip(root: Location, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tokenizer.json").write_text("{}")
    folder = save_version(root, 3, assets=tmp_path)
    assert folder == get_checkpoint_step_folder(root, 3) == latest_checkpoint(root)
    assert found(root) == 3
    opened = Checkpoint.open_folder(folder)
    assert (opened.step, opened.trainer_state, opened.model) == (3, {"version": 3}, MODEL)
    assert isinstance(opened.assets_folder, RemotePath)
    assert (opened.assets_folder / "sub" / "tokenizer.json").read_bytes() == b"{}"
    assert verify_checkpoint(folder).ok


def test_a_load_reads_only_what_it_needs(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_planners, "MAX_SLAB_BYTES", 1 << 12)
    rows, columns = 64, 64
    tensor = torch.arange(float(rows * columns)).view(rows, columns)
    folder = save_sharded_checkpoint(root, 1, whole_tensors({"t": tensor}), model=MODEL, state={})
    for verified in (True, False):
        quarter = torch.zeros(rows // 4, columns)
        Watched.read.clear()
        load_sharded_checkpoint(
            folder, {"t": ShardedTensor((rows, columns), [TensorBox((16, 0), quarter)])}, verify=verified
        )
        assert torch.equal(quarter, tensor[16:32])
        data = sum(count for name, count in Watched.read if name.endswith(".safetensors"))
        assert data <= tensor.nbytes // 4 + 2000  # the header of the file


def test_every_moment_of_a_save(root: Location) -> None:
    """P1: whatever was put when the program was killed, what is found is complete, and nothing that returned is lost."""
    begun, returned = {}, {}
    for version, step in enumerate([1, 2, 2, 3], 1):  # step 2 is saved again
        begun[len(Watched.contents)] = version
        if version % 2:
            save_version(root, version, step)
        else:
            with AsyncSaver() as saver:
                saver.start_save(root, step, part(version, 0, 1), model=MODEL, state={"version": version})
        returned[len(Watched.contents)] = version
        delete_old_checkpoints(root, keep=1)
    moments = list(Watched.contents)
    versions = []
    for done, content in enumerate(moments, 1):
        object_stores.write_objects(content)
        versions.append(found(root))
        least, most = (max((v for at, v in marks.items() if at < done), default=0) for marks in (returned, begun))
        assert least <= versions[-1] <= most
        remove_leftovers(root)
        assert found(root) == versions[-1]
        left = {path.removeprefix("/bucket/run/").split("/")[0] for path in Watched.store}
        assert left == {folder.name for folder in list_checkpoints(root)}
    assert set(versions) == {0, 1, 2, 3, 4}
    assert len(moments) > 20


def put_until(root: Location, moment: int, error: BaseException) -> str | None:
    """Save version 2 while the store raises at one moment; what was told, or None when all went well."""
    calls = itertools.count()

    def announce(what: str) -> None:
        if next(calls) == moment:
            raise error

    Watched.announce = staticmethod(announce)
    try:
        save_version(root, 2)
    except (CheckpointError, KeyboardInterrupt) as told:
        return str(told)
    finally:
        Watched.announce = staticmethod(lambda what: None)
    return None


@pytest.mark.parametrize("error", [OSError(5, "the store is out of order"), KeyboardInterrupt("stopped")])
def test_an_error_at_any_moment_leaves_the_older_one(root: Location, error: BaseException) -> None:
    save_version(root, 1)
    before = object_stores.content()
    moments = itertools.count()
    while (told := put_until(root, next(moments), error)) is not None:
        assert str(error).removeprefix("[Errno 5] ") in told
        remove_leftovers(root)
        if found(root) == 2:  # the last moments are those after the commit
            assert isinstance(error, KeyboardInterrupt)
            break
        assert found(root) == 1
        assert object_stores.content() == before
    assert found(root) == 2
    assert next(moments) > 5


def test_a_commit_whose_answer_is_lost_is_not_taken_apart(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Watched.pipe_file

    def lost(self: Watched, path: str, value: bytes, **options: Any) -> None:
        real(self, path, value, **options)
        raise TimeoutError("no answer")

    save_version(root, 1, step=7)
    with monkeypatch.context() as patch:
        patch.setattr(Watched, "pipe_file", lost)
        with pytest.raises(CheckpointError, match="no answer"):
            save_version(root, 2, step=7)
    assert found(root) == 2
    remove_leftovers(root)
    assert found(root) == 2


def test_a_store_that_is_out_of_reach_is_not_an_empty_one(root: Location) -> None:
    """Else a run would begin anew, and a sweep might delete."""
    save_version(root, 1)

    def broken(what: str) -> None:
        raise PermissionError(what)

    Watched.announce = staticmethod(broken)
    for ask in (latest_checkpoint, list_checkpoints, remove_leftovers, open_weight_source):
        with pytest.raises(ObjectStoreError, match="PermissionError"):
            ask(root)
    with pytest.raises(CheckpointError, match="PermissionError"):
        load_sharded_checkpoint(get_checkpoint_step_folder(root, 1), {})


# Folders


def test_folders_without_a_manifest_are_absent_and_damaged_ones_are_told(root: Location) -> None:
    assert latest_checkpoint(root) is None
    assert remove_leftovers(root) == []
    save_version(root, 1)
    for path, data in object_stores.content().items():
        Watched.announce = staticmethod(lambda what: None)
        if not path.endswith(MANIFEST):
            (root / "step-00000002" / path.rpartition("/")[2]).write_bytes(data)
        else:
            (root / "step-00000003" / MANIFEST).write_bytes(data[:-3])
            (root / "step-00000004" / MANIFEST).write_bytes(data)  # says that it is step 1
    (root / "notes" / "mine").write_bytes(b"")
    assert list_checkpoints(root) == [get_checkpoint_step_folder(root, 1)]
    with pytest.raises(CheckpointError, match=r"step-00000004: .* with step 1(.|\n)*move step-00000004 elsewhere"):
        latest_checkpoint(root)
    assert remove_leftovers(root) == [root / "step-00000002"]
    assert {path.name for path in root.iterdir()} == {
        "notes", "step-00000001", "step-00000003", "step-00000004",
    }  # fmt: skip


def test_retain(root: Location) -> None:
    for version in range(1, 7):
        save_version(root, version)
    gone = delete_old_checkpoints(root, keep=1, keep_every=3)
    assert list_checkpoints(root) == [get_checkpoint_step_folder(root, 3), get_checkpoint_step_folder(root, 6)]
    assert len(gone) == 4
    assert len({path.split("/")[3] for path in object_stores.content()}) == 2


def test_a_checkpoint_copied_to_or_from_a_store_is_one(root: Location, tmp_path: Path) -> None:
    local = save_version(tmp_path, 1)
    for path in local.iterdir():
        (get_checkpoint_step_folder(root, 1) / path.name).write_bytes(path.read_bytes())
    assert found(root) == 1
    assert remove_leftovers(root) == []
    assert found(root) == 1
    assert diff_checkpoints(local, get_checkpoint_step_folder(root, 1)).is_identical
    save_version(root, 2)
    for name, data in object_stores.content().items():
        target = tmp_path / Path(name).relative_to("/bucket/run")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert found(tmp_path) == 2


# Damage


def test_damage_is_one_sentence_with_file_and_tensor(root: Location) -> None:
    """P7."""
    folder = save_version(root, 1)
    sound = object_stores.content()
    for path in sound:
        for change in (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], lambda data: b""):
            object_stores.write_objects({**sound, path: change(sound[path])})
            with pytest.raises(CheckpointError) as caught:
                load_sharded_checkpoint(folder, part(1, 0, 1))
            assert path.rpartition("/")[2] in caught.value.message
            assert path.endswith(MANIFEST) or any(key in caught.value.message for key in part(1, 0, 1))
        object_stores.write_objects({other: data for other, data in sound.items() if other != path})
        with pytest.raises(CheckpointError):
            load_sharded_checkpoint(folder, part(1, 0, 1))


# What the commands ask for


def test_inspect_verify_and_convert(root: Location, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "tokenizer.json").write_bytes(b"{}")
    folder = save_sharded_checkpoint(
        root / "checkpoints", 5, whole_tensors(weights()), model=MODEL, state={"a": 1}, assets=tmp_path / "assets"
    )
    url = str(root)
    assert resolve_run_to_checkpoint(url) == folder
    assert inspect_checkpoint(resolve_run_to_checkpoint(url)).step == 5
    report = verify_checkpoint(folder, finite=True)
    assert report.ok
    assert not report.extra
    (folder / "other").write_bytes(b"x")
    assert verify_checkpoint(folder).extra == ["other"]
    convert_checkpoint(url, tmp_path / "hf", "hf", verify=True)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == b"{}"
    copy_assets(open_weight_source(url), tmp_path / "copied")
    assert (tmp_path / "copied" / "tokenizer.json").read_bytes() == b"{}"


def test_a_huggingface_folder_is_read_from_a_store(root: Location, tmp_path: Path) -> None:
    convert_checkpoint(
        save_sharded_checkpoint(tmp_path, 1, whole_tensors(weights(2.0)), model=MODEL, state={}), tmp_path / "hf", "hf"
    )
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    (tmp_path / "hf" / "additional_chat_templates" / "tools.jinja").write_bytes(b"{{ tools }}")
    for path in (tmp_path / "hf").rglob("*.*"):
        (root / path.relative_to(tmp_path / "hf").as_posix()).write_bytes(path.read_bytes())
    one, other = open_weight_source(tmp_path / "hf"), open_weight_source(str(root))
    assert one.model == other.model
    assert all(torch.equal(one.read_tensor(name), other.read_tensor(name)) for name in one.tensor_names())
    assert other.asset_files()["additional_chat_templates/tools.jinja"] == b"{{ tools }}"
    (root / "model.safetensors").write_bytes((root / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"watched://bucket/run/model\.safetensors: truncated"):
        open_weight_source(str(root))
    with pytest.raises(CheckpointError, match="watched://bucket/none: no such folder"):
        open_weight_source("watched://bucket/none")


# Several ranks


def save_shared(folder: Path) -> tuple[int, int]:
    root = parse_location(object_stores.share(folder))
    rank, world = dist.get_rank(), dist.get_world_size()
    save_sharded_checkpoint(root, 1, part(1, rank, world), model=MODEL, state={"version": 1})
    with AsyncSaver() as saver:
        for version in (2, 3):
            saver.start_save(root, 2, part(version, rank, world), model=MODEL, state={"version": version})
    dist.barrier()
    mine = part(0, rank, world)
    load_sharded_checkpoint(get_checkpoint_step_folder(root, 1), mine)
    expected = part(1, rank, world)
    same = all(torch.equal(mine[key].boxes[0].tensor, expected[key].boxes[0].tensor) for key in mine)
    return found(root), same


def test_four_ranks(tmp_path: Path) -> None:
    assert run_ranks(save_shared, 4, tmp_path) == [(3, True)] * 4
    root = parse_location(object_stores.share(tmp_path))
    assert [path.name for path in list_checkpoints(root)] == ["step-00000001", "step-00000002"]
    assert remove_leftovers(root) == []
    assert len(list((tmp_path / "step-00000002").iterdir())) == 2


def fail_shared(folder: Path) -> str:
    root, rank = parse_location(object_stores.share(folder)), dist.get_rank()
    save_sharded_checkpoint(root, 1, part(1, rank, 2), model=MODEL, state={"version": 1})
    if rank == 1:
        object_stores.Shared._open = _refuse  # type: ignore[method-assign]
    try:
        save_sharded_checkpoint(root, 2, part(2, rank, 2), model=MODEL, state={"version": 2})
    except CheckpointError as error:
        return error.message
    return "no error"


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError("no entry")


def test_a_rank_that_is_refused_is_named_on_all(tmp_path: Path) -> None:
    told = run_ranks(fail_shared, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith("rank 1: shared://")
    assert "no entry" in told[0]
    assert found(parse_location(object_stores.share(tmp_path))) == 1

"""What is saved in any sharding loads in any other; what is damaged, missing or foreign is one sentence on every rank."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import load_file

from mega_ckpt import checkpoint, dcp_planners
from mega_ckpt.manifest import DTYPE_NAMES, MANIFEST
from mega_ckpt.store import (
    AsyncSaver,
    Checkpoint,
    delete_old_checkpoints,
    get_checkpoint_step_folder,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_checkpoint,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import (
    ShardedTensor,
    TensorBox,
    TensorPiece,
    TensorShape,
    map_flat_range_to_sharded_tensors,
)
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset

MODEL = ModelConfig.parse(load_model_preset("tiny"))
Tensors = dict[str, torch.Tensor]


def whole_tensors(tensors: Tensors) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor(tuple(t.shape), [TensorBox((0,) * t.dim(), t)]) for key, t in tensors.items()}


def save_step(root: Path, step: int, tensors: Tensors, **more: Any) -> Path:
    return save_sharded_checkpoint(root, step, whole_tensors(tensors), model=MODEL, state=more.pop("state", {}), **more)


def some_tensors(seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {
        "weights/a": torch.randn(6, 5, generator=draw),
        "weights/b": torch.randn(7, generator=draw).bfloat16(),
        "optimizer/main/a": torch.randn(6, 5, generator=draw, dtype=torch.float64),
        "step": torch.tensor(3),
        "mask": torch.rand(9, generator=draw) > 0.5,
        "none": torch.empty(0, 3),
    }


def equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def zeros(tensors: Tensors) -> Tensors:
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}


def split(tensor: torch.Tensor, parts: int, choose: random.Random) -> list[ShardedTensor]:
    """Share a tensor out over `parts` holders: by recursive cuts, as flat ranges, or as copies."""
    shape, kind = tuple(tensor.shape), choose.choice(["cuts", "flat", "copies"])
    held = [ShardedTensor(shape, []) for _ in range(parts)]
    if kind == "copies" or not tensor.numel():
        return [ShardedTensor(shape, [TensorBox((0,) * tensor.dim(), tensor)]) for _ in range(parts)]
    if kind == "flat":
        ends = sorted(choose.randint(0, tensor.numel()) for _ in range(parts - 1))
        for part, (start, stop) in enumerate(zip([0, *ends], [*ends, tensor.numel()], strict=True)):
            flat = tensor.contiguous().view(-1)[start:stop]
            held[part].boxes += (
                map_flat_range_to_sharded_tensors(flat, [TensorPiece.whole_tensor("t", shape)], shape, start)
                .get("t", held[part])
                .boxes
            )
        return held
    for box in _random_cuts(TensorBox((0,) * tensor.dim(), tensor), choose):
        held[choose.randrange(parts)].boxes.append(box)
    return held


def _random_cuts(box: TensorBox, choose: random.Random, depth: int = 3) -> Iterable[TensorBox]:
    axes = [axis for axis, n in enumerate(box.tensor.shape) if n > 1]
    if not axes or not depth or choose.random() < 0.3:
        return [box]
    axis = choose.choice(axes)
    at = choose.randint(1, box.tensor.shape[axis] - 1)
    low, high = box.tensor.tensor_split([at], axis)
    up = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
    return [
        *_random_cuts(TensorBox(box.offset, low), choose, depth - 1),
        *_random_cuts(TensorBox(up, high), choose, depth - 1),
    ]


def blank(sharded: ShardedTensor) -> ShardedTensor:
    return ShardedTensor(sharded.shape, [TensorBox(box.offset, torch.zeros_like(box.tensor)) for box in sharded.boxes])


def matches(sharded: ShardedTensor, tensor: torch.Tensor) -> bool:
    return all(
        torch.equal(
            box.tensor, tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]
        )
        for box in sharded.boxes
    )


# One process


def test_round_trip_is_exact_and_plain_safetensors(tmp_path: Path) -> None:
    tensors, state = some_tensors(), {"samples": 12, "scale": 0.1, "settings": {"lr": [1e-5, None]}}
    folder = save_step(tmp_path / "new" / "root", 3, tensors, state=state, provenance={"by": "test"})
    assert folder == tmp_path / "new" / "root" / "step-00000003"
    back = zeros(tensors)
    load_sharded_checkpoint(folder, whole_tensors(back))
    assert equal(tensors, back)
    opened = Checkpoint.open_folder(folder)
    assert (opened.step, opened.model, opened.trainer_state) == (3, MODEL, state)
    assert opened.tensor_keys("weights/") == ["weights/a", "weights/b"]
    assert (opened.tensor_shape("weights/b"), opened.tensor_dtype("weights/b")) == ((7,), torch.bfloat16)
    (shard,) = folder.glob("*.safetensors")
    assert equal(load_file(shard), tensors)
    assert sorted(os.listdir(folder)) == [MANIFEST, shard.name]


@given(seed=st.integers(0, 10**6), shape=st.lists(st.integers(1, 6), max_size=3).map(tuple), small=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_boxes_load_into_any_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, shape: TensorShape, small: bool
) -> None:
    choose = random.Random(seed)
    dtype = choose.choice([dtype for dtype in DTYPE_NAMES if dtype.itemsize < 8])
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with monkeypatch.context() as patch:
        # Tiny limits, so that boxes are cut into slabs and slabs spread over files.
        patch.setattr(dcp_planners, "MAX_SLAB_BYTES", 16 if small else 1 << 20)
        patch.setattr(dcp_planners, "MAX_FILE_BYTES", 40 if small else 1 << 20)
        (held,) = split(tensor, 1, choose)
        folder = save_sharded_checkpoint(tmp_path, seed, {"t": held}, model=MODEL, state={})
    for target in map(blank, split(tensor, 3, choose)):
        load_sharded_checkpoint(folder, {"t": target})
        assert matches(target, tensor)
    offset = tuple(choose.randrange(n) for n in shape)
    extent = tuple(choose.randint(1, n - o) for n, o in zip(shape, offset, strict=True))
    assert matches(
        ShardedTensor(shape, [TensorBox(offset, Checkpoint.open_folder(folder).read_tensor("t", offset, extent))]),
        tensor,
    )


def test_assets_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "tokenizer.json").write_text("{}")
    (source / "sub" / "empty").touch()
    opened = Checkpoint.open_folder(save_step(tmp_path / "root", 1, {}, assets=source))
    assert opened.assets_folder is not None
    assert (opened.assets_folder / "tokenizer.json").read_text() == "{}"
    assert (opened.assets_folder / "sub" / "empty").read_bytes() == b""
    assert Checkpoint.open_folder(save_step(tmp_path / "root", 2, {})).assets_folder is None
    with pytest.raises(CheckpointError, match="missing: no such folder"):
        save_step(tmp_path / "root", 3, {}, assets=tmp_path / "missing")


def test_reading_a_part_reads_only_that_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_planners, "MAX_SLAB_BYTES", 4 * 10)
    tensor = torch.arange(80.0).view(8, 10)
    opened = Checkpoint.open_folder(save_step(tmp_path, 1, {"t": tensor}))
    (shard,) = opened.folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert torch.equal(opened.read_tensor("t", (2, 3), (2, 4)), tensor[2:4, 3:7])
    with pytest.raises(CheckpointError, match=r"t at \[7, 0\]"):
        opened.read_tensor("t", (7, 0), (1, 1))
    assert not torch.equal(Checkpoint.open_folder(opened.folder, verify=False).read_tensor("t"), tensor)


def test_more_shards_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_planners, "MAX_FILE_BYTES", 1)
    monkeypatch.setattr(checkpoint, "MAX_OPEN_SHARDS", 2)
    tensors = {f"t{number}": torch.tensor([number]) for number in range(50)}
    before = len(os.listdir("/proc/self/fd"))
    opened = Checkpoint.open_folder(save_step(tmp_path, 1, tensors))
    for _ in range(2):
        assert all(torch.equal(opened.read_tensor(key), tensor) for key, tensor in tensors.items())
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"weights/z": torch.zeros(1)}, "the tensor weights/z is missing"),
        ({"weights/y": torch.zeros(1), "weights/z": torch.zeros(1)}, r"weights/y \(and 1 more\)"),
        ({"weights/a": torch.zeros(5, 6)}, r"weights/a has shape \[6, 5\], but the run requires \[5, 6\]"),
        ({"weights/b": torch.zeros(7)}, "weights/b has dtype torch.bfloat16, but the run requires torch.float32"),
    ],
)
def test_a_tensor_that_is_not_what_is_wanted_is_named(tmp_path: Path, wanted: Tensors, sentence: str) -> None:
    folder = save_step(tmp_path, 1, some_tensors())
    with pytest.raises(CheckpointError, match=sentence):
        load_sharded_checkpoint(folder, whole_tensors(wanted))


@pytest.mark.parametrize(
    ("boxes", "sentence"),
    [
        ([((0,), 2)], "t: the boxes"),
        ([((0,), 3), ((2,), 2)], "t: the boxes"),
        ([((0,), 4), ((0,), 2)], "t: the boxes"),
        ([((0,), 4), ((3,), 2)], "t: the boxes"),
    ],
)
def test_boxes_that_do_not_tile_are_refused(
    tmp_path: Path, boxes: list[tuple[TensorShape, int]], sentence: str
) -> None:
    sharded = ShardedTensor((4,), [TensorBox(offset, torch.zeros(n)) for offset, n in boxes])
    with pytest.raises(CheckpointError, match=sentence):
        save_sharded_checkpoint(tmp_path, 1, {"t": sharded}, model=MODEL, state={})
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_safetensors_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"t: dtype torch\.complex64 is not supported"):
        save_step(tmp_path, 1, {"t": torch.zeros(2, dtype=torch.complex64)})


def test_a_disk_that_fails_leaves_nothing_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    save_step(tmp_path, 1, some_tensors())
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_step(tmp_path, 2, some_tensors())
    assert os.listdir(tmp_path) == ["step-00000001"]


# Damage


def damaged(folder: Path, name: str, change: str, choose: random.Random) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    if change == "flip":
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    elif change == "truncate":
        del data[choose.randrange(len(data)) :]
    elif change == "grow":
        data += b"\0"
    path.unlink()
    if change != "remove":
        path.write_bytes(data)


@pytest.mark.parametrize("change", ["flip", "truncate", "grow", "remove"])
def test_damage_of_any_file_is_one_sentence_with_file_and_tensor(tmp_path: Path, change: str) -> None:
    tensors, choose = some_tensors(), random.Random(change)
    folder = save_step(tmp_path, 1, tensors)
    for turn in range(25):
        for name in os.listdir(folder):
            copy = tmp_path / f"copy-{turn}"
            shutil.copytree(folder, copy)
            damaged(copy, name, change, choose)
            with pytest.raises(CheckpointError) as caught:
                load_sharded_checkpoint(copy, whole_tensors(zeros(tensors)))
            assert name in caught.value.message
            assert name == MANIFEST or any(key in caught.value.message for key in tensors)
            shutil.rmtree(copy)


def test_a_shard_behind_a_link_is_refused(tmp_path: Path) -> None:
    folder = save_step(tmp_path / "root", 1, some_tensors())
    (shard,) = folder.glob("*.safetensors")
    shard.rename(tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="links are not followed"):
        Checkpoint.open_folder(folder)


def test_a_pipe_in_place_of_a_shard_does_not_hang(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1, some_tensors())
    (shard,) = folder.glob("*.safetensors")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="must be a plain file"):
        Checkpoint.open_folder(folder)


@pytest.mark.parametrize(("name", "message"), [(".", "not a mega checkpoint"), ("missing", "no such folder")])
def test_a_folder_that_is_no_checkpoint(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_sharded_checkpoint(tmp_path / name, {})


# Folders


def test_latest_and_committed_see_complete_ones_only(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    assert list_checkpoints(tmp_path) == []
    folders = [save_step(tmp_path, step, some_tensors(step)) for step in (5, 100, 20)]
    (tmp_path / "step-00000400").mkdir()
    shutil.copytree(folders[0], tmp_path / ".step-00000500.tmp-0a0a0a0a")
    shutil.copytree(folders[0], tmp_path / "step-00000500.bak")
    (tmp_path / "step-00000600").touch()
    assert latest_checkpoint(tmp_path) == folders[1]
    assert list_checkpoints(tmp_path) == [folders[0], folders[2], folders[1]]


def test_a_newest_checkpoint_whose_manifest_was_removed_is_not_absent(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 3, some_tensors(3))
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"{folder.name}(.|\n)*move {folder.name} elsewhere"):
        latest_checkpoint(tmp_path)


def test_a_newest_checkpoint_that_cannot_be_read_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (save_step(tmp_path, step, {}) for step in (1, 2))
    sound = (new / MANIFEST).read_bytes()

    def unreadable(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    for content, words in [
        (sound[:-5], "damaged"), (b"", "damaged"), ((old / MANIFEST).read_bytes(), "with step 1"), (None, "Stale file"),
    ]:  # fmt: skip
        if content is None:
            monkeypatch.setattr(Path, "read_bytes", unreadable)
        else:
            (new / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{new.name}.*{words}(.|\n)*move {new.name} elsewhere"):
            latest_checkpoint(tmp_path)
        assert new not in list_checkpoints(tmp_path)
        assert delete_old_checkpoints(tmp_path, keep=1) == []
    new.rename(tmp_path / "aside")
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path) == old


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1, {})

    def unreadable(path: Path) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "listdir", unreadable)
    with pytest.raises(OSError, match="Input/output error"):
        latest_checkpoint(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_step(tmp_path, 1, some_tensors(1))
    folder = save_step(tmp_path, 1, some_tensors(2))
    assert torch.equal(Checkpoint.open_folder(folder).read_tensor("weights/a"), some_tensors(2)["weights/a"])
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [(None, None, [1, 2, 3, 4, 5, 6]), (2, None, [5, 6]), (0, None, [6]), (1, 2, [2, 4, 6]), (1, 5, [5, 6])],
)
def test_retain(tmp_path: Path, keep: int | None, every: int | None, left: list[int]) -> None:
    for step in range(1, 7):
        save_step(tmp_path, step, {})
    gone = delete_old_checkpoints(tmp_path, keep=keep, keep_every=every)
    assert list_checkpoints(tmp_path) == [get_checkpoint_step_folder(tmp_path, step) for step in left]
    assert len(os.listdir(tmp_path)) == len(left) == 6 - len(gone)


def test_sweep_removes_leftovers_and_puts_a_replaced_one_back(tmp_path: Path) -> None:
    one, two = (save_step(tmp_path, step, some_tensors()) for step in (1, 2))
    shutil.copytree(one, tmp_path / ".step-00000003.tmp-0a0a0a0a")
    shutil.copytree(one, tmp_path / ".step-00000000.trash-0a0a0a0a")
    shutil.copytree(one, tmp_path / ".step-00000001.replaced-0a0a0a0a")
    two.rename(tmp_path / ".step-00000002.replaced-0a0a0a0a")
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / ".step-00000002.replaced-0a0a0a0a"
    assert len(remove_leftovers(tmp_path)) == 3
    assert sorted(os.listdir(tmp_path)) == ["notes", one.name, two.name]
    assert latest_checkpoint(tmp_path) == two


# In the background


def test_what_changes_after_start_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    tensors, state = some_tensors(), {"list": [1]}
    with AsyncSaver() as saver:
        for step in (1, 2):
            saver.start_save(tmp_path, step, whole_tensors(tensors), model=MODEL, state=state)
            tensors["weights/a"].zero_()
            state["list"].append(step)
        assert saver.wait_for_save() == get_checkpoint_step_folder(tmp_path, 2)
        assert saver.wait_for_save() is None
        saver.start_save(tmp_path, 3, whole_tensors(some_tensors(3)), model=MODEL, state={})
    first, second = (Checkpoint.open_folder(get_checkpoint_step_folder(tmp_path, step)) for step in (1, 2))
    assert torch.equal(first.read_tensor("weights/a"), some_tensors()["weights/a"])
    assert first.trainer_state == {"list": [1]}
    assert not second.read_tensor("weights/a").any()
    assert latest_checkpoint(tmp_path) == get_checkpoint_step_folder(tmp_path, 3)


def test_an_error_in_the_background_reaches_the_next_call(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        for retry in (saver.wait_for_save, lambda: saver.start_save(tmp_path, 2, {}, model=MODEL, state={})):
            saver.start_save(
                tmp_path, 1, {"t": ShardedTensor((4,), [TensorBox((0,), torch.zeros(2))])}, model=MODEL, state={}
            )
            with pytest.raises(CheckpointError, match="t: the boxes"):
                retry()
        saver.start_save(tmp_path, 3, {}, model=MODEL, state={})
    assert list_checkpoints(tmp_path) == [get_checkpoint_step_folder(tmp_path, 3)]


# Several ranks


def reshard(root: Path, seeds: range) -> bool:
    """Every rank holds its part of random tensors; saved in one random sharding, loaded in another."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with AsyncSaver() as saver:
        for seed in seeds:
            choose = random.Random(seed)
            tensors = some_tensors(seed)
            mine = {key: split(tensor, world, choose)[rank] for key, tensor in tensors.items()}
            if seed % 2:
                saver.start_save(root, seed, mine, model=MODEL, state={})
                folder = saver.wait_for_save()
            else:
                folder = save_sharded_checkpoint(root, seed, mine, model=MODEL, state={})
            assert folder is not None
            other = {key: blank(split(tensor, world, choose)[rank]) for key, tensor in tensors.items()}
            load_sharded_checkpoint(folder, other)
            assert all(matches(other[key], tensors[key]) for key in tensors), f"seed {seed}"
    return True


def test_any_sharding_of_four_ranks_loads_in_any_other(tmp_path: Path) -> None:
    assert run_ranks(reshard, 4, tmp_path, range(30)) == [True] * 4
    for seed in range(30):
        tensors = some_tensors(seed)
        alone = zeros(tensors)
        load_sharded_checkpoint(get_checkpoint_step_folder(tmp_path, seed), whole_tensors(alone))
        assert equal(alone, tensors)


def save_copies(root: Path) -> None:
    save_sharded_checkpoint(
        root, 1, whole_tensors({f"t{i}": torch.full((100,), float(i)) for i in range(8)}), model=MODEL, state={}
    )


def test_copies_are_written_once_and_shared_out(tmp_path: Path) -> None:
    run_ranks(save_copies, 4, tmp_path)
    files = [path.stat().st_size for path in (tmp_path / "step-00000001").glob("*.safetensors")]
    assert len(files) == 4
    assert sum(files) < 8 * 400 + 4 * 300


def fail(root: Path, case: str) -> str:
    """One rank fails; returns what this rank was told."""
    rank, tensors = dist.get_rank(), whole_tensors({"t": torch.ones(4)})
    folder = save_sharded_checkpoint(root, 1, tensors, model=MODEL, state={})
    try:
        if case == "disk" and rank == 2:
            _break_writes()
        if case == "dtype" and rank == 1:
            tensors = whole_tensors({"t": torch.ones(4).double()})
        if case == "missing" and rank == 1:
            load_sharded_checkpoint(folder, whole_tensors({"u": torch.ones(4)}))
        elif case == "missing":
            load_sharded_checkpoint(folder, tensors)
        elif case == "staging":
            meta = whole_tensors({"t": torch.ones(4, device="meta")})
            with AsyncSaver() as saver:
                saver.start_save(root, 2, meta if rank == 3 else tensors, model=MODEL, state={})
        else:
            mine = ShardedTensor((4,), [TensorBox((rank,), torch.ones(1))])
            save_sharded_checkpoint(
                root,
                2,
                {"t": mine} if case == "disk" else tensors,
                model=MODEL,
                state={"x": float("nan")} if case == "state" else {},
            )
    except CheckpointError as error:
        return error.message
    return "no error"


def _break_writes() -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    os.write = full  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("disk", "rank 2: .*No space left"),
        ("dtype", "t: dtype and shape must be equal on all ranks"),
        ("missing", "rank 1: .*tensor u is missing"),
        ("staging", "rank 3: "),
        ("state", "must be JSON"),
    ],
)
def test_what_one_rank_meets_every_rank_tells_alike(tmp_path: Path, case: str, sentence: str) -> None:
    told = run_ranks(fail, 4, tmp_path, case, timeout=60)
    assert len(set(told)) == 1
    with pytest.raises(CheckpointError, match=sentence):
        raise CheckpointError(told[0])
    assert os.listdir(tmp_path) == ["step-00000001"]

"""Copies in host memory: the newest step that is whole, wherever its copies are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mega_ckpt.store import Checkpoint, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.job import memory_checkpoint as memory_module
from mega_trainer.job.memory_checkpoint import MemoryCheckpoint, MemoryCopyStep, should_keep_memory_copies
from mega_trainer.job.private_folder import claim_private_folder, launcher_folder_path, load_secret_key
from mega_trainer.job.resume import convert_epochs_to_steps, find_newer_memory_copy, inherit_data_order

NODES = (1, os.getpid())  # two processes that live as long as the test, as two launchers


def held_tensors(step: int, rank: int) -> dict[str, ShardedTensor]:
    """What a rank holds after a step: boxes of two types, one of them a part of something larger."""
    whole = torch.full((4, 6), float(step * 10 + rank), dtype=torch.bfloat16)
    return {
        "a": ShardedTensor((8, 6), [TensorBox((0, 0), whole[:, 1:4])]),
        "b": ShardedTensor((3,), [TensorBox((0,), torch.full((3,), rank + step / 8))]),
    }


def output_of(root: Path, output: str = "run") -> Path:
    return root.parent / f"{root.name}-{output}"


def folder(root: Path, node: int) -> Path:
    """Folder of a launcher's copies."""
    return launcher_folder_path(root, load_secret_key(output_of(root)), node)


def memory(root: Path, nodes: tuple[int, ...], output: str = "run", run: str = "job") -> MemoryCheckpoint:
    """A new process's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = CommGroup("world", tuple(range(size)), rank, dist.group.WORLD)
    environment = {"TORCHELASTIC_RUN_ID": run, "LOCAL_RANK": str(rank % 2)}
    made = MemoryCheckpoint(str(output_of(root, output)), world, environment, nodes[rank // 2], root)
    dist.barrier()
    return made


def found(one: MemoryCheckpoint) -> tuple[int, bool] | None:
    """The step that is gone on from, and whether it has this rank's bits and numbers."""
    whole = one.newest_complete_step()
    if whole is None:
        return None
    copy, back = one.fetch_local_copy(whole), held_tensors(0, 0)
    copy.copy_into(back)
    expected = held_tensors(copy.step, dist.get_rank())
    same = all(torch.equal(back[key].boxes[0].tensor, expected[key].boxes[0].tensor) for key in expected)
    return copy.step, same and copy.state == {"consumed": copy.step}


def lose_and_find(root: Path, nodes: tuple[int, int]) -> dict[str, Any]:
    rank, told = dist.get_rank(), {}
    first = memory(root, nodes)
    told["nothing"] = found(first)
    for step in (1, 2, 3):
        first.save_copies(step, held_tensors(step, rank), {"consumed": step})
    told["all"] = found(memory(root, nodes))
    told["another run"] = found(memory(root, nodes, run="another"))
    another = memory(root, nodes, output="another")
    told["another folder"] = found(another)
    another.remove_folder()
    told["ranks in another order"] = found(memory(root, nodes[::-1]))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder(root, nodes[1]))
    dist.barrier()
    again = memory(root, nodes)
    told["a machine lost"] = found(again)
    again.save_copies(4, held_tensors(4, rank), {"consumed": 4})
    dist.barrier()
    for node in nodes if rank == 0 else ():  # killed within the copy of step 4
        for path in folder(root, node).glob("3.*.json"):
            if '"step": 4' in path.read_text():
                path.unlink()
    dist.barrier()
    told["a copy cut short"] = found(memory(root, nodes))
    dist.barrier()
    for node in nodes if rank == 0 else ():
        for path in folder(root, node).glob("2.*"):
            path.unlink()
    dist.barrier()
    told["a rank's lost everywhere"] = found(memory(root, nodes))
    again.remove_run_copies()
    dist.barrier()
    told["cleared"] = found(memory(root, nodes))
    dist.barrier()
    again.remove_folder()
    dist.barrier()
    told["left"] = [path.name for path in root.iterdir()]
    return told


def test_ranks_go_on_from_the_newest_step_that_is_whole(tmp_path: Path) -> None:
    root, ended = tmp_path / "memory", 2**22 + 1  # a process ID that no launcher has
    os.close(claim_private_folder(launcher_folder_path(root, b"another run's", ended), ended))
    for told in run_ranks(lose_and_find, 4, root, NODES):
        assert told == {
            "nothing": None, "all": (3, True), "another run": None, "another folder": None,
            "ranks in another order": (3, True), "a machine lost": (3, True), "a copy cut short": (3, True),
            "a rank's lost everywhere": None, "cleared": None, "left": [],
        }  # fmt: skip


def rows(rank: int, size: int) -> dict[str, ShardedTensor]:
    """A rank's rows of one tensor, and one that all hold alike."""
    count = 12 // size
    own = torch.arange(48.0, dtype=torch.float64).view(12, 4)[rank * count :][:count]
    alike = TensorBox((0,), torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
    return {
        "weights/a": ShardedTensor((12, 4), [TensorBox((rank * count, 0), own)]),
        "weights/b": ShardedTensor((2,), [alike]),
    }


def keep_rows(root: Path, nodes: tuple[int, ...]) -> None:
    memory(root, nodes).save_copies(7, rows(dist.get_rank(), dist.get_world_size()), {"consumed": 70})


def bring_to_a_checkpoint(root: Path, nodes: tuple[int, ...], folder: Path) -> tuple[int, int, int]:
    """The step and ranks of the copies, and how many boxes of the first tensor this rank brings."""
    one = memory(root, nodes)
    whole = one.newest_complete_step()
    assert whole is not None
    assert whole.state == {"consumed": 70}
    shares = one.get_checkpoint_shares_of_copies(whole)
    save_sharded_checkpoint(
        folder, whole.step, shares, model=ModelConfig.parse(load_model_preset("tiny")), state=whole.state
    )
    return whole.step, whole.ranks, len(shares["weights/a"].boxes)


@pytest.mark.parametrize("lost", [False, True])
def test_copies_of_other_ranks_become_a_checkpoint(tmp_path: Path, lost: bool) -> None:
    run_ranks(keep_rows, 4, tmp_path / "memory", NODES)
    if lost:
        shutil.rmtree(folder(tmp_path / "memory", NODES[1]))
    ranks, nodes = (2, NODES[:1]) if lost else (3, NODES)
    told = run_ranks(bring_to_a_checkpoint, ranks, tmp_path / "memory", nodes, tmp_path / "checkpoints")
    assert told == ([(7, 4, 2)] * 2 if lost else [(7, 4, 2), (7, 4, 1), (7, 4, 1)])
    saved = Checkpoint.open_folder(tmp_path / "checkpoints" / "step-00000007")
    assert torch.equal(saved.read_tensor("weights/a"), torch.arange(48.0, dtype=torch.float64).view(12, 4))
    assert saved.read_tensor("weights/b").tolist() == [1.5, 2.5]


def fill_up(root: Path) -> str:
    made = memory(root, (1, 1))
    try:
        made.save_copies(
            1, {"a": ShardedTensor((1 << 60,), [TensorBox((0,), torch.empty(1, device="meta").expand(1 << 60))])}, {}
        )
    except ConfigError as error:
        return str(error)
    return "there is room"


def test_copies_that_have_no_room_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for told in run_ranks(fill_up, 2, tmp_path):
        assert "checkpoint.memory_every requires " in told


def test_copies_are_kept_where_ranks_are_started_again(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked, again = RunConfig.parse(settings(checkpoint={"memory_every": 1})), {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert should_keep_memory_copies(asked, again)
    assert not should_keep_memory_copies(RunConfig.parse(settings()), again)
    with caplog.at_level("INFO", "mega"):
        assert not should_keep_memory_copies(asked, {"TORCHELASTIC_MAX_RESTARTS": "0"})
    assert "has no effect without a launcher that restarts ranks (torchrun --max-restarts)" in caplog.text


def test_epochs_that_have_become_steps_are_no_other_settings(settings: Any) -> None:
    config = RunConfig.parse(settings(train={"epochs": 2.0}))
    saved = inherit_data_order(convert_epochs_to_steps(config, 40.0), {}).model_dump(mode="json", by_alias=True)
    assert saved["train"]["steps"] == 20
    memory = mock.Mock(spec=MemoryCheckpoint, rank_count=1)
    memory.newest_complete_step.return_value = MemoryCopyStep(3, 1, {"settings": saved, "consumed_samples": 12})
    assert find_newer_memory_copy(config, None, memory) is memory.fetch_local_copy.return_value


def pinned_and_mapped(root: Path) -> tuple[int, int, tuple[int, bool] | None]:
    """Of six saves to a device's copies: pinnings, mappings of files, and the copy found after."""
    one, pinned = memory(root, (1,)), list[int]()
    real = one._folder.memory_map_copy_file
    with (
        mock.patch.object(memory_module, "is_on_cuda", return_value=True),
        mock.patch.object(memory_module, "pin_host_memory", lambda buffer: pinned.append(buffer.data_ptr())),
        mock.patch.object(one._folder, "memory_map_copy_file", side_effect=real) as mapped,
    ):
        for step in range(1, 7):
            one.save_copies(step, held_tensors(step, 0), {"consumed": step})
            if step == 4:
                one.remove_run_copies()  # a rollback removes the files, so that new ones are mapped
    return len(pinned), mapped.call_count, found(memory(root, (1,)))


def test_a_copy_is_pinned_once_and_not_at_each_save(tmp_path: Path) -> None:
    assert run_ranks(pinned_and_mapped, 1, tmp_path / "shm", timeout=60) == [(4, 4, (6, True))]

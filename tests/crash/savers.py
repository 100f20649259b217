"""Programs that save, to be watched and killed. A version is a step and what is saved at it."""

from __future__ import annotations

import itertools
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from crash.disk import Operation, recorded

from mega_ckpt.store import (
    AsyncSaver,
    Checkpoint,
    delete_old_checkpoints,
    latest_checkpoint,
    load_sharded_checkpoint,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset

MODEL = ModelConfig.parse(load_model_preset("tiny"))
ROWS = 8


def truth(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version."""
    return {"weights/a": torch.full((ROWS, 3), float(version)), "optimizer/main/a": torch.full((5,), version * 0.5)}


def part(version: int, rank: int, world: int) -> dict[str, ShardedTensor]:
    """What a rank holds of them: some rows of the first, a copy of the second."""
    tensors, rows = truth(version), ROWS // world
    mine = tensors["weights/a"][rank * rows : (rank + 1) * rows]
    return {
        "weights/a": ShardedTensor((ROWS, 3), [TensorBox((rank * rows, 0), mine)]),
        "optimizer/main/a": ShardedTensor((5,), [TensorBox((0,), tensors["optimizer/main/a"])]),
    }


def found(root: Path) -> int:
    """The version that a start resumes from, 0 for none. It must be complete."""
    folder = latest_checkpoint(root)
    if folder is None:
        return 0
    version = Checkpoint.open_folder(folder).trainer_state["version"]
    assert isinstance(version, int)
    back = {key: torch.zeros_like(tensor) for key, tensor in truth(version).items()}
    load_sharded_checkpoint(
        folder, {key: ShardedTensor(tuple(t.shape), [TensorBox((0,) * t.dim(), t)]) for key, t in back.items()}
    )
    assert all(torch.equal(back[key], tensor) for key, tensor in truth(version).items())
    return version


def save_and_watch(scratch: Path, steps: list[int], in_background: bool, keep: int | None) -> list[Operation]:
    """Save one version after the other at `steps` to <scratch>/run/checkpoints; returns what this rank did to the disk."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assets = scratch / f"assets-{rank}"
    assets.mkdir()
    (assets / "tokenizer.json").write_bytes(b"{}")
    scratch, root = scratch / "run", scratch / "run" / "checkpoints"
    scratch.mkdir(exist_ok=True)
    with AsyncSaver() as saver:
        if world > 1:
            dist.barrier()
        # With several ranks the folder holds more than this rank's doing, so the recording is not compared with it.
        with recorded(scratch, complete=world == 1) as recording:
            for version, step in enumerate(steps, 1):
                recording.mark(f"version {version} begins")
                tensors, state = part(version, rank, world), {"version": version}
                if in_background:
                    saver.start_save(root, step, tensors, model=MODEL, state=state, assets=assets)
                    saver.wait_for_save()
                else:
                    save_sharded_checkpoint(root, step, tensors, model=MODEL, state=state, assets=assets)
                recording.mark(f"version {version} returned")
                if keep and rank == 0:
                    delete_old_checkpoints(root, keep=keep)
    return recording.operations


def save_until_killed(root: Path, pipe: Connection) -> None:
    """Resume from what is there and save on and on; each version is told when its save has returned."""
    remove_leftovers(root)
    start = found(root)
    with AsyncSaver() as saver:
        for version in itertools.count(start + 1):
            # Two versions a step: every step is saved twice.
            tensors, state = part(version, 0, 1), {"version": version}
            if version % 3:
                save_sharded_checkpoint(root, version // 2, tensors, model=MODEL, state=state)
            else:
                saver.start_save(root, version // 2, tensors, model=MODEL, state=state)
                saver.wait_for_save()
            pipe.send(version)
            delete_old_checkpoints(root, keep=2)

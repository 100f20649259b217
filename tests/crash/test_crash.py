"""Killed at any moment of a save, the next start finds a complete checkpoint: the last one whose save had returned, or newer."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from crash.disk import Disk, Operation, Tree, crashes, write_tree
from crash.savers import MODEL, found, part, save_and_watch, save_until_killed
from ranks import PRELOAD, run_ranks

from mega_ckpt.store import remove_leftovers, save_sharded_checkpoint


def resumed(content: Tree, scratch: Path) -> int:
    """The version that is found after a crash; the sweep of the next start must not change it, and leave nothing."""
    write_tree(content, scratch)
    root = scratch / "checkpoints"
    version = found(root)
    remove_leftovers(root)
    assert found(root) == version
    assert not [name for name in (os.listdir(root) if root.exists() else []) if name.startswith(".")]
    return version


def bounds(operations: Sequence[Operation]) -> tuple[int, int]:
    """The last version whose save had returned, and the last whose save had begun."""
    marks = [operation.path.split() for operation in operations if operation.kind == "mark"]
    returned, begun = (
        [0, *(int(number) for _, number, what in marks if what == end)] for end in ("returned", "begins")
    )
    return max(returned), max(begun)


def check_all(operations: Sequence[Operation], scratch: Path, seeds: int = 5) -> set[int]:
    """Look at every moment; returns the versions that were found."""
    versions: dict[str, int] = {}
    for done, how, content in crashes(operations, seeds):
        key = repr(content)
        try:
            if key not in versions:
                versions[key] = resumed(content, scratch / str(len(versions)))
            returned, begun = bounds(operations[:done])
            assert returned <= versions[key] <= begun
        except Exception as error:
            last = operations[done - 1] if done else "nothing"
            raise AssertionError(f"after {done} operations ({last}), {how}") from error
    return set(versions.values())


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("steps", "keep"), [([1, 2], None), ([3, 3], None), ([1, 2, 3], 1)])
def test_every_moment_of_one_process(tmp_path: Path, steps: list[int], keep: int | None, in_background: bool) -> None:
    operations = save_and_watch(tmp_path, steps, in_background, keep)
    assert check_all(operations, tmp_path) == set(range(len(steps) + 1))


def interleaved(by_rank: Sequence[Sequence[Operation]], choose: random.Random) -> list[Operation]:
    """Another order in which the ranks may have done the same: they wait for each other before and after the shards."""
    phases: list[list[list[Operation]]] = [[[] for _ in by_rank]]
    for operation in sorted((one for operations in by_rank for one in operations), key=lambda one: one.when):
        rank = next(rank for rank, operations in enumerate(by_rank) if operation in operations)
        writes = "/shard-" in operation.path
        if bool(len(phases) % 2 == 0) != writes and (writes or rank == 0):
            phases.append([[] for _ in by_rank])
        if writes or rank == 0:
            phases[-1][rank].append(operation)
    out: list[Operation] = []
    for phase in phases:
        queues = [list(operations) for operations in phase if operations]
        while queues:
            queue = choose.choice(queues)
            out.append(queue.pop(0))
            queues = [queue for queue in queues if queue]
    return out


@pytest.mark.parametrize("in_background", [False, True])
def test_every_moment_of_four_ranks(tmp_path: Path, in_background: bool) -> None:
    by_rank = run_ranks(save_and_watch, 4, tmp_path, [1, 1, 2], in_background, 1)
    as_it_was = sorted((one for operations in by_rank for one in operations), key=lambda one: one.when)
    shards = {operation.path.rsplit("/", 1)[-1] for operation in as_it_was if operation.kind == "create"}
    assert {f"shard-{rank:05d}-000.safetensors" for rank in range(4)} < shards
    for turn in range(2):
        operations = interleaved(by_rank, random.Random(turn))
        (tmp_path / str(turn)).mkdir()
        assert check_all(operations, tmp_path / str(turn), seeds=2) == {0, 1, 2, 3}


def test_one_rank_dies_while_the_others_write_on(tmp_path: Path) -> None:
    by_rank = run_ranks(save_and_watch, 4, tmp_path, [1], False, None)
    merged = interleaved(by_rank, random.Random(0))
    shards = [index for index, operation in enumerate(merged) if "/shard-" in operation.path]
    for dead in range(4):
        name = f"/shard-{dead:05d}"
        own = [operation for operation in merged if name in operation.path]
        for survived in range(len(own)):
            lost = own[survived:]
            rest = [operation for operation in merged[: shards[-1] + 1] if operation not in lost]
            disk = Disk({})
            for operation in rest:
                disk.apply(operation)
            assert resumed(disk.kept(), tmp_path / f"{dead}-{survived}") == 0


def test_the_model_of_the_disk_can_lose_a_checkpoint(tmp_path: Path) -> None:
    """Without fsync the same check must fail; else it would prove nothing."""
    operations = save_and_watch(tmp_path, [1, 2], False, None)
    for kind in ("fsync", "fsync-folder"):
        careless = [operation for operation in operations if operation.kind != kind]
        (tmp_path / kind).mkdir()
        with pytest.raises(AssertionError, match="operations"):
            check_all(careless, tmp_path / kind)


def test_kill_at_random_times(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    choose, reached = random.Random(), 0
    for _ in range(8):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_until_killed, args=(tmp_path, sender), daemon=True)
        process.start()
        sender.close()
        assert receiver.poll(60), "no save came through"
        process.join(choose.uniform(0, 0.2))
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        returned = reached
        while True:
            try:
                returned = max(returned, receiver.recv())
            except EOFError:
                break
        reached = found(tmp_path)
        assert returned <= reached <= returned + 1
    save_sharded_checkpoint(tmp_path, 10**6, part(10**6, 0, 1), model=MODEL, state={"version": 10**6})
    assert found(tmp_path) == 10**6

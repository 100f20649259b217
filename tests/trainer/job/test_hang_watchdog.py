from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from mega_trainer.distributed import device
from mega_trainer.distributed.comm import CommGroup, PendingCollective, RingTransfer
from mega_trainer.job import hang_watchdog as watch_module
from mega_trainer.job.hang_watchdog import HangWatchdog, RankHeartbeat, _blocking_ranks, find_stragglers
from mega_trainer.job.rank_position import (
    RankCodePosition,
    StackLine,
    describe_wait,
    format_stack,
    main_thread_position,
    read_thread_stacks,
)
from mega_trainer.parallel.gradient_buckets import StepGradientBucket
from mega_trainer.parallel.zero_buffers import FlatBufferStage

TENSOR = torch.zeros(1)


class Never:
    """A message that does not come until it is let."""

    def __init__(self, reached: threading.Event, let: threading.Event) -> None:
        self.reached, self.let = reached, let

    def wait(self) -> None:
        self.reached.set()
        self.let.wait()

    cpu = wait  # or a tensor that is not done


def host_waits(never: Never) -> object:
    return RingTransfer(TENSOR, TENSOR, [PendingCollective(never, CommGroup("cp", tuple(range(9))))]).wait()


def device_waits(never: Never) -> object:
    return device.to_host(never)  # type: ignore[arg-type]


def bucket_waits(never: Never) -> object:
    """At the end of a step's backwards, for the sums over the data ranks."""
    bucket = SimpleNamespace(_flight=(PendingCollective(never, CommGroup("dp", (0, 2))), None, None), grads=None)
    bucket.wait_for_reduce = partial(StepGradientBucket.wait_for_reduce, bucket)  # type: ignore[arg-type]
    return FlatBufferStage.finish_gradients(SimpleNamespace(_in_flight=deque([bucket]), buffers=[]))  # type: ignore[arg-type]


def works(never: Never) -> object:
    return never.wait()


def stands(function: Callable[[Never], object], *, main: bool) -> RankCodePosition:
    """Where a rank stands whose main thread, or autograd's, is in a function."""
    reached, let = threading.Event(), threading.Event()
    thread = threading.Thread(target=function, args=(Never(reached, let),))
    thread.start()
    reached.wait()
    ident = thread.ident if main else threading.main_thread().ident
    assert ident is not None
    both = [key for key in (thread.ident, threading.main_thread().ident) if key]
    lines = read_thread_stacks()
    found = main_thread_position({key: lines[key] for key in both}, ident, "norm")
    assert not main or any(function.__name__ in line for line in format_stack(lines[ident]))
    if found.waits:
        found = found.model_copy(update={"waits": describe_wait(found)})
    let.set()
    thread.join()
    return found


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize(
    ("function", "file", "waits"),
    [
        (host_waits, "distributed/comm.py", "wait in cp of ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."),
        (device_waits, "distributed/device.py", "to_host"),
        (bucket_waits, "parallel/gradient_buckets.py", "wait_for_reduce in dp of ranks 0, 2"),
    ],
)
def test_a_rank_that_waits_for_others_is_seen_to(
    function: Callable[[Never], object], file: str, waits: str, main: bool
) -> None:
    found = stands(function, main=main)
    assert found.where.startswith(f"mega_trainer/{file}:")
    assert (found.phase, found.waits) == ("norm", waits)


MEGA = "/src/packages"
STACKS: dict[str, tuple[list[tuple[str, str]], str]] = {  # innermost line first, and the wait that is seen
    "an exchange of experts": (
        [("torch/cuda/streams.py", "synchronize"), ("mega_trainer/parallel/async_all_to_all.py", "wait_and_read")],
        "synchronize",
    ),
    "offloaded gradients": (
        [
            ("torch/cuda/streams.py", "synchronize"),
            ("mega_trainer/optim/optimizer_slots.py", "overlap_copies_with_update"),
        ],
        "synchronize",
    ),
    "the copies of a save": (
        [("torch/cuda/streams.py", "synchronize"), ("mega_ckpt/host_staging.py", "copy_slices_to_host")],
        "synchronize",
    ),
    "the whole device": (
        [("torch/cuda/__init__.py", "synchronize"), ("mega_trainer/job/profiler.py", "stop")],
        "synchronize",
    ),
    "metadata of a save": (
        [
            ("torch/distributed/distributed_c10d.py", "all_gather_object"),
            ("torch/distributed/c10d_logger.py", "wrapper"),
            ("mega_ckpt/store.py", "save"),
        ],
        "all_gather_object",
    ),
    "a hook of FSDP": (
        [
            ("torch/distributed/distributed_c10d.py", "all_gather_into_tensor"),
            ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather"),
            ("mega_trainer/parallel/fsdp.py", "unshard"),
        ],
        "all_gather_into_tensor",
    ),
    "sinkhorn": (
        [
            ("mega_trainer/distributed/device.py", "to_host"),
            ("mega_trainer/model/expert_router.py", "sinkhorn_normalize"),
        ],
        "to_host",
    ),
    "a product": ([("torch/nn/functional.py", "linear"), ("mega_trainer/parallel/parallel_linear.py", "forward")], ""),
    "an event that is made": (
        [("torch/cuda/streams.py", "record"), ("mega_trainer/job/phase_timer.py", "__init__")],
        "",
    ),
    "work that a collective called": (
        [("mega_trainer/optim/muon.py", "update"), ("torch/distributed/distributed_c10d.py", "wait")],
        "",
    ),
}


@pytest.mark.parametrize(("lines", "waits"), STACKS.values(), ids=STACKS)
def test_a_rank_that_waits_for_its_device_or_in_torch_is_seen_to(lines: list[tuple[str, str]], waits: str) -> None:
    """On a GPU a host that waits for its device waits for the collectives that its device is in."""
    stack = [StackLine(f"{MEGA if file.startswith('mega') else '/env'}/{file}", 7, name) for file, name in lines]
    found = main_thread_position({1: stack}, 1, "forward")
    assert found.waits == waits
    working = RankCodePosition(where="elsewhere", phase="forward")
    signs = [sign(0, found), sign(1, working)]
    assert [each.rank for each in _blocking_ranks(signs, 5.0, 2)] == ([1] if waits else [0, 1])
    if waits == "synchronize":
        assert describe_wait(found) == "synchronize"  # no group is named: the last one used need not be the one


def sign(rank: int, at: RankCodePosition, **more: Any) -> RankHeartbeat:
    return RankHeartbeat(rank=rank, host=f"host{rank}", pid=rank, step=7, at=at, still=9.0, written=0.0, **more)


def test_the_one_that_waits_for_nobody_is_to_blame() -> None:
    places = [stands(host_waits, main=True), stands(works, main=True), stands(device_waits, main=True)]
    signs = [sign(rank, place) for rank, place in enumerate(places)]
    assert [each.rank for each in _blocking_ranks(signs, 5.0, 3)] == [1]
    assert _blocking_ranks(signs, 10.0, 3) == []
    assert _blocking_ranks(signs, 5.0, 4) == []


def test_of_ranks_that_all_wait_those_elsewhere_are_to_blame() -> None:
    here, there = stands(host_waits, main=True), stands(bucket_waits, main=True)
    signs = [sign(rank, there if rank == 2 else here) for rank in range(4)]
    assert [each.rank for each in _blocking_ranks(signs, 5.0, 4)] == [2]
    assert [each.rank for each in _blocking_ranks(signs[:2], 5.0, 2)] == [0, 1]
    told = str(signs[2].model_copy(update={"stack": ["a.py:1 f", "b.py:2 g"]}))
    assert told.startswith("  rank 2 on host2, step 7, was in norm, at mega_trainer/parallel/gradient_buckets.py:")
    assert told.endswith("waiting: wait_for_reduce in dp of ranks 0, 2\n    | a.py:1 f\n    | b.py:2 g")


def test_a_rank_that_works_while_the_others_wait_is_slow_and_its_phase_is_told() -> None:
    at = RankCodePosition(where="x", phase="forward")
    usual, slow = {"": 50, "forward": 30, "backward": 20}, {"": 5, "forward": 70, "backward": 25}
    signs = [sign(rank, at, looks=slow if rank == 1 else usual) for rank in range(4)]
    told = find_stragglers(signs)
    assert told == {
        1: "  rank 1 on host1 works 95% of the time, the median rank 50%; most of that in forward: 70% against 30%"
    }
    assert find_stragglers([sign(rank, at, looks=usual) for rank in range(4)]) == {}
    assert find_stragglers([sign(rank, at, looks={"forward": 9}) for rank in range(4)]) == {}


@pytest.mark.parametrize("name", ["main", "checkpoint_0"])
@pytest.mark.parametrize(("phase", "moves"), [("evaluate", True), ("save", True), ("forward", False)])
def test_a_long_evaluation_or_save_is_no_hang(phase: str, moves: bool, name: str, tmp_path: Path) -> None:
    """A harness works in code of its own, and the thread that writes a checkpoint while the main one waits for it."""
    first, second, reached = threading.Event(), threading.Event(), [threading.Event(), threading.Event()]

    def works_alone() -> None:
        reached[0].set()
        first.wait()
        reached[1].set()
        second.wait()

    thread = threading.Thread(target=works_alone, name=name)
    thread.start()
    watch = HangWatchdog(HashStore(), 0, 2, lambda: 1, lambda: phase, 60.0, tmp_path)
    watch._main = thread.ident if name == "main" else None
    reached[0].wait()
    watch._observe_main_thread(1.0)
    first.set()
    reached[1].wait()
    watch._observe_main_thread(2.0)
    second.set()
    thread.join()
    assert watch._since == (2.0 if moves else 1.0)


def test_a_rank_met_in_the_same_place_of_another_step_has_moved(tmp_path: Path) -> None:
    """Steps of about the time between two looks are seen at the same point again and again."""
    reached, let, step = threading.Event(), threading.Event(), iter([4, 5, 5, 6])
    thread = threading.Thread(target=works, args=(Never(reached, let),))
    thread.start()
    reached.wait()
    watch = HangWatchdog(HashStore(), 0, 2, lambda: next(step), lambda: "forward", 60.0, tmp_path)
    watch._main = thread.ident
    since = []
    for now in (1.0, 2.0, 3.0):
        watch._observe_main_thread(now)
        since.append(watch._since)
    let.set()
    thread.join()
    assert since == [1.0, 1.0, 3.0]


class Clock:
    """The monotonic clock of the judging rank; others' clocks are apart from it by `shifts`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shifts: Sequence[float]) -> None:
        self.now, self.shifts = 1000.0, shifts
        monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))

    def write(self, store: HashStore, rank: int) -> None:
        at = RankCodePosition(where="x", phase="forward")
        written = sign(rank, at).model_copy(update={"written": self.now + self.shifts[rank], "still": 0.0})
        store.set(f"watch/{rank}", written.model_dump_json())


def verdict(
    clock: Clock, judge: int, ends: dict[int, float], output: Path, seconds: float = 8.0
) -> tuple[float, list[int]]:
    """Signs come every second, of a rank until it ends: when the judging one blames whom, at second 40 at the latest."""
    store, size, begun = HashStore(), len(clock.shifts), clock.now
    watch = HangWatchdog(store, judge, size, lambda: 7, lambda: "forward", seconds, output)
    while clock.now < begun + 40:
        for rank in range(size):
            if clock.now - begun <= ends.get(rank, 99.0):
                clock.write(store, rank)
        if blamed := watch._find_culprits():
            return clock.now - begun, [each.rank for each in blamed]
        clock.now += 1.0
    return clock.now - begun, []


HOURS = 3600.0
SHIFTS = {
    "none": (0.0, 0.0, 0.0, 0.0), "ahead": (0.0, 5 * HOURS, 5 * HOURS, 0.0), "behind": (0.0, -5 * HOURS, -5 * HOURS, 0.0),
    "each another": (-3 * HOURS, 2 * HOURS, 0.1 * HOURS, -7 * HOURS), "seconds": (0.0, 9.0, -9.0, 20.0),
    "the judge ahead": (9 * HOURS, 0.0, 0.0, 0.0),
}  # fmt: skip
ENDS: dict[str, tuple[int, dict[int, float], list[int]]] = {  # who judges, when which ranks fall silent, who is blamed
    "none": (0, {}, []), "none, seen by the last": (3, {}, []), "the next one": (0, {1: 5.0}, [1]),
    "a machine": (0, {1: 5.0, 2: 5.0}, [1, 2]), "seen from before it": (1, {2: 3.0, 3: 4.0}, [2, 3]),
    "over the end": (3, {0: 2.0}, [0]), "all others": (2, {0: 2.0, 1: 2.0, 3: 2.0}, [0, 1, 3]),
    "one long before the next": (0, {1: 5.0, 3: 1.0}, [1, 3]), "one just now": (0, {1: 5.0, 2: 12.0}, [1]),
    "one that another follows": (0, {2: 5.0}, []),
}  # fmt: skip


@pytest.mark.parametrize("shifts", SHIFTS.values(), ids=SHIFTS)
@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS)
def test_clocks_that_are_apart_change_nothing_about_who_is_blamed(
    case: tuple[int, dict[int, float], list[int]],
    shifts: Sequence[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    judge, ends, expected = case
    seconds, blamed = verdict(Clock(monkeypatch, shifts), judge, ends, tmp_path)
    assert blamed == expected
    following = (judge + 1) % len(shifts)
    assert seconds == (ends[following] + 9.0 if expected else 40.0)


def test_a_rank_that_has_left_is_not_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, store = Clock(monkeypatch, (0.0, 0.0)), HashStore()
    watch = HangWatchdog(store, 0, 2, lambda: 7, lambda: "forward", 8.0, tmp_path)
    clock.write(store, 1)
    assert not watch._find_culprits()
    store.set("watch/1", "")
    for _ in range(3):
        clock.now += 9.0
        assert not watch._find_culprits()


READING = """
import ctypes
import threading
from mega_trainer.job.rank_position import read_thread_stacks

libc, stopped = ctypes.CDLL(None), threading.Event()
entered = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def start_native_threads():
    while not stopped.is_set():
        threads = [ctypes.c_ulong() for _ in range(20)]
        for thread in threads:
            libc.pthread_create(ctypes.byref(thread), None, entered, None)
        for thread in threads:
            libc.pthread_join(thread, None)

starter = threading.Thread(target=start_native_threads)
starter.start()
innermost = {lines[0].name for _ in range(20000) for lines in read_thread_stacks().values() if lines}
stopped.set()
starter.join()
assert {"_read_stack", "start_native_threads"} <= innermost, innermost
"""


def test_stacks_are_read_while_native_threads_enter_python() -> None:
    done = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)

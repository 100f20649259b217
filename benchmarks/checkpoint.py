"""How long does an asynchronous save hold training up, and does loading a quarter read a quarter?

    python benchmarks/checkpoint.py --folder DISK [--megabytes 822] [--rounds 7]

Makes tensors as a run has them (weights in bf16, main weights and two moments in fp32). A round copies their bytes to
memory that is there already, starts an asynchronous save, copies again when that is done, then saves synchronously. The
stall is compared with the two copies around it, so that what else the machine does falls on both sides, and the median over
the rounds counts; `stall_over_copy_cpu` compares the processor seconds of the thread that is held up, which do not change with
the load of the machine. Then a quarter of every tensor's rows is loaded, with nothing of the files in
the page cache, and the bytes that the disk delivered are counted. Writes `benchmarks/results/checkpoint.json`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from record import write

from mega_ckpt.store import AsyncSaver, load_sharded_checkpoint, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset

MODEL = ModelConfig.parse(load_model_preset("tiny"))
SHAPE = (14_336, 4096)  # the feed-forward matrices of an 8B model


def make_tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """14 bytes a parameter, 822 MB a matrix and what belongs to it."""
    kinds = {"weights": torch.bfloat16, "optimizer/main": torch.float32, "optimizer/exp_avg": torch.float32}
    kinds["optimizer/exp_avg_sq"] = torch.float32
    count = max(1, megabytes * 1_000_000 // (14 * SHAPE[0] * SHAPE[1]))
    return {
        f"{kind}/{number}": torch.randn(SHAPE).to(dtype) for kind, dtype in kinds.items() for number in range(count)
    }


def rows(tensors: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, ShardedTensor]:
    step = SHAPE[0] // parts
    return {
        key: ShardedTensor(SHAPE, [TensorBox((part * step, 0), tensor[part * step : (part + 1) * step])])
        for key, tensor in tensors.items()
    }


class Taken(NamedTuple):
    """What some work took: seconds, and processor seconds of this thread."""

    wall: float
    cpu: float


def taken(work: Callable[[], object]) -> Taken:
    start, cpu = time.perf_counter(), time.thread_time()
    work()
    return Taken(time.perf_counter() - start, time.thread_time() - cpu)


def saves(root: Path, tensors: dict[str, torch.Tensor], rounds: int) -> list[dict[str, Taken]]:
    """Of each round the two bare copies, the asynchronous stall between them and its save, and the synchronous save."""
    whole = rows(tensors, 0, 1)
    copies = {key: tensor.clone() for key, tensor in tensors.items()}

    def copy() -> None:
        for key, tensor in tensors.items():
            copies[key].copy_(tensor)

    out = []
    with AsyncSaver() as saver:
        for _ in range(rounds + 1):  # the first round makes the staging buffer and is not counted
            one = {"before": taken(copy)}
            one["stall"] = taken(lambda: saver.start_save(root, 1, whole, model=MODEL, state={}))
            one["rest"] = taken(saver.wait_for_save)
            one["after"] = taken(copy)
            one["sync"] = taken(lambda: save_sharded_checkpoint(root, 2, whole, model=MODEL, state={}))
            out.append(one)
    return out[1:]


def over_copy(rounds: list[dict[str, Taken]], what: str) -> list[float]:
    """Of each round, what the stall took over the mean of the copies before and after it."""
    return [
        getattr(one["stall"], what) / statistics.mean((getattr(one["before"], what), getattr(one["after"], what)))
        for one in rounds
    ]


def bytes_read(folder: Path, wanted: dict[str, ShardedTensor], *, verify: bool) -> int:
    """What the disk delivers for a load, when nothing is in the page cache."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = _delivered()
    load_sharded_checkpoint(folder, wanted, verify=verify)
    return _delivered() - before


def _delivered() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an existing folder on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=822)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)  # processor seconds are those of one thread
    root = options.folder / "checkpoint-benchmark"
    tensors = make_tensors(options.megabytes)
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        times = saves(root, tensors, options.rounds)
        blank = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        folder = root / "step-00000002"
        quarter = {
            f"quarter_{'verified' if verify else 'unverified'}": bytes_read(folder, rows(blank, 1, 4), verify=verify)
            for verify in (True, False)
        }
        read = {"whole_verified": bytes_read(folder, rows(blank, 0, 1), verify=True), **quarter}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    seconds = {name: [one[name].wall for one in times] for name in times[0]}
    results = {
        "bytes": size,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "stall_over_copy": statistics.median(over_copy(times, "wall")),
        "stall_over_copy_cpu": statistics.median(over_copy(times, "cpu")),
        "stall_over_copy_rounds": over_copy(times, "wall"),
        "stall_over_sync": statistics.median(one["stall"].wall / one["sync"].wall for one in times),
        "seconds": seconds,
        "read_share_of_bytes": {name: count / size for name, count in read.items()},
    }
    print(write("checkpoint", results, ["torch", "xxhash"]).read_text())


if __name__ == "__main__":
    main()

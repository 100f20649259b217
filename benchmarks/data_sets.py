"""Opening a blend of thousands of data sets: seconds, reads, memory and files of one process on one core.

5,000 data sets of 400 million tokens, 2T together, which are one sparse `.bin` and one `.idx` under 5,000 names; what is
measured is the opening (`build_blended_datasets`), and 200 samples after it, each of a data set that was not read before.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import record

from mega_data.blended_dataset import build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.token_files.indexed_reader import HEADER, MAGIC

COUNT, DOCUMENTS, LENGTH, SAMPLES = 5000, 400_000, 1000, 200


def make(folder: Path) -> None:
    """The data sets."""
    with open(folder / "one.bin", "wb") as stream:
        stream.truncate(DOCUMENTS * LENGTH * 2)
    with open(folder / "one.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, 8, DOCUMENTS, DOCUMENTS + 1))
        stream.write(np.full(DOCUMENTS, LENGTH, "<i4").tobytes())
        stream.write((np.arange(DOCUMENTS, dtype="<i8") * LENGTH * 2).tobytes())
        stream.write(np.arange(DOCUMENTS + 1, dtype="<i8").tobytes())
    for number in range(COUNT):
        for suffix in (".bin", ".idx"):
            (folder / f"part-{number:04d}{suffix}").hardlink_to(folder / f"one{suffix}")


def used() -> dict[str, float]:
    """What this process has used so far."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resident, shared = (int(pages) * 4096 / 1e6 for pages in Path("/proc/self/statm").read_text().split()[1:3])
    return {
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "seconds": time.monotonic(),
        "reads": int(io["syscr"]),
        "bytes_read": int(io["rchar"]),
        "private_megabytes": resident - shared,
        "mapped_megabytes": shared,  # pages of the files, which the system keeps and shares as it likes
        "files": len(os.listdir("/proc/self/fd")),
    }


def measure(folder: str, order: str) -> None:
    """Open all, and read a few samples: what each took, a line of JSON."""
    config = DataConfig.parse({"train": f"{folder}/part-*", "seq_length": 4096, "order": order, "split": [1]})
    at = [used()]
    train = build_blended_datasets(config, seed=1, samples={"train": 10**8}, eod=None)[0]
    at.append(used())
    for k in range(SAMPLES):
        train[k * COUNT // SAMPLES].tokens.sum()
    at.append(used())
    steps = zip(("opening", "samples"), at, at[1:], strict=False)
    print(json.dumps({name: {key: round(b[key] - a[key], 3) for key in a} for name, a, b in steps}))


def main() -> None:
    """Each order in a process of its own."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for order in ("shuffled", "stable"):
            command = ["taskset", "-c", "0", sys.executable, __file__, folder, order]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[order] = json.loads(done.stdout.splitlines()[-1])
            opening = results[order]["opening"]
            print(
                f"{order}: {COUNT} data sets, {COUNT * DOCUMENTS * LENGTH / 1e12:g}T tokens, open in {opening['seconds']:.1f} s;"
                f" each {opening['reads'] / COUNT:.1f} reads, {opening['bytes_read'] / COUNT:.0f} bytes,"
                f" {opening['private_megabytes'] / COUNT * 1000:.1f} kB, {opening['files'] / COUNT:.2f} files;"
                f" {SAMPLES} first samples of as many: {results[order]['samples']}"
            )
    print(record.write("data_sets", {"data_sets": COUNT, "tokens": COUNT * DOCUMENTS * LENGTH, **results}, ["numpy"]))


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) > 1 else main()

"""How long does MinHash de-duplication take, against datatrove's, and in how much memory?

Ours: `mega data clean` with `duplicates: {exact: false, minhash: true}`, the whole command. Datatrove's: its four steps,
`datatrove_minhash.py`, which shares nothing with mega and runs in an environment of its own. Both read one corpus of plain
JSON lines, write what stays and what goes uncompressed, with the same bands, rows and shingles, on the same cores. In the
corpus a fifth of the documents are earlier ones with a few words changed (at most 2 %), which both should find. Then ours
once more, on a larger corpus: datatrove, at 16 times the time, would take an hour for a gigabyte, so that processor seconds
for each are compared.

    python -m venv other && other/bin/pip install 'datatrove[io]' spacy nltk regex tokenizers 'xxhash<4'
    python benchmarks/minhash.py --other other/bin/python [--megabytes 100] [--large 1000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import record
from preprocess import installed_texts

from mega_data.cleaning.clean_config import CleanConfig
from mega_data.cleaning.clean_run import clean_corpus

HERE = Path(__file__).parent
FILES = 8


def make_corpus(folder: Path, megabytes: float) -> tuple[int, set[str]]:
    """`FILES` files of JSON lines; returns the bytes of text and the ids of the documents that are copies."""
    rng = random.Random(1)
    lines = [line for text in installed_texts() for line in text.splitlines() if len(line) > 40]
    folder.mkdir()
    streams = [open(folder / f"{i}.jsonl", "w", encoding="utf-8") for i in range(FILES)]  # noqa: SIM115
    size, copies, earlier = 0, set[str](), list[str]()
    for number, text in enumerate(documents(rng, lines)):
        if size >= megabytes * 1e6:
            break
        if earlier and rng.random() < 0.2:
            text = changed(rng, rng.choice(earlier))
            copies.add(f"{number:08}")
        elif len(earlier) < 20_000:
            earlier.append(text)
        file = int(size / (megabytes * 1e6) * FILES)
        streams[file].write(json.dumps({"id": f"{number:08}", "text": text}) + "\n")
        size += len(text.encode())
    for stream in streams:
        stream.close()
    return size, copies


def elsewhere(function: Any, *args: Any) -> Any:
    """What a function gives in another process: a process's largest size begins with that of the one that started it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def documents(rng: random.Random, lines: list[str]) -> Iterator[str]:
    """Random lines of real text, 3 KB a document on average."""
    while True:
        yield "\n".join(rng.choices(lines, k=min(2000, max(5, int(rng.lognormvariate(3.3, 0.8))))))


def changed(rng: random.Random, text: str) -> str:
    words = text.split(" ")
    for _ in range(len(words) // 150):
        words[rng.randrange(len(words))] = f"changed{rng.randrange(1000)}"
    return " ".join(words)


def run_ours(source: Path, output: Path, cores: int) -> None:
    """Print what `datatrove_minhash.py` does, of ours."""
    config = CleanConfig.parse({"duplicates": {"exact": False, "minhash": True}, "compression": "none"})
    start = time.perf_counter()
    clean_corpus([source], config, output, workers=cores)
    wall = time.perf_counter() - start
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({
        "wall": wall,
        "cpu": sum(used.ru_utime + used.ru_stime for used in (own, workers)),
        "largest_process_mb": max(own.ru_maxrss, workers.ru_maxrss) / 1e3,
        "kept": sorted(json.loads(line)["id"] for path in (output / "kept").iterdir() for line in path.open()),
    }))  # fmt: skip


def measure(side: str, python: str, source: Path, cores: int) -> dict[str, Any]:
    """One run of one side in a process of its own, on so many cores."""
    script = [str(HERE / "datatrove_minhash.py")] if side == "datatrove" else [__file__, "--ours"]
    chosen = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    with tempfile.TemporaryDirectory(dir=source.parent) as output:
        command = ["taskset", "-c", chosen, python, *script, str(source), f"{output}/out", str(cores)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(source: Path, size: int, copies: set[str], other: str, cores: int, rounds: int) -> dict[str, object]:
    """Medians of both sides, ratios datatrove's over ours (2 is twice as fast), and how much of the copies each found."""
    turns = [{"datatrove": measure("datatrove", other, source, cores), "ours": measure("ours", sys.executable, source, cores)}
             for _ in range(rounds)]  # fmt: skip
    result: dict[str, object] = {"cores": cores, "rounds": rounds}
    for side in ("ours", "datatrove"):
        for clock in ("wall", "cpu"):
            result[f"{side}_{clock}_s"] = round(statistics.median(turn[side][clock] for turn in turns), 2)
        result[f"{side}_largest_process_mb"] = round(max(turn[side]["largest_process_mb"] for turn in turns))
        result[f"{side}_kept"] = len(turns[0][side]["kept"])
        result[f"{side}_copies_kept"] = len(copies.intersection(turns[0][side]["kept"]))
    for clock in ("wall", "cpu"):
        ratios = [turn["datatrove"][clock] / turn["ours"][clock] for turn in turns]
        result[f"ratio_{clock}"] = round(statistics.median(ratios), 2)
        result[f"ratio_{clock}_rounds"] = [round(ratio, 2) for ratio in ratios]
    return {**result, "text_bytes": size, "copies": len(copies)}


def alone(source: Path, size: int, copies: set[str], cores: int) -> dict[str, object]:
    """Ours on one corpus."""
    found = measure("ours", sys.executable, source, cores)
    kept = found.pop("kept")
    return {**found, "cpu_s_per_gb": found["cpu"] / size * 1e9, "kept": len(kept),
            "copies_kept": len(copies.intersection(kept)), "text_bytes": size, "copies": len(copies)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", help="a Python that has datatrove; without it, ours alone")
    parser.add_argument("--megabytes", type=float, default=100, help="of the corpus for both")
    parser.add_argument("--large", type=float, default=1000, help="of the one for ours alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--ours", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        run_ours(Path(args.ours[0]), Path(args.ours[1]), int(args.ours[2]))
        return
    with tempfile.TemporaryDirectory() as name:
        found: dict[str, object] = {}
        if args.other:
            size, copies = elsewhere(make_corpus, Path(name) / "corpus", args.megabytes)
            found["both"] = compare(Path(name) / "corpus", size, copies, args.other, args.cores, args.rounds)
        size, copies = elsewhere(make_corpus, Path(name) / "large", args.large)
        found["large"] = alone(Path(name) / "large", size, copies, args.cores)
    print(record.write("minhash", found, ["rensa", "numpy", "xxhash"]).read_text())


if __name__ == "__main__":
    main()

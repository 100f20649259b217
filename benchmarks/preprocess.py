"""How fast is `preprocess`, against a bare loop of the tokenizer that keeps nothing?

Bare: `encode_batch_fast` over documents in memory, a megabyte a batch, tokenizer loaded, results thrown away. Ours: the
whole `preprocess` call, from opening the tokenizer and the input to the synced files. Same documents, same cores, each
run in a fresh process pinned to them. The ratio (bare seconds over ours: 1 is as fast) is taken twice: by wall clock,
in turns; and by CPU seconds, both at once on the same cores, so that a busy machine slows both alike.

    python benchmarks/preprocess.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import record

from mega_data.preprocess import preprocess
from mega_data.tokenizer import Tokenizer, train_tokenizer

BATCH = 1 << 20
SIDES = ("bare", "jsonl", "folder")


def make_corpus(folder: Path) -> int:
    """The standard library's sources as `corpus.jsonl` and `corpus/`, a 32k tokenizer of them; returns bytes of text."""
    size = 0
    library = Path(sysconfig.get_paths()["stdlib"])
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as lines:
        for path in sorted(library.rglob("*.py")):
            text = read_text(path)
            if not text or "site-packages" in path.parts:
                continue
            size += len(text.encode())
            lines.write(json.dumps({"text": text}) + "\n")
            copy = folder / "corpus" / path.relative_to(library)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8", newline="")
    with contextlib.redirect_stderr(io.StringIO()):
        train_tokenizer(documents(folder), 32_000, folder / "tokenizer")
    return size


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""


def documents(folder: Path) -> list[str]:
    with open(folder / "corpus.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) > BATCH:
            yield batch
            batch = []
    yield batch


def bare(folder: Path) -> Callable[[], None]:
    backend = Tokenizer(folder / "tokenizer").backend
    groups = list(batches(documents(folder)))

    def loop() -> None:
        for group in groups:
            backend.encode_batch_fast(group, add_special_tokens=False)

    return loop


def ours(folder: Path, source: Path, cores: int) -> Callable[[], None]:
    def whole() -> None:
        preprocess([source], folder / "tokenizer", folder / "out", append_eod=True, workers=cores, overwrite=True)

    return whole


def run_side(side: str, folder: Path, cores: int) -> None:
    """Print wall and CPU seconds of one run."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    sources = {"jsonl": folder / "corpus.jsonl", "folder": folder / "corpus"}
    work = bare(folder) if side == "bare" else ours(folder, sources[side], cores)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}))


def start(side: str, folder: Path, cores: int) -> subprocess.Popen[str]:
    parallelism = "true" if side == "bare" and cores > 1 else "false"
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": parallelism}
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--cores", str(cores)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, float]:
    found: dict[str, float] = json.loads(process.communicate()[0])
    return found


def in_turns(folder: Path, cores: int) -> dict[str, float]:
    """Wall seconds of each side, one after another."""
    return {side: finish(start(side, folder, cores))["wall"] for side in SIDES}


def together(side: str, folder: Path, cores: int) -> float:
    """CPU seconds of bare over those of `side`, both at once on the same cores."""
    both = [start(name, folder, cores) for name in ("bare", side)]
    bare_cpu, our_cpu = (finish(process)["cpu"] for process in both)
    return bare_cpu / our_cpu


def compare(folder: Path, size: int, cores: int, rounds: int) -> dict[str, object]:
    """MB/s of each side, and ours against bare by either clock: medians over the rounds, and every round."""
    turns = [in_turns(folder, cores) for _ in range(rounds)]
    result: dict[str, object] = {"cores": cores, "rounds": rounds}
    for side in SIDES:
        result[f"{side}_mb_per_s"] = round(size / 1e6 / statistics.median(turn[side] for turn in turns), 2)
    for side in SIDES[1:]:
        ratios = {
            "wall_in_turns": [turn["bare"] / turn[side] for turn in turns],
            "cpu_together": [together(side, folder, cores) for _ in range(rounds)],
        }
        for clock, values in ratios.items():
            result[f"{side}_{clock}"] = round(statistics.median(values), 3)
            result[f"{side}_{clock}_rounds"] = [round(value, 3) for value in values]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args.side, args.folder, args.cores)
        return
    with tempfile.TemporaryDirectory() as name:
        size = make_corpus(Path(name))
        usable = len(os.sched_getaffinity(0))
        results = [compare(Path(name), size, cores, args.rounds) for cores in (1, 2) if cores <= usable]
    path = record.write("preprocess", {"text_bytes": size, "runs": results}, ["tokenizers", "numpy"])
    print(path.read_text())


if __name__ == "__main__":
    main()

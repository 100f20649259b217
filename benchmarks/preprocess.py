"""How fast is `preprocess`, against a bare loop of the tokenizer that keeps nothing?

Bare: `bare_encode.py`, a process of its own that shares nothing with mega: its own tokenizer, the library's settings.
Ours: the whole `preprocess` call in a fresh process, from opening the tokenizer and the input to the synced files. Both
pinned to the same cores, in turns. The ratio is bare seconds over ours (1 is as fast), by processor time (user and
system, which a busy machine disturbs little) and by wall clock.

    python benchmarks/preprocess.py [--rounds 5] [--corpus CORPUS.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import record

from mega_data.preprocess import preprocess
from mega_data.tokenizer import train_tokenizer

HERE = Path(__file__).parent
SIDES = ("bare", "jsonl", "folder")
LIMITS = {".py": 30_000_000, ".md": 8_000_000, ".rst": 8_000_000, ".txt": 8_000_000, ".html": 5_000_000,
          ".json": 3_000_000, "METADATA": 10_000_000}  # fmt: skip


def make_corpus(folder: Path, given: Path | None) -> int:
    """Mixed text as `corpus.jsonl` and `corpus/`, and a 32k tokenizer of it; returns bytes of text.

    Without a corpus: source code, prose, markup and settings of the Python library and the installed packages.
    """
    texts = [json.loads(line)["text"] for line in given.open(encoding="utf-8")] if given else installed_texts()
    (folder / "corpus").mkdir()
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as lines:
        for number, text in enumerate(texts):
            lines.write(json.dumps({"text": text}) + "\n")
            (folder / "corpus" / f"{number:06}").write_text(text, encoding="utf-8", newline="")
    with contextlib.redirect_stderr(io.StringIO()):
        train_tokenizer(texts[::4], 32_000, folder / "tokenizer")
    return sum(len(text.encode()) for text in texts)


def installed_texts() -> list[str]:
    """Files of this Python's library and packages, up to so many bytes of each kind, in a fixed order."""
    left, texts = dict(LIMITS), []
    paths = [path for place in ("stdlib", "purelib") for path in sorted(Path(sysconfig.get_paths()[place]).rglob("*"))]
    random.Random(1).shuffle(paths)
    for path in paths:
        kind = path.suffix or path.name
        if left.get(kind, 0) > 0 and path.is_file() and (text := read_text(path)).strip():
            texts.append(text)
            left[kind] -= len(text)
    return texts


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()[: 1 << 20]
    except UnicodeDecodeError:
        return ""


def run_ours(folder: Path, side: str, cores: int) -> None:
    """Print wall and processor seconds of one `preprocess`."""
    source = folder / {"jsonl": "corpus.jsonl", "folder": "corpus"}[side]
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    preprocess(
        [source],
        folder / "tokenizer",
        folder / "out",
        append_eod=True,
        workers=cores,
        overwrite=True,
        encoder="tokenizers",
    )
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(json.dumps({"wall": time.perf_counter() - start, "cpu": cpu}))


def measure(folder: Path, side: str, cores: int) -> dict[str, float]:
    """One run of one side in a process of its own, which has these cores from its start: numpy makes a thread a core."""
    parallelism = "true" if cores > 1 else "false"
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": parallelism}
    bare = [HERE / "bare_encode.py", folder / "tokenizer" / "tokenizer.json", folder / "corpus.jsonl"]
    ours = [__file__, "--side", side, "--folder", folder, "--cores", cores]
    command = [sys.executable, *map(str, bare if side == "bare" else ours)]
    command = ["taskset", "--cpu-list", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores])), *command]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(folder: Path, size: int, cores: int, rounds: int) -> dict[str, object]:
    """MB/s of each side, and ours against bare by either clock: medians over the rounds, and every round."""
    turns = [{side: measure(folder, side, cores) for side in SIDES} for _ in range(rounds)]
    result: dict[str, object] = {"cores": cores, "rounds": rounds}
    for side in SIDES:
        result[f"{side}_mb_per_s"] = round(size / 1e6 / statistics.median(turn[side]["wall"] for turn in turns), 2)
    for side in SIDES[1:]:
        for clock in ("cpu", "wall"):
            values = [turn["bare"][clock] / turn[side][clock] for turn in turns]
            result[f"{side}_{clock}"] = round(statistics.median(values), 3)
            result[f"{side}_{clock}_rounds"] = [round(value, 3) for value in values]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--corpus", type=Path, help="JSON lines to measure on, instead of what is installed here")
    parser.add_argument("--side", choices=SIDES[1:], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_ours(args.folder, args.side, args.cores)
        return
    with tempfile.TemporaryDirectory() as name:
        size = make_corpus(Path(name), args.corpus)
        usable = len(os.sched_getaffinity(0))
        results = [compare(Path(name), size, cores, args.rounds) for cores in (1, 2) if cores <= usable]
    path = record.write("preprocess", {"text_bytes": size, "runs": results}, ["tokenizers", "numpy"])
    print(path.read_text())


if __name__ == "__main__":
    main()

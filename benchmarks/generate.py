"""Tokens per second of generation on a CPU against transformers: the same model, requests, precision (fp32) and threads.

    python benchmarks/generate.py [--smollm2 FOLDER] [--rounds 3] [--threads 2] [--dry]

Each side is a process of its own, and they take turns. Batch 1: requests one after another. Batch 32: 64 requests of mixed
lengths, 32 at a time, evenly from 8 to 256 tokens of prompt and to 128 new ones, or with the same means and a long tail;
transformers pads a batch and ends with its longest, mega lets the next one in. mega guesses
by repetition of the text, as it does where nobody says otherwise; a third side is mega without. The random model has
ten million weights; FOLDER is SmolLM2-135M as a HuggingFace folder. Greedy tokens are compared, too. On a busy machine take
one thread: those that wait for each other count as busy.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import record
from sides import Side

HERE = Path(__file__).parent


def workloads(vocabulary: int) -> dict[str, dict[str, Any]]:
    """Requests of each case: tokens of prompts, and how many to generate."""
    draw = random.Random(0)

    def request(prompt: int, new: int) -> dict[str, Any]:
        return {"prompt": [draw.randrange(10, vocabulary) for _ in range(prompt)], "new": new}

    def tailed(mean: int) -> int:
        return 8 + int(draw.expovariate(1 / (mean - 8)))

    return {
        "batch 1": {"batch": 1, "requests": [request(n, 64) for n in (8, 64, 200)]},
        "batch 32": {
            "batch": 32,
            "requests": [request(draw.randrange(8, 257), draw.randrange(8, 129)) for _ in range(64)],
        },
        "batch 32, long tail": {"batch": 32, "requests": [request(tailed(132), tailed(68)) for _ in range(64)]},
    }


def serve_ours(folder: str, workload_file: str, threads: str, guesses: str) -> None:
    """As `bare_generate.main`, by mega, with its usual guesses or without."""
    import torch

    from mega_eval.drafters import choose_default_drafter
    from mega_eval.engine_requests import EngineRequest
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.model_loading import load_inference_model
    from mega_eval.text_stream import GenerationLimits

    class NoText:
        """Tokens are all that is wanted, as of transformers' side."""

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            raise NotImplementedError

        def decode(self, ids: object, *, skip_special_tokens: bool = False) -> str:
            return ""

    torch.set_num_threads(int(threads))
    model, workload = load_inference_model(folder), json.loads(Path(workload_file).read_text())
    asked = workload["requests"]
    for _ in sys.stdin:
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        longest = max(len(one["prompt"]) + one["new"] for one in asked)
        engine = InferenceEngine(
            model, NoText(), cache_tokens=longest * workload["batch"], batch_size=workload["batch"],
            drafter=choose_default_drafter(model) if guesses == "guesses" else None,
        )  # fmt: skip
        tokens: list[list[int]] = [[] for _ in asked]
        for one in asked:
            engine.add_request(EngineRequest(one["prompt"], GenerationLimits(one["new"])))
        while engine.num_waiting or engine.num_running:
            for event in engine.step():
                tokens[event.request] += event.tokens
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(json.dumps({"wall": time.perf_counter() - start, "cpu": cpu, "tokens": tokens}), flush=True)


def compare(folder: str, workload: dict[str, Any], rounds: int, threads: int) -> dict[str, Any]:
    """Both sides in turn, after one round that does not count."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        given = folder, file.name, str(threads)
        ours = [Side(str(HERE / "generate.py"), "--serve", *given, guesses) for guesses in ("guesses", "none")]
        sides = [*ours, Side(str(HERE / "bare_generate.py"), *given)]
        runs = [[side.run() for side in sides] for _ in range(rounds + 1)][1:]
        for side in sides:
            side.close()
    tokens = sum(one["new"] for one in workload["requests"])
    *times, bare = ([run[side] for run in runs] for side in range(len(sides)))

    def speedup(own: list[dict[str, Any]], kind: str) -> float:
        return round(median(b[kind] / a[kind] for a, b in zip(own, bare, strict=True)), 2)

    return {
        "threads": threads,
        "mega_tokens_per_second": round(tokens / median(own["wall"] for own in times[0]), 1),
        "transformers_tokens_per_second": round(tokens / median(other["wall"] for other in bare), 1),
        "speedup": speedup(times[0], "wall"),
        "speedup_in_processor_time": speedup(times[0], "cpu"),
        "the_same_without_guesses": speedup(times[1], "cpu"),
        "same_texts": sum(a == b for a, b in zip(times[0][0]["tokens"], bare[0]["tokens"], strict=True)),
        "texts": len(workload["requests"]),
    }


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", help="SmolLM2-135M as a HuggingFace folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=["batch 1", "batch 32", "batch 32, long tail"])
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(HERE / "bare_generate.py"), folder], check=True)
        models = {"random-10M": (folder, 8192)}
        if options.smollm2:
            models["SmolLM2-135M"] = options.smollm2, 49152
        results = {
            f"{name}, {case}": compare(path, workload, options.rounds, options.threads)
            for name, (path, vocabulary) in models.items()
            for case, workload in workloads(vocabulary).items()
            if options.case in (None, case)
        }
    for name, result in results.items():
        print(name, result)
    if not options.dry:
        record.write("generate", results, ["torch", "transformers"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_ours(*sys.argv[2:])
    else:
        main()

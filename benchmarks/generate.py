"""Tokens per second of generation on a CPU against transformers: the same model, requests, precision (fp32) and threads.

    python benchmarks/generate.py [--smollm2 FOLDER] [--rounds 3] [--threads 2] [--dry]
    python benchmarks/generate.py --steps [--before FOLDER] [--rounds 7] [--dry]

Each side is a process of its own, and they take turns. Batch 1: requests one after another. Batch 32: 64 requests of mixed
lengths, 32 at a time, evenly from 8 to 256 tokens of prompt and to 128 new ones, or with the same means and a long tail;
transformers pads a batch and ends with its longest, mega lets the next one in. mega guesses
by repetition of the text, as it does where nobody says otherwise; a third side is mega without. The random model has
ten million weights; FOLDER is SmolLM2-135M as a HuggingFace folder. Greedy tokens are compared, too. On a busy machine take
one thread: those that wait for each other count as busy.

`--steps` counts the operations of a decode step of a model of tiny width, and takes its time on one thread, nearly all of
which is that of the host: Python and torch's dispatch, which on a GPU must stay ahead of the device. FOLDER is a checkout
of another commit, whose steps are taken in turn. The result is `decode_steps.json`.
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
from sides import Side, spread

HERE = Path(__file__).parent
STEPS = 20
STEPPED = {
    "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 512,
    "max_position": 128,
}  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}


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


class NoText:
    """Tokens are all that is wanted, as of transformers' side."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: object, *, skip_special_tokens: bool = False) -> str:
        return ""


def serve_ours(folder: str, workload_file: str, threads: str, guesses: str) -> None:
    """As `bare_generate.main`, by mega, with its usual guesses or without."""
    import torch

    from mega_eval.drafters import choose_default_drafter
    from mega_eval.engine_requests import EngineRequest
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.model_loading import load_inference_model
    from mega_eval.text_stream import GenerationLimits

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


def serve_steps(checkout: str, layers: str) -> None:
    """Answer each line, a number of rows and `greedy` or `sampled`, with counts and milliseconds of a decode step."""
    sys.path[:0] = [f"{checkout}/packages/{package}" for package in ("common", "data", "ckpt", "trainer", "eval")]
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from mega_common.model_config import ModelConfig
    from mega_eval.engine_requests import EngineRequest
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.sampling import Sampling
    from mega_eval.text_stream import GenerationLimits
    from mega_trainer.model.decoder import Decoder
    from mega_trainer.model.layer_builder import LayerBuilder

    class Operations(TorchDispatchMode):
        """Names of the operations that torch dispatches."""

        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ModelConfig.parse({**STEPPED, "num_layers": int(layers)})
    model = Decoder(LayerBuilder(config)).eval().requires_grad_(False)
    for line in sys.stdin:
        rows, kind = line.split()
        engine = InferenceEngine(model, NoText(), cache_tokens=64 * int(rows), batch_size=int(rows), chunk_tokens=4096)
        sampling = Sampling(**SAMPLED if kind == "sampled" else {})
        for row in range(int(rows)):
            prompt = [(7 * row + number) % config.vocab_size for number in range(4 + row % 8)]
            engine.add_request(EngineRequest(prompt, GenerationLimits(STEPS + 8), sampling, sample=row))
        for _ in range(3):
            engine.step()
        with Operations() as operations:
            engine.step()
        start = time.process_time()
        for _ in range(STEPS):
            engine.step()
        spent = (time.process_time() - start) / STEPS
        attention = sum("scaled_dot_product" in name for name in operations.names)
        counts = {"attention_calls": attention, "operations": len(operations.names)}
        print(json.dumps({**counts, "milliseconds": 1e3 * spent}), flush=True)


def count_steps(before: str | None, rounds: int) -> dict[str, Any]:
    """A decode step of this checkout and of the one before, by layers, rows and sampling."""
    results = {}
    for layers in (2, 32):
        sides = {
            name: Side(str(HERE / "generate.py"), "--serve-steps", folder, str(layers))
            for name, folder in {"before": before, "now": str(HERE.parent)}.items()
            if folder
        }
        for rows in (1, 16, 64):
            for kind in ("greedy", "sampled"):
                runs = [{name: side.run(f"{rows} {kind}") for name, side in sides.items()} for _ in range(rounds + 1)][
                    1:
                ]
                results[f"{layers} layers, {rows} rows, {kind}"] = {
                    name: {**runs[0][name], "milliseconds": spread([run[name]["milliseconds"] for run in runs])}
                    for name in sides
                }
        for side in sides.values():
            side.close()
    return results


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", help="SmolLM2-135M as a HuggingFace folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=["batch 1", "batch 32", "batch 32, long tail"])
    parser.add_argument("--dry", action="store_true", help="write no result")
    parser.add_argument("--steps", action="store_true", help="decode steps of a model of tiny width")
    parser.add_argument("--before", help="with --steps: checkout of another commit, to compare with")
    options = parser.parse_args()
    if options.steps:
        results = count_steps(options.before, options.rounds)
        for name, result in results.items():
            print(name, result)
        if not options.dry:
            record.write("decode_steps", results, ["torch"])
        return
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
    elif sys.argv[1:2] == ["--serve-steps"]:
        serve_steps(*sys.argv[2:])
    else:
        main()

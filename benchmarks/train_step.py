"""Training step: tokens per second of mega against transformers, and against the floor of its own matrix products.

    python benchmarks/train_step.py [--rounds 7] [--threads 2]

Each contestant in a process of its own (`bare_step.py` is transformers'), which take turns: each round times a few steps of
each, so that a machine that slows down slows them all; the ratios are medians over rounds. transformers is its Llama with
scaled-dot-product attention and torch's fused AdamW; in bf16 its weights, gradients and moments are bf16 (the fastest it
has), while mega keeps fp32 gradients, moments and main weights. Both also run compiled: transformers' whole model, and mega with
`compile: true`. With --processor-time the clock is that of all threads of a process, for a machine with other work to do. The
floor is the time of the step's matrix products alone, each at the shape and precision it has in the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import bare_step
import numpy as np
import record
import torch
import transformers
from sides import Side, spread, times_in_turn

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.objectives.training_objective import count_step_tokens
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.run.build_components import connect_parallel_groups, get_compute_dtype
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import build_training_state_and_executor

LAYERS, WIDTH, FFN, HEADS, VOCABULARY, BATCH, LENGTH = 4, 256, 688, 4, 16_384, 8, 256
STEPS = 3  # of each contestant in a round
CPU = torch.device("cpu")
HERE = Path(__file__).parent


MODEL = {
    "num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": FFN, "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "tie_embeddings": True, "max_position": LENGTH,
}  # fmt: skip


def settings(
    precision: str,
    model: dict[str, Any] = MODEL,
    rows: int = BATCH,
    length: int = LENGTH,
    recompute: str = "none",
    *,
    compiled: bool | Literal["auto"] = "auto",
) -> RunConfig:
    return RunConfig.parse(
        {
            "model": model,
            "data": {"train": "unused", "seq_length": length},
            "batch": {"micro": rows, "global": rows},
            "recompute": {"kind": recompute},
            "precision": precision,
            "compile": compiled,
        }
    )


def tokens(config: RunConfig) -> np.ndarray:
    shape = (config.batch.micro, config.data.seq_length + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape)


def ours(config: RunConfig, device: torch.device = CPU) -> Callable[[], object]:
    groups = connect_parallel_groups(config, RankInfo())
    state, executor = build_training_state_and_executor(config, groups, device)
    initialize_weights(state.stages[0], 0)
    state.optimizer.load_main_from_model()
    ids = tokens(config)
    rows, length = ids[:, 1:].shape
    batch = StepBatch(
        ids[:, :-1], ids[:, 1:], np.ones((rows, length), bool), np.tile(np.arange(length), (rows, 1)), None,
        np.arange(rows),
    )  # fmt: skip

    def step() -> None:
        micro = list(split_micro_batches(batch, config, device))
        train_step(executor, state.optimizer, micro, tokens=count_step_tokens(batch, 0, groups), lr=1e-4, clip=1.0)

    return step


def hf_config(config: RunConfig) -> transformers.LlamaConfig:
    model = config.model
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.key_value_heads, tie_word_embeddings=model.tie_embeddings,
        max_position_embeddings=config.data.seq_length, attn_implementation="sdpa",
    )  # fmt: skip


def theirs(config: RunConfig, device: torch.device = CPU) -> Callable[[], object]:
    with device:
        llama = transformers.LlamaForCausalLM(hf_config(config)).to(get_compute_dtype(config))
    ids = torch.from_numpy(tokens(config)[:, :-1].copy()).to(device)
    step: Callable[[], object] = bare_step.step_of(llama, ids, recompute=config.recompute.kind == "full")
    return step


def floor(precision: str) -> Callable[[], object]:
    """Every matrix product of a step: forward, and the two of the backward."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    n, head = BATCH * LENGTH, WIDTH // HEADS
    shapes = [(n, WIDTH, 3 * WIDTH), (n, WIDTH, WIDTH), (n, WIDTH, 2 * FFN), (n, FFN, WIDTH)] * LAYERS
    shapes += [(n, WIDTH, VOCABULARY)]
    products = []
    for rows, inner, columns in shapes:
        x, w, y = (torch.randn(s).to(dtype) for s in ((rows, inner), (columns, inner), (rows, columns)))
        products += [(x, w.t()), (y, w), (y.t(), x)]
    q, scores = torch.randn(BATCH * HEADS, LENGTH, head).to(dtype), torch.randn(BATCH * HEADS, LENGTH, LENGTH).to(dtype)
    attention = [(q, q.transpose(1, 2)), (scores, q)] * 3 * LAYERS

    def step() -> None:
        for a, b in products:
            a @ b
        for a, b in attention[: len(attention) // 2]:  # causal: half of the square
            torch.bmm(a, b)

    return step


def seconds(step: Callable[[], object], device: torch.device = CPU) -> float:
    """Of one step, the mean of a few."""
    begin = perf_counter()
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - begin) / STEPS


def serve(precision: str, contestant: str, threads: str) -> None:
    """One of ours, or the floor, for `sides`."""
    torch.set_num_threads(int(threads))
    if contestant == "floor":
        bare_step.answer_calls(floor(precision))
    else:
        bare_step.answer_calls(ours(settings(precision, compiled=contestant == "compiled")))


def bare(config: RunConfig, model: dict[str, Any], threads: int, folder: Path, *, compiled: bool = False) -> Side:
    """transformers' side, on the same tokens."""
    given = {
        "model": model, "tokens": tokens(config)[:, :-1].tolist(), "threads": threads, "compiled": compiled,
        "dtype": str(get_compute_dtype(config)).removeprefix("torch."),
    }  # fmt: skip
    file = folder / f"{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(given))
    return Side(str(HERE / "bare_step.py"), str(file))


def compare(precision: str, rounds: int, threads: int, clock: str) -> dict[str, Any]:
    config = settings(precision)
    model = hf_config(config).to_dict()
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: Side(__file__, "--serve", precision, contestant, str(threads))
            for name, contestant in (("mega", "plain"), ("mega, compile", "compiled"), ("floor", "floor"))
        }
        sides["transformers"] = bare(config, model, threads, Path(folder))
        sides["transformers, compiled"] = bare(config, model, threads, Path(folder), compiled=True)
        times = times_in_turn(sides, str(STEPS), rounds, clock)

    def ratio(other: str, mine: str) -> dict[str, float]:
        return spread([a / b for a, b in zip(times[other], times[mine], strict=True)])

    rate = {name: round(BATCH * LENGTH / statistics.median(values)) for name, values in times.items()}
    return {
        "tokens_per_second": rate,
        "speed_over_transformers": ratio("transformers", "mega"),
        "compiled_speed_over_transformers": ratio("transformers", "mega, compile"),
        "compiled_speed_over_compiled_transformers": ratio("transformers, compiled", "mega, compile"),
        "compiled_speed_over_uncompiled": ratio("mega", "mega, compile"),
        "share_of_floor": ratio("floor", "mega"),
        "transformers_share_of_floor": ratio("floor", "transformers"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--processor-time", action="store_true", help="time the processors' work, not the wall's clock")
    options = parser.parse_args()
    model = settings("fp32").model
    results: dict[str, Any] = {
        "parameters": count_parameters_by_layer(model).total, "batch": [BATCH, LENGTH], "threads": options.threads,
        "clock": "processor" if options.processor_time else "wall",
    }  # fmt: skip
    for precision in options.precision:
        results[precision] = compare(precision, options.rounds, options.threads, results["clock"])
        print(precision, results[precision])
    print("written to", record.write("train_step", results, ["torch", "transformers"]))


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main()

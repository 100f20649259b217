"""Small training runs: layouts against one process, time and memory against `mega plan`, and the speed of checkpoints.

Every rank of a job runs these; the runs follow each other in one process group.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mega_ckpt.store import get_checkpoint_step_folder, load_sharded_checkpoint, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_common.progress_logging import format_with_decimal_unit
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.doctor.check_result import CheckResult, make_upper_bound_check_result
from mega_trainer.plan.layout_search import make_planned_run
from mega_trainer.plan.machine import MachineSpec
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.run.training_run import run_training
from mega_trainer.verify.case_comparison import TOLERANCE, compare_cases_with_one_process, merge_rank_findings
from mega_trainer.verify.layout_case import LayoutCase

NOT_COMPARABLE = "not comparable: values are NaN, infinite or all 0"  # in the layout or in one process
PLAN_STEPS = 8
TIME_BOUND, MEMORY_BOUND = 0.2, 0.1  # relative errors of the plan
CHECKPOINT_BYTES, CHECKPOINT_BYTES_CPU = 1 << 30, 1 << 25  # of a rank
SMALL_MODEL = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 256,
}  # fmt: skip
EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64}}
PLANNED_MODELS: Mapping[str, tuple[Mapping[str, Any], int]] = {  # name -> model, tokens of a sequence
    "1.3B": (load_model_preset("gpt3-1.3b"), 2048),
    "8B-wide, 4 layers": ({**load_model_preset("llama3-8b"), "num_layers": 4}, 4096),
}
PLANNED_MODELS_CPU: Mapping[str, tuple[Mapping[str, Any], int]] = {"1M": (SMALL_MODEL, 64)}


def write_tokens(folder: Path, vocab_size: int, sequence: int) -> Path:
    """Write the indexed data set `folder`/tokens, 64 documents of 2 x `sequence` consecutive ids; return its path prefix."""
    generator = np.random.default_rng(0)
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        for _ in range(64):
            start = generator.integers(0, vocab_size)
            writer.add_document((np.arange(start, start + 2 * sequence) % vocab_size).astype(np.uint16))
    return folder / "tokens"


def list_parity_cases(ranks: int) -> dict[str, LayoutCase]:
    """Return layouts of `ranks` ranks by name, in which a small model must train as in one process."""
    model = {**SMALL_MODEL, "init_std": 0.2}  # attention that is not uniform
    common: dict[str, Any] = {"batch": 4 * ranks, "micro": 1, "length": 64}
    if ranks == 1:
        return {"recompute": LayoutCase("small", model, **common, recompute={"kind": "full"})}
    found: dict[str, dict[str, Any]] = {f"dp {ranks}, ZeRO-{level}": {"zero": level} for level in (1, 2, 3)}
    if ranks % 2 == 0:
        found |= {
            "tp 2, sequence parallel": {"tp": 2, "sp": True}, "pp 2": {"pp": 2}, "cp 2, ring": {"cp": 2, "cp_kind": "ring"},
            "cp 2, all-to-all": {"cp": 2, "cp_kind": "alltoall"}, "ep 2": {"ep": 2},
        }  # fmt: skip
    if ranks % 4 == 0:
        found |= {"tp 2, pp 2": {"tp": 2, "pp": 2, "zero": 1}, "tp 2, cp 2": {"tp": 2, "cp": 2, "zero": 1}}
    return {
        name: LayoutCase("small", model | EXPERTS if "ep" in parallel else model, ranks, parallel=parallel, **common)
        for name, parallel in found.items()
    }


def check_layout_parity(device: torch.device, ranks: RankInfo) -> Iterator[CheckResult]:
    """Yield, on rank 0, the largest relative difference between each layout and one process, in fp64.

    Losses, gradients, weights and optimizer state are compared. A device that computes NaN or only zeros fails, as there is
    nothing to compare.
    """
    cases = list_parity_cases(ranks.world_size)
    for (name, case), found in zip(
        cases.items(), compare_cases_with_one_process([*cases.values()], device=device), strict=True
    ):
        everyone = [found]
        if ranks.world_size > 1:
            everyone = [None] * ranks.world_size
            dist.all_gather_object(everyone, found)
        if ranks.rank == 0:
            error = merge_rank_findings(case, everyone).largest_error
            result = make_upper_bound_check_result("parity", name, error, TOLERANCE)
            yield result if math.isfinite(error) else replace(result, measured=NOT_COMPARABLE)


def check_plan_predictions(
    folder: Path, device: str, ranks: RankInfo, machine: MachineSpec | None
) -> Iterator[CheckResult]:
    """Yield, on rank 0, step time and peak memory of short runs, against the prediction of `mega plan`."""
    gpu = device == "cuda"
    for name, (model, sequence) in (PLANNED_MODELS if gpu else PLANNED_MODELS_CPU).items():
        raw = _small_run(
            folder, device, ranks.world_size, f"plan-{name.replace(' ', '-')}",
            {
                "model": model, "data": {"seq_length": sequence}, "batch": {"micro": 1, "global": 4 * ranks.world_size},
                "train": {"steps": PLAN_STEPS}, "precision": "bf16" if gpu else "fp32", "parallel": {"zero": 1},
            },
        )  # fmt: skip
        if gpu:
            gc.collect()  # tensors of an earlier run, which the next one would be measured with
            torch.cuda.reset_peak_memory_stats()
        run_training(RunConfig.parse(raw), ranks)
        if ranks.rank == 0:
            lines = _read_metrics(raw)[3:]
            config = RunConfig.parse(raw)
            memory = max(line["memory_bytes"] for line in lines) if gpu else None
            yield from _compare_plan(name, config, ranks.world_size, machine, lines, memory)


def _compare_plan(
    name: str,
    config: RunConfig,
    ranks: int,
    machine: MachineSpec | None,
    lines: list[dict[str, Any]],
    memory: float | None,
) -> Iterator[CheckResult]:
    seconds = statistics.median(line["seconds"] for line in lines)
    speed = f"{seconds:.3g} s, {format_with_decimal_unit(statistics.median(line['tokens_per_second'] for line in lines))} tokens/s"
    if machine is None:
        yield CheckResult("plan", f"step time, {name}", "no expectation", speed, value=seconds, unit="s")
    else:
        predicted = make_planned_run(config, ranks, machine).predict_step_time().seconds
        fits = seconds <= (1 + TIME_BOUND) * predicted
        expected = f"<= {(1 + TIME_BOUND) * predicted:.3g} s"
        yield CheckResult("plan", f"step time, {name}", "ok" if fits else "failed", speed, expected, seconds, "s")
    needed = sum(predict_memory(config.model, make_training_layout(config, ranks))[0].values())
    if memory is None:
        wanted = f"plan: {format_with_decimal_unit(needed)}B"
        yield CheckResult("plan", f"peak memory, {name}", "no expectation", "not measured on a CPU", wanted)
        return
    near = abs(memory / needed - 1) <= MEMORY_BOUND
    yield CheckResult(
        "plan", f"peak memory, {name}", "ok" if near else "failed", f"{format_with_decimal_unit(memory)}B",
        f"{format_with_decimal_unit(needed)}B within {100 * MEMORY_BOUND:.0f} %", memory, "B",
    )  # fmt: skip


def check_checkpoint_save_and_load(folder: Path, device: str, ranks: RankInfo) -> Iterator[CheckResult]:
    """Yield, on rank 0, the speeds of saving and loading a sharded tensor, and how many of its values changed."""
    place = torch.device(device, ranks.local_rank) if device == "cuda" else torch.device("cpu")
    count = (CHECKPOINT_BYTES if device == "cuda" else CHECKPOINT_BYTES_CPU) // 4
    generator = torch.Generator(place).manual_seed(ranks.rank)
    values = torch.randn(count, device=place, generator=generator)
    shape, offset = (count * ranks.world_size,), (count * ranks.rank,)
    root, model, group = folder / "checkpoints", ModelConfig.parse(load_model_preset("tiny")), dist.group.WORLD
    group = group if ranks.world_size > 1 else None
    _wait_for_ranks(device)
    begin = time.perf_counter()
    save_sharded_checkpoint(
        root, 1, {"w": ShardedTensor(shape, [TensorBox(offset, values)])}, model=model, state={}, group=group
    )
    saved = time.perf_counter()
    loaded = torch.zeros_like(values)
    load_sharded_checkpoint(
        get_checkpoint_step_folder(root, 1), {"w": ShardedTensor(shape, [TensorBox(offset, loaded)])}, group=group
    )
    seconds = {"save, durable": saved - begin, "load, verified": time.perf_counter() - saved}
    differing = float((loaded != values).sum())
    if ranks.rank == 0:
        for name, taken in seconds.items():
            rate = 4 * count * ranks.world_size / taken / 1e9
            yield CheckResult("checkpoint", name, "no expectation", f"{rate:.3g} GB/s", value=rate, unit="GB/s")
        yield make_upper_bound_check_result("checkpoint", "changed values", differing, 0.0)


def _small_run(folder: Path, device: str, ranks: int, name: str, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return run.yaml of a short run, with `sections` such as the model merged into it."""
    base: dict[str, Any] = {
        "data": {"train": str(folder / "tokens"), "seq_length": 64, "split": [1, 0, 0]},
        "batch": {"micro": 1, "global": 4 * ranks}, "train": {"steps": PLAN_STEPS}, "optimizer": {"lr": 1e-3},
        "precision": "fp64", "compile": False, "checkpoint": {"save": False}, "log": {"tensorboard": False, "every": 1},
        "device": device, "output": str(folder / name),
    }  # fmt: skip
    merged = {
        key: {**base[key], **value} if isinstance(base.get(key), dict) else value for key, value in sections.items()
    }
    return {**base, **merged}


def _read_metrics(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


def _wait_for_ranks(device: str) -> None:
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cuda" if device == "cuda" else "cpu"))

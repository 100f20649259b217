"""Batch and learning rate of every step, by each tool's own code, are those of the translated run.yaml, or are named there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml

from mega_cli.megatron_args import render_run_yaml
from mega_cli.moving_in import translate_deepspeed, translate_hf_training_args
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config

STEPS = 60
MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}


@dataclass(frozen=True)
class Case:
    """A file of another tool.

    Attributes:
        file: its content.
        ranks: number of ranks of the run; None where the file gives it.
        open: what the translation says of a schedule that mega does not have; it must then not load.
        named: what the translation says of a first step that has another rate.
    """

    name: str
    file: dict[str, Any]
    ranks: int | None = 1
    open: str = ""
    named: str = ""
    accelerate: dict[str, Any] = field(default_factory=dict)


def translated(folder: Path, case: Case, translate: Any) -> str:
    path = folder / "settings.json"
    path.write_text(json.dumps(case.file | case.accelerate))
    return render_run_yaml(translate(path, case.ranks))


def load_run(text: str) -> RunConfig:
    """Load a translation whose model and data are filled in, over `STEPS` steps where it is counted in epochs."""
    run = yaml.safe_load(text)
    if "steps" not in run.get("train", {}):
        run["train"] = {key: value for key, value in run.get("train", {}).items() if key != "epochs"} | {"steps": STEPS}
    parallel = {key: value for key, value in run.get("parallel", {}).items() if key in ("tp", "pp", "cp")}
    known = {"model": MODEL, "init_from": "model", "data": {"train": "data/train", "seq_length": 64}}
    return RunConfig.parse(resolve_run_config(run | known | {"parallel": parallel}))


def assert_equal(text: str, case: Case, batch: int, rates: list[float]) -> None:
    if case.open:
        assert case.open in text
        with pytest.raises(ConfigError, match="TO BE FILLED IN"):
            load_run(text)
        return
    run = load_run(text)
    curve = run.build_lr_curve()
    found = [curve(run.batch.samples_after_steps(step)) for step in range(len(rates))]
    first = 1 if case.named else 0
    assert run.batch.global_ == batch
    assert found[first:] == pytest.approx(rates[first:], rel=1e-9, abs=1e-18)
    assert case.named in text


def deepspeed_file(schedule: str = "", ranks_file: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    scheduler = {"scheduler": {"type": schedule, "params": params}} if schedule else {}
    batch = ranks_file or {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    return {**batch, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, **scheduler}


MICRO = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
DEEPSPEED = [
    Case("log", deepspeed_file("WarmupLR", warmup_num_steps=20), 4),
    Case("log, max", deepspeed_file("WarmupLR", warmup_num_steps=16, warmup_max_lr=1e-4)),
    Case("log, min", deepspeed_file("WarmupLR", warmup_num_steps=20, warmup_min_lr=1e-5, warmup_max_lr=2e-4)),
    Case("unknown type is log", deepspeed_file("WarmupLR", warmup_num_steps=20, warmup_type="cubic")),
    Case("default length", deepspeed_file("WarmupLR")),
    Case("one step is two", deepspeed_file("WarmupLR", warmup_num_steps=1)),
    Case("linear", deepspeed_file("WarmupLR", warmup_num_steps=20, warmup_type="linear", warmup_min_lr=1e-5)),
    Case("decay", deepspeed_file("WarmupDecayLR", warmup_num_steps=10, total_num_steps=50, warmup_max_lr=3e-4)),
    Case("decay, its own rate", deepspeed_file("WarmupDecayLR", warmup_num_steps=10, total_num_steps=60)),
    Case(
        "decay, linear to a minimum",
        deepspeed_file(
            "WarmupDecayLR", warmup_num_steps=10, total_num_steps=40, warmup_type="linear", warmup_min_lr=1e-5,
            warmup_max_lr=1e-4,
        ),
    ),
    Case("cosine", deepspeed_file("WarmupCosineLR", warmup_num_steps=10, total_num_steps=60)),
    Case("cosine, ends early", deepspeed_file("WarmupCosineLR", warmup_num_steps=10, total_num_steps=40, cos_min_ratio=0.1)),
    Case("cosine, linear", deepspeed_file("WarmupCosineLR", warmup_num_steps=10, total_num_steps=60, warmup_type="linear")),
    Case(
        "cosine, minimum of the warm-up",
        deepspeed_file("WarmupCosineLR", warmup_num_steps=10, total_num_steps=60, warmup_min_ratio=0.1),
        named="lr_schedule.warmup_init: is also the rate of the first step",
    ),
    Case("none", deepspeed_file()),
    Case("ulysses", deepspeed_file(ranks_file={**MICRO, "sequence_parallel_size": 4}), 8),
    Case("autotp", deepspeed_file(ranks_file={**MICRO, "tensor_parallel": {"autotp_size": 4}}), 8),
    Case("pipeline", deepspeed_file(ranks_file={**MICRO, "pipeline": {"stages": 2}}), 8),
    Case("whole and micro", deepspeed_file(ranks_file={"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}), 4),
    Case("whole and steps", deepspeed_file(ranks_file={"train_batch_size": 64, "gradient_accumulation_steps": 4}), 4),
    Case("whole", deepspeed_file(ranks_file={"train_batch_size": 64}), 4),
    Case("whole and autotp", deepspeed_file(ranks_file={"train_batch_size": 64, "tensor_parallel": {"autotp_size": 2}}), 4),
    Case("one cycle", deepspeed_file("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-3), open="OneCycle has no equivalent"),
    Case("range test", deepspeed_file("LRRangeTest"), open="LRRangeTest has no equivalent"),
]  # fmt: skip


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    installed = Path(sys.prefix) / "deepspeed"
    if not installed.is_dir():
        pytest.skip("DeepSpeed is not installed: make setup")
    given = tmp_path_factory.mktemp("deepspeed") / "given.json"
    given.write_text(json.dumps({case.name: {"file": case.file, "ranks": case.ranks} for case in DEEPSPEED}))
    command = [sys.executable, Path(__file__).parent / "settings_by_deepspeed.py", given, str(STEPS)]
    environment = {**os.environ, "DEEPSPEED": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return found


@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda case: case.name)
def test_deepspeed(tmp_path: Path, by_deepspeed: dict[str, Any], case: Case) -> None:
    own = by_deepspeed[case.name]
    assert_equal(translated(tmp_path, case, translate_deepspeed), case, own["batch"], own["rates"])


def arguments(kind: str | None = None, kwargs: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    schedule = {"lr_scheduler_type": kind} if kind else {}
    kwargs_given = {"lr_scheduler_kwargs": kwargs} if kwargs else {}
    steps = {} if "num_train_epochs" in fields else {"max_steps": STEPS}
    return {"learning_rate": 2e-4, **steps, **schedule, **kwargs_given, **fields}


TRANSFORMERS = [
    Case("defaults", {"max_steps": STEPS}),
    Case("linear", arguments("linear", warmup_steps=10, per_device_train_batch_size=2, gradient_accumulation_steps=4), 4),
    Case("a share below 1", arguments("linear", warmup_steps=0.13)),
    Case("a share of epochs", arguments("cosine", warmup_steps=0.13, num_train_epochs=2.0)),
    Case("cosine", arguments("cosine", warmup_steps=7)),
    Case("cosine, cycles", arguments("cosine", {"num_cycles": 1.5}), open="num_cycles = 1.5 has no equivalent"),
    Case("one restart", arguments("cosine_with_restarts", warmup_steps=7)),
    Case("restarts", arguments("cosine_with_restarts", {"num_cycles": 3}), open="num_cycles = 3 has no equivalent"),
    Case("minimum", arguments("cosine_with_min_lr", {"min_lr": 1e-5}, warmup_steps=5)),
    Case("share of a minimum", arguments("cosine_with_min_lr", {"min_lr_rate": 0.1}, warmup_steps=5)),
    Case("early warm-up", arguments("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, warmup_steps=6)),
    Case("early, from a rate", arguments(
        "cosine_warmup_with_min_lr", {"min_lr": 1e-5, "warmup_lr_rate": 0.3}, warmup_steps=6)),
    Case("early, one step", arguments("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, warmup_steps=1)),
    Case("constant has no warm-up", arguments("constant", warmup_steps=10)),
    Case("constant with warm-up", arguments("constant_with_warmup", warmup_steps=10)),
    Case("root", arguments("inverse_sqrt", warmup_steps=10)),
    Case("root without warm-up", arguments("inverse_sqrt")),
    Case("root with a scale", arguments("inverse_sqrt", {"timescale": 30}, warmup_steps=10)),
    Case("polynomial", arguments("polynomial", {"lr_end": 1e-5}, warmup_steps=10)),
    Case("power", arguments("polynomial", {"power": 2.0}), open="power = 2 has no equivalent"),
    Case("wsd", arguments("warmup_stable_decay", {"num_decay_steps": 20}, warmup_steps=10)),
    Case("wsd, shapes", arguments(
        "warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 15, "decay_type": "1-sqrt", "warmup_type": "cosine",
                                "min_lr_ratio": 0.1}, warmup_steps=10)),
    Case("wsd, roots", arguments(
        "warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear", "warmup_type": "1-sqrt"}, warmup_steps=10)),
    Case("plateau", arguments("reduce_lr_on_plateau"), open="reduce_lr_on_plateau has no equivalent"),
]  # fmt: skip


def accelerate_sizes(**sizes: int) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16",
        "use_cpu": False, "debug": False, "num_machines": 1,
        "parallelism_config": {f"parallelism_config_{key}_size": size for key, size in sizes.items()},
    }  # fmt: skip


TRAINED = arguments("cosine", per_device_train_batch_size=2, gradient_accumulation_steps=2)
ACCELERATE = [
    Case("tensor", TRAINED, None, accelerate=accelerate_sizes(dp_shard=4, tp=2)),
    Case("tensor and context", TRAINED, None, accelerate=accelerate_sizes(dp_shard=2, tp=2, cp=2)),
    Case("sequence", TRAINED, None, accelerate=accelerate_sizes(dp_shard=2, sp=4)),
    Case("copies and shards", TRAINED, None, accelerate=accelerate_sizes(dp_replicate=2, dp_shard=2, cp=2)),
    Case("none", TRAINED, None, accelerate=accelerate_sizes()),
]


def transformers_rates(folder: Path, file: dict[str, Any]) -> list[float]:
    """Return the rate of each step by the Trainer's own arguments and schedulers."""
    args = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **file)
    return scheduler_rates(
        args.learning_rate, args.lr_scheduler_type, args.get_warmup_steps(STEPS), args.lr_scheduler_kwargs
    )


def scheduler_rates(lr: float, kind: Any, warmup: int, kwargs: dict[str, Any] | None = None) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = transformers.get_scheduler(kind, optimizer, warmup, STEPS, kwargs)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def trainer_batch(file: dict[str, Any], ranks: int, parallel: Any = None) -> int:
    """Return the Trainer's own count of the rows of a step."""
    kind = transformers.Trainer
    trainer = SimpleNamespace(
        model=SimpleNamespace(), accelerator=SimpleNamespace(parallelism_config=parallel), is_deepspeed_enabled=False,
        _train_batch_size=file.get("per_device_train_batch_size", 8),
    )  # fmt: skip
    for name in ("get_tp_size", "get_cp_size", "get_sp_size"):
        setattr(trainer, name, getattr(kind, name).__get__(trainer))
    args = SimpleNamespace(world_size=ranks, gradient_accumulation_steps=file.get("gradient_accumulation_steps", 1))
    return int(kind.get_total_train_batch_size(trainer, args))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", TRANSFORMERS, ids=lambda case: case.name)
def test_transformers(tmp_path: Path, case: Case) -> None:
    assert case.ranks is not None
    text = translated(tmp_path, case, translate_hf_training_args)
    rates = [] if case.open else transformers_rates(tmp_path, case.file)
    assert_equal(text, case, trainer_batch(case.file, case.ranks), rates)


@pytest.mark.parametrize("case", ACCELERATE, ids=lambda case: case.name)
def test_accelerate(tmp_path: Path, case: Case) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args", reason="Accelerate is not installed")
    from accelerate.parallelism_config import ParallelismConfig

    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(case.accelerate))
    own = config.load_config_from_file(str(path))
    sizes = {key.removeprefix("parallelism_config_"): size for key, size in own.parallelism_config.items()}
    batch = trainer_batch(case.file, own.num_processes, ParallelismConfig(**sizes))
    assert_equal(
        translated(tmp_path, case, translate_hf_training_args), case, batch, transformers_rates(tmp_path, case.file)
    )


def axolotl(**fields: Any) -> dict[str, Any]:
    steps = {} if "num_epochs" in fields else {"max_steps": STEPS}
    return {"base_model": "some/model", "sequence_len": 64, "learning_rate": 2e-4, **steps, **fields}


AXOLOTL = [
    Case("defaults", axolotl()),
    Case(
        "sizes",
        axolotl(micro_batch_size=2, gradient_accumulation_steps=4, context_parallel_size=2, tensor_parallel_size=2),
        8,
    ),
    Case("old name", axolotl(micro_batch_size=2, gradient_accumulation_steps=4, sequence_parallel_degree=4), 8),
    Case("batch_size", axolotl(micro_batch_size=2, batch_size=8), 2),
    Case("warm-up of one step is two", axolotl(warmup_steps=1)),
    Case("no warm-up", axolotl(warmup_steps=0, lr_scheduler="linear")),
    Case("share is rounded down", axolotl(warmup_ratio=0.099)),
    Case("share of epochs", axolotl(warmup_ratio=0.1, num_epochs=2), named="Axolotl rounds it down"),
    Case("minimum", axolotl(cosine_min_lr_ratio=0.1, warmup_steps=6)),
    Case("minimum, reached early", axolotl(cosine_min_lr_ratio=0.1, cosine_constant_lr_ratio=0.7, warmup_steps=6)),
    Case("quadratic", axolotl(lr_quadratic_warmup=True, warmup_steps=6)),
    Case("linear ignores the cosine's minimum", axolotl(lr_scheduler="linear", cosine_min_lr_ratio=0.1)),
    Case("rex", axolotl(lr_scheduler="rex"), open="rex has no equivalent"),
    Case("one cycle", axolotl(lr_scheduler="one_cycle"), open="one_cycle has no equivalent"),
    Case("restarts", axolotl(jagged_restart_steps=10), open="jagged_restart_steps"),
]


def axolotl_warmup(file: dict[str, Any]) -> int:
    """Return Axolotl's warm-up: its own share rounded down and at most 100 steps, and never one step."""
    steps = file.get("warmup_steps")
    if steps is None and "warmup_ratio" in file:
        steps = math.floor(file["warmup_ratio"] * STEPS)
    if steps is None:
        steps = min(math.floor(0.03 * STEPS), 100)
    return 2 if steps == 1 else int(steps)


def axolotl_rates(file: dict[str, Any]) -> Iterator[float]:
    """Yield the rates by Axolotl's documentation: transformers' schedulers, and three cosines of its own."""
    kind, lr, warmup = file.get("lr_scheduler", "cosine"), file["learning_rate"], axolotl_warmup(file)
    plain = scheduler_rates(lr, kind, warmup)
    lowest = file.get("cosine_min_lr_ratio", 0.0) if kind == "cosine" else 0.0
    last = math.floor(STEPS * file.get("cosine_constant_lr_ratio", 1.0))
    for step, rate in enumerate(plain):
        if step < warmup:
            yield rate * step / warmup if file.get("lr_quadratic_warmup") else rate
        elif lowest:
            left = (1 + math.cos(math.pi * (min(step, last) - warmup) / (last - warmup))) / 2
            yield lr * (lowest + (1 - lowest) * left)
        else:
            yield rate


@pytest.mark.parametrize("case", AXOLOTL, ids=lambda case: case.name)
def test_axolotl(tmp_path: Path, case: Case) -> None:
    file, shared = case.file, 1
    for key in ("context_parallel_size", "tensor_parallel_size", "sequence_parallel_degree"):
        shared *= file.get(key, 1)
    rows = file.get("batch_size", file.get("micro_batch_size", 1) * file.get("gradient_accumulation_steps", 1))
    rates = [] if case.open else list(axolotl_rates(file))
    assert case.ranks is not None
    assert_equal(translated(tmp_path, case, translate_hf_training_args), case, rows * case.ranks // shared, rates)


def test_the_table_has_forty_files() -> None:
    assert len(DEEPSPEED + TRANSFORMERS + ACCELERATE + AXOLOTL) >= 40

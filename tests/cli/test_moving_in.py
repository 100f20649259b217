"""Settings of DeepSpeed, HuggingFace, Axolotl and Accelerate become a run.yaml that loads, and none is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mega_cli.main import build_app
from mega_cli.megatron_args import to_yaml
from mega_cli.moving_in import from_deepspeed, from_hf_args
from mega_common.errors import ConfigError
from mega_trainer.config import RunConfig, resolve

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


def loaded(text: str) -> RunConfig:
    """The run, with what was to be filled in filled in."""
    known = {"model": MODEL, "init_from": "model", "data": {"train": "data/train", "seq_length": 64}}
    return RunConfig.parse(resolve(yaml.safe_load(text) | known))


def written(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "settings"
    path.write_text(json.dumps(values))
    return path


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": "2e-5", "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_max_lr": 3e-5},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "mystery": 3,
    "compression": {"enabled": True},
}


def test_deepspeed(tmp_path: Path) -> None:
    text = to_yaml(from_deepspeed(written(tmp_path, DEEPSPEED), ranks=2))
    run = loaded(text)
    assert (run.batch.micro, run.batch.global_) == (4, 64)
    assert (run.optimizer.lr, run.optimizer.betas, run.optimizer.eps) == (3e-5, (0.9, 0.98), 1e-6)
    assert (run.optimizer.weight_decay, run.optimizer.clip_grad, run.optimizer.offload) == (0.01, 0.5, True)
    assert (run.lr_schedule.name, run.lr_schedule.warmup_steps, run.lr_schedule.decay_steps) == ("wsd", 10, 101)
    assert (run.precision, run.parallel.zero) == ("bf16", 2)
    assert "compression.enabled: True, mystery: 3: not known here" in text
    assert "fp16.enabled: False" not in text
    assert "overlap_comm: True: sums of gradients always run beside the backward" in text


def test_what_deepspeed_leaves_to_others_is_told_and_its_defaults_are_written_out(tmp_path: Path) -> None:
    values = {
        "train_batch_size": "auto",
        "fp16": {"enabled": True, "initial_scale_power": 12},
        "optimizer": {"type": "Lamb"},
    }
    text = to_yaml(from_deepspeed(written(tmp_path, values)))
    run = loaded(text)
    assert (run.precision, run.fp16.initial_scale, run.optimizer.clip_grad, run.parallel.zero) == ("fp16", 4096, 0, 0)
    assert "train_batch_size: is left to the program" in text
    assert "gradient_clipping: is 0 where the file has none" in text
    assert "optimizer.type: mega has adamw and muon, and not Lamb" in text


ARGUMENTS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-4, "adam_beta2": 0.95,
    "adam_beta1": 0.9, "weight_decay": 0.1, "max_grad_norm": 2.0, "max_steps": 500, "lr_scheduler_type": "cosine",
    "warmup_steps": 20, "bf16": True, "fp16": False, "gradient_checkpointing": True, "save_steps": 100, "save_total_limit": 2,
    "eval_steps": 50, "seed": 7, "output_dir": "out", "fsdp": ["full_shard", "auto_wrap"], "label_smoothing_factor": 0.1,
}  # fmt: skip


def test_training_arguments(tmp_path: Path) -> None:
    text = to_yaml(from_hf_args(written(tmp_path, ARGUMENTS), ranks=8))
    run = loaded(text)
    assert (run.batch.micro, run.batch.global_, run.train.steps, run.train.eval_every) == (2, 64, 500, 50)
    assert (run.optimizer.lr, run.optimizer.betas, run.optimizer.clip_grad) == (1e-4, (0.9, 0.95), 2.0)
    assert (run.lr_schedule.name, run.lr_schedule.warmup_steps, run.precision) == ("cosine", 20, "bf16")
    assert (run.recompute.kind, run.checkpoint.every, run.checkpoint.keep, run.train.seed) == ("full", 100, 2, 7)
    assert (run.parallel.zero, run.output) == (3, "out")
    assert "label_smoothing_factor: 0.1: changes the loss" in text


AXOLOTL = """
base_model: some/model
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 2
learning_rate: 2e-4
bf16: auto
sequence_len: 512
warmup_ratio: 0.1
"""


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yml").write_text(AXOLOTL)
    done = CliRunner().invoke(build_app(), ["train", "--from-hf-args", str(tmp_path / "axolotl.yml")])
    run = loaded(done.stdout)
    assert run.lora is not None
    assert (run.lora.rank, run.lora.alpha, run.lora.modules) == (8, 16, [".*q_proj", ".*v_proj"])
    assert (run.train.epochs, run.optimizer.lr, run.precision, run.lr_schedule.name) == (2, 2e-4, "bf16", "cosine")
    assert yaml.safe_load(done.stdout)["data"]["seq_length"] == 512
    assert "batch.global: is for one data rank" in done.stdout
    assert (run.lr_schedule.warmup_share, run.batch.micro) == (0.1, 2)
    assert "lr_schedule.warmup_share: is rounded up to whole steps; Axolotl rounds it down" in done.stdout
    assert "mega ckpt pull some/model models/model" in done.stdout


def test_accelerate_says_how_many_ranks_and_what_they_share(tmp_path: Path) -> None:
    values = {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4, "per_device_train_batch_size": 1,
        "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }  # fmt: skip
    run = loaded(to_yaml(from_hf_args(written(tmp_path, values))))
    assert (run.batch.global_, run.precision, run.parallel.zero) == (4, "bf16", 2)


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", '{"learning_rate": "fast", "max_steps": "many"}'])
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings"
    path.write_text(text)
    with pytest.raises(ConfigError, match="settings"):
        from_hf_args(path)

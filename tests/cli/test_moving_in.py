"""Settings of DeepSpeed, HuggingFace, Axolotl and Accelerate become a run.yaml that loads, and none is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mega_cli.main import build_typer_app
from mega_cli.megatron_args import render_run_yaml
from mega_cli.moving_in import translate_deepspeed, translate_hf_training_args
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, flatten_settings, resolve_run_config

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


def loaded(text: str) -> RunConfig:
    """The run, with what was to be filled in filled in."""
    known = {"model": MODEL, "init_from": "model", "data": {"train": "data/train", "seq_length": 64}}
    return RunConfig.parse(resolve_run_config(yaml.safe_load(text) | known))


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
    text = render_run_yaml(translate_deepspeed(written(tmp_path, DEEPSPEED), ranks=2))
    run = loaded(text)
    assert (run.batch.micro, run.batch.global_) == (4, 64)
    assert (run.optimizer.lr, run.optimizer.betas, run.optimizer.eps) == (3e-5, (0.9, 0.98), 1e-6)
    assert (run.optimizer.weight_decay, run.optimizer.clip_grad, run.optimizer.offload) == (0.01, 0.5, True)
    assert (run.lr_schedule.name, run.lr_schedule.warmup_steps, run.lr_schedule.decay_steps) == ("wsd", 10, 101)
    assert (run.precision, run.parallel.zero) == ("bf16", 2)
    assert "compression.enabled: True, mystery: 3: is not translated" in text
    assert "fp16.enabled: False" not in text
    assert "overlap_comm: True: gradient buckets are always reduced during the backward" in text


def test_what_deepspeed_leaves_to_others_is_told_and_its_defaults_are_written_out(tmp_path: Path) -> None:
    values = {
        "train_batch_size": "auto",
        "fp16": {"enabled": True, "initial_scale_power": 12},
        "optimizer": {"type": "Lamb"},
    }
    text = render_run_yaml(translate_deepspeed(written(tmp_path, values)))
    run = loaded(text)
    assert (run.precision, run.fp16.initial_scale, run.optimizer.clip_grad, run.parallel.zero) == ("fp16", 4096, 0, 0)
    assert "train_batch_size: is auto: set by the training program" in text
    assert "gradient_clipping: is not in the file: 0 up to DeepSpeed 0.19.2" in text
    assert "optimizer.type: mega has adamw and muon, but not Lamb" in text


ARGUMENTS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-4, "adam_beta2": 0.95,
    "adam_beta1": 0.9, "weight_decay": 0.1, "max_grad_norm": 2.0, "max_steps": 500, "lr_scheduler_type": "cosine",
    "warmup_steps": 20, "bf16": True, "fp16": False, "gradient_checkpointing": True, "save_steps": 100, "save_total_limit": 2,
    "eval_steps": 50, "seed": 7, "output_dir": "out", "fsdp": ["full_shard", "auto_wrap"], "label_smoothing_factor": 0.1,
}  # fmt: skip


def test_training_arguments(tmp_path: Path) -> None:
    text = render_run_yaml(translate_hf_training_args(written(tmp_path, ARGUMENTS), ranks=8))
    run = loaded(text)
    assert (run.batch.micro, run.batch.global_, run.train.steps, run.train.eval_every) == (2, 64, 500, 50)
    assert (run.optimizer.lr, run.optimizer.betas, run.optimizer.clip_grad) == (1e-4, (0.9, 0.95), 2.0)
    assert (run.lr_schedule.name, run.lr_schedule.warmup_steps, run.precision) == ("cosine", 20, "bf16")
    assert (run.recompute.kind, run.checkpoint.every, run.checkpoint.keep, run.train.seed) == ("full", 100, 2, 7)
    assert (run.parallel.zero, run.output) == (3, "out")
    assert "label_smoothing_factor: 0.1: changes the loss" in text


@pytest.mark.parametrize(
    ("given", "clip"),
    [
        ({}, 1.0), ({"max_grad_norm": 0}, 0), ({"max_grad_norm": 0.3}, 0.3), ({"max_grad_norm": None}, 0),
        ({"max_grad_norm": None, "assistant_only_loss": True}, 0),  # TRL
        ({"max_grad_norm": None, "gradient_clipping": 0.5}, 0.5),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_clipped_as_by_transformers(given: dict[str, Any], clip: float, tmp_path: Path) -> None:
    values = {name: value for name, value in ARGUMENTS.items() if name != "max_grad_norm"}
    run = loaded(render_run_yaml(translate_hf_training_args(written(tmp_path, values | given), ranks=8)))
    assert run.optimizer.clip_grad == clip


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
    done = CliRunner().invoke(build_typer_app(), ["train", "--from-hf-args", str(tmp_path / "axolotl.yml")])
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
    run = loaded(render_run_yaml(translate_hf_training_args(written(tmp_path, values))))
    assert (run.batch.global_, run.precision, run.parallel.zero) == (4, "bf16", 2)


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", '{"learning_rate": "fast", "max_steps": "many"}'])
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings"
    path.write_text(text)
    with pytest.raises(ConfigError, match="settings"):
        translate_hf_training_args(path)


AXOLOTL_BASE = {
    "base_model": "some/model", "sequence_len": 64, "micro_batch_size": 2, "max_steps": 10, "learning_rate": 1e-5,
}  # fmt: skip
TRL_BASE = {"model_name_or_path": "some/model", "per_device_train_batch_size": 2, "max_steps": 10}
PAIRS = {"data.kind": "pairs"}


def translated(folder: Path, values: dict[str, Any], ranks: int = 1) -> tuple[dict[str, Any], str]:
    """The run by dotted keys, and the whole text."""
    text = render_run_yaml(translate_hf_training_args(written(folder, values), ranks))
    return dict(flatten_settings(yaml.safe_load(text))), text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (AXOLOTL_BASE | {"rl": "dpo"}, PAIRS | {"objective.kind": "dpo", "objective.beta": 0.1}),
        (AXOLOTL_BASE | {"rl": "dpo", "rl_beta": 0.2}, {"objective.kind": "dpo", "objective.beta": 0.2}),
        (AXOLOTL_BASE | {"rl": "dpo", "trl": {"beta": 0.3}}, {"objective.beta": 0.3}),
        (AXOLOTL_BASE | {"rl": "dpo", "dpo_label_smoothing": 0.1}, {"objective.label_smoothing": 0.1}),
        (AXOLOTL_BASE | {"rl": "dpo", "dpo_loss_type": ["ipo"]}, {"objective.kind": "ipo"}),
        (AXOLOTL_BASE | {"rl": "dpo", "train_on_inputs": False}, PAIRS),
        (AXOLOTL_BASE | {"rl": "ipo", "rl_beta": 0.05}, PAIRS | {"objective.kind": "ipo", "objective.beta": 0.05}),
        (
            AXOLOTL_BASE | {"rl": "kto", "kto_undesirable_weight": 0.2},
            PAIRS | {"objective.kind": "kto", "objective.undesirable_weight": 0.2, "objective.beta": 0.1},
        ),
        (
            AXOLOTL_BASE | {"rl": "simpo", "rl_beta": 2.5, "simpo_gamma": 1.2, "cpo_alpha": 0},
            PAIRS | {"objective.kind": "simpo", "objective.beta": 2.5, "objective.gamma": 1.2},
        ),
        (AXOLOTL_BASE | {"rl": "simpo"}, {"objective.beta": 0.1, "objective.gamma": 0.5}),
        (
            AXOLOTL_BASE | {"reward_model": True, "center_rewards_coefficient": 0.01},
            PAIRS | {"objective.kind": "reward", "objective.center": 0.01, "model.score": True},
        ),
        (TRL_BASE | {"loss_type": "sigmoid"}, PAIRS | {"objective.kind": "dpo", "optimizer.lr": 1e-6}),
        (TRL_BASE | {"loss_type": ["ipo"], "beta": 0.4}, PAIRS | {"objective.kind": "ipo", "objective.beta": 0.4}),
        (TRL_BASE | {"loss_type": "kto", "desirable_weight": 1.5}, {"objective.desirable_weight": 1.5}),
        (TRL_BASE | {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}, {"objective.kind": "simpo"}),
        (TRL_BASE | {"center_rewards_coefficient": None}, {"objective.kind": "reward", "optimizer.lr": 1e-4}),
        (AXOLOTL_BASE | {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, {"data.kind": None}),
        (TRL_BASE | {"packing": True}, {"optimizer.lr": 2e-5, "precision": "bf16", "recompute": "full"}),
        (TRL_BASE | {"loss_type": "nll"}, {"optimizer.lr": 2e-5}),
        (TRL_BASE, {"optimizer.lr": 5e-5, "precision": "fp32"}),
    ],
)  # fmt: skip
def test_an_objective_is_translated(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]) -> None:
    run, text = translated(tmp_path, values)
    assert {key: run.get(key) for key in expected} == expected
    wanted = yaml.safe_load(text)
    model = MODEL | {"score": True} if wanted.get("model", {}).get("score") else MODEL
    data = {"train": "data/train", "seq_length": 64} | ({"kind": "pairs"} if run.get("data.kind") == "pairs" else {})
    parsed = RunConfig.parse(resolve_run_config(wanted | {"model": model, "init_from": "model", "data": data}))
    assert parsed.objective.uses_preference_pairs == (run.get("data.kind") == "pairs")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (AXOLOTL_BASE | {"rl": "grpo"}, "rl = grpo is an objective that is not supported"),
        (AXOLOTL_BASE | {"rl": "orpo"}, "rl = orpo"),
        (AXOLOTL_BASE | {"rl": "gdpo"}, "rl = gdpo"),
        (AXOLOTL_BASE | {"rl": "ebft"}, "rl = ebft"),
        (AXOLOTL_BASE | {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"]}, "dpo_loss_type"),
        (AXOLOTL_BASE | {"rl": "dpo", "dpo_loss_type": ["robust"]}, "dpo_loss_type"),
        (AXOLOTL_BASE | {"rl": "dpo", "dpo_use_weighting": True}, "dpo_use_weighting = True"),
        (AXOLOTL_BASE | {"process_reward_model": True}, "process_reward_model"),
        (AXOLOTL_BASE | {"kd_trainer": True}, "kd_trainer"),
        (AXOLOTL_BASE | {"adapter": "llama-adapter"}, "adapter = llama-adapter is not supported"),
        (AXOLOTL_BASE | {"load_in_4bit": True}, "load_in_4bit = True requires a LoRA adapter"),
        (
            AXOLOTL_BASE | {"adapter": "qlora", "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}},
            "the 4-bit type fp4 is not supported",
        ),
        (TRL_BASE | {"loss_type": "hinge"}, "loss_type = hinge is a loss that is not supported"),
        (TRL_BASE | {"loss_type": "grpo"}, "loss_type = grpo"),
        (TRL_BASE | {"loss_type": "dft"}, "loss_type = dft"),
        (TRL_BASE | {"loss_type": "apo_zero_unpaired", "desirable_weight": 1.0}, "loss_type"),
        (TRL_BASE | {"num_generations": 8}, "num_generations = 8"),
        (TRL_BASE | {"loss_type": "sigmoid", "f_divergence_type": "js_divergence"}, "f_divergence_type"),
        (TRL_BASE | {"loss_type": "sigmoid", "cpo_alpha": 1.0}, "CPO is an objective that is not supported"),
        (TRL_BASE | {"teacher_model_name_or_path": "big", "lmbda": 0.5}, "teacher_model_name_or_path"),
        (TRL_BASE | {"loss_type": "sigmoid", "beta": 0.1, "missing_eos_penalty": None}, "missing_eos_penalty"),
        (TRL_BASE | {"loss_type": "sigmoid", "beta": 0.1, "tpo_alpha": 1.0}, "tpo_alpha = 1.0 belongs to an objective"),
        (TRL_BASE | {"step_separator": "x"}, "step_separator"),
        (TRL_BASE | {"min_density_ratio": 0.5, "beta": 0.1}, "min_density_ratio"),
        (TRL_BASE | {"beta": 0.5, "seq_kd": False}, "seq_kd"),
        (AXOLOTL_BASE | {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins = .* selects an objective"),
        (AXOLOTL_BASE | {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "selects an objective"),
        ({"stage": "dpo", "model_name_or_path": "some/model", "pref_beta": 0.1}, "stage = dpo"),
        (
            {k: v for k, v in AXOLOTL_BASE.items() if k != "learning_rate"},
            "Axolotl requires learning_rate",
        ),
    ],
)  # fmt: skip
def test_an_objective_or_adapter_that_is_not_translated_is_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        translated(tmp_path, values)


def test_a_beta_of_no_known_objective_is_left_to_fill_in(tmp_path: Path) -> None:
    run, text = translated(tmp_path, TRL_BASE | {"beta": 0.1})
    assert run["objective.kind"] == "TO BE FILLED IN"
    assert "objective.kind: beta belongs to several objectives" in text


LORA = {"lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}


@pytest.mark.parametrize(
    ("values", "expected", "named"),
    [
        (AXOLOTL_BASE | LORA | {"adapter": "qlora", "load_in_4bit": True}, {"lora.quantize": "nf4"}, "no double quantisation"),
        (AXOLOTL_BASE | LORA | {"adapter": "lora", "load_in_4bit": True}, {"lora.quantize": "nf4"}, ""),
        (AXOLOTL_BASE | LORA | {"adapter": "lora"}, {"lora.quantize": None, "lora.rank": 8}, ""),
        (AXOLOTL_BASE | LORA, {"lora.rank": None, "lora.modules": None}, "the file trains no adapter"),
        (AXOLOTL_BASE | LORA | {"adapter": "lora", "peft_use_dora": True}, {"lora.dora": True}, ""),
        (AXOLOTL_BASE | LORA | {"adapter": "lora", "peft_use_rslora": True}, {"lora.rslora": True}, ""),
        (AXOLOTL_BASE | LORA | {"adapter": "lora", "load_in_8bit": True}, {"lora.quantize": None}, "load_in_8bit"),
        (AXOLOTL_BASE | {"adapter": "lora", "lora_target_modules": ["q_proj"]}, {"lora.modules": [".*q_proj"]}, ""),
        (AXOLOTL_BASE | {"adapter": "lora"}, {"lora.modules": "TO BE FILLED IN"}, "PEFT uses a default for the model's type"),
        (
            AXOLOTL_BASE | LORA | {"adapter": "qlora", "fsdp_config": {"reshard_after_forward": True}},
            {"lora.quantize": "nf4", "parallel.zero": 2},
            "4-bit weights are not sharded",
        ),
        (
            TRL_BASE | {"use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear"},
            {"lora.quantize": "nf4", "lora.rank": 16, "lora.alpha": 32, "lora.dropout": 0.05, "lora.modules": [".*_proj"]},
            "",
        ),
        (TRL_BASE | {"use_peft": False, "lora_r": 16}, {"lora.rank": None}, "the file trains no adapter"),
        (TRL_BASE | {"peft_config": {"r": 4, "target_modules": ["v_proj"]}}, {"lora.rank": 4, "lora.alpha": 8}, ""),
    ],
)  # fmt: skip
def test_an_adapter_is_translated(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any], named: str) -> None:
    run, text = translated(tmp_path, values)
    assert {key: run.get(key) for key in expected} == expected
    assert named in text


@pytest.mark.parametrize(
    ("values", "ranks", "named"),
    [
        (AXOLOTL_BASE | {"tensor_parallel_size": 3}, 8, "number of ranks must be a multiple of 3"),
        (AXOLOTL_BASE | {"dp_shard_size": 4, "tensor_parallel_size": 2}, 4, "require 8 ranks"),
        (AXOLOTL_BASE | {"batch_size": 7}, 1, "batch_size = 7 must be a multiple of micro_batch_size = 2"),
        (TRL_BASE | {"gradient_accumulation_steps": 1.5}, 1, "gradient_accumulation_steps must be a whole number, found 1.5"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, values: dict[str, Any], ranks: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        translated(tmp_path, values, ranks)


@pytest.mark.parametrize(
    ("values", "ranks", "named"),
    [
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            4,
            "train_batch_size = 32 must be micro x accumulation x data ranks = 2 x 2 x 4",
        ),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, 4, "train_batch_size = 30 must be micro x"),
        (
            {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 3},
            8,
            "number of ranks must be a multiple of 3",
        ),
        ({"train_batch_size": 9, "tensor_parallel": {"autotp_size": 2}}, 4, "autotp_size = 2"),
    ],
)
def test_a_batch_of_deepspeed_that_does_not_fit_is_refused(
    tmp_path: Path, values: dict[str, Any], ranks: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        translate_deepspeed(written(tmp_path, values), ranks)


def test_what_huggingface_fills_into_deepspeeds_file_is_left_to_fill_in(tmp_path: Path) -> None:
    values = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    }
    run = dict(flatten_settings(yaml.safe_load(render_run_yaml(translate_deepspeed(written(tmp_path, values), 1)))))
    for key in ("optimizer.lr", "optimizer.betas", "lr_schedule.name"):
        assert run[key] == "TO BE FILLED IN", key


@pytest.mark.parametrize(
    ("file", "batch", "named"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, 8, "its sizes and stage are read"),
        ({"sequence_parallel_size": 4, "zero_optimization": {"stage": 3}}, 4, "its sizes and stage are read"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {}}},
            16,
            "WarmupLR of DeepSpeed's file replaces linear",
        ),
        ({"mystery": 1}, 16, "deepspeed.mystery: 1: is in DeepSpeed's file"),
        (None, 16, "ds.json does not exist"),
    ],
)
def test_a_file_of_deepspeed_that_the_arguments_name_is_read(
    tmp_path: Path, file: dict[str, Any] | None, batch: int, named: str
) -> None:
    if file is not None:
        (tmp_path / "ds.json").write_text(json.dumps(file))
    run, text = translated(tmp_path, TRL_BASE | {"deepspeed": "ds.json"}, ranks=8)
    assert run["batch.global"] == batch
    assert named in text.replace("\n#     ", " ")
    assert run["parallel.zero"] == (3 if file and "zero_optimization" in file else 1)


def test_settings_of_deepspeed_may_stand_in_the_arguments(tmp_path: Path) -> None:
    run, _ = translated(tmp_path, TRL_BASE | {"deepspeed": {"tensor_parallel": {"autotp_size": 4}}}, ranks=8)
    assert (run["batch.global"], run["parallel.tp"]) == (4, 4)


FACTORY = {"stage": "sft", "model_name_or_path": "some/model", "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("values", "expected", "named"),
    [
        (FACTORY, {"lora.rank": 8, "lora.alpha": 16, "lora.dropout": 0.0, "lora.modules": [".*_proj"]}, ""),
        (FACTORY, {"data.seq_length": 2048, "data.kind": "conversations", "train.epochs": 3.0}, ""),
        (FACTORY | {"finetuning_type": "full"}, {"lora.rank": None, "lora.modules": None}, ""),
        (FACTORY | {"finetuning_type": "full", "lora_rank": 8}, {"lora.rank": None}, "the file trains no adapter"),
        (FACTORY | {"finetuning_type": "lora", "lora_rank": 64}, {"lora.rank": 64, "lora.alpha": 128}, ""),
        (FACTORY | {"lora_rank": 64, "lora_alpha": 64}, {"lora.rank": 64, "lora.alpha": 64}, ""),
        (FACTORY | {"lora_target": "q_proj, v_proj"}, {"lora.modules": [".*q_proj", ".*v_proj"]}, ""),
        (FACTORY | {"additional_target": "embed_tokens,lm_head"}, {"lora.modules_to_save": ["embed_tokens", "lm_head"]}, ""),
        (FACTORY | {"quantization_bit": 4}, {"lora.quantize": "nf4"}, "no double quantisation"),
        (FACTORY | {"quantization_bit": 4, "double_quantization": False}, {"lora.quantize": "nf4"}, ""),
        (FACTORY | {"cutoff_len": 4096, "train_on_prompt": True}, {"data.seq_length": 4096, "data.kind": None}, ""),
        (FACTORY | {"stage": "pt", "pure_bf16": True}, {"data.kind": None, "precision": "bf16"}, ""),
        (AXOLOTL_BASE, {"precision": "bf16", "data.seq_length": 64, "data.kind": None}, ""),
        ({"base_model": "some/model", "learning_rate": 1e-5}, {"data.seq_length": 512, "train.epochs": 1.0}, ""),
        (AXOLOTL_BASE | {"datasets": [{"path": "d", "type": "chat_template"}]}, {"data.kind": "conversations"}, ""),
        (AXOLOTL_BASE | {"datasets": [{"path": "d", "type": "completion"}]}, {"data.kind": None}, ""),
        (AXOLOTL_BASE | {"train_on_inputs": True, "datasets": [{"path": "d", "type": "alpaca"}]}, {"data.kind": None}, ""),
        (AXOLOTL_BASE | {"sequence_len": 64, "bf16": False}, {"precision": "fp32", "data.seq_length": 64}, ""),
        (AXOLOTL_BASE | {"fp16": True}, {"precision": "fp16"}, ""),
        (AXOLOTL_BASE | {"bf16": False, "bfloat16": True}, {"precision": "bf16"}, ""),
        (AXOLOTL_BASE | {"optimizer": "muon"}, {}, "settings of Muon are not translated"),
        ({"max_steps": 5, "fsdp_config": {"activation_checkpointing": True}}, {"recompute": "full"}, ""),
        ({"max_steps": 5, "fsdp_config": {"fsdp_activation_checkpointing": True}}, {"recompute": "full"}, ""),
        ({"max_steps": 5, "fsdp_config": {"activation_checkpointing": False}}, {"recompute": None}, ""),
        ({"max_steps": 90, "eval_steps": 0.1, "save_steps": 0.25}, {"train.eval_every": 9, "checkpoint.every": 23}, ""),
        ({"max_steps": 90, "logging_steps": 0.1, "save_steps": 7}, {"log.every": 9, "checkpoint.every": 7}, ""),
        ({"num_train_epochs": 1, "save_steps": 0.1}, {"checkpoint.every": None}, "save_steps: 0.1: is a fraction of"),
        ({"mixed_precision": "fp8", "max_steps": 3}, {"precision": "bf16"}, "mixed_precision: fp8 is not translated"),
        ({"mixed_precision": "no", "max_steps": 3}, {"precision": "fp32"}, ""),
        (
            TRL_BASE | {"use_peft": True, "lora_target_modules": ["proj", "self_attn.q", "q_proj"]},
            {"lora.modules": ["proj", r"self_attn\.q", ".*q_proj"]},
            "",
        ),
        ({"max_steps": 5, "optim": "schedule_free_adamw"}, {}, "not schedule_free_adamw"),
        ({"max_steps": 5, "optim": "stable_adamw"}, {}, "not stable_adamw"),
        ({"max_steps": 5, "optim": "grokadamw"}, {}, "not grokadamw"),
        ({"max_steps": 5, "optim": "galore_adamw_8bit"}, {}, "not galore_adamw_8bit"),
        ({"max_steps": 5, "optim": "apollo_adamw"}, {}, "not apollo_adamw"),
        ({"max_steps": 5, "optim": "adamw_anyprecision"}, {}, "not adamw_anyprecision"),
        ({"max_steps": 5, "optim": "paged_adamw_8bit"}, {}, "moments are in fp32"),
        ({"max_steps": 5, "optim": "adamw_torch_4bit"}, {}, "moments are in fp32"),
    ],
)  # fmt: skip
def test_defaults_and_names_of_each_program(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any], named: str
) -> None:
    run, text = translated(tmp_path, values)
    assert {key: run.get(key) for key in expected} == expected
    assert named in text


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"])
def test_an_adamw_is_adamw(tmp_path: Path, name: str) -> None:
    _, text = translated(tmp_path, {"max_steps": 5, "optim": name})
    assert "optim" not in text.replace("optimizer:", "")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (FACTORY | {"finetuning_type": "freeze"}, "finetuning_type = freeze is not supported"),
        (FACTORY | {"finetuning_type": "oft"}, "finetuning_type = oft is not supported"),
        (FACTORY | {"quantization_bit": 8}, "quantization_bit = 8 is not supported"),
        (FACTORY | {"finetuning_type": "full", "quantization_bit": 4}, "requires a LoRA adapter"),
        (FACTORY | {"stage": "kto"}, "stage = kto selects an objective"),
    ],
)
def test_a_file_of_llama_factory_that_is_not_translated_is_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        translated(tmp_path, values)

"""Offloading, loss scales, autocast and optimizer arguments of other tools: translated, or named with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_cli.megatron_args import render_run_yaml
from mega_cli.moving_in import translate_deepspeed, translate_hf_training_args
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, flatten_settings, resolve_run_config

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
NAMED_UNKNOWN = "not known here"


def _written(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "settings"
    path.write_text(json.dumps(values))
    return path


def _checked(text: str) -> dict[str, Any]:
    """Return the run's settings, after a check that they load once the open keys are filled in."""
    values = yaml.safe_load(text)
    filled = values | {"model": MODEL, "init_from": "model", "data": {"train": "data/train", "seq_length": 64}}
    if values.get("precision") == "TO BE FILLED IN":
        filled |= {"precision": "bf16"}
    RunConfig.parse(resolve_run_config(filled))
    return flatten_settings(values)


ADAMW = {"type": "AdamW", "params": {"lr": 1e-5}}
CONSTANT = {"optimizer": ADAMW, "train_micro_batch_size_per_gpu": 1}
FP16 = {"enabled": True}


@pytest.mark.parametrize(
    ("values", "expected", "named"),
    [
        ({"fp16": FP16 | {"loss_scale": 1024}}, {"precision": "fp16", "fp16.initial_scale": 1024.0}, "loss_scale: 1024: is the initial loss scale"),
        ({"fp16": FP16 | {"loss_scale": 1000}}, {"fp16.initial_scale": 1024.0}, "loss_scale: 1000: is the initial loss scale"),
        ({"fp16": FP16 | {"loss_scale": 0, "initial_scale_power": 12}}, {"fp16.initial_scale": 4096.0}, "tolerates 1 before"),
        ({"fp16": FP16 | {"loss_scale": 0.0, "hysteresis": 1}}, {"fp16.initial_scale": None}, ""),
        ({"fp16": FP16 | {"loss_scale": 512, "initial_scale_power": 12}}, {"fp16.initial_scale": 512.0}, "initial_scale_power: 12"),
        ({"fp16": FP16 | {"loss_scale_window": 500, "min_loss_scale": 2}}, {"fp16.growth_interval": 500, "fp16.min_scale": 2}, ""),
        ({"fp16": FP16 | {"hysteresis": 4}}, {"precision": "fp16"}, "tolerates 3 before"),
        ({"fp16": FP16 | {"auto_cast": False}}, {"precision": "fp16"}, "auto_cast: False: inputs have"),
        ({"fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2}}, {"precision": "fp32", "fp16.initial_scale": None}, ""),
        ({"bf16": FP16 | {"bf16_optimizer_states": True}}, {"precision": "bf16"}, "bf16_optimizer_states: True: main weights"),
        ({"torch_autocast": FP16 | {"dtype": "bfloat16"}}, {"precision": "bf16"}, ""),
        ({"torch_autocast": FP16 | {"dtype": "torch.float16"}}, {"precision": "fp16"}, ""),
        ({"torch_autocast": FP16}, {"precision": "TO BE FILLED IN"}, "torch_autocast has no dtype"),
        ({"torch_autocast": FP16 | {"dtype": "fp8"}}, {"precision": "TO BE FILLED IN"}, "dtype must be bfloat16 or float16"),
        ({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}, "bf16": FP16}, {"precision": "bf16"}, ""),
        (
            {"torch_autocast": FP16 | {"dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}},
            {"precision": "bf16"},
            "lower_precision_safe_modules: ['torch.nn.Linear']: mega selects the layers",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, {}, "amsgrad: True: AdamW is used without it"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": False}}}, {}, ""),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, {}, "bias_correction: False: AdamW is used without it"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, "torch_adam: True: mega has its own implementation"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, {"optimizer.offload": True}, ""),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, {"optimizer.offload": None}, ""),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, {"optimizer.offload": True}, "not on disk"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"optimizer.offload": True}, ""),
    ],
)  # fmt: skip
def test_deepspeed_settings(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any], named: str) -> None:
    text = render_run_yaml(translate_deepspeed(_written(tmp_path, CONSTANT | values)))
    run = _checked(text)
    assert {key: run.get(key) for key in expected} == expected
    assert named in text
    assert NAMED_UNKNOWN not in text


def test_a_negative_loss_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale = -1 must be 0"):
        translate_deepspeed(_written(tmp_path, CONSTANT | {"fp16": FP16 | {"loss_scale": -1}}))


HF = {"max_steps": 5, "per_device_train_batch_size": 1}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}
OFFLOAD, NONE = {"optimizer.offload": True}, {"optimizer.offload": None}
ZERO3 = OFFLOAD | {"parallel.zero": 3}


@pytest.mark.parametrize(
    ("values", "expected", "named"),
    [
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}, OFFLOAD, ""),
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "nvme"}}, OFFLOAD, "not on disk"),
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "none"}}, NONE, ""),
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}}, NONE, "weights stay on the device"),
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 3, "offload_param_device": "none"}}, NONE, ""),
        (ACCELERATE | {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}}, {"parallel.zero": 3}, "zero3_init_flag"),
        (ACCELERATE | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": True}}, ZERO3,
         "fsdp_offload_params: True: weights and gradients stay"),
        (ACCELERATE | {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False}}, NONE, ""),
        (ACCELERATE | {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": "true"}}, ZERO3, ""),
        (ACCELERATE | {"megatron_lm_config": {"megatron_lm_optimizer_cpu_offload": True}}, OFFLOAD, ""),
        (HF | {"fsdp": "full_shard auto_wrap offload"}, ZERO3, "fsdp: offload: weights and gradients stay"),
        (HF | {"fsdp": ["shard_grad_op", "offload"]}, OFFLOAD | {"parallel.zero": 2}, "fsdp: offload"),
        (HF | {"fsdp": "auto_wrap full_shard"}, NONE | {"parallel.zero": 3}, ""),
        (HF | {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, ZERO3, "cpu_offload: True: weights"),
        (HF | {"fsdp": "full_shard", "fsdp_config": {"offload_params": True}}, ZERO3, "offload_params: True: weights"),
        (HF | {"fsdp": ""}, NONE, ""),
        (HF | {"fsdp": []}, NONE, ""),
        (HF | {"optim": "adamw_torch", "optim_args": "beta1=0.8"}, {}, "optim_args: beta1=0.8: HuggingFace's AdamW does not read it"),
        (HF | {"optim_args": "foreach=True"}, {}, "optim_args: foreach=True: HuggingFace's AdamW"),
        (HF | {"optim": "adafactor", "optim_args": "scale_parameter=True"}, {}, "is of an optimizer that is not translated"),
        (HF | {"optim": "ao_adamw_fp8", "optim_args": {"eps": 1e-6}}, {}, "optim_args.eps: 1e-06: is of an optimizer"),
    ],
)  # fmt: skip
def test_settings_of_hugging_face(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any], named: str) -> None:
    text = render_run_yaml(translate_hf_training_args(_written(tmp_path, values)))
    run = _checked(text)
    assert {key: run.get(key) for key in expected} == expected
    assert named in text
    assert NAMED_UNKNOWN not in text


def test_offloading_of_a_named_deepspeed_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    )
    run = _checked(render_run_yaml(translate_hf_training_args(_written(tmp_path, HF | {"deepspeed": "ds.json"}))))
    assert (run["parallel.zero"], run["optimizer.offload"]) == (2, True)


@pytest.mark.parametrize("label", ["rated answers", "over all samples of a step"])
def test_kto_reads_rated_answers(tmp_path: Path, label: str) -> None:
    values = HF | {"desirable_weight": 1.0, "loss_type": "kto"}
    text = render_run_yaml(translate_hf_training_args(_written(tmp_path, values)))
    assert label in text
    assert "single answers" not in text

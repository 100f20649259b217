"""Modules of transformers in training: layouts of data ranks, documents, folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_problems import check_form, follow_hint, list_problems
from ranks import run_ranks

from mega_ckpt.convert import convert_checkpoint
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_data.batch_loader import StepBatch
from mega_trainer.config import transformers_rules
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.input_check import find_unmatched_patterns
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.training_run import run_training

transformers = pytest.importorskip("transformers")
Settings = Callable[..., dict[str, Any]]
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 64}
DROPOUT = GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
QUIET = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LFM2 = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
BERT = LLAMA | {"model_type": "bert"}


def make_run(settings: Settings, tmp_path: Path, config: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a run of a module with random weights of transformers."""
    file = tmp_path / f"{config['model_type']}.json"
    file.write_text(json.dumps(config))
    model = {"from": str(file), "implementation": "transformers"}
    raw = settings(**{"precision": "fp64", "train": {"steps": 2}, **sections})
    return resolve_run_config({**raw, "model": model})


def train_rank(raw: dict[str, Any], rank: int, size: int) -> TrainState:
    return run_training(RunConfig.parse(raw), RankInfo(rank=rank, local_rank=rank, world_size=size))


def train_on_ranks(raw: dict[str, Any]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    train_rank(raw, dist.get_rank(), dist.get_world_size())


def losses(raw: dict[str, Any]) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def check_layout(raw: dict[str, Any], tmp_path: Path, zero: int, ranks: int = 2) -> None:
    """Check that two steps on `ranks` ranks equal those of one process, to 1e-10."""
    one = {**raw, "output": str(tmp_path / "one")}
    more = {**raw, "output": str(tmp_path / f"zero{zero}"), "parallel": {"zero": zero}}
    train_rank(one, 0, 1)
    run_ranks(train_on_ranks, ranks, more)
    torch.testing.assert_close(losses(more), losses(one), rtol=1e-10, atol=0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_ranks_equal_one_process(settings: Settings, tmp_path: Path, zero: int) -> None:
    check_layout(make_run(settings, tmp_path, LLAMA), tmp_path, zero)


@pytest.mark.parametrize(
    ("config", "zero", "sections"),
    [
        pytest.param(MIXTRAL, 3, {}, id="experts with an auxiliary loss"),
        pytest.param(DROPOUT, 2, {"batch": {"micro": 1}}, id="dropout"),
        pytest.param(QUIET, 3, {"recompute": {"kind": "full"}}, id="recompute"),
        pytest.param(
            LLAMA,
            3,
            {"data": {"kind": "documents"}},
            id="documents",
        ),
    ],
)
def test_options_equal_one_process(
    settings: Settings, tmp_path: Path, config: dict[str, Any], zero: int, sections: dict[str, Any]
) -> None:
    check_layout(make_run(settings, tmp_path, config, **sections), tmp_path, zero)


@pytest.mark.parametrize(
    ("config", "sections", "message"),
    [
        pytest.param(LFM2, {"data": {"kind": "documents"}}, "depend on earlier documents", id="recurrent documents"),
        pytest.param(BERT, {}, "attends to later tokens", id="bidirectional"),
        pytest.param(LLAMA, {"parallel": {"tp": 2}}, "parallel.tp", id="tensor parallelism"),
        pytest.param(LLAMA, {"parallel": {"pp": 2}}, "parallel.pp", id="pipeline"),
        pytest.param(LLAMA, {"parallel": {"cp": 2}}, "parallel.cp", id="context parallelism"),
        pytest.param(LLAMA, {"precision": "fp8"}, "precision", id="fp8"),
        pytest.param(LLAMA, {"recompute": "selective"}, "recompute.kind", id="selective recomputation"),
        pytest.param(LLAMA, {"optimizer": {"name": "muon"}}, "optimizer.name", id="muon"),
        pytest.param(
            LLAMA, {"data": {"reset_attention_mask": True}}, "reset_position_ids", id="positions of documents"
        ),
        pytest.param(LLAMA, {"data": {"seq_length": 65}}, "data.seq_length", id="positions"),
        pytest.param(LLAMA | {"model_type": "clip"}, {}, "has no causal language model", id="another kind of model"),
        pytest.param(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, {}, "quantized", id="quantized"),
        pytest.param(LLAMA | {"num_attention_heads": 3}, {}, "model_type llama: transformers cannot", id="broken"),
    ],
)
def test_unsupported_runs_are_refused(
    settings: Settings, tmp_path: Path, config: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        train_rank(make_run(settings, tmp_path, config, **sections), 0, 1)


def test_positions_that_go_on_over_documents_are_refused(settings: Settings, tmp_path: Path) -> None:
    config = RunConfig.parse(make_run(settings, tmp_path, LLAMA))
    positions, documents = np.array([[0, 1, 0, 1, 2]]), np.array([[0, 0, 1, 1, 1]])
    batch = StepBatch(positions, positions, np.ones((1, 5), np.float32), positions, documents, np.zeros(1, np.int64))
    (micro,) = split_micro_batches(batch, config, torch.device("cpu"))
    assert micro.positions.tolist() == positions.tolist()
    with pytest.raises(DataError, match="must restart at each document"):
        list(split_micro_batches(replace(batch, position_ids=np.arange(5)[None]), config, torch.device("cpu")))


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "parallel.tp": {"parallel": {"tp": 2}},
    "parallel.pp": {"parallel": {"pp": 2}},
    "parallel.cp": {"parallel": {"cp": 2}},
    "parallel.ep": {"parallel": {"ep": 2}},
    "parallel.sp": {"parallel": {"tp": 2, "sp": True}},
    "parallel.virtual_stages": {"parallel": {"pp": 2, "virtual_stages": 2}},
    "precision": {"precision": "fp8"},
    "recompute.kind": {"recompute": {"kind": "selective"}},
    "recompute.layers": {"recompute": {"kind": "full", "layers": 1}},
    "offload.activations": {"offload": {"activations": 1}},
    "objective.kind": {"objective": {"kind": "dpo"}},
    "optimizer.name": {"optimizer": {"name": "muon"}},
    "optimizer.decoupled_lr": {"optimizer": {"decoupled_lr": 0.1}},
    "lora": {"lora": {"rank": 2}},
    "eval.tasks": {"eval": {"tasks": ["hellaswag"]}},
    "kernels.linear": {"kernels": {"linear": "te"}},
    "kernels.functions": {"kernels": {"functions": ["fused_norm"]}},
    "kernels.attention": {"kernels": {"attention": "flash"}},
    "kernels.conv": {"kernels": {"conv": "causal_conv1d"}},
    "kernels.scan": {"kernels": {"scan": "mamba_ssm"}},
    "kernels.delta": {"kernels": {"delta": "fla"}},
    "data.kind": {"data": {"kind": "masked"}},
    "data.reset_position_ids": {"data": {"reset_attention_mask": True}},
    "data.reset_attention_mask": {"data": {"reset_position_ids": True}},
    "data.seq_length": {"data": {"seq_length": 65}},
}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_each_unsupported_setting_is_named_with_a_fix(path: str, settings: Settings, tmp_path: Path) -> None:
    raw = make_run(settings, tmp_path, LLAMA, **UNSUPPORTED[path])
    words = "config.json declares" if path == "data.seq_length" else transformers_rules.WITH
    found = [problem for problem in list_problems(raw) if problem.path == path and words in problem.rule]
    assert found, [str(problem) for problem in list_problems(raw)]
    for problem in found:
        check_form(problem)
        for changed in follow_hint(raw, problem.hint):
            assert problem.rule not in [each.rule for each in list_problems(changed) if each.path == path], str(problem)


def test_every_unsupported_setting_has_a_case(settings: Settings, tmp_path: Path) -> None:
    run = RunConfig.parse(make_run(settings, tmp_path, LLAMA))
    others = {"data.kind", "data.reset_position_ids", "data.reset_attention_mask", "data.seq_length"}
    assert {path for path, *_ in transformers_rules._unsupported_settings(run)} | others == UNSUPPORTED.keys()


def test_frozen_tensors_are_those_of_transformers(settings: Settings, tmp_path: Path) -> None:
    raw = make_run(settings, tmp_path, LLAMA, train={"steps": 1, "freeze": ["model.layers.0.*"]})
    state = train_rank(raw, 0, 1)
    frozen = {n for n, p in state.stages[0].module.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(name.startswith("model.layers.0.") for name in frozen)
    (problem,) = find_unmatched_patterns(RunConfig.parse({**raw, "train": {"freeze": ["layers.9.*"]}}))
    assert "must match a tensor" in str(problem)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("config", [MIXTRAL, QUIET, LFM2], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_folder_comes_back_byte_for_byte(
    settings: Settings, tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    """A run that changes nothing exports the files of its folder: experts separate, tied weights once."""
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    module = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"}),
        dtype=kind,
    )
    module.save_pretrained(tmp_path / "hf")
    raw = settings(precision=dtype, train={"steps": 1}, optimizer={"lr": 1e-45})
    raw["model"] = {"from": str(tmp_path / "hf"), "implementation": "transformers"}
    train_rank(resolve_run_config(raw), 0, 1)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", "hf", verify=True)
    assert digests(tmp_path / "out") == digests(tmp_path / "hf")


def test_a_run_resumes_on_another_number_of_ranks(settings: Settings, tmp_path: Path) -> None:
    raw = make_run(settings, tmp_path, LLAMA)
    whole = {**raw, "train": {"steps": 3}, "output": str(tmp_path / "whole")}
    train_rank(whole, 0, 1)
    first = {**raw, "train": {"steps": 3}, "checkpoint": {"async": False, "every": 1}, "parallel": {"zero": 3}}
    run_ranks(train_on_ranks, 2, {**first, "train": {"steps": 2}, "lr_schedule": {"decay_steps": 3}})
    train_rank({**first, "parallel": {}, "lr_schedule": {"decay_steps": 3}}, 0, 1)
    torch.testing.assert_close(losses(first), losses(whole), rtol=1e-10, atol=0)

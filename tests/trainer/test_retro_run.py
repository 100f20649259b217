"""A run of a model with retrieval, from a data set and its neighbors on disk to a checkpoint, and what that is not for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from chunked_data import documents, found
from ranks import run_ranks

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.formats.megatron_args import read_megatron_args
from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError, ConfigError
from mega_eval.model_loading import load_inference_model
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training

M, S = 8, 32
MODEL = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "vocab_size": 207,
    "retro": {"chunk_length": M, "layers": [0, 1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("faiss", reason="neighbors are searched by faiss")
    folder = tmp_path_factory.mktemp("data")
    documents(folder / "d", np.random.default_rng(3).integers(0, 60, (40, 21)).tolist())
    found(folder, folder / "d", split=(1,))
    return folder / "d"


def settings(data: Path, output: Path, steps: int, **parallel: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "precision": "fp64", "train": {"steps": steps}, "output": str(output), "parallel": parallel,
        "data": {
            "train": [str(data)], "kind": "retro", "seq_length": S, "split": [1], "tokenizer": str(data.parent / "words"),
        },
        "batch": {"micro": 2, "global": 4}, "checkpoint": {"every": 2}, "lr_schedule": {"name": "constant"},
    }  # fmt: skip


def resumed(raw: dict[str, Any]) -> None:
    run_training(RunConfig.parse(raw), RankInfo(dist.get_rank(), dist.get_world_size()))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    source = open_weight_source(folder)
    return {name: source.read_tensor(name).clone() for name in canonical_tensors(source.model)}


@pytest.fixture(scope="module")
def whole_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one process."""
    output = tmp_path_factory.mktemp("whole")
    run_training(RunConfig.parse(settings(data, output, 4)), RankInfo(0, 1))
    return output


def test_a_run_resumes_in_another_layout(data: Path, whole_run: Path, tmp_path: Path) -> None:
    run_training(RunConfig.parse(settings(data, tmp_path, 2)), RankInfo(0, 1))
    run_ranks(resumed, 2, settings(data, tmp_path, 4, pp=2))
    one, other = weights(whole_run), weights(tmp_path)
    assert "model.layers.0.encoder.1.self_attn.q_proj.weight" in one
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-8, atol=1e-10)


def test_megatrons_own_is_refused() -> None:
    """NVIDIA's published folders say so in their arguments."""
    with pytest.raises(CheckpointError, match="retro-8b: Megatron's Retro models are not supported"):
        read_megatron_args({"num_layers": 32, "retro_add_retriever": True}, "retro-8b")


def test_what_asks_without_neighbors_is_refused(whole_run: Path) -> None:
    with pytest.raises(ConfigError, match="requires retrieved neighbors of each text"):
        load_inference_model(whole_run, kinds=("decoder", "encoder", "encoder-decoder", "reward model"))


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("hf", "retro is not supported by any HuggingFace family"),
        ("megatron", "retro is not supported with --to megatron"),
    ],
)
def test_others_formats_are_refused(whole_run: Path, tmp_path: Path, to: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        convert_checkpoint(whole_run, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()

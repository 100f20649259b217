"""Cards of an exported model: what they tell, and what they leave alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.model_config import ModelConfig

MODEL = ModelConfig(
    num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=32, max_position=16
)  # fmt: skip


def trained(run: Path, data: Path, **state: Any) -> Path:
    """A run's folder with a checkpoint of step 20, as far as an export looks."""
    settings = {
        "output": "runs/poet", "data": {"seq_length": 16, "order": "shuffled", "split": [9, 1, 0]},
        "optimizer": {"name": "adamw", "lr": 1e-3, "muon": {"rounds": 5}}, "train": {"seed": 7, "steps": 40}, "precision": "bf16",
    }  # fmt: skip
    told = {"settings": settings, "consumed_samples": 80, "read": {str(data): 60, "data/gone|away": 20}, **state}
    tensors = {
        f"weights/{name}": ShardedTensor(shape, [TensorBox((0,) * len(shape), torch.zeros(shape))])
        for name, shape in canonical_tensors(MODEL).items()
    }
    save_sharded_checkpoint(run / "checkpoints", 20, tensors, model=MODEL, state=told)
    lines = [{"step": step, "loss": 40 / step, "valid_loss": 3.0 if step == 10 else None} for step in range(1, 31)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    info = {"documents": 1234, "tokens": 5678, "license": "CC-BY-4.0", "tokenizer": {"path": "/tok"}}
    (tmp_path / "wiki.info").write_text(json.dumps(info))
    return tmp_path / "wiki"


def test_an_export_of_a_run_has_cards(tmp_path: Path, data: Path) -> None:
    convert_checkpoint(trained(tmp_path / "run", data), tmp_path / "hf", "hf")
    card = (tmp_path / "hf/README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["pipeline_tag"] == "text-generation"
    parameters = sum(math.prod(shape) for shape in canonical_tensors(MODEL).values())
    for told in (
        "# poet", f"| parameters | {parameters:,} |", "20 steps, 80 samples of 16 tokens: 1.28k tokens", "random weights",
        "2.0000 per token (perplexity 7.389), step 20", "3.0000 per token (perplexity 20.09), step 10", "| optimizer.lr | 0.001 |",
    ):  # fmt: skip
        assert told in text
    rows = (tmp_path / "hf/DATA_CARD.md").read_text()
    assert f"| {data} | 60 | 960 | 75.0 % | 1,234 | 5,678 | CC-BY-4.0 |" in rows
    assert "| data/gone/away | 20 | 320 | 25.0 % | unknown | unknown | unknown |" in rows
    assert "seed 7; split (train, valid, test): [9, 1, 0]; tokenizer: /tok" in rows


def test_a_readme_is_never_written_over(tmp_path: Path, data: Path) -> None:
    run = trained(tmp_path / "run", data)
    for existing, made in (("README.md", "MODEL_CARD.md"), ("DATA_CARD.md", "README.md")):
        assets = run / "assets"
        assets.mkdir(exist_ok=True)
        (assets / existing).write_text("mine")
        checkpoint = next((run / "checkpoints").iterdir())
        convert_checkpoint(_with_assets(checkpoint, assets, tmp_path / existing), tmp_path / f"hf-{existing}", "hf")
        assert (tmp_path / f"hf-{existing}" / existing).read_text() == "mine"
        assert "# poet" in (tmp_path / f"hf-{existing}" / made).read_text()
        (assets / existing).unlink()


def _with_assets(checkpoint: Path, assets: Path, folder: Path) -> Path:
    from mega_ckpt.store import Checkpoint

    opened = Checkpoint.open_folder(checkpoint)
    tensors = {
        key: ShardedTensor(opened.tensor_shape(key), [TensorBox((0,) * len(opened.tensor_shape(key)), opened.read_tensor(key))]) for key in opened.tensor_keys()
    }  # fmt: skip
    save_sharded_checkpoint(folder, 20, tensors, model=opened.model, state=opened.trainer_state, assets=assets)
    return folder


def test_weights_that_no_run_has_made_have_no_cards(tmp_path: Path, data: Path) -> None:
    convert_checkpoint(trained(tmp_path / "run", data, settings={}), tmp_path / "hf", "hf")
    assert not list((tmp_path / "hf").glob("*.md"))

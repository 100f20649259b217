"""A run of torch's own, saved by torch.distributed.checkpoint: mega makes its next step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from mega_ckpt.convert import Options, convert
from mega_ckpt.source import open_source
from mega_ckpt.store import Checkpoint
from mega_data.files.indexed_writer import IndexedWriter
from mega_trainer.config import RunConfig
from mega_trainer.ranks import Ranks
from mega_trainer.train import run

TOKENS = np.random.default_rng(0).integers(0, 48, (4, 17))
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}


def step(model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer, number: int) -> None:
    tokens = torch.tensor(TOKENS[number : number + 1])
    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    model.config.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_next_step_is_the_one_that_torch_makes(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for number in range(3):
        step(model, optimizer, number)
    save(model, optimizer, tmp_path / "theirs")
    step(model, optimizer, 3)
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_document(TOKENS[3].astype(np.uint16))
    convert(tmp_path / "theirs", tmp_path / "ours", "mega", verify=True)
    config = {
        "model": Checkpoint.open(tmp_path / "ours").model.model_dump(),
        "data": {"train": str(tmp_path / "tokens"), "seq_length": 16, "kind": "documents", "split": "1"},
        "batch": {"micro": 1, "global": 1},
        "train": {"steps": 4},
        "optimizer": {**ADAM, "betas": list(ADAM["betas"]), "clip_grad": 0.0},
        "lr_schedule": {"name": "constant"},
        "precision": "fp32",
        "checkpoint": {"load": str(tmp_path / "ours"), "async": False},
        "log": {"tensorboard": False},
        "device": "cpu",
        "output": str(tmp_path / "run"),
    }
    assert run(RunConfig.parse(config), Ranks()).step == 4
    found = open_source(tmp_path / "run")
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # the embedding
            torch.testing.assert_close(found.read(name), tensor, rtol=1e-4, atol=1e-6)
    made = Checkpoint.open(tmp_path / "run/checkpoints/step-00000004")
    for name, parameter in model.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(made.read(f"optimizer/{kind}/{name}"), optimizer.state[parameter][kind])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_that_are_cast_have_what_they_were_beside_them(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    step(model, optimizer, 0)
    save(model, optimizer, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "mega", options=Options(dtype=torch.bfloat16), verify=True)
    made = Checkpoint.open(tmp_path / "ours")
    assert (made.step, made.dtype("weights/lm_head.weight")) == (1, torch.bfloat16)
    assert torch.equal(made.read("optimizer/main/lm_head.weight"), model.lm_head.weight)

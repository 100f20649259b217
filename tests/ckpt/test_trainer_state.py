"""Moments beside models of the hub, by number: whose they are, and what is said where that cannot be told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.source import open_weight_source
from mega_ckpt.weight_source import MOMENTS, OptimizerNotConverted

SIZES = {"vocab_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, hidden_size=16, intermediate_size=24, num_key_value_heads=2, head_dim=4)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES,
            hidden_size=16,
            intermediate_size=24,
            num_key_value_heads=2,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, hidden_size=16, intermediate_size=24, num_key_value_heads=2, head_dim=4)
    ),
}


def decays(name: str) -> bool:
    return not ("bias" in name or "norm" in name or "ln_" in name)


def written(folder: Path, name: str, optimizer: str, *, groups: int) -> transformers.PreTrainedModel:
    """A model, and an optimizer's state of so many groups, whose moments are twice and three times the weights."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(folder)
    named = list(model.named_parameters())
    parts = [[p for n, p in named if decays(n)], [p for n, p in named if not decays(n)]]
    adam = torch.optim.AdamW([{"params": part} for part in parts] if groups == 2 else [p for _, p in named])
    for _, parameter in named:
        moments = {kind: parameter.detach() * times for kind, times in zip(MOMENTS, (2, 3), strict=True)}
        adam.state[parameter] = {"step": torch.tensor(7.0), **moments}
    torch.save(adam.state_dict(), folder / optimizer)
    return model


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"qwen3_moe"}))
@pytest.mark.parametrize(("optimizer", "groups"), [("optimizer.pt", 2), ("optimizer.bin", 1)])
def test_moments_are_those_of_their_weights(tmp_path: Path, name: str, optimizer: str, groups: int) -> None:
    written(tmp_path, name, optimizer, groups=groups)
    source = open_weight_source(tmp_path)
    assert isinstance(source, HfSource)
    training = source.read_training_state(torch.float32)
    assert training is not None
    assert training.step == 7
    for key in source.tensor_names():
        shape = source.tensor_shape(key)
        for kind, times in zip(MOMENTS, (2, 3), strict=True):
            assert torch.equal(
                training.tensors[kind].read_tensor_slice(key, (0,) * len(shape), shape), source.read_tensor(key) * times
            )


def test_moments_of_experts_that_are_held_together_stay_behind(tmp_path: Path) -> None:
    written(tmp_path, "qwen3_moe", "optimizer.pt", groups=2)
    source = open_weight_source(tmp_path)
    assert isinstance(source, HfSource)
    with pytest.raises(
        OptimizerNotConverted, match=r"the optimizer state has no exp_avg of model.layers.0.mlp.experts"
    ):
        source.read_training_state(torch.float32)


def test_moments_that_nobody_can_tell_apart_stay_behind(tmp_path: Path) -> None:
    model = written(tmp_path, "qwen3", "optimizer.pt", groups=2)
    path, source = tmp_path / "optimizer.pt", open_weight_source(tmp_path)
    assert isinstance(source, HfSource)
    broken = mock.patch.object(transformers.Qwen3ForCausalLM, "__init__", side_effect=RuntimeError("no such kernel"))
    missing = mock.patch.dict(sys.modules, {"transformers": None})
    for lacking, said in (
        (missing, "transformers, which defines the order of the parameters, is not installed"),
        (broken, r"cannot build the model \(no such kernel\)"),
    ):
        with lacking, pytest.raises(OptimizerNotConverted, match=said):
            source.read_training_state(torch.float32)
    parameters = list(model.parameters())
    for spoilt, said in (
        (
            torch.optim.AdamW([{"params": [one]} for one in parameters[:3]]),
            "of 3 parameters in 3 groups, but there are 25 weights",
        ),
        (torch.optim.AdamW(parameters[::-1]), "in another order than the weights"),
    ):
        for group in spoilt.param_groups:
            for one in group["params"]:
                spoilt.state[one] = {"step": torch.tensor(1.0), "exp_avg": one.detach(), "exp_avg_sq": one.detach()}
        torch.save(spoilt.state_dict(), path)
        with pytest.raises(OptimizerNotConverted, match=said):
            source.read_training_state(torch.float32)
    for content, said in (([1], "not a state dict of a torch optimizer"), ({"param_groups": print}, "print")):
        torch.save(content, path)
        with pytest.raises(OptimizerNotConverted, match=f"optimizer.pt.*{said}"):
            source.read_training_state(torch.float32)
    path.write_bytes(b"x")
    with pytest.raises(OptimizerNotConverted, match=r"optimizer.pt: damaged"):
        source.read_training_state(torch.float32)

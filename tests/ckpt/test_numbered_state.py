"""Moments by the number of a parameter: whose they are where that can be told, and only then."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.source import open_weight_source
from mega_ckpt.weight_source import OptimizerNotConverted
from mega_common.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_of(**more: Any) -> transformers.PreTrainedModel:
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))


def stepped(model: transformers.PreTrainedModel, given: Any) -> torch.optim.Optimizer:
    """An optimizer that was given so much of the model, after two steps."""
    optimizer = torch.optim.AdamW(given)
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]])).logits.square().mean().backward()
        optimizer.step()
    return optimizer


def lightning(folder: Path, model: transformers.PreTrainedModel, *optimizers: torch.optim.Optimizer) -> HfSource:
    """As Lightning saves it."""
    folder.mkdir(exist_ok=True)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    told = {"state_dict": state, "optimizer_states": [one.state_dict() for one in optimizers], "global_step": 2}
    torch.save(told, folder / "last.ckpt")
    model.config.save_pretrained(folder)
    source = open_weight_source(folder)
    assert isinstance(source, HfSource)
    return source


def check(source: HfSource, model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    training = source.read_training_state(torch.float32)
    assert training is not None
    assert training.step == 2
    for name, parameter in model.named_parameters():
        for kind in MOMENTS:
            found = training.tensors[kind].read_tensor_slice(name, (0,) * parameter.dim(), tuple(parameter.shape))
            assert torch.equal(found, optimizer.state[parameter][kind]), name


@pytest.mark.parametrize("tied", [False, True])
def test_all_parameters_in_one_group_are_the_weights_in_their_order(tmp_path: Path, tied: bool) -> None:
    model = model_of(tie_word_embeddings=tied)
    optimizer = stepped(model, model.parameters())
    check(lightning(tmp_path, model, optimizer), model, optimizer)


def test_names_beside_the_numbers_are_believed_in_any_groups_and_order(tmp_path: Path) -> None:
    model = model_of()
    named = [(f"model.{name}", one) for name, one in model.named_parameters()]
    groups = [{"params": named[5::-1], "weight_decay": 0.1}, {"params": named[6:], "weight_decay": 0.0}]
    optimizer = stepped(model, groups)
    check(lightning(tmp_path, model, optimizer), model, optimizer)


def test_names_for_numbers_as_fsdp_has_them(tmp_path: Path) -> None:
    model = model_of()
    optimizer = stepped(model, model.parameters())
    names = {number: f"model.{name}" for number, (name, _) in enumerate(model.named_parameters())}
    saved = optimizer.state_dict()
    named = {
        "state": {names[key]: one for key, one in saved["state"].items()},
        "param_groups": [{"params": list(names.values())}],
    }
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state, "optimizer": named}, tmp_path / "lit_model.pth")
    model.config.save_pretrained(tmp_path)
    source = open_weight_source(tmp_path)
    assert isinstance(source, HfSource)
    check(source, model, optimizer)


def test_numbers_that_may_be_of_any_parameter_stay_behind(tmp_path: Path) -> None:
    model = model_of()
    parameters = list(model.parameters())
    two = stepped(model, [{"params": parameters[::2]}, {"params": parameters[1::2]}])
    some = stepped(model, parameters[1:])
    told = {"of 12 parameters in 2 groups, but there are 12 weights": [two], "of 11 parameters in 1 groups, but there are 12 weights": [some],
            "in another order": [stepped(model, parameters[::-1])], "Adam moments": [stepped(model, parameters)] * 2}  # fmt: skip
    for number, (message, optimizers) in enumerate(told.items()):
        source = lightning(tmp_path / str(number), model, *optimizers)
        assert torch.equal(source.read_tensor("lm_head.weight"), model.lm_head.weight)
        with pytest.raises(OptimizerNotConverted, match=message):
            source.read_training_state(torch.float32)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def index_of(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "pytorch_optim.bin.index.json").write_text(content)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "runs a program": (lambda folder: torch.save({0: Evil()}, folder / "pytorch_optim-00001.bin"), "requires '(posix|os).system'"),
    "lacks a file": (lambda folder: (folder / "pytorch_optim-00001.bin").unlink(), "pytorch_optim-00001.bin is missing"),
    "lacks the groups": (lambda folder: (folder / "pytorch_optim_group.bin").unlink(), "pytorch_optim_group.bin is missing"),
    "is no state": (lambda folder: torch.save([1], folder / "pytorch_optim-00001.bin"), "have no optimizer state"),
    "has no groups": (lambda folder: torch.save([1], folder / "pytorch_optim_group.bin"), "not a state dict of a torch optimizer"),
    "is no index": (index_of("{}"), "not an index"),
    "is no JSON": (index_of("index"), "not an index"),
    "points elsewhere": (index_of(json.dumps({"weight_map": {"0": "../../evil.bin"}})), "evil.bin is missing"),
}  # fmt: skip


def test_what_is_wrong_beside_shards_of_colossalai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    optimizer = stepped(model, model.parameters())
    good, state = tmp_path / "good", optimizer.state_dict()
    for inside in ("modeling", "optimizer"):
        (good / inside).mkdir(parents=True)
    torch.save(model.state_dict(), good / "modeling/pytorch_model.bin")
    model.config.save_pretrained(good / "modeling")
    torch.save(state["state"], good / "optimizer/pytorch_optim-00001.bin")
    torch.save(state["param_groups"], good / "optimizer/pytorch_optim_group.bin")
    index_of(json.dumps({"weight_map": {"0": "pytorch_optim-00001.bin"}}))(good / "optimizer")
    source = open_weight_source(good / "modeling")
    assert isinstance(source, HfSource)
    check(source, model, optimizer)
    monkeypatch.chdir(tmp_path)
    for name, (spoil, message) in SPOILT.items():
        shutil.copytree(good, tmp_path / name)
        spoil(tmp_path / name / "optimizer")
        with pytest.raises(CheckpointError, match=message) as caught:
            open_weight_source(tmp_path / name / "modeling")
        assert "\n" not in caught.value.message
    assert not (tmp_path / "evil").exists()

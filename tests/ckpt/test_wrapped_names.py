"""Weights under names that other tools changed: wrappers of modules, prefixes, and tied embeddings kept under one of two names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import save_model
from safetensors.torch import load_file, save_file

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.formats.foreign_checkpoint import remove_module_wrapper_parts, strip_common_prefix
from mega_ckpt.formats.hf_source import HfSource
from mega_common.errors import CheckpointError

TIED, UNTIED = "llama-tied-linear", "llama-biases-head-llama3"

# How a tool renames `model.layers.0.self_attn.q_proj.weight` and its like.
RENAMED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "DDP of torch.compile": lambda name: f"module._orig_mod.{name}",
    "torch.compile of DDP": lambda name: f"_orig_mod.module.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
    "FSDP in each layer": lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module."),
    "activation checkpointing": lambda name: name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
    "torch.compile of the body": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "torch.compile of a layer": lambda name: name.replace(".layers.1.", ".layers.1._orig_mod."),
    "Lightning": lambda name: f"model.{name}",
    "Lightning of torch.compile": lambda name: f"model._orig_mod.{name}",
    "Lightning of DeepSpeed": lambda name: f"_forward_module.model.{name}",
    "verl": lambda name: f"actor_module.{name}",
}


def rename(folder: Path, change: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Rename the tensors of a folder of one file; returns them by their new names."""
    tensors = {change(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("case", [TIED, UNTIED])
@pytest.mark.parametrize("tool", RENAMED)
def test_names_that_a_tool_changed_are_read(tmp_path: Path, case: str, tool: str) -> None:
    plain, changed = (save_model(tmp_path / name, case) for name in ("plain", "changed"))
    rename(changed, RENAMED[tool])
    one, other = HfSource(plain), HfSource(changed)
    assert list(one.tensor_names()) == list(other.tensor_names())
    assert all(torch.equal(one.read_tensor(name), other.read_tensor(name)) for name in list(one.tensor_names()))


def test_what_is_written_from_them_has_the_models_names(tmp_path: Path) -> None:
    plain, changed = (save_model(tmp_path / name, UNTIED) for name in ("plain", "changed"))
    rename(changed, RENAMED["torch.compile"])
    convert_checkpoint(changed, tmp_path / "mega", "mega", verify=True)
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf", verify=True)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == load_file(plain / "model.safetensors").keys()


def test_a_pickle_of_a_wrapped_model_is_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", UNTIED)
    before = {name: HfSource(folder).read_tensor(name).clone() for name in list(HfSource(folder).tensor_names())}
    torch.save(
        {f"module.{name}": one for name, one in load_file(folder / "model.safetensors").items()},
        folder / "pytorch_model.bin",
    )
    (folder / "model.safetensors").unlink()
    assert all(torch.equal(HfSource(folder).read_tensor(name), tensor) for name, tensor in before.items())


def test_a_name_that_is_there_wrapped_and_plain_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", UNTIED)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "module.model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight twice"):
        HfSource(folder)


def test_names_that_cannot_be_read_are_shown(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", UNTIED)
    rename(folder, lambda name: name.replace("self_attn", "attn"))
    with pytest.raises(CheckpointError) as caught:
        HfSource(folder)
    assert "self_attn" in caught.value.message
    assert "model.layers.0.attn.k_proj" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("module.a.weight", "a.weight"),
        ("a.module.b", "a.b"),
        ("a._orig_mod.b._fsdp_wrapped_module.c", "a.b.c"),
        ("submodule.a", "submodule.a"),
        ("a.my_orig_mod.b", "a.my_orig_mod.b"),
        ("modules.0.a", "modules.0.a"),
    ],
)
def test_only_whole_parts_of_a_name_are_wrappers(name: str, bare: str) -> None:
    assert remove_module_wrapper_parts(name) == bare


def test_no_prefix_is_stripped_where_names_are_as_expected() -> None:
    assert strip_common_prefix({"a.b": 1, "c": 2}, {"a.b", "b", "c"}) == {"a.b": 1, "c": 2}  # type: ignore[dict-item, comparison-overlap]


HEADS = [
    ("llama-tied-linear", "model.embed_tokens.weight", "lm_head.weight"),
    ("gpt2", "transformer.wte.weight", "lm_head.weight"),
    ("gemma2", "model.embed_tokens.weight", "lm_head.weight"),
    ("cohere", "model.embed_tokens.weight", "lm_head.weight"),
    ("cohere2", "model.embed_tokens.weight", "lm_head.weight"),
    ("falcon", "transformer.word_embeddings.weight", "lm_head.weight"),
    ("bert", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("roberta", "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
    ("t5", "shared.weight", "lm_head.weight"),
    ("t5", "shared.weight", "encoder.embed_tokens.weight"),
    ("t5", "shared.weight", "decoder.embed_tokens.weight"),
]


@pytest.mark.parametrize(("case", "embedding", "head"), HEADS)
def test_a_tied_embedding_may_be_stored_under_another_of_its_names_alone(
    tmp_path: Path, case: str, embedding: str, head: str
) -> None:
    plain, changed = (save_model(tmp_path / name, case) for name in ("plain", "changed"))
    assert embedding in load_file(plain / "model.safetensors")
    assert json.loads((plain / "config.json").read_text()).get("tie_word_embeddings", True)
    rename(changed, lambda name: head if name == embedding else name)
    one, other = HfSource(plain), HfSource(changed)
    assert all(torch.equal(one.read_tensor(name), other.read_tensor(name)) for name in list(one.tensor_names()))
    convert_checkpoint(changed, tmp_path / "mega", "mega", verify=True)
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf", verify=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (changed / "model.safetensors").read_bytes()

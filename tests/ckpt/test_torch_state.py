"""Folders of HuggingFace's older days, whose weights are pickles of torch: read without running anything."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import save_model
from safetensors.torch import load_file

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.formats.torch_archive import load_state_tensors
from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError

BIN = "pytorch_model.bin"
CASES = ["gpt2", "gpt_neox", "llama-tied-linear"]


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("torch") / "hf", request.param, dtype=torch.float16)


def state_of(folder: Path) -> dict[str, Any]:
    """As models were saved: tied embeddings twice, in one storage, and masks that are no weights."""
    state: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    if kind == "gpt2":
        state |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 32, 32).bool().tril() for i in range(3)}
        state["lm_head.weight"] = state["transformer.wte.weight"]
        state["transformer.wpe.weight"] = state["transformer.wpe.weight"].t().contiguous().t()  # strides of its own
    if kind == "llama":
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def single(state: dict[str, Any], out: Path) -> None:
    torch.save(state, out / BIN)


def old(state: dict[str, Any], out: Path) -> None:
    torch.save(state, out / BIN, _use_new_zipfile_serialization=False)


def sharded(state: dict[str, Any], out: Path) -> None:
    names = list(state)
    files = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for file, held in files.items():
        torch.save({name: state[name] for name in held}, out / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (out / f"{BIN}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("write", [single, old, sharded])
def test_pickled_weights_are_those_of_safetensors(
    write: Callable[[dict[str, Any], Path], None], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    write(state_of(folder), tmp_path / "bin")
    found, expected = open_weight_source(tmp_path / "bin"), open_weight_source(folder)
    assert found.tensor_names() == expected.tensor_names()
    assert all(torch.equal(found.read_tensor(name), expected.read_tensor(name)) for name in expected.tensor_names())
    convert_checkpoint(tmp_path / "bin", tmp_path / "mega", "mega", verify=True)
    convert_checkpoint(tmp_path / "mega", tmp_path / "out", "hf", verify=True)
    convert_checkpoint(tmp_path / "bin", tmp_path / "direct", "hf", verify=True)
    for out in ("out", "direct"):
        made, disk = load_file(tmp_path / out / "model.safetensors"), load_file(folder / "model.safetensors")
        assert made.keys() == disk.keys()
        assert all(torch.equal(tensor, disk[name]) for name, tensor in made.items())
        assert not [path.name for path in (tmp_path / out).iterdir() if BIN in path.name]
        assert json.loads((tmp_path / out / "config.json").read_text()) == json.loads(
            (folder / "config.json").read_text()
        )


def test_safetensors_win(folder: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(folder, tmp_path / "both"))
    torch.save({"other": torch.zeros(1)}, both / BIN)
    assert open_weight_source(both).tensor_names() == open_weight_source(folder).tensor_names()


@pytest.mark.parametrize("write", [single, old])
def test_tensors_stay_in_the_file_until_they_are_used(
    write: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    write({"a": torch.arange(4.0), "b": torch.arange(8).half()}, tmp_path)
    tensors, content = load_state_tensors(tmp_path / BIN), (tmp_path / BIN).read_bytes()
    later = content.replace(torch.arange(4.0).numpy().tobytes(), torch.full((4,), 7.0).numpy().tobytes())
    with open(tmp_path / BIN, "r+b") as file:
        file.write(later)
    assert torch.equal(tensors["a"].read(), torch.full((4,), 7.0))
    assert torch.equal(tensors["b"].read(), torch.arange(8).half())


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "runs a program": (lambda p: torch.save({"a": Evil()}, p), "requires '(posix|os).system', which is not allowed"),
    "runs a program, in the old format": (
        lambda p: torch.save({"a": Evil()}, p, _use_new_zipfile_serialization=False), "requires '(posix|os).system'",
    ),
    "is of a trainer": (lambda p: torch.save({"model": {"a": torch.ones(1)}, "step": 3}, p), "must be a state dict of a model"),
    "is text": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1"), "is a Git LFS pointer, not the file itself"),
    "is empty": (lambda p: p.write_bytes(b""), "damaged"),
    "is cut off": (lambda p: old_and_cut(p, -3), r"truncated: \d+ bytes instead of \d+"),
    "lacks its storages": (lambda p: old_and_cut(p, -24), "damaged: the length of storage|truncated"),
}  # fmt: skip


def old_and_cut(path: Path, end: int) -> None:
    torch.save({"a": torch.arange(4.0)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:end])


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_no_state_is_told_in_a_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    change, told = DAMAGE[case]
    change(tmp_path / BIN)
    with pytest.raises(CheckpointError, match=f"{BIN}: .*({told})") as caught:
        load_state_tensors(tmp_path / BIN)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "evil").exists()

"""GGUF files: the weights and the config.json that the model had before, each type decoded as its package does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_models import write_gguf
from hf_models import save_model

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import is_equivalent_config
from mega_ckpt.formats.gguf_file import open_gguf_model
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError

Kind = gguf.GGMLQuantizationType
CASES = [
    "llama", "llama-3.1", "llama-tied-linear", "mixtral", "qwen2", "qwen3", "qwen3-yarn", "qwen2_moe",
    "qwen3_moe", "gemma2-plain", "gemma3-plain", "phi3", "phi3-long", "gpt_oss-32",
]  # fmt: skip


def settings(raw: dict[str, Any]) -> Callable[[gguf.GGUFWriter, str], None]:
    """The metadata and tensors of a rope that is not the usual one."""

    def add(writer: gguf.GGUFWriter, arch: str) -> None:
        rope = raw["rope_parameters"]
        kind = rope.get("rope_type", "default")
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if kind == "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(1.25 if "attention_factor" in rope else 1.2649110640673518)
        if arch == "gpt-oss":
            writer.add_float32("gpt-oss.rope.scaling.yarn_beta_fast", 32.0)
            writer.add_float32("gpt-oss.rope.scaling.yarn_beta_slow", 1.0)

    return add


def factors(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    rope = raw["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**raw)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    head = raw["head_dim"]
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2).float() / head))
    return {"rope_freqs.weight": plain / scaled}


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_what_it_was_before(case: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", case)
    raw = json.loads((folder / "config.json").read_text())
    path = write_gguf(folder, tmp_path / "model.gguf", more=settings(raw), tensors=factors(raw))
    found, expected = open_weight_source(path), HfSource(folder)
    assert is_equivalent_config(found.model, expected.model)
    for name in expected.tensor_names():
        close = "gemma" in case and name.endswith("norm.weight")  # one was added, and is taken away
        assert torch.allclose(found.read_tensor(name), expected.read_tensor(name), rtol=0, atol=3e-7 if close else 0), (
            name
        )
    convert_checkpoint(path, tmp_path / "mega", "mega", verify=True)
    convert_checkpoint(tmp_path / "mega", tmp_path / "out", "hf", verify=True)
    assert is_equivalent_config(HfSource(tmp_path / "out").model, expected.model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "TQ2_0", "Q4_K", "IQ4_XS", "IQ2_XXS", "MXFP4"])  # fmt: skip
def test_each_type_is_decoded_as_its_package_does(kind: str, tmp_path: Path) -> None:
    """In rows of 512, of which a decoder takes some at a time."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    codes = torch.randint(0, 120, (600, 512 // block * size), dtype=torch.uint8).numpy()
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", codes, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = open_gguf_model(tmp_path / "x.gguf").tensors["x"]
    expected = torch.from_numpy(gguf.dequantize(codes, Kind[kind]))
    plain = {"F16": torch.float16, "BF16": torch.bfloat16, "MXFP4": torch.bfloat16}.get(kind, torch.float32)
    assert (stored.dtype, stored.shape) == (plain, (600, 512))
    assert torch.equal(stored.read().float().view(torch.int32), expected.float().view(torch.int32))


def small(tmp_path: Path, **more: Any) -> Path:
    folder = save_model(tmp_path / "hf", "llama")
    return write_gguf(folder, tmp_path / "model.gguf", **more)


def add(key: str, value: Any) -> Callable[[gguf.GGUFWriter, str], None]:
    def more(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return more


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that is not known": ({"more": add("llama.attention.curved", 1.5)}, "llama.attention.curved = 1.5 is not supported"),
    "a part of each head is rotated": ({"more": add("llama.rope.scaling.type", "spiral")}, "rope_type = 'spiral' is not supported"),
    "frequencies of its own": (
        {"tensors": {"rope_freqs.weight": torch.tensor([1.0, 3.0, 2.0])}}, "must be Llama 3's frequency scaling",
    ),
    "a tensor that is not known": (
        {"tensors": {"blk.1.attn_gate.weight": torch.ones(2)}}, "the tensor blk.1.attn_gate.weight is not part of a llama model with this metadata",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, tmp_path: Path) -> None:
    more, told = REFUSED[case]
    with pytest.raises(CheckpointError, match=told):
        open_weight_source(small(tmp_path, **more))


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="the GGUF architecture 'mamba' is not supported"):
        open_weight_source(tmp_path / "x.gguf")


@pytest.mark.parametrize("end", [0, 3, 40, 700, -1])
def test_a_file_that_is_cut_off(end: int, tmp_path: Path) -> None:
    path = small(tmp_path)
    path.write_bytes(path.read_bytes()[:end] if end != -1 else path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match=r"model\.gguf: damaged, or not a supported GGUF file"):
        open_weight_source(path)


def test_a_folder_with_a_file_and_one_with_two(tmp_path: Path) -> None:
    path = small(tmp_path)
    (tmp_path / "one").mkdir()
    shutil.copy(path, tmp_path / "one")
    assert open_weight_source(tmp_path / "one").model == open_weight_source(path).model
    shutil.copy(path, tmp_path / "one" / "other.gguf")
    with pytest.raises(CheckpointError, match=r"has several GGUF files: model\.gguf, other\.gguf"):
        open_weight_source(tmp_path / "one")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    whole = small(tmp_path)
    reader = gguf.GGUFReader(whole)
    names = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found, expected = open_weight_source(tmp_path / names[1]), open_weight_source(whole)
    assert all(torch.equal(found.read_tensor(name), expected.read_tensor(name)) for name in expected.tensor_names())
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: missing"):
        open_weight_source(tmp_path / names[0])

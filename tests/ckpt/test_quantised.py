"""Quantised folders are read as the numbers that they stand for, exactly."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import content
from quantised_models import (
    E4M3,
    deepseek,
    fp8,
    gpt_oss,
    group,
    integers,
    quantise,
    random_scales,
    spread,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.quantized_weights import dequantize_tensors
from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError

BLOCK = (16, 16)


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    return deepseek(tmp_path_factory.mktemp("fp8") / "v3")


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss(tmp_path_factory.mktemp("mxfp4") / "oss")


def export(folder: Path, out: Path) -> dict[str, Tensor]:
    """What stands in a folder that was made of it by way of a mega checkpoint."""
    convert_checkpoint(folder, out / "mega", "mega", verify=True)
    convert_checkpoint(out / "mega", out / "hf", "hf", verify=True)
    convert_checkpoint(folder, out / "direct", "hf", verify=True)
    assert content(out / "hf") == content(out / "direct")
    raw = json.loads((out / "hf" / "config.json").read_text())
    assert raw["dtype"] == "bfloat16"
    assert raw == {
        key: value
        for key, value in json.loads((folder / "config.json").read_text()).items()
        if key != "quantization_config"
    }
    return load_file(out / "hf" / "model.safetensors")


def equal_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    bits = {name: (one.dtype, one.contiguous().view(torch.uint8)) for name, one in found.items()}
    return all(
        dtype == expected[name].dtype and torch.equal(held, expected[name].contiguous().view(torch.uint8))
        for name, (dtype, held) in bits.items()
    )


def test_deepseeks_blocks_at_the_edges_too(v3: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, values = v3
    stored = load_file(folder / "model.safetensors")
    latent = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert (stored[latent].shape, stored[f"{latent}_scale_inv"].shape) == ((18, 24), (2, 2))  # blocks of 16, cut off
    assert HfSource(folder).quantization == "fp8, a scale for 16 x 16 weights; read as bfloat16"
    assert equal_tensors(export(folder, tmp_path), values)


def test_blocks_as_transformers_decodes_them(tmp_path: Path) -> None:
    """Its decoder wants blocks that divide the matrix."""
    decode = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)._dequantize_one
    folder, _ = deepseek(tmp_path / "v3", (2, 2))
    stored, source = load_file(folder / "model.safetensors"), HfSource(folder)
    for name in ("self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "mlp.gate_proj"):
        name = f"model.layers.0.{name}.weight"
        expected = decode(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
        assert torch.equal(source.read_tensor(name), expected)


def test_mxfp4_as_transformers_decodes_it(oss: Path, tmp_path: Path) -> None:
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    stored = load_file(oss / "model.safetensors")
    values = {name: value for name, value in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in stored:
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            values[base] = decode(stored[name], stored[f"{base}_scales"])
    assert equal_tensors(export(oss, tmp_path), values)


def test_every_code_and_exponent_of_mxfp4() -> None:
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    tensors = {"x_blocks": stored_of(blocks), "x_scales": stored_of(scales)}
    found, _ = dequantize_tensors(tensors, {"quantization_config": {"quant_method": "mxfp4"}}, Path("folder"))
    with pytest.raises(CheckpointError, match="a scale of x is not finite"):  # 255
        found["x"].read()
    scales[0, 255] = 0
    assert torch.equal(found["x"].read().contiguous().view(torch.int16), decode(blocks, scales).view(torch.int16))


def stored_of(tensor: Tensor) -> LazyTensor:
    return LazyTensor(Path("file"), tensor.dtype, tuple(tensor.shape), lambda: tensor)


def tensor_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """With scales of activations beside, which change no weight."""
    block = (weight.shape[0], weight.shape[1])
    parts, value = fp8(weight, block, random_scales(block, block, torch.bfloat16))
    return {
        "weight": parts["weight"],
        "weight_scale": parts["weight_scale_inv"][0],
        "input_scale": torch.ones(1),
    }, value


def channel_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    block = (1, weight.shape[1])
    parts, value = fp8(weight, block, random_scales(tuple(weight.shape), block, torch.bfloat16))
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, value


def block_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts, value = fp8(weight, BLOCK, random_scales(tuple(weight.shape), BLOCK, torch.bfloat16))
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, value


def power_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Scales that are exponents: ue8m0."""
    powers = torch.randint(120, 130, random_scales(tuple(weight.shape), BLOCK).shape, dtype=torch.uint8)
    parts, value = fp8(weight, BLOCK, (powers.float() - 127).exp2())
    return parts | {"weight_scale_inv": powers.view(torch.float8_e8m0fnu)}, value


Change = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
FP8 = {"num_bits": 8, "type": "float"}
SCHEMES: dict[str, tuple[dict[str, Any], Change, str]] = {
    "int4 in groups": (
        group("pack-quantized", group_size=8), lambda w: integers(w, 4, (1, 8), pack=True), "int4 by group",
    ),
    "int4 in groups, asymmetric": (
        group("pack-quantized", group_size=8, symmetric=False), lambda w: integers(w, 4, (1, 8), pack=True, zero=True), "int4",
    ),
    "int4 in groups, by activation order": (
        group("pack-quantized", group_size=8, actorder="group"), lambda w: integers(w, 4, (1, 8), pack=True, order=True), "int4",
    ),
    "int8, packed, a channel": (
        group("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
        lambda w: integers(w, 8, (1, w.shape[1]), pack=True, zero=True), "int8 by channel",
    ),
    "int8, a channel": (
        group("int-quantized", num_bits=8, strategy="channel"), lambda w: integers(w, 8, (1, w.shape[1]), pack=False), "int8",
    ),
    "int8, asymmetric": (
        group("naive-quantized", num_bits=8, strategy="channel", symmetric=False),
        lambda w: integers(w, 8, (1, w.shape[1]), pack=False, zero=True), "int8",
    ),
    "fp8, a tensor": (group("float-quantized", **FP8, strategy="tensor"), tensor_fp8, "float8 by tensor, scales of activations left out"),
    "fp8, a channel": (group("float-quantized", **FP8, strategy="channel"), channel_fp8, "float8 by channel"),
    "fp8, a block": (group("float-quantized", **FP8, strategy="block", block_structure=[16, 16]), block_fp8, "float8 by block"),
    "fp8 without blocks": ({"quant_method": "fp8", "activation_scheme": "static"}, tensor_fp8, "a scale for each tensor"),
    "fp8, ue8m0": ({"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}, power_fp8, "16 x 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMES)
def test_what_codes_stand_for(case: str, tmp_path: Path) -> None:
    scheme, change, said = SCHEMES[case]
    folder, values = quantise(tmp_path / "source", "llama", scheme, change, "_proj")
    assert said in str(HfSource(folder).quantization)
    assert equal_tensors(export(folder, tmp_path), values)


def edit(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, raw["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


SCALE = "model.layers.0.self_attn.o_proj.weight_scale_inv"
REFUSED: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "no scale": (lambda t, _: t.pop(SCALE), f"model.safetensors: quantized {SCALE[:-10]} requires the tensor {SCALE}, which is missing"),
    "scale of another shape": (lambda t, _: t.update({SCALE: torch.ones(2, 3)}), r"o_proj.weight \[24, 32\] have shape \[2, 3\], but blocks of 16 x 16 require \[2, 2\]"),
    "scale not finite": (lambda t, _: t[SCALE].fill_(torch.nan), "model.safetensors: a scale of .*o_proj.weight is not finite"),
    "scale without codes": (lambda t, _: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "the tensor model.norm.weight_scale_inv is not part of"),
    "block size is a word": (lambda _, s: s.update(weight_block_size="128"), "quantization_config of config.json is damaged or not supported"),
    "gptq": (lambda _, s: s.update(quant_method="gptq"), "quantized with 'gptq' are not supported"),
    "bitsandbytes": (lambda _, s: s.update(quant_method="bitsandbytes"), "quantized with 'bitsandbytes'"),
    "sparse": (lambda _, s: s.update(group("dense"), sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format = 'sparse-24-bitmask' are not supported"),
    "rotated": (lambda _, s: s.update(group("int-quantized"), transform_config={"config_groups": {}, "x": 1}), "transform_config"),
    "marlin": (lambda _, s: s.update(group("marlin-24")), "the format 'marlin-24' of compressed-tensors are not supported"),
    "activations only": (lambda _, s: s.update(group("dense") | {"config_groups": {"g": {"targets": ["Linear"], "weights": None}}}), "for activations only"),
    "5 bits": (lambda _, s: s.update(group("pack-quantized", num_bits=5)), "5 bits per weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_or_not_plain_is_told_in_a_sentence(
    case: str, v3: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(v3[0], tmp_path / "hf"))
    change, told = REFUSED[case]
    edit(folder, change)
    with pytest.raises(CheckpointError, match=f"(?s){told}") as caught:
        convert_checkpoint(folder, tmp_path / "out", "mega")
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_mxfp4_without_its_exponents(oss: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(oss, tmp_path / "hf"))
    name = "model.layers.1.mlp.experts.down_proj"
    edit(folder, lambda tensors, _: tensors.pop(f"{name}_scales"))
    with pytest.raises(CheckpointError, match=f"{name} requires the tensor {name}_scales, which is missing"):
        open_weight_source(folder)


SCHEME = group("int-quantized", num_bits=8, strategy="channel")
LOST: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "scale": (lambda t, _: t.pop("model.layers.1.mlp.up_proj.weight_scale"), "quantized .*up_proj.weight requires the tensor .*weight_scale, which is missing"),
    "group": (lambda _, s: s["config_groups"].update(g={**s["config_groups"]["group_0"], "targets": ["A"]}, group_0={**s["config_groups"]["group_0"], "targets": ["B"]}), "config_groups without a group for model.layers"),
    "index": (lambda t, _: t.update({"model.layers.1.mlp.up_proj.weight_g_idx": torch.arange(24)}), "up_proj.weight_g_idx conflicts with the shape"),
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST)
def test_codes_are_never_taken_for_weights(lost: str, tmp_path: Path) -> None:
    change = lambda w: integers(w, 8, (1, w.shape[1]), pack=False)  # noqa: E731
    folder, _ = quantise(tmp_path / "hf", "llama", SCHEME, change, "_proj")
    edit(folder, LOST[lost][0])
    with pytest.raises(CheckpointError, match=LOST[lost][1]):
        convert_checkpoint(folder, tmp_path / "out", "mega")


def test_a_slice_decodes_no_more_than_once_in_a_row(
    v3: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name = HfSource(v3[0]), "model.layers.0.self_attn.o_proj.weight"
    whole = source.read_tensor(name)
    assert source.read_tensor(name).data_ptr() == whole.data_ptr()
    assert torch.equal(source.read_tensor_slice(name, (3, 5), (7, 9)), v3[1][name][3:10, 5:14])


LAYERS, WIDTH, FFN = 10, 512, 2048


def _peak_of_converting(folder: Path, out: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    status = Path("/proc/self/status")
    read = lambda key: 1024 * int(status.read_text().split(f"{key}:")[1].split()[0])  # noqa: E731
    convert_checkpoint(deepseek(out.with_name("warm"))[0], out.with_name("warmed"), "mega")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = read("VmRSS")
    convert_checkpoint(folder, out, "mega")
    pipe.send(read("VmHWM") - before)


def test_memory_for_a_few_tensors_not_for_the_model(tmp_path: Path) -> None:
    """P13: 32 M quantised weights, 64 MB in bf16; the largest tensor has 2 MB, and what is written is 4 GB at most."""
    block = (128, 128)
    codes = torch.randint(0, 126, (FFN, WIDTH), dtype=torch.uint8).view(E4M3)
    tensors = {
        "model.embed_tokens.weight": torch.zeros(64, WIDTH).bfloat16(),
        "model.norm.weight": torch.ones(WIDTH).bfloat16(),
    }
    shapes = {f"mlp.{n}_proj": (FFN, WIDTH) for n in ("gate", "up")} | {"mlp.down_proj": (WIDTH, FFN)}
    shapes |= {f"self_attn.{n}_proj": (WIDTH, WIDTH) for n in "qkvo"}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            key = f"model.layers.{layer}.{name}.weight"
            tensors[key] = codes.flatten()[: shape[0] * shape[1]].view(shape).clone()
            tensors[f"{key}_scale_inv"] = random_scales(shape, block)
        for name in ("input", "post_attention"):
            tensors[f"model.layers.{layer}.{name}_layernorm.weight"] = torch.ones(WIDTH).bfloat16()
    raw = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)},
    }  # fmt: skip
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_peak_of_converting, args=(folder, tmp_path / "out", send)
    )
    process.start()
    process.join()
    assert receive.poll()
    assert receive.recv() < 10 * codes.numel() * 2
    source, name = open_weight_source(tmp_path / "out"), f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    expected = tensors[name].float() * spread(tensors[f"{name}_scale_inv"], (WIDTH, FFN), block)
    assert torch.equal(source.read_tensor(name), expected.bfloat16())

"""Quantized exports: transformers and mega read the same weights, which are close to the originals."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import save_model
from safetensors.torch import load_file, save_file

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.formats.calibrated_rounding import InputSecondMoments
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.safetensors_file import SafetensorsFile
from mega_ckpt.formats.weight_quantization import make_quantizer
from mega_common.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="the library that loads the folders")
SIZES = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
# Largest root mean square error of the weights, as a share of theirs: normal weights, by the published formats.
ERRORS = {"fp8": 0.03, "fp8-block": 0.03, "int8": 0.01, "int4": 0.09, "int4-asym": 0.09, "mxfp4": 0.15}

COMPRESSED = ("weight", "weight_scale", "weight_zero_point")  # what compressed-tensors makes the codes of


def save(folder: Path, kind: str, **settings: Any) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **{**SIZES, **settings}), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save(root / "llama", "llama", tie_word_embeddings=True),
        "qwen2": save(root / "qwen2", "qwen2"),
        "phi3": save(root / "phi3", "phi3", pad_token_id=0),  # several canonical weights in one matrix
    }


def export(source: Path, out: Path, quantize: str, to: str = "hf", **options: Any) -> HfSource:
    convert_checkpoint(source, out, to, options=ConvertOptions(quantize=quantize, **options))
    return HfSource(out)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("quantize", ERRORS)
def test_transformers_and_mega_read_the_same_weights_which_are_close(
    models: dict[str, Path], kind: str, quantize: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="with which transformers loads the folders")
    found, original = export(models[kind], tmp_path / "out", quantize), HfSource(models[kind])
    load = transformers.AutoModelForCausalLM.from_pretrained
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = load(tmp_path / "out", quantization_config=settings, dtype=torch.float32).state_dict()
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, disk in found._table.items():
        values = found._disk[name].read()
        torch.testing.assert_close(values, theirs[name].to(values.dtype), rtol=0, atol=0)
        quantized = "_proj" in name and name.endswith("weight")
        assert (f"{name.removesuffix('weight')}weight_scale" in written) == quantized
        exact = original._disk[disk.name].read().float()
        error = float((values.float() - exact).norm() / exact.norm()) if quantized else (values - exact).abs().max()
        assert error <= (ERRORS[quantize] if quantized else 0), name
    tokens = torch.arange(20)[None]
    # compressed-tensors 0.20 expects unpacked shapes of zero points when a model is loaded without dequantization.
    options = {"quantization_config": settings} if quantize == "int4-asym" else {}
    with torch.no_grad():
        compressed = load(tmp_path / "out", dtype=torch.bfloat16, **options)(tokens).logits
        exact = load(models[kind], dtype=torch.bfloat16)(tokens).logits
    assert (compressed - exact).abs().mean() < 5 * ERRORS[quantize] * exact.abs().mean()
    card = (tmp_path / "out" / "README.md").read_text()
    assert found.quantization is not None
    assert "rounded to the nearest without calibration data" in card


@pytest.mark.parametrize("calibrated", [False, True])
def test_weights_that_groups_of_int4_can_express_stay_the_same(*, calibrated: bool) -> None:
    rng = torch.Generator().manual_seed(4)
    codes, zeros = torch.randint(16, (24, 4, 32), generator=rng), torch.randint(16, (24, 4, 1), generator=rng)
    codes[..., 0], codes[..., 7] = 0, 15
    scales = 0.01 + torch.rand(24, 4, 1, generator=rng).bfloat16()
    weights = ((codes - zeros) * scales.float()).flatten(1)
    inputs = torch.randn(200, 128, generator=rng)
    moments = InputSecondMoments.prepare(inputs.T @ inputs) if calibrated else None
    parts = make_quantizer("int4-asym", {"weight": (24, 128)}).encode(weights, torch.bfloat16, moments)
    assert torch.equal(parts["weight_scale"], scales.squeeze(-1))
    for part, expected, words in (
        ("weight_packed", codes.flatten(1), parts["weight_packed"]),
        ("weight_zero_point", zeros.squeeze(-1).T, parts["weight_zero_point"].T),
    ):
        found = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)
        assert torch.equal(found, expected.int()), part


def test_compressed_tensors_packs_int4_and_its_zero_points_the_same_way(tmp_path: Path) -> None:
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    schemes = importlib.import_module("compressed_tensors.quantization")
    compressor = pack_quantized.PackedQuantizationCompressor
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 12}  # 12 rows: an int32 has 8 zero points
    original = HfSource(save(tmp_path / "in", "llama", **heads))
    found, file = export(tmp_path / "in", tmp_path / "out", "int4-asym"), tmp_path / "out" / "model.safetensors"
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = schemes.QuantizationScheme.model_validate(section["config_groups"]["group_0"])
    published = schemes.preset_name_to_scheme("W4A16_ASYM", ["Linear"]).weights
    assert scheme.weights == published.model_copy(update={"group_size": 32, "observer": "minmax"})

    written = load_file(file)
    theirs, expected = dict(written), {}
    layers = [name.removesuffix("weight_packed") for name in written if name.endswith("weight_packed")]
    assert len(layers) == 14
    for layer in layers:
        parts = {name.removeprefix(layer): tensor for name, tensor in written.items() if name.startswith(layer)}
        values = compressor.decompress(parts, scheme)
        assert torch.equal(found.read_tensor(f"{layer}weight"), values["weight"])
        again = compressor.compress({name: values[name] for name in COMPRESSED}, scheme)
        assert all(torch.equal(again[name], part) for name, part in parts.items())

        weight = original.read_tensor(f"{layer}weight")
        groups = weight.unflatten(1, (-1, 32))
        scale, zero = schemes.utils.calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        values = dict(zip(COMPRESSED, (weight, scale, zero), strict=True))
        parts = compressor.compress(values, scheme)
        expected[f"{layer}weight"] = compressor.decompress(parts, scheme)["weight"]
        theirs |= {f"{layer}{name}": part for name, part in parts.items()}

    save_file(theirs, file)
    convert_checkpoint(tmp_path / "out", tmp_path / "mega", "mega", verify=True)
    convert_checkpoint(tmp_path / "mega", tmp_path / "plain", "hf")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(plain[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_mlx_weights_are_codes_with_a_scale_and_an_offset(
    models: dict[str, Path], quantize: str, tmp_path: Path
) -> None:
    found, original = export(models["llama"], tmp_path / "out", quantize, "mlx"), HfSource(models["llama"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert SafetensorsFile.open_file(tmp_path / "out" / "model.safetensors").header.metadata == {"format": "mlx"}
    bits = int(quantize.removeprefix("int"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"] == {
        "group_size": 64, "bits": bits, "mode": "affine",
    }  # fmt: skip
    name = "model.layers.1.mlp.down_proj"
    words = written[f"{name}.weight"].view(torch.int32).tolist()
    codes = torch.tensor(
        [[(word >> bits * at) & (1 << bits) - 1 for word in row for at in range(32 // bits)] for row in words]
    )
    scales, biases = (written[f"{name}.{part}"].float().repeat_interleave(64, 1) for part in ("scales", "biases"))
    expected = (codes * scales + biases).bfloat16()
    assert torch.equal(found.read_tensor(f"{name}.weight"), expected)
    exact = original.read_tensor(f"{name}.weight").float()
    assert float((expected - exact).norm() / exact.norm()) < {4: 0.12, 8: 0.01}[bits]


def test_small_files_hold_the_same_tensors(models: dict[str, Path], tmp_path: Path) -> None:
    export(models["qwen2"], tmp_path / "one", "int4")
    export(models["qwen2"], tmp_path / "many", "int4", max_shard=60_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    split = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("case", "to", "options", "expected"),
    [
        ("gpt2", "hf", {"quantize": "fp8"}, "requires a matrix (out, in) for each linear layer"),
        ("llama", "hf", {"quantize": "int4"}, "has 24 columns, but --quantize int4 requires a multiple of 32"),
        ("llama", "hf", {"quantize": "fp8-block"}, "use --quantize fp8"),
        ("llama", "hf", {"quantize": "q8_0"}, "--quantize q8_0 is not supported with --to hf"),
        ("llama", "mega", {"quantize": "fp8"}, "--quantize fp8 is not supported with --to mega"),
        ("llama", "mlx", {"quantize": "fp8"}, "--quantize fp8 is not supported with --to mlx"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    case: str, to: str, options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "in", case)
    with pytest.raises(CheckpointError) as found:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to, options=ConvertOptions(**options))
    assert expected in f"{found.value.message} {found.value.hint}"
    assert not (tmp_path / "out").exists()


def test_rounded_weights_are_not_compared_with_verify(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--verify compares exact weights"):
        convert_checkpoint(
            models["llama"], tmp_path / "out", "hf", options=ConvertOptions(quantize="int8"), verify=True
        )

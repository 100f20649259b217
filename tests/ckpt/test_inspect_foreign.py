"""`mega ckpt inspect` and `verify` of models without a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import save_model
from quantised_models import deepseek
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mega_ckpt.convert import convert_checkpoint
from mega_cli.ckpt import app
from mega_common.errors import CheckpointError

HOW = "original quantization: fp8, a scale for 16 x 16 weights; read as bfloat16"


def call(*args: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek(tmp_path_factory.mktemp("fp8") / "v3")[0]


def test_a_quantised_folder_and_what_is_made_of_it_say_so(v3: Path, tmp_path: Path) -> None:
    assert HOW in call("inspect", v3)
    convert_checkpoint(v3, tmp_path / "mega", "mega")
    assert HOW in call("inspect", tmp_path / "mega")
    plain = save_model(tmp_path / "hf", "llama")
    shown = call("inspect", plain)
    assert "original quantization" not in shown
    assert "safetensors" in shown


def test_conversion_says_it_in_one_line(v3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mega")
    convert_checkpoint(v3, tmp_path / "hf", "hf")
    said = [message for message in caplog.messages if "quantized" in message]
    assert said == [f"the weights of {v3} are quantized ({HOW.partition(': ')[2]}); the output is not"]


def test_every_tensor_is_read(v3: Path, tmp_path: Path) -> None:
    assert "all tensors can be read; the format has no checksums" in call("verify", v3, "--finite")
    plain = save_model(tmp_path / "hf", "llama")
    tensors = load_file(plain / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, plain / "model.safetensors")
    assert "model.norm.weight: 1 elements are not finite" in call("verify", plain, "--finite", status=2)
    with pytest.raises(CheckpointError, match="not a mega checkpoint"):
        call("verify", tmp_path)


def test_a_scale_that_is_no_number_is_found(v3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_bytes((v3 / "config.json").read_bytes())
    tensors = load_file(v3 / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[f"{name}_scale_inv"][1, 1] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    assert f"a scale of {name} is not finite" in call("verify", folder, status=2)

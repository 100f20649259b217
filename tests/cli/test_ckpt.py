from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.store import parse_location, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_cli.ckpt import app
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.model_config import ModelConfig
from mega_data.token_files.indexed_writer import IndexedWriter

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}


def save_run(folder: Path, step: int = 3, scale: float = 1.0) -> Path:
    model = ModelConfig.parse(MODEL)
    held = {
        f"weights/{name}": ShardedTensor(shape, [TensorBox((0,) * len(shape), torch.full(shape, scale))])
        for name, shape in canonical_tensors(model).items()
    }
    save_sharded_checkpoint(folder / "checkpoints", step, held, model=model, state={"step": step})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(tmp_path / "run")


def call(*args: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


def test_convert_to_hf_and_back(run: Path, tmp_path: Path) -> None:
    hf, mega = tmp_path / "hf", tmp_path / "mega"
    assert call(
        "convert", run, hf, "--to", "hf", "--dtype", "bf16", "--max-shard-size", "5KB", "--verify"
    ).strip() == str(hf)
    assert json.loads((hf / "config.json").read_text())["dtype"] == "bfloat16"
    assert (hf / "model.safetensors.index.json").is_file()
    call("convert", hf, mega, "--to", "mega")
    with pytest.raises(CheckpointError, match="exists already"):
        call("convert", hf, mega, "--to", "mega")
    call("convert", hf, mega, "--to", "mega", "--dtype", "fp32", "--overwrite")
    assert json.loads(call("inspect", mega, "--json"))["groups"][0]["dtype"] == "F32"


def test_convert_compares_logits(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mega_eval import logit_comparison

    seen = []
    real = logit_comparison.compare_logits
    monkeypatch.setattr(
        logit_comparison, "compare_logits", lambda *args, **more: seen.append(real(*args, **more)) or seen[-1]
    )
    call("convert", run, tmp_path / "hf", "--to", "hf", "--verify")
    assert [found.difference for found in seen] == [0.0]
    monkeypatch.setattr(logit_comparison, "TOLERANCES", dict.fromkeys(logit_comparison.TOLERANCES, -1.0))
    with pytest.raises(CheckpointError, match="are different models"):
        call("convert", run, tmp_path / "other", "--to", "mega", "--verify")
    assert not (tmp_path / "other").exists()
    with pytest.raises(DataError, match="no-such"):
        call("convert", run, tmp_path / "other", "--to", "mega", "--verify-data", tmp_path / "no-such")


def test_convert_prints_the_perplexity(run: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "held-out", np.uint16) as writer:
        writer.add_document(np.arange(1, 40))
    options = ["--to", "hf", "--quantize", "int8", "--perplexity"]
    lines = call("convert", run, tmp_path / "out", *options, tmp_path / "held-out").splitlines()
    assert re.fullmatch(
        r"perplexity [\d.]+ before, [\d.]+ after \([-+][\d.]+ %\), on 38 tokens in sequences .*", lines[0]
    )
    assert lines[1:] == [str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="neither a text file nor a token data set"):
        call("convert", run, tmp_path / "other", *options, tmp_path / "no-such")


def test_convert_calibrates_on_data_that_are_not_measured(run: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "texts", np.uint16) as writer:
        writer.add_document(np.arange(1, 40))
    options = ["--to", "hf", "--quantize", "int8", "--calibrate", tmp_path / "texts"]
    with pytest.raises(ConfigError, match="conflicts with --calibrate"):
        call("convert", run, tmp_path / "out", *options, "--perplexity", tmp_path / "texts")
    call("convert", run, tmp_path / "out", *options)
    assert "calibrated on 38 tokens of texts (GPTQ)" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"--calibrate .*: neither a text file nor a token data set"):
        call("convert", run, tmp_path / "other", *options[:-1], tmp_path / "no-such")


def test_convert_names_a_family(run: Path, tmp_path: Path) -> None:
    call("convert", run, tmp_path / "out", "--to", "hf", "--family", "mistral")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]


@pytest.mark.parametrize("size", ["5", "GB", "0MB", "-1GB", "5XB", "1.5GB"])
def test_a_shard_size_that_is_none(run: Path, tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match="--max-shard-size must be a number with KB, MB, GB or TB"):
        call("convert", run, tmp_path / "out", "--to", "hf", "--max-shard-size", size)


def test_inspect(run: Path) -> None:
    found = json.loads(call("inspect", run, "--json"))
    assert (found["step"], found["model"]["hidden_size"]) == (3, 16)
    assert "hidden_size" in call("inspect", run / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError):
        call("inspect", run / "nothing")


def test_verify(run: Path) -> None:
    assert "all checksums match" in call("verify", run, "--finite")
    shard = next(run.glob("checkpoints/step-*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = json.loads(call("verify", run, "--json", status=2))
    assert shard.name in found["problems"][0]


def test_diff(run: Path, tmp_path: Path) -> None:
    assert "are equal bit for bit" in call("diff", run, run)
    other = save_run(tmp_path / "other", scale=2.0)
    found = json.loads(call("diff", run, other, "--json", status=2))
    assert {one["max_abs"] for one in found["tensors"]} == {1.0}


def test_urls(run: Path, tmp_path: Path) -> None:
    url = f"memory://bucket/{tmp_path.name}"
    for path in (run / "checkpoints").rglob("*.*"):
        (parse_location(url) / path.relative_to(run)).write_bytes(path.read_bytes())
    assert json.loads(call("inspect", url, "--json"))["folder"] == f"{url}/checkpoints/step-00000003"
    assert "all checksums match" in call("verify", url)
    assert "are equal bit for bit" in call("diff", url, run)
    call("convert", url, tmp_path / "hf", "--to", "hf", "--verify")
    call("prune", url, tmp_path / "pruned")
    call("average", url, run, "--output", f"{url}/mean")
    call("prune", f"{url}/mean", f"{url}/pruned")
    call("convert", run, f"{url}/converted", "--to", "mega", "--verify")
    assert json.loads(call("diff", run, f"{url}/converted", "--json", status=2))["tensors"] == []
    assert json.loads(call("diff", run, f"{url}/mean", "--json", status=2))["tensors"] == []
    assert "are equal bit for bit" in call("diff", f"{url}/mean", f"{url}/pruned")


def test_prune(run: Path, tmp_path: Path) -> None:
    assert call("prune", run, tmp_path / "out").strip() == str(tmp_path / "out")
    assert json.loads(call("inspect", tmp_path / "out", "--json"))["step"] == 3
    with pytest.raises(CheckpointError, match="exists already"):
        call("prune", run, tmp_path / "out")


def test_average(run: Path, tmp_path: Path) -> None:
    other, mean = save_run(tmp_path / "other", scale=5.0), tmp_path / "mean"
    assert call("average", run, other, "--output", mean, "--weights", "3,1").strip() == str(mean)
    found = json.loads(call("diff", run, mean, "--json", status=2))
    assert {one["max_abs"] for one in found["tensors"]} == {1.0}
    for weights in ("", "0.5,", "half,half"):
        with pytest.raises(ConfigError, match="--weights must be comma-separated numbers"):
            call("average", run, other, "--output", tmp_path / "out", "--weights", weights)


def test_shrink(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document(np.arange(200) % MODEL["vocab_size"])
    args = ["--data", tmp_path / "data", "--seq-length", "16", "--windows", "3", "--device", "cpu"]
    with caplog.at_level("INFO", logger="mega"):
        call("shrink", run, tmp_path / "small", "--layers", "1", "--ffn", "10", "--heads", "2", "--hidden", "8", *args)
    assert "removed layers: 1" in caplog.text  # all alike: the last
    small = json.loads(call("inspect", tmp_path / "small", "--json"))["model"]
    assert [small[key] for key in ("num_layers", "ffn_hidden_size", "num_attention_heads", "hidden_size")] == [
        1,
        10,
        2,
        8,
    ]
    with pytest.raises(ConfigError, match="--ffn 99 must be at most 24"):
        call("shrink", run, tmp_path / "none", "--ffn", "99", *args)


def test_upcycle(run: Path, tmp_path: Path) -> None:
    made = tmp_path / "moe"
    assert call("upcycle", run, made, "--experts", "4", "--top-k", "2", "--expert-ffn", "12").strip() == str(made)
    assert json.loads(call("inspect", made, "--json"))["step"] == 0
    with pytest.raises(ConfigError, match="must divide"):
        call("upcycle", run, tmp_path / "other", "--experts", "4", "--top-k", "2", "--expert-ffn", "7")


def test_push_and_pull(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "mega_ckpt.hub.push_to_hub", lambda *args, **options: asked.append((args, options)) or "address"
    )
    monkeypatch.setattr("mega_ckpt.hub.pull_from_hub", lambda *args, **options: asked.append((args, options)))
    pushed = call("push", run, "ada/llama", "--private", "--revision", "v2", "--message", "second")
    pulled = call("pull", "ada/llama", tmp_path / "out", "--revision", "v2")
    assert (pushed, pulled) == ("address\n", f"{tmp_path / 'out'}\n")
    assert asked == [
        ((run, "ada/llama"), {"private": True, "revision": "v2", "message": "second"}),
        (("ada/llama", tmp_path / "out"), {"revision": "v2"}),
    ]


def test_help_has_examples_and_needs_no_torch() -> None:
    for command in ("convert", "inspect", "verify", "diff", "prune", "average", "upcycle", "shrink", "push", "pull"):
        assert f"Example: mega ckpt {command}" in " ".join(call(command, "--help").split())
    code = "import sys, mega_cli.ckpt; sys.exit('torch' in sys.modules or 'mega_ckpt' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_megatron_and_back(run: Path, tmp_path: Path) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    call("convert", run, megatron, "--to", "megatron", "--format", "torch", "--tp", 2, "--pp", 2)
    assert len(list(megatron.glob("release/mp_rank_*/model_optim_rng.pt"))) == 4
    found = json.loads(call("inspect", megatron, "--json"))
    assert (found["state"]["format"], found["state"]["saved with"]) == ("Megatron torch", {"tp": 2, "pp": 2})
    (tmp_path / "model.yaml").write_text("vocab_size: 40\n")
    call("convert", megatron, back, "--to", "mega", "--config", tmp_path / "model.yaml", "--verify")
    assert json.loads(call("inspect", back, "--json"))["model"]["vocab_size"] == 40

"""The command: a whole verification on two processes; its table, JSON and exit status where something differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from commands import typed
from typer.testing import CliRunner

from mega_cli.main import build_typer_app
from mega_common.errors import ConfigError
from mega_trainer.verify.failure_location import TensorDifference
from mega_trainer.verify.verification import LayoutFailureReport, Verification, VerifyCheckRow

MODEL = {
    "num_layers": 6, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 2,
    "vocab_size": 1000, "layers": ["mamba+mlp", "attention+mlp"] * 3, "mamba": {"num_heads": 8, "head_dim": 64},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "data": {"train": ["none"]}, "parallel": {"tp": 2, "sp": True}}))
    return path


def test_a_run_is_verified(run: Path, tmp_path: Path) -> None:
    written = tmp_path / "verify.json"
    out = typed(build_typer_app(), "verify", run, "--layouts", 1, "--ranks", 2, "--json", written).stdout
    assert "mamba+mlp, attention+mlp" in out
    assert "hidden_size 256 -> 32" in out
    assert "1 layouts agree with one process" in out
    content = json.loads(written.read_text())
    checks = {check["check"]: check for check in content["checks"]}
    assert content["passed"]
    assert checks.keys() == {"bf16", "chunk size", "generation", "layout", "restore"}
    assert checks["layout"]["name"].startswith("tp=2 sp=True")
    assert checks["layout"]["error"] < 1e-10
    assert content["failure"] is None


def test_mup_is_checked_over_widths(run: Path, tmp_path: Path) -> None:
    dense = (
        "--set",
        "model.mamba=null",
        "--set",
        "model.layers=[attention+mlp,attention+mlp]",
        "--set",
        "model.num_layers=2",
        "--set",
        "optimizer.lr=4e-3",
    )
    arguments = ("verify", run, "--mup", "--widths", "32,128", "--out", tmp_path / "coordinates.html", *dense)
    out = typed(build_typer_app(), *arguments).stdout
    assert "with muP the change of the logits does not depend on the width" in out
    assert "Coordinate check of muP" in (tmp_path / "coordinates.html").read_text()
    typed(build_typer_app(), "verify", run, "--mup", "--widths", "wide", fails=ConfigError)


def test_a_failure_is_named_with_its_layout_layer_and_tensor(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    difference = TensorDifference("gradient", "model.layers.1.mlp.up_proj.weight", 1, (2, 3), 0.25, 0.5, 1.0)

    def run_checks(self: Verification) -> Iterator[VerifyCheckRow]:
        self.failures.append(None)  # type: ignore[arg-type]
        yield VerifyCheckRow("layout", "tp=2 micro=8", 2, 1.0, 1e-10, "gradients 1.0e+00")
        yield VerifyCheckRow(
            "generation", "generation against training", 1, skipped="an encoder does not generate text"
        )
        forgetful = TensorDifference(
            "activation", "model.layers.1.mlp", 1, (0, 5, 3), 0.5, 0.25, 1.0, (), "in training"
        )
        yield VerifyCheckRow("generation", "23 tokens", 1, 1.0, 1e-10, "log-probabilities 1.0", difference=forgetful)

    report = LayoutFailureReport("tp=2 micro=8", 2, "gradients 1.0e+00", difference)
    monkeypatch.setattr(Verification, "run_checks", run_checks)
    monkeypatch.setattr(Verification, "explain_failure", lambda self: report)
    result = CliRunner().invoke(build_typer_app(), ["verify", str(run), "--json", "-"])
    assert result.exit_code == 1
    failure = json.loads(result.stdout)["failure"]
    assert (failure["difference"]["layer"], failure["difference"]["position"]) == (1, [2, 3])
    words = " ".join(result.stderr.split())
    assert "smallest failing layout: tp=2 micro=8 (2 rank(s)): gradients 1.0e+00" in words
    assert "layer 1, gradient model.layers.1.mlp.up_proj.weight at [2, 3]: 0.5, in one process 0.25" in words
    assert "skipped: an encoder does not generate text" in words
    where = "layer 1, activation model.layers.1.mlp at [0, 5, 3]: 0.25, in training 0.5"
    assert f"first difference of generation: {where}" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml does not exist"),
        (["--only", "tensor=2"], "tensor=2 is not a setting of a layout"),
        (["--only", "tp=3"], "parallel.tp"),
        (["--set", "model.num_heads=3"], "num_heads"),
    ],
)
def test_wrong_arguments_are_one_message(arguments: list[str], message: str, run: Path) -> None:
    words = arguments if arguments[0] == "missing.yaml" else [str(run), *arguments]
    result = typed(build_typer_app(), "verify", *words, fails=ConfigError)
    assert message in str(result.exception)
